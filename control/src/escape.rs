//! Escapes untrusted text for terminals and logs: it cannot move the cursor, change colours, or start a line.

use std::borrow::Cow;

/// Returns whether a character is printed unchanged.
fn is_printable(c: char) -> bool {
    // Bidirectional formatting (Unicode UAX #9), and the line and paragraph separators.
    let rearranges =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !rearranges
}

/// Escapes control characters, as `\u{1b}`, and characters that change the order or the lines of text.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_printable) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_printable(c) { escaped.push(c) } else { escaped.extend(c.escape_default()) }
    }
    Cow::Owned(escaped)
}

/// As [`printable`] for JSON text, where such characters occur only in strings.
#[must_use]
pub fn printable_json(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        // All escaped characters are below U+10000.
        if is_printable(c) { escaped.push(c) } else { escaped.push_str(&format!("\\u{:04x}", u32::from(c))) }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert!(matches!(printable("/srv/a b \u{e9}\u{4e2d}"), Cow::Borrowed(_)));
        for (text, shown) in [
            ("\x1b]0;title\x07", r"\u{1b}]0;title\u{7}"),
            ("a\nWARN b\r\t", r"a\nWARN b\r\t"),
            ("\u{9b}31m\x7f", r"\u{9b}31m\u{7f}"),
            ("exe\u{202e}txt", r"exe\u{202e}txt"),
        ] {
            assert_eq!(printable(text), shown);
            let json = printable_json(&serde_json::to_string(text).unwrap());
            assert!(json.chars().all(is_printable), "{json}");
            assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }
}

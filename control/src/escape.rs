//! Text of others, for a terminal and for a log: nothing in it moves the cursor, changes colours, or begins a line of its own.

use std::borrow::Cow;

/// What a character that is not shown as itself is shown as.
fn is_shown(c: char) -> bool {
    // Marks that change the order of what follows, and ends of lines that only some programs know.
    let rearranges =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !rearranges
}

/// Escapes control characters, as `\u{1b}`, and whatever else would not be shown as itself.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_shown) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_shown(c) { shown.push(c) } else { shown.extend(c.escape_default()) }
    }
    Cow::Owned(shown)
}

/// The same of JSON, in which such characters are in strings alone and can be written in another way.
#[must_use]
pub fn printable_json(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        // All of them are in the basic plane.
        if is_shown(c) { shown.push(c) } else { shown.push_str(&format!("\\u{:04x}", u32::from(c))) }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        assert!(matches!(printable("/srv/a b \u{e9}\u{4e2d}"), Cow::Borrowed(_)));
        for (text, shown) in [
            ("\x1b]0;title\x07", r"\u{1b}]0;title\u{7}"),
            ("a\nWARN b\r\t", r"a\nWARN b\r\t"),
            ("\u{9b}31m\x7f", r"\u{9b}31m\u{7f}"),
            ("exe\u{202e}txt", r"exe\u{202e}txt"),
        ] {
            assert_eq!(printable(text), shown);
            let json = printable_json(&serde_json::to_string(text).unwrap());
            assert!(json.chars().all(is_shown), "{json}");
            assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }
}

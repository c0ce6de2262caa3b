//! Progress bars, and names in JSON.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

pub fn bar(what: &str) -> ProgressBar {
    let target =
        if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(&format!("{{wide_bar}} {{pos}}/{{len}} {what} {{eta}}"));
    ProgressBar::with_draw_target(Some(0), target).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Sets a name in JSON: as text, and, if it is not UTF-8, also as hexadecimal digits of its bytes.
pub fn set_name(answer: &mut Value, key: &str, name: &[u8]) {
    answer[key] = String::from_utf8_lossy(name).into();
    if std::str::from_utf8(name).is_err() {
        let digits: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        answer[format!("{key}_hex")] = digits.into();
    }
}

//! What the project set itself to reach, and what was measured of it.

use std::fmt::{self, Write as _};

/// A figure with a bound.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    what: String,
    value: f64,
    limit: f64,
    at_least: bool,
}

impl Target {
    /// A figure that is to be so much or more.
    pub fn at_least(what: impl Into<String>, value: f64, limit: f64) -> Self {
        Self { what: what.into(), value, limit, at_least: true }
    }

    /// A figure that is to be so much or less.
    pub fn at_most(what: impl Into<String>, value: f64, limit: f64) -> Self {
        Self { what: what.into(), value, limit, at_least: false }
    }

    fn verdict(&self) -> &'static str {
        let reached = if self.at_least { self.value >= self.limit } else { self.value <= self.limit };
        if reached { "reached" } else { "missed" }
    }

    fn bound(&self) -> String {
        format!("at {} {}", if self.at_least { "least" } else { "most" }, crate::stats::round(self.limit))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:.2} (target: {}: {})", self.what, self.value, self.bound(), self.verdict())
    }
}

/// The targets as a chapter of a report.
pub fn chapter(out: &mut String, targets: &[Target]) {
    out.push_str("## Targets\n\n| | measured | target | |\n| --- | --- | --- | --- |\n");
    for target in targets {
        let _ = writeln!(out, "| {} | {:.2} | {} | {} |", target.what, target.value, target.bound(), target.verdict());
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_whether_it_is_reached() {
        assert_eq!(Target::at_least("a", 2.0, 1.5).to_string(), "a: 2.00 (target: at least 1.5: reached)");
        assert_eq!(Target::at_most("a", 2.0, 1.5).to_string(), "a: 2.00 (target: at most 1.5: missed)");
        let mut out = String::new();
        chapter(&mut out, &[Target::at_least("a", 1.0, 1.5)]);
        assert!(out.ends_with("| a | 1.00 | at least 1.5 | missed |\n\n"), "{out}");
    }
}

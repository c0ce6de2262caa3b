//! What the project set itself to reach, and what was measured of it.

use std::fmt::{self, Write as _};

use crate::stats;

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

/// The geometric mean and the least of some rows' ratios, each of which is to be so much or more.
pub fn of_rows(what: &str, ratios: &[f64], limit: f64) -> Vec<Target> {
    let mean = stats::geometric_mean(ratios.iter().copied());
    let figures = [("geometric mean", mean), ("least", least(ratios))];
    let target = |(how, value): (&str, Option<f64>)| {
        Some(Target::at_least(format!("{what}, {how} of {} rows", ratios.len()), value?, limit))
    };
    figures.into_iter().filter_map(target).collect()
}

/// The least of some rows' ratios.
pub fn least(ratios: &[f64]) -> Option<f64> {
    ratios.iter().copied().min_by(f64::total_cmp)
}

/// The targets as a chapter of a report; none where there is no target.
pub fn chapter(out: &mut String, targets: &[Target]) {
    if targets.is_empty() {
        return;
    }
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

    #[test]
    fn rows_have_a_mean_and_a_least() {
        let text: Vec<String> = of_rows("a", &[2.0, 0.5], 1.1).iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            [
                "a, geometric mean of 2 rows: 1.00 (target: at least 1.1: missed)",
                "a, least of 2 rows: 0.50 (target: at least 1.1: missed)"
            ]
        );
        assert_eq!(of_rows("a", &[], 1.1), []);
    }
}

//! What the project set itself to reach, and what was measured of it.

use std::fmt::{self, Write as _};

use crate::line::Line;
use crate::stats;

/// A figure with a bound.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    what: String,
    /// `None` where a row was run and Ferry or the peer failed.
    value: Option<f64>,
    limit: f64,
    at_least: bool,
}

impl Target {
    /// A figure that is to be so much or more.
    pub fn at_least(what: impl Into<String>, value: impl Into<Option<f64>>, limit: f64) -> Self {
        Self { what: what.into(), value: value.into(), limit, at_least: true }
    }

    /// A figure that is to be so much or less.
    pub fn at_most(what: impl Into<String>, value: impl Into<Option<f64>>, limit: f64) -> Self {
        Self { what: what.into(), value: value.into(), limit, at_least: false }
    }

    /// The ratio of a row to a peer, which is to be so much or more; none where this run does not have the row.
    pub fn ratio(what: impl Into<String>, line: Option<&Line>, peer: &str, limit: f64) -> Option<Self> {
        line.map(|line| Self::at_least(what, line.ratio.get(peer).copied(), limit))
    }

    fn verdict(&self) -> &'static str {
        match self.value {
            None => "not measured",
            Some(value) if self.at_least && value >= self.limit || !self.at_least && value <= self.limit => "reached",
            Some(_) => "missed",
        }
    }

    fn bound(&self) -> String {
        format!("at {} {}", if self.at_least { "least" } else { "most" }, stats::round(self.limit))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value {
            Some(value) => write!(f, "{}: {value:.2} (target: {}: {})", self.what, self.bound(), self.verdict()),
            None => write!(f, "{}: {} (target: {})", self.what, self.verdict(), self.bound()),
        }
    }
}

/// The figures of some rows, and how many rows there are: Ferry or the peer may have failed in some of them.
#[derive(Debug, Clone, PartialEq)]
pub struct RowFigures {
    values: Vec<f64>,
    rows: usize,
    /// Whether this run has any of the rows. A run of other rows has no target about them.
    has_run: bool,
}

impl RowFigures {
    /// A figure of each line; `None` stands for a row that this run does not have.
    pub fn of<'a>(lines: impl IntoIterator<Item = Option<&'a Line>>, figure: impl Fn(&'a Line) -> Option<f64>) -> Self {
        let mut figures = Self { values: Vec::new(), rows: 0, has_run: false };
        for line in lines {
            figures.rows += 1;
            figures.has_run |= line.is_some();
            figures.values.extend(line.and_then(&figure));
        }
        figures
    }

    /// The ratios to a peer.
    pub fn ratios<'a>(lines: impl IntoIterator<Item = Option<&'a Line>>, peer: &str) -> Self {
        Self::of(lines, |line| line.ratio.get(peer).copied())
    }

    /// How many rows have a figure.
    pub fn count(&self) -> String {
        format!("{} of {} rows", self.values.len(), self.rows)
    }

    /// Their geometric mean, which is to be so much or more.
    pub fn mean(&self, what: &str, limit: f64) -> Option<Target> {
        self.target(what, "geometric mean", stats::geometric_mean(self.values.iter().copied()), limit)
    }

    /// The least of them, which is to be so much or more.
    pub fn least(&self, what: &str, limit: f64) -> Option<Target> {
        self.target(what, "least", self.values.iter().copied().min_by(f64::total_cmp), limit)
    }

    /// Both, for rows each of which is to be so much or more.
    pub fn targets(&self, what: &str, limit: f64) -> impl Iterator<Item = Target> {
        self.mean(what, limit).into_iter().chain(self.least(what, limit))
    }

    fn target(&self, what: &str, how: &str, value: Option<f64>, limit: f64) -> Option<Target> {
        self.has_run.then(|| Target::at_least(format!("{what}, {how} of {}", self.count()), value, limit))
    }
}

/// The targets as a chapter of a report; none where there is no target.
pub fn chapter(out: &mut String, targets: &[Target]) {
    if targets.is_empty() {
        return;
    }
    out.push_str("## Targets\n\n| | measured | target | |\n| --- | --- | --- | --- |\n");
    for target in targets {
        let value = target.value.map_or("-".into(), |value| format!("{value:.2}"));
        let _ = writeln!(out, "| {} | {value} | {} | {} |", target.what, target.bound(), target.verdict());
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Better;

    #[test]
    fn says_whether_it_is_reached() {
        assert_eq!(Target::at_least("a", 2.0, 1.5).to_string(), "a: 2.00 (target: at least 1.5: reached)");
        assert_eq!(Target::at_most("a", 2.0, 1.5).to_string(), "a: 2.00 (target: at most 1.5: missed)");
        assert_eq!(Target::at_most("a", None, 1.5).to_string(), "a: not measured (target: at most 1.5)");
        let mut out = String::new();
        chapter(&mut out, &[Target::at_least("a", 1.0, 1.5), Target::at_least("b", None, 1.5)]);
        assert!(
            out.ends_with("| a | 1.00 | at least 1.5 | missed |\n| b | - | at least 1.5 | not measured |\n\n"),
            "{out}"
        );
    }

    #[test]
    fn rows_without_a_figure_are_told() {
        let line = |values: &[(&str, f64)]| {
            let mut line = Line::new("t", "a".into(), "c", "MiB/s", Better::Higher);
            line.fill(&values.iter().map(|(name, value)| ((*name).to_owned(), vec![*value])).collect());
            line
        };
        let [twice, half, failed] =
            [line(&[("ferry", 2.0), ("p", 1.0)]), line(&[("ferry", 1.0), ("p", 2.0)]), line(&[("p", 1.0)])];
        let text = |lines: &[Option<&Line>]| {
            let figures = RowFigures::ratios(lines.iter().copied(), "p");
            figures.targets("a", 1.1).map(|target| target.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(
            text(&[Some(&twice), Some(&half), Some(&failed), None]),
            [
                "a, geometric mean of 2 of 4 rows: 1.00 (target: at least 1.1: missed)",
                "a, least of 2 of 4 rows: 0.50 (target: at least 1.1: missed)"
            ]
        );
        assert_eq!(text(&[Some(&failed)])[1], "a, least of 0 of 1 rows: not measured (target: at least 1.1)");
        let of = |line: Option<&Line>| Target::ratio("a", line, "p", 1.1).map(|target| target.to_string());
        assert_eq!((of(Some(&failed)), of(None)), (Some("a: not measured (target: at least 1.1)".into()), None));
        assert!(text(&[None]).is_empty() && text(&[]).is_empty());
    }
}

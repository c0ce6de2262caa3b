//! When a run begins no further row.

use std::time::{Duration, Instant};

use crate::line::Line;

/// How long a run may take.
#[derive(Debug, Clone, Copy)]
pub enum TimeLimit {
    /// A full run, on a machine that is slower than expected: rows that it leaves out are a failure.
    Full(Duration),
    /// A quick run.
    Quick(Duration),
}

impl TimeLimit {
    /// Whether a run that started then begins no further row.
    pub fn is_over(self, started: Instant) -> bool {
        let (Self::Full(limit) | Self::Quick(limit)) = self;
        started.elapsed() > limit
    }

    /// Tells why a row has no figures.
    pub fn tell(self, line: &mut Line) {
        match self {
            Self::Full(limit) => {
                let minutes = limit.as_secs() / 60;
                line.fail(&format!("the run had taken {minutes} minutes, as on a busy machine"));
            }
            Self::Quick(_) => line.skip("the time of --quick was over"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Better;

    #[test]
    fn a_full_run_that_leaves_rows_out_fails() {
        let told = |limit: TimeLimit| {
            let mut line = Line::new("t", "r".into(), "c", "ms", Better::Lower);
            limit.tell(&mut line);
            (line.error, line.skipped)
        };
        let (error, skipped) = told(TimeLimit::Full(Duration::from_secs(20 * 60)));
        assert_eq!((error.as_deref(), skipped), (Some("the run had taken 20 minutes, as on a busy machine"), None));
        let (error, skipped) = told(TimeLimit::Quick(Duration::ZERO));
        assert_eq!((error, skipped.as_deref()), (None, Some("the time of --quick was over")));
        assert!(TimeLimit::Quick(Duration::ZERO).is_over(Instant::now() - Duration::from_millis(1)));
        assert!(!TimeLimit::Full(Duration::from_secs(60)).is_over(Instant::now()));
    }
}

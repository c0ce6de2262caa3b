//! What the rows of the table consist of.

use std::time::Instant;

use anyhow::Result;

use super::place::Place;

/// Measures one run of a prepared size: the figures of its case.
pub type Measure = Box<dyn FnMut() -> Result<Vec<f64>>>;

/// How far a figure may grow from the second of several sizes to the last: a straight line, and what noise does to it.
pub const STRAIGHT: Option<f64> = Some(1.5);

/// One figure of a case.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// What it is; nothing where it is the only one.
    pub name: &'static str,
    pub unit: &'static str,
    /// At most how many times that of the second size the last size's may be.
    pub growth_max: Option<f64>,
}

/// Rows of the table that differ in size.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    /// What the sizes count.
    pub of: &'static str,
    pub sizes: &'static [u64],
    /// The largest size of a quick run.
    pub quick_max: u64,
    pub figures: &'static [Figure],
    /// Prepares one size in an empty directory; the result is called once for each run.
    pub prepare: fn(&Place, u64) -> Result<Measure>,
}

/// The memory that this process has.
pub fn resident_mib() -> Result<f64> {
    let [kib] = crate::procfs::kib(std::process::id(), ["VmRSS:"])?;
    Ok(kib / 1024.0)
}

/// The time since `begin` for each of `count`, in microseconds.
#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
pub fn us_each(begin: Instant, count: u64) -> f64 {
    begin.elapsed().as_secs_f64() * 1e6 / count as f64
}

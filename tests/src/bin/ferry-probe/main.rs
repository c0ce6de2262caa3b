//! A probe.
fn main(){}

//! ferry
fn main() {}

//! The program `ferry-agent`: `ferry agent` alone, small enough for every guest.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(ferry_agent::main())
}

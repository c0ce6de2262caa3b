//! Checks a file system from within: the required behaviour of each system call, in small checks.
//!
//! `ferry-probe DIR [CHECK...]` runs the checks in fresh directories below DIR and prints for each `NAME ok` or `NAME
//! FAILED: why`. It runs in a guest on a share, and on the host as a reference: a failure on both is not the share's.
//! `ferry-probe --role ROLE ARG...` is one of several processes of a check.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on has failed")]

mod files;
mod locks;
mod many;
mod names;
mod privileges;
mod set_id;
mod space;
mod special;
mod storms;
mod sys;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;

/// A check's name, and its function, which gets a directory of its own.
type Check = (&'static str, fn(&Path));

/// The location and reason of the last failure.
static WHY: Mutex<String> = Mutex::new(String::new());

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // SAFETY: nothing else runs yet; umask has no preconditions.
    unsafe { libc::umask(0o022) };
    if let Some(("--role", args)) = args.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return many::role(args);
    }
    let Some((dir, wanted)) = args.split_first() else {
        eprintln!("ferry-probe: usage: ferry-probe DIR [CHECK...]");
        return ExitCode::from(2);
    };
    std::panic::set_hook(Box::new(|info| *WHY.lock().unwrap() = info.to_string().replace('\n', " ")));
    let all = [
        files::CHECKS,
        locks::CHECKS,
        many::CHECKS,
        names::CHECKS,
        privileges::CHECKS,
        set_id::CHECKS,
        space::CHECKS,
        special::CHECKS,
        storms::CHECKS,
    ];
    let mut failed = false;
    for (name, check) in all.concat() {
        if !wanted.is_empty() && !wanted.iter().any(|one| one == name) {
            continue;
        }
        let directory = Path::new(dir).join(format!("probe-{name}"));
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _ = std::fs::remove_dir_all(&directory);
            std::fs::create_dir(&directory).unwrap();
            check(&directory);
            std::fs::remove_dir_all(&directory).unwrap();
        }));
        match outcome {
            Ok(()) => println!("{name} ok"),
            Err(_) => {
                failed = true;
                println!("{name} FAILED: {}", WHY.lock().unwrap());
            }
        }
    }
    ExitCode::from(u8::from(failed))
}

//! Times of files that change without a request, which programs like make depend on.

use std::process::Command;
use std::time::Duration;

use ferry_tests::mounts::{Cell, Mounted};
use ferry_tests::on_cells;

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// Longer than anything here takes that does not hang.
const LIMIT: Duration = Duration::from_secs(60);

/// Builds, changes the source through a mapping as an editor might, and builds again.
const MAKE: &str = r#"
probe=$1
printf 'out: in\n\tcp in out\n' >Makefile
seq 1 20000 >in
make
make -q
sleep 0.05
"$probe" --role map-write in 5 stored
! make -q
make
cmp in out
grep -q stored out
"#;

/// Flags of a file are no part of what a kernel asks for, but change the time of its last change.
const CHATTR: &str = r#"
: >file
before=$(stat -c %z file)
sleep 0.05
chattr +d file
after=$(stat -c %z file)
test "$before" != "$after"
"#;

fn times(cell: &Cell) {
    let Some(mounted) = Mounted::new(cell) else { return };
    let sh = |script: &str| {
        let ran = mounted
            .site
            .run(Command::new("sh").args(["-exuc", script, "sh", PROBE]).current_dir(&mounted.site.path), LIMIT);
        assert_eq!(ran.status, 0, "{cell}: {}\n{}", ran.out, ran.err);
    };
    sh(CHATTR);
    sh(MAKE);
    let mut role = Command::new(PROBE);
    let ran = mounted.site.run(role.args(["--role", "mapped-times"]).arg(mounted.site.path.join("mapped")), LIMIT);
    assert_eq!(ran.status, 0, "{cell}: {}", ran.err);
    mounted.finish();
}

on_cells!(times: quick [dir_passthrough, dir_passthrough_always, dir_devfuse_always, dir_uring]
    long [dir_devfuse, dir_passthrough_none, dir_passthrough_metadata, dir_uring_always]);

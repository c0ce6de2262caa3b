//! Machines that do not allow everything: a program of its own, because one of its tests forbids io_uring for the machine, and
//! other tests need it.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::sources::Null;
use common::{is_mounted, mount, paths, plain};
use ferry_fuse::{Cache, Export, Options, Path};

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// The parameter is global to the machine, so tests that change or need it run one at a time.
static MACHINE: Mutex<()> = Mutex::new(());

fn machine() -> MutexGuard<'static, ()> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Disables io_uring until it is dropped.
struct Forbidden;

impl Forbidden {
    fn now() -> Option<Self> {
        std::fs::write(PARAMETER, "N").is_ok().then_some(Self)
    }
}

impl Drop for Forbidden {
    fn drop(&mut self) {
        std::fs::write(PARAMETER, "Y").unwrap();
    }
}

fn serves(at: &std::path::Path) -> bool {
    File::open(at.join("file")).unwrap().read_at(&mut [0; 512], 0).unwrap() == 512
}

/// Linux refuses all requests of an idmappable mount without permission checks in the kernel.
#[test]
fn a_mount_without_permission_checks_in_the_kernel_works() {
    let _machine = machine();
    for (path, allow_idmap) in paths().into_iter().flat_map(|path| [(path, false), (path, true)]) {
        let tmp = tempfile::tempdir().unwrap();
        let options = Options { default_permissions: false, allow_idmap, ..plain(path) };
        let export = Export::mount(tmp.path(), Arc::new(Null::default()), options).unwrap();
        assert!(serves(tmp.path()), "{path:?}, idmapped: {allow_idmap}");
        export.stop();
    }
}

#[test]
fn a_missing_parameter_is_reported_with_a_remedy() {
    let _machine = machine();
    if !paths().contains(&Path::Uring) {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let Some(forbidden) = Forbidden::now() else { return ferry_skip::skip!("needs root") };
    let error = Export::mount(tmp.path(), Arc::new(Null::default()), plain(Path::Uring));
    let export = Export::mount(tmp.path(), Arc::new(Null::default()), plain(Path::Auto));
    drop(forbidden);
    let error = error.unwrap_err().to_string();
    assert!(error.contains(&format!("`echo Y > {PARAMETER}`")), "{error}");
    let export = export.unwrap();
    assert!(serves(tmp.path()));
    assert_eq!(export.explain().path, Path::Devfuse);
    let text = export.explain().to_string();
    assert!(text.contains("go through /dev/fuse") && text.contains(&format!("`echo Y > {PARAMETER}`")), "{text}");
    assert!(text.contains("it was turned off") && !text.contains("(passthrough)"), "{text}");
    export.stop();
    assert!(!is_mounted(tmp.path()));
}

#[test]
fn used_features_are_explained() {
    let _machine = machine();
    for path in paths() {
        let tmp = tempfile::tempdir().unwrap();
        let source = ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap();
        let mounted = mount(Arc::new(source), Options { path, cache: Cache::None, ..Options::default() });
        let explanation = mounted.export().explain();
        let text = explanation.to_string();
        let way =
            if path == Path::Uring { "go through io_uring: " } else { "Not through io_uring: it was not requested." };
        assert!(text.contains(way), "{text}");
        assert_eq!(text.contains("directly (passthrough)"), explanation.passthrough.used, "{text}");
        assert!(text.contains("not told of changes that are made elsewhere: it keeps nothing"), "{text}");
        assert_eq!(explanation.rings > 0, path == Path::Uring);
        mounted.stop();
    }
}

/// The mount point of [`as_user`].
const AT: &str = "FERRY_TEST_AT";

#[test]
#[ignore = "for a user who may not mount: run by a_user_mounts_and_is_served_on_both_paths"]
fn as_user() {
    let Some(at) = std::env::var_os(AT) else { return };
    for path in [Path::Devfuse, Path::Uring] {
        let mounted = Export::mount(at.as_ref(), Arc::new(Null::default()), Options { path, ..Options::default() });
        let export = mounted.unwrap();
        for _ in 0..10 {
            assert!(serves(at.as_ref()));
        }
        assert_eq!(export.explain().path, path);
        assert!(!export.explain().passthrough.used);
        export.stop();
        assert!(!is_mounted(at.as_ref()));
        println!("served on {path:?}");
    }
}

/// Makes /dev/fuse accessible to all users, as on most machines, in a separate mount namespace.
const OPEN_DEVICE: &str = "set -e
    mount -t tmpfs -o mode=755,dev none \"$1\"
    mknod -m 666 \"$1/fuse\" c 10 229
    mount --bind \"$1/fuse\" /dev/fuse
    shift
    exec /usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups -- \"$@\"";

#[test]
fn a_user_mounts_and_is_served_on_both_paths() {
    let _machine = machine();
    let helper = Command::new("fusermount3").arg("--version").output().is_ok();
    if !paths().contains(&Path::Uring) || !helper || !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("needs root, fusermount3 and FUSE-over-io_uring");
    }
    let directory = tempfile::tempdir().unwrap();
    let all = |path: &std::path::Path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    all(directory.path());
    let (device, at) = (directory.path().join("device"), directory.path().join("mnt"));
    std::fs::create_dir(&device).unwrap();
    std::fs::create_dir(&at).unwrap();
    std::os::unix::fs::chown(&at, Some(65534), Some(65534)).unwrap();
    // A copy that every user can execute, wherever the build directory is.
    let program = directory.path().join("test");
    // Copied by another process, because a file that a thread here has open for writing cannot be executed.
    let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status();
    assert!(copied.unwrap().success());
    all(&program);
    let mut command = Command::new("timeout");
    command.args(["30", "unshare", "--mount", "--propagation", "private", "sh", "-c", OPEN_DEVICE, "sh"]);
    command.arg(&device).arg(&program).args(["as_user", "--exact", "--ignored", "--nocapture"]);
    let output = command.env(AT, &at).current_dir(directory.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("served on Devfuse") && text.contains("served on Uring"), "{text}{errors}");
    assert!(output.status.success(), "{text}{errors}");
}

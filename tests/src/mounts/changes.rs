//! Every kind of change, made on one side and checked on the other.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

/// How late a change may be seen: a notification is on its way when the change is answered, but the machine may be busy.
const LATE: Duration = Duration::from_secs(20);

/// Waits until the other side shows it; counts those that took a second look.
#[track_caller]
pub fn shows(what: &str, late: &mut Vec<String>, seen: impl Fn() -> bool) {
    let begin = Instant::now();
    if seen() {
        return;
    }
    while !seen() {
        assert!(begin.elapsed() < LATE, "{what}: the other side does not show it, after {late:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
    late.push(format!("{what} {:?}", begin.elapsed()));
}

/// Every kind of change by `one`, after `two` has put the old state into its caches.
pub fn each_change(one: &Path, two: &Path, late: &mut Vec<String>) {
    let text = |name: &str| fs::read_to_string(two.join(name)).unwrap_or_default();
    let meta = |name: &str| fs::symlink_metadata(two.join(name)).unwrap();
    let names = |name: &str| {
        let entries = fs::read_dir(two.join(name)).map(|entries| entries.flatten().count());
        entries.unwrap_or(usize::MAX)
    };
    assert!(!two.join("file").exists() && names(".") == 0);
    fs::write(one.join("file"), "one").unwrap();
    shows("a new name", late, || two.join("file").exists());
    shows("a longer listing", late, || names(".") == 1);
    assert_eq!((text("file").as_str(), meta("file").len()), ("one", 3));
    fs::write(one.join("file"), "one and two").unwrap();
    shows("new contents", late, || text("file") == "one and two" && meta("file").len() == 11);
    let open = File::open(two.join("file")).unwrap();
    open.read_exact_at(&mut [0; 11], 0).unwrap();
    File::options().append(true).open(one.join("file")).unwrap().write_all(b" and more").unwrap();
    shows("an appended end, in a file that is open", late, || {
        let mut bytes = [0; 64];
        open.metadata().unwrap().len() == 20 && open.read_at(&mut bytes, 0).unwrap() == 20
    });
    File::options().write(true).open(one.join("file")).unwrap().write_all_at(b"TWO", 0).unwrap();
    shows("overwritten bytes, in a file that is open", late, || {
        let mut bytes = [0; 3];
        open.read_exact_at(&mut bytes, 0).is_ok() && bytes == *b"TWO"
    });
    File::options().write(true).open(one.join("file")).unwrap().set_len(5).unwrap();
    shows("a truncation", late, || text("file").len() == 5 && meta("file").len() == 5);
    fs::set_permissions(one.join("file"), Permissions::from_mode(0o640)).unwrap();
    shows("a mode", late, || meta("file").mode() & 0o777 == 0o640);
    std::os::unix::fs::chown(one.join("file"), Some(7), Some(8)).unwrap();
    shows("an owner", late, || (meta("file").uid(), meta("file").gid()) == (7, 8));
    rustix::fs::setxattr(one.join("file"), "user.x", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    shows("an attribute", late, || rustix::fs::getxattr(two.join("file"), "user.x", &mut [0; 8]).is_ok());
    fs::hard_link(one.join("file"), one.join("link")).unwrap();
    shows("a link", late, || two.join("link").exists() && meta("file").nlink() == 2);
    fs::rename(one.join("file"), one.join("moved")).unwrap();
    shows("a rename", late, || !two.join("file").exists() && text("moved").len() == 5);
    fs::write(one.join("other"), "other").unwrap();
    shows("another name", late, || text("other") == "other");
    fs::rename(one.join("other"), one.join("moved")).unwrap();
    shows("a rename over a name", late, || text("moved") == "other" && !two.join("other").exists());
    fs::remove_file(one.join("link")).unwrap();
    shows("a removed name", late, || !two.join("link").exists());
    fs::create_dir_all(one.join("directory/inside")).unwrap();
    shows("a directory", late, || names("directory") == 1);
    fs::rename(one.join("directory/inside"), one.join("out")).unwrap();
    shows("a directory moved out", late, || names("directory") == 0 && names("out") == 0);
    fs::remove_dir(one.join("directory")).unwrap();
    shows("a removed directory", late, || names("directory") == usize::MAX);
    symlink("there", one.join("sign")).unwrap();
    shows("a symbolic link", late, || fs::read_link(two.join("sign")).is_ok_and(|to| to == Path::new("there")));
    fs::remove_file(one.join("sign")).unwrap();
    symlink("elsewhere", one.join("sign")).unwrap();
    shows("another one", late, || fs::read_link(two.join("sign")).is_ok_and(|to| to == Path::new("elsewhere")));
    for name in ["moved", "sign"] {
        fs::remove_file(one.join(name)).unwrap();
    }
    fs::remove_dir(one.join("out")).unwrap();
    shows("all gone", late, || names(".") == 0);
}

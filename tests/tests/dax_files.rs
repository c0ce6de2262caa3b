//! Which files a guest uses its window for, where it leaves that to the server: `ferry share --dax-files`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs::{self, File};
use std::time::Duration;

use ferry_driver::{Config, Driver, INIT_FLAGS, ROOT};
use ferry_tests::confined::Confined;
use ferry_wire::fuse::abi::{ATTR_DAX, InitFlags, MINOR_MAX};

/// Files by their lengths.
const FILES: [(&str, u64); 4] = [("empty", 0), ("page", 4096), ("more", 4097), ("large", (1 << 20) + 1)];

#[test]
fn they_are_those_that_were_chosen() {
    for (flags, expected) in [
        (&["--dax-files", "always"][..], [true; 4]),
        (&["--dax-files", "never"], [false; 4]),
        (&["--dax-files", "size>4K"], [false, false, true, true]),
        (&[], [false, false, false, true]),
    ] {
        let server = Confined::start(flags);
        for (name, bytes) in FILES {
            File::create(server.path.join(name)).unwrap().set_len(bytes).unwrap();
        }
        fs::create_dir(server.path.join("dir")).unwrap();
        let config = Config { window: true, timeout: Duration::from_secs(60), ..Config::default() };
        let mut driver = Driver::connect(&server.socket, config).unwrap();
        let _window = driver.window().unwrap();
        driver.init_with(INIT_FLAGS | InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX, MINOR_MAX).unwrap();
        let found = FILES.map(|(name, _)| {
            let entry = driver.lookup(ROOT, name).unwrap();
            let again = driver.getattr(entry.nodeid).unwrap();
            assert_eq!(entry.attr.flags & ATTR_DAX, again.attr.flags & ATTR_DAX, "{name}");
            entry.attr.flags & ATTR_DAX != 0
        });
        assert_eq!(found, expected, "{flags:?}");
        assert_eq!(driver.lookup(ROOT, "dir").unwrap().attr.flags & ATTR_DAX, 0);
        // Guests that know nothing of it are told nothing.
        driver.init().unwrap();
        assert_eq!(driver.lookup(ROOT, "large").unwrap().attr.flags & ATTR_DAX, 0);
    }
}

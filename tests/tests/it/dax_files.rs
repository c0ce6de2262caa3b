//! The files for which a guest uses its window if it leaves the choice to the server: `ferry share --dax-files`.

use std::fs::{self, File};
use std::time::Duration;

use ferry_driver::{Config, Driver, INIT_FLAGS, ROOT};
use ferry_tests::confined::ConfinedShare;
use ferry_wire::fuse::abi::{ATTR_DAX, InitFlags, MINOR_MAX, OpenFlags};

/// As Linux sends it.
const O_RDWR: u32 = 2;

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
        let server = ConfinedShare::start(&[&["--cache", "none"], flags].concat());
        for (name, bytes) in FILES {
            File::create(server.path.join(name)).unwrap().set_len(bytes).unwrap();
        }
        fs::create_dir(server.path.join("dir")).unwrap();
        let config = Config { window: true, timeout: Duration::from_secs(60), ..Config::default() };
        let mut driver = Driver::connect(&server.socket, config).unwrap();
        let _window = driver.window().unwrap();
        // Without a cache what is not mapped is read and written directly. What is, is not: Linux would fail to make it longer.
        let direct = |driver: &mut Driver, name: &str| {
            let node = driver.lookup(ROOT, name).unwrap().nodeid;
            let opened = driver.open(node, O_RDWR).unwrap();
            driver.release(node, opened.fh).unwrap();
            OpenFlags::from_bits_retain(opened.open_flags).contains(OpenFlags::DIRECT_IO)
        };
        let window = INIT_FLAGS | InitFlags::MAP_ALIGNMENT;
        driver.init_with(window | InitFlags::HAS_INODE_DAX, MINOR_MAX).unwrap();
        let found = FILES.map(|(name, _)| {
            let entry = driver.lookup(ROOT, name).unwrap();
            let again = driver.getattr(entry.nodeid).unwrap();
            assert_eq!(entry.attr.flags & ATTR_DAX, again.attr.flags & ATTR_DAX, "{name}");
            entry.attr.flags & ATTR_DAX != 0
        });
        assert_eq!(found, expected, "{flags:?}");
        assert_eq!(FILES.map(|(name, _)| !direct(&mut driver, name)), expected, "{flags:?}");
        // It is the client who goes by what it was told first.
        let grown = File::options().write(true).open(server.path.join("page")).unwrap();
        grown.set_len(2 << 20).unwrap();
        assert_eq!(direct(&mut driver, "page"), !expected[1], "{flags:?}");
        driver.init_with(window, MINOR_MAX).unwrap();
        assert!(FILES.iter().all(|(name, _)| !direct(&mut driver, name)), "a guest with dax=always maps all files");
        assert_eq!(driver.lookup(ROOT, "dir").unwrap().attr.flags & ATTR_DAX, 0);
        // Guests that know nothing of it are told nothing.
        driver.init().unwrap();
        assert_eq!(driver.lookup(ROOT, "large").unwrap().attr.flags & ATTR_DAX, 0);
        assert!(FILES.iter().all(|(name, _)| direct(&mut driver, name)), "a guest without a window");
    }
}

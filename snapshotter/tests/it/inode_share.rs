//! Containers whose images share the memory of equal files: on this machine, if its kernel can, and in a guest with Linux 7.2.

use std::fs;
use std::path::Path;

use ferry_image::InodeShare;
use ferry_tests::disks::tool;
use ferry_tests::host_root::run_on_host_root;

use crate::server::{Mounted, Server, can_mount, refused};

const FILE_BYTES: usize = 40 << 20;
const ON: &str = "inode-share = true\n";

/// Returns the size of all files' pages in memory, in bytes.
fn cached() -> usize {
    let all = fs::read_to_string("/proc/meminfo").unwrap();
    let line = all.lines().find_map(|line| line.strip_prefix("Cached:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// A kernel that cannot is named at the start.
#[test]
fn containers_share_the_memory_of_equal_files() {
    if !can_mount() {
        return;
    }
    let turn_on = |root: &Path| fs::write(root.with_file_name("more.toml"), ON).unwrap();
    if let Some(why) = InodeShare::missing() {
        let directory = tempfile::tempdir_in(crate::server::DIR).unwrap();
        turn_on(&directory.path().join("root"));
        let said = refused(directory.path(), "require");
        assert!(said.contains("inode-share = true needs Linux 7.0 or later") && said.contains(&why), "{said}");
        let said = refused(directory.path(), "never");
        assert!(said.contains("layers are not images here"), "{said}");
        return;
    }
    let mut server = Server::start_with("require", turn_on);
    let mut client = server.client();
    let contents: Vec<u8> = (0..u32::try_from(FILE_BYTES / 4).unwrap()).flat_map(u32::to_le_bytes).collect();
    for (name, parent) in [("base", ""), ("one", "base"), ("two", "base")] {
        let mounted = Mounted::of(&client.prepare("a", parent).unwrap());
        let (file, bytes) = if parent.is_empty() { ("file", &*contents) } else { ("own", name.as_bytes()) };
        fs::write(mounted.path().join(file), bytes).unwrap();
        drop(mounted);
        client.commit(name, "a").unwrap();
    }
    // Each has a merged image of its own.
    let containers = ["one", "two"].map(|layer| {
        let mounts = client.prepare(&format!("of-{layer}"), layer).unwrap();
        assert!(mounts[0].options.iter().any(|option| option.ends_with("/merged")), "{mounts:?}");
        Mounted::of(&mounts)
    });
    let read = |at: &Mounted| {
        let before = cached();
        assert!(fs::read(at.path().join("file")).unwrap() == contents);
        cached().saturating_sub(before)
    };
    let [one, two] = &containers;
    let grows = [read(one), read(two)];
    println!("the first container adds {} bytes, the second {}", grows[0], grows[1]);
    assert!(grows[0] > FILE_BYTES / 2 && grows[1] < FILE_BYTES / 10, "{grows:?}");
    // What one changes is its own, and an image of that like any other.
    fs::write(one.path().join("file"), "changed").unwrap();
    assert!(fs::read(two.path().join("file")).unwrap() == contents);
    drop(containers);
    client.commit("changed", "of-one").unwrap();
    let mounted = Mounted::of(&client.prepare("of-changed", "changed").unwrap());
    assert_eq!(fs::read(mounted.path().join("file")).unwrap(), b"changed");
    assert_eq!(rustix::fs::llistxattr(mounted.path().join("own"), &mut [0; 4096][..]).unwrap(), 0);
    println!("shared");
}

const SCRIPT: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
truncate -s 400M /run/disk
"$2" -q /run/disk
mount -o loop /run/disk /var/tmp
"$1" --exact inode_share::containers_share_the_memory_of_equal_files --nocapture
"#;

#[test]
#[ignore = "long: make test-all"]
fn containers_share_memory_in_a_guest() {
    let out = run_on_host_root(SCRIPT, [std::env::current_exe().unwrap().as_path(), &tool("mkfs.ext4")]);
    assert!(out.contains("\nshared\n"), "{out}");
}

//! Inodes that were moved, identified for another host.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;

use common::*;
use ferry_dir::Dir;
use ferry_vfs::*;

#[test]
fn inodes_that_the_host_moved_are_found() {
    for options in both_modes() {
        let share = Share::new(options.clone());
        fs::create_dir_all(share.path("a/b/c")).unwrap();
        fs::create_dir_all(share.path("elsewhere/deep")).unwrap();
        (0..2000).for_each(|number| fs::write(share.path(format!("a/{number}")), "").unwrap());
        for file in ["linked", "renamed", "gone", "stays", "a/b/c/below"] {
            fs::write(share.path(file), file).unwrap();
        }
        let [linked, renamed, gone, stays] = ["linked", "renamed", "gone", "stays"].map(|file| share.ino(file));
        let (dir, below) = (share.ino("a/b"), share.ino("a/b/c/below"));
        fs::hard_link(share.path("linked"), share.path("elsewhere/deep/link")).unwrap();
        for file in ["linked", "gone"] {
            fs::remove_file(share.path(file)).unwrap();
        }
        fs::rename(share.path("renamed"), share.path("a/b/c/moved")).unwrap();
        fs::rename(share.path("a/b"), share.path("elsewhere/b")).unwrap();
        // Others are none of the inodes that are looked for, whatever they are called.
        fs::write(share.path("renamed"), "another").unwrap();

        let all = [linked, renamed, gone, stays, dir, below];
        for within in [IdentityScope::Paths, IdentityScope::CheckedPaths] {
            let found = share.dir.search(&all, within);
            let other = Dir::open(share.tmp.path(), options.clone()).unwrap();
            for (ino, file) in [
                (linked, Some("elsewhere/deep/link")),
                (renamed, Some("elsewhere/b/c/moved")),
                (gone, None),
                (stays, Some("stays")),
                (dir, Some("elsewhere/b")),
                (below, Some("elsewhere/b/c/below")),
            ] {
                let identity = found.iter().find(|(found, _)| *found == ino).map(|(_, identity)| identity);
                assert_eq!(identity.is_some(), file.is_some(), "{file:?} {options:?}");
                let (Some(identity), Some(file)) = (identity, file) else { continue };
                other.adopt(ino, 1, (identity, within), None).unwrap();
                let attr = other.getattr(&share.cx, ino, None).unwrap();
                assert_eq!(attr.ino, std::os::unix::fs::MetadataExt::ino(&fs::metadata(share.path(file)).unwrap()));
            }
            assert_eq!(found.len(), 5);
        }
    }
}

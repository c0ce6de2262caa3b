//! Two mounts of one source with `--cache always`; one has passthrough.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use common::{Mounted, mount, paths, plain, wait_until};
use ferry_fuse::{Cache, Options, Path};

const BYTES: usize = 8192;

fn pair(path: Path, source: &Arc<ferry_dir::Dir>) -> [Mounted; 2] {
    [Some(true), Some(false)].map(|passthrough| {
        let options = Options { shared: true, cache: Cache::Always, passthrough, ..plain(path) };
        mount(Arc::clone(source) as _, options)
    })
}

fn seen(at: &Mounted) -> Vec<u8> {
    std::fs::read(at.path("file")).unwrap()
}

/// The first open decides that the inode passes through. The kernel requires the same of a later open for writing, but
/// the other mount must still be notified of each write.
#[test]
fn writes_to_a_file_that_others_read_are_notified_at_once() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("passthrough needs root");
        return;
    }
    for path in paths() {
        let tmp = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(tmp.path().join("file"), vec![b'a'; BYTES]).unwrap();
        let source = Arc::new(ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap());
        let [one, two] = pair(path, &source);
        if !one.export().explain().passthrough.used {
            ferry_skip::skip!("{path:?}: {:?}", one.export().explain().passthrough);
            continue;
        }
        assert_eq!(seen(&two), vec![b'a'; BYTES]);
        let reader = File::open(one.path("file")).unwrap();
        let mut bytes = vec![0; BYTES];
        reader.read_exact_at(&mut bytes, 0).unwrap();
        let requests = one.export().stats().requests;
        reader.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(one.export().stats().requests, requests, "reads are passed through");

        let writer = File::options().read(true).write(true).open(one.path("file")).unwrap();
        for (round, byte) in (b'b'..=b'k').enumerate() {
            writer.write_all_at(&vec![byte; BYTES], 0).unwrap();
            reader.read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes, vec![byte; BYTES], "through the same mount");
            writer.read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes, vec![byte; BYTES], "by the writer itself");
            wait_until(&format!("round {round}: the other mount shows it"), || seen(&two) == bytes);
        }
        writer.write_all_at(b"more", BYTES as u64).unwrap();
        wait_until("it is longer", || std::fs::metadata(two.path("file")).unwrap().len() == BYTES as u64 + 4);
        assert_eq!(reader.metadata().unwrap().len(), BYTES as u64 + 4);
        reader.read_exact_at(&mut bytes[..4], BYTES as u64).unwrap();
        assert_eq!(&bytes[..4], b"more");
        drop((reader, writer));
        assert_eq!(seen(&one), seen(&two));
        one.stop();
        two.stop();
    }
}

//! Images of QEMU's from anywhere: they are refused and stay as they are, or are served, and no request ends the program.
#![no_main]

use std::io::Write;

use ferry_disk::{Format, Options, open};
use ferry_vfs::{BlockRange, Disk};
use libfuzzer_sys::fuzz_target;

/// As much of a disk as is looked at: from its beginning, and before its end.
const PART: u64 = 256 << 10;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, image)) = bytes.split_first() else { return };
    let mut file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    file.write_all(image).expect("a write");
    let read_only = Options { format: Some(Format::Qcow2), read_only: true, ..Options::default() };
    if let Ok(disk) = open(file.path(), &read_only) {
        look(&*disk);
        drop(disk);
    }
    assert!(std::fs::read(file.path()).expect("the file") == image, "what is only read has changed");
    let grow_to = (choice & 1 != 0).then_some(u64::from(*choice) << 20);
    match open(file.path(), &Options { read_only: false, grow_to, ..read_only }) {
        Ok(disk) => {
            look(&*disk);
            change(&*disk, *choice);
            look(&*disk);
        }
        Err(_) if grow_to.is_none() => {
            assert!(std::fs::read(file.path()).expect("the file") == image, "what is refused has changed");
        }
        Err(_) => {}
    }
});

/// The beginning and the end of a disk, and what is between if it is small.
fn parts(disk: &dyn Disk) -> [BlockRange; 2] {
    let end = disk.geometry().bytes;
    let bytes = PART.min(end);
    [0, end - bytes].map(|offset| BlockRange { offset, bytes, alignment: 1 })
}

fn look(disk: &dyn Disk) {
    for part in parts(disk) {
        let _ = disk.read(&part, &mut Vec::new());
    }
}

fn change(disk: &dyn Disk, choice: u8) {
    for (number, part) in parts(disk).into_iter().enumerate() {
        let at = BlockRange { offset: part.offset + 512.min(part.bytes - 512), bytes: 512, ..part };
        let written = disk.write(&at, choice & 2 != 0, &mut &[choice; 512][..]);
        if written.is_ok() {
            let mut out = Vec::new();
            if disk.read(&at, &mut out).is_ok() {
                assert!(out == [choice; 512], "what was written is not there");
            }
        }
        let _ = disk.write_zeroes(part.offset, part.bytes / 2 / 512 * 512, number == 0, choice & 4 != 0);
        if disk.features().discard {
            let _ = disk.discard(part.offset, part.bytes);
        }
    }
    let _ = disk.flush();
}

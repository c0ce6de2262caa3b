//! Invalid names, in every request that has one.
//!
//! A server without a sandbox that takes a name for a path creates `/ferry-hostile-escape` on its host.

use ferry_wire::fuse::abi::{CreateIn, LinkIn, MkdirIn, MknodIn, Opcode, Rename2In, RenameIn};
use zerocopy::IntoBytes;

use super::{Case, Expect, Subject};

/// Where in a request the bad name goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    First,
    Second,
}

const REQUESTS: &[(&str, Opcode, Place)] = &[
    ("lookup", Opcode::Lookup, Place::First),
    ("symlink", Opcode::Symlink, Place::First),
    ("mknod", Opcode::Mknod, Place::First),
    ("mkdir", Opcode::Mkdir, Place::First),
    ("unlink", Opcode::Unlink, Place::First),
    ("rmdir", Opcode::Rmdir, Place::First),
    ("rename", Opcode::Rename, Place::First),
    ("rename-to", Opcode::Rename, Place::Second),
    ("rename2", Opcode::Rename2, Place::First),
    ("rename2-to", Opcode::Rename2, Place::Second),
    ("link", Opcode::Link, Place::First),
    ("create", Opcode::Create, Place::First),
];

/// What is wrong, and the bytes (with the NUL that ends the name, unless that is what is wrong).
fn names() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("absolute", b"/ferry-hostile-escape\0".to_vec()),
        ("slash", b"a/b\0".to_vec()),
        ("slash-behind", b"file/\0".to_vec()),
        ("up", b"../ferry-hostile-escape\0".to_vec()),
        ("dot-dot", b"..\0".to_vec()),
        ("dot", b".\0".to_vec()),
        ("empty", b"\0".to_vec()),
        ("nul-inside", b"a\0b\0".to_vec()),
        ("256-bytes", [&[b'n'; 256][..], b"\0"].concat()),
        ("no-nul", b"file".to_vec()),
        ("nothing", Vec::new()),
    ]
}

/// The fixed arguments of a request, and a good name where it takes two.
fn arguments(subject: &Subject, opcode: Opcode, place: Place, name: &[u8]) -> Vec<u8> {
    let newdir = subject.directory;
    let fixed = match opcode {
        Opcode::Mknod => MknodIn { mode: 0o100_644, ..MknodIn::ZERO }.as_bytes().to_vec(),
        Opcode::Mkdir => MkdirIn { mode: 0o755, umask: 0 }.as_bytes().to_vec(),
        Opcode::Rename => RenameIn { newdir }.as_bytes().to_vec(),
        Opcode::Rename2 => Rename2In { newdir, flags: 0, padding: 0 }.as_bytes().to_vec(),
        Opcode::Link => LinkIn { oldnodeid: subject.file }.as_bytes().to_vec(),
        Opcode::Create => CreateIn { flags: 0o102, mode: 0o100_644, ..CreateIn::ZERO }.as_bytes().to_vec(),
        _ => Vec::new(),
    };
    let (first, second): (&[u8], &[u8]) = match (opcode, place) {
        // The old name must exist, so that nothing but the new name can be wrong.
        (_, Place::Second) => (b"file\0", name),
        (Opcode::Rename | Opcode::Rename2, _) => (name, b"renamed\0"),
        (Opcode::Symlink, _) => (name, b"target\0"),
        _ => (name, b""),
    };
    [&fixed, first, second].concat()
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for &(request, opcode, place) in REQUESTS {
        for (wrong, name) in names() {
            // Two names in a row: without its own NUL, the first takes the second's.
            if wrong == "no-nul"
                && place == Place::First
                && matches!(opcode, Opcode::Rename | Opcode::Rename2 | Opcode::Symlink)
            {
                continue;
            }
            let expect = match (opcode, wrong) {
                // The protocol knows these two names (EXPORT_SUPPORT); they must not lead out.
                (Opcode::Lookup, "dot" | "dot-dot") => Expect::ErrorOrRoot,
                _ => Expect::Error,
            };
            cases.push(Case::new(format!("name/{request}/{wrong}"), expect, move |subject| {
                let args = arguments(subject, opcode, place, &name);
                let node = if opcode == Opcode::Lookup { crate::ROOT } else { subject.directory };
                let bytes = subject.bytes(opcode.as_raw(), node, &args);
                subject.send(&bytes, 4096)
            }));
        }
    }
    cases
}

//! Visits every name of an image once.
//!
//! Whole paths of all pending names would take too much memory: 2048 names of 255 bytes are half a megabyte, and an
//! image may have many files there. So a path is a linked list of names, and its text is created on demand.

use std::collections::HashSet;
use std::rc::Rc;

use ferry_vfs::FileType;

use crate::format::data::Data;
use crate::format::error::{Flaw, ImageResult};
use crate::format::image::{Image, Inode, Nid};

/// The maximum depth of a walk; Linux's paths end at 2048 names (`PATH_MAX`).
pub(crate) const DEPTH_MAX: usize = 2048;
/// The minimum size of a name in an image, in bytes. A damaged image may reference its directories more than once.
pub(crate) const NAME_BYTES_MIN: u64 = 13;
/// The maximum length of a path in a finding, in bytes before escaping: Linux's limit.
const SHOWN_BYTES_MAX: usize = 4096;

/// A path, as its last name and the path above.
#[derive(Debug)]
pub struct Step<'a> {
    above: Option<Rc<Step<'a>>>,
    name: &'a [u8],
    pub(crate) depth: usize,
}

impl<'a> Step<'a> {
    /// Returns the start of a walk, with its whole path.
    pub(crate) fn top(path: &'a [u8]) -> Rc<Self> {
        Rc::new(Self { above: None, name: path, depth: 0 })
    }

    /// Returns the path of a name in this directory.
    pub(crate) fn below(self: &Rc<Self>, name: &'a [u8]) -> Rc<Self> {
        Rc::new(Self { above: Some(Rc::clone(self)), name, depth: self.depth + 1 })
    }

    /// Returns the last name.
    pub(crate) fn name(&self) -> &'a [u8] {
        self.name
    }

    /// Returns the path.
    pub fn path(&self) -> Vec<u8> {
        self.end(usize::MAX)
    }

    /// Returns the path for findings; only the end of one that is too long for Linux.
    pub fn text(&self) -> String {
        self.end(SHOWN_BYTES_MAX).escape_ascii().to_string()
    }

    /// Returns the last names of the path, up to this many bytes, or all of them.
    fn end(&self, bytes_max: usize) -> Vec<u8> {
        let (mut names, mut bytes) = (Vec::new(), 0);
        let mut step = Some(self);
        while let Some(this) = step.filter(|this| names.is_empty() || bytes + this.name.len() < bytes_max) {
            names.push(this.name);
            bytes += this.name.len() + 1;
            step = this.above.as_deref();
        }
        let mut path = if step.is_some() { b"...".to_vec() } else { names.pop().unwrap_or_default().to_vec() };
        for name in names.iter().rev() {
            if !path.ends_with(b"/") {
                path.push(b'/');
            }
            path.extend_from_slice(name);
        }
        path
    }
}

/// Calls `each` with every path below a directory whose path is `top`: directories before their entries. Each directory
/// is entered once, so that the walk of a damaged image ends.
///
/// # Errors
///
/// The image is damaged, or the error of `each`.
pub fn walk<'a, E: From<Flaw>>(
    image: &'a Image,
    from: Nid,
    top: &'a [u8],
    mut each: impl FnMut(&Rc<Step<'a>>, &Inode) -> Result<(), E>,
) -> Result<(), E> {
    let mut entered = HashSet::new();
    let mut names_left = image.bytes() / NAME_BYTES_MIN;
    let mut left = vec![(from, Step::top(top))];
    while let Some((nid, step)) = left.pop() {
        let inode = image.inode(nid)?;
        each(&step, &inode)?;
        if inode.kind() != FileType::Directory || !entered.insert(nid) {
            continue;
        }
        if step.depth > DEPTH_MAX {
            return Err(Flaw { what: "more than 2048 directories, one in the other", offset: nid.0 }.into());
        }
        let first = left.len();
        for entry in image.entries(&inode, 0)? {
            let entry = entry?;
            if matches!(entry.name, b"." | b"..") {
                continue;
            }
            let crowded = Flaw { what: "more names than there is room for", offset: nid.0 };
            names_left = names_left.checked_sub(1).ok_or(crowded)?;
            left.push((entry.nid, step.below(entry.name)));
        }
        left[first..].reverse();
    }
    Ok(())
}

/// Calls `call` with each regular file once: a directory's files, then those of its subdirectories, depth first.
pub(crate) fn each_file<'a>(
    image: &'a Image,
    call: &mut dyn FnMut(&Inode, Data<'a>) -> ImageResult<()>,
) -> ImageResult<()> {
    let mut seen = HashSet::from([image.root()]);
    let mut left = vec![image.root()];
    let mut names_left = image.bytes() / NAME_BYTES_MIN;
    while let Some(nid) = left.pop() {
        let first = left.len();
        for entry in image.entries(&image.inode(nid)?, 0)? {
            let nid = entry?.nid;
            let crowded = Flaw { what: "more names than there is room for", offset: 0 };
            names_left = names_left.checked_sub(1).ok_or(crowded)?;
            if !seen.insert(nid) {
                continue;
            }
            let inode = image.inode(nid)?;
            match inode.kind() {
                FileType::Directory => left.push(nid),
                FileType::RegularFile => call(&inode, image.data(&inode)?)?,
                _ => {}
            }
        }
        // The last one is taken first.
        left[first..].reverse();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ferry_vfs::{Name, Timespec};

    use super::*;
    use crate::format::tree::{Content, Node, Tree};
    use crate::{check, dump};

    #[test]
    fn paths_are_put_together_and_long_ones_cut() {
        let root = Step::top(b"/");
        assert_eq!((root.path(), root.text()), (b"/".to_vec(), "/".into()));
        let file = root.below(b"a").below(b"\x01");
        assert_eq!((file.path(), file.text()), (b"/a/\x01".to_vec(), "/a/\\x01".into()));
        assert_eq!(Step::top(b"/etc/").below(b"x").path(), b"/etc/x");
        let name = [1; 255];
        let long = (0..DEPTH_MAX).fold(root, |step, _| step.below(&name));
        assert_eq!(long.path().len(), 256 * DEPTH_MAX);
        let text = long.text();
        assert!(text.starts_with(".../\\x01") && text.len() <= 4 * SHOWN_BYTES_MAX + 3, "{} bytes", text.len());
        // Also of one name that is too long.
        assert_eq!(Step::top(&[b'a'; 5000]).text().len(), 5000);
    }

    /// An image of so many directories, one in the other, with names of 255 bytes, and so many files in the last one.
    fn deep(depth: usize, files: usize) -> Image {
        let node = |mode, nlink, content| {
            let mtime = Timespec { sec: 1, nsec: 0 };
            Node { mode, uid: 0, gid: 0, rdev: 0, mtime, nlink, xattrs: Vec::new(), content }
        };
        let name = |name: &[u8]| Name::new(name).expect("a name").to_buf();
        let mut nodes: Vec<_> =
            (0..depth).map(|at| node(0o040_755, 3, Content::Directory(vec![(name(&[b'a'; 255]), at + 1)]))).collect();
        let names = (0..files).map(|at| (name(format!("{at:06}").as_bytes()), depth + 1 + at)).collect();
        nodes.push(node(0o040_755, 2, Content::Directory(names)));
        nodes.extend((0..files).map(|_| node(0o100_644, 1, Content::Inline(Vec::new()))));
        let tree = Tree { nodes, ..Tree::default() };
        let bytes = crate::format::composefs::write(tree, None).expect("it can be written");
        Image::from_bytes(bytes).expect("it is sound")
    }

    /// The most memory that this process has had since it was last forgotten, in KiB.
    fn peak() -> u64 {
        let status = fs::read_to_string("/proc/self/status").expect("it can be read");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it is told");
        line.trim().trim_end_matches("kB").trim().parse().expect("a number")
    }

    /// 1000 paths of half a megabyte each.
    #[test]
    fn long_paths_of_many_files_take_no_memory() {
        if !ferry_alone::in_own_process() {
            return;
        }
        let image = deep(2040, 1000);
        let begin = peak();
        assert_eq!(check(&image).findings, Vec::<String>::new());
        dump(&image, &mut std::io::sink()).expect("it is sound");
        let mut count = 0;
        walk(&image, image.root(), b"/", |_, _| -> Result<(), Flaw> {
            count += 1;
            Ok(())
        })
        .expect("it is sound");
        assert_eq!(count, 2041 + 1000);
        let grown = peak().saturating_sub(begin);
        assert!(grown < 100 << 10, "{grown} KiB");
    }

    #[test]
    fn trees_that_are_too_deep_are_refused_by_all() {
        let walked = |image: &Image| walk(image, image.root(), b"/", |_, _| -> Result<(), Flaw> { Ok(()) });
        let image = deep(DEPTH_MAX, 1);
        assert_eq!(check(&image).findings, Vec::<String>::new());
        walked(&image).expect("it is as deep as may be");
        let image = deep(DEPTH_MAX + 1, 0);
        assert_eq!(check(&image).findings.len(), 1);
        let flaw = walked(&image).expect_err("it is too deep");
        assert!(flaw.what.contains("2048 directories"), "{flaw}");
        dump(&image, &mut std::io::sink()).expect_err("it is too deep");
    }
}

use ferry_vfs::Timespec;
use proptest::prelude::*;

use super::*;
use crate::check;
use crate::format::walk::walk;

/// The names of a directory in a layer.
type Names = BTreeMap<String, Item>;

#[derive(Clone, Debug)]
enum Item {
    /// Files of one layer with the same number are names of one inode.
    File(u8),
    Whiteout,
    Directory {
        mode: u16,
        is_opaque: bool,
        names: Names,
    },
}

fn names() -> impl Strategy<Value = Names> {
    let leaf = prop_oneof![4 => any::<u8>().prop_map(Item::File), 1 => Just(Item::Whiteout)];
    let item = leaf.prop_recursive(3, 24, 4, |item| {
        let mode = prop_oneof![Just(0o040_755), Just(0o041_777), Just(0o042_700)];
        let names = prop::collection::btree_map("[a-d]", item, 0..4);
        (mode, prop::bool::weighted(0.2), names).prop_map(|(mode, is_opaque, names)| Item::Directory {
            mode,
            is_opaque,
            names,
        })
    });
    prop::collection::btree_map("[a-d]", item, 0..5)
}

fn pack(layer: usize) -> flat::Pack {
    flat::Pack { name: Algorithm::Blake3.of(&layer.to_le_bytes()), blocks: 20_000, ahead: false }
}

/// The packs of a layer: one that all have, and its own.
fn packs(layer: usize) -> [flat::Pack; 2] {
    [pack(usize::MAX), pack(layer)]
}

fn node(layer: usize, mode: u16, number: u8, content: Content) -> Node {
    let xattr = |name: &str| (name.as_bytes().to_vec(), vec![number]);
    let xattrs = match number % 3 {
        0 => vec![xattr("security.capability"), xattr("user.own")],
        1 => vec![xattr("trusted.overlay.origin")],
        _ => Vec::new(),
    };
    let mtime = Timespec { sec: i64::from(number), nsec: u32::try_from(layer).unwrap() };
    let uid = u32::try_from(layer).unwrap() * 40_000;
    Node { mode, uid, gid: 7, rdev: 0, mtime, nlink: 1, xattrs, content }
}

fn file(layer: usize, number: u8) -> Node {
    let block = u64::from(number) * 64;
    let (mode, content) = match number % 5 {
        0 => (0o100_644, Content::Inline(vec![number; usize::from(number % 65)])),
        1 => (0o104_755, Content::Layer { bytes: 5000 + u64::from(number), pack: usize::from(number % 2), block }),
        2 => (0o100_600, Content::Chunks { bytes: 131_073, chunks: vec![(1, block), (0, block), (1, block + 32)] }),
        3 => (0o120_777, Content::Inline(format!("target-{number}").into_bytes())),
        _ => (0o010_644, Content::None),
    };
    node(layer, mode, number, content)
}

/// The image of a layer.
fn image(layer: usize, names: &Names) -> Image {
    let mut tree = Tree::default();
    tree.nodes.push(node(layer, 0o040_755, 2, Content::Directory(Vec::new())));
    fill(&mut tree, layer, (0, names), &mut HashMap::new());
    // With identities and without.
    Image::from_bytes(flat::write_layers(&tree, &packs(layer), &[0; 32], layer.is_multiple_of(2)).unwrap()).unwrap()
}

fn fill(tree: &mut Tree, layer: usize, (directory, names): (NodeId, &Names), links: &mut HashMap<u8, NodeId>) {
    let (mut entries, mut nlink) = (Vec::new(), 2);
    for (name, item) in names {
        let id = match item {
            Item::File(number) if links.contains_key(number) => {
                tree.nodes[links[number]].nlink += 1;
                links[number]
            }
            _ => tree.nodes.len(),
        };
        entries.push((Name::new(name.as_bytes()).unwrap().to_buf(), id));
        if id < tree.nodes.len() {
            continue;
        }
        match item {
            Item::File(number) => {
                links.insert(*number, id);
                tree.nodes.push(file(layer, *number));
            }
            Item::Whiteout => tree.nodes.push(node(layer, 0o020_000, 2, Content::None)),
            Item::Directory { mode, is_opaque, names } => {
                let mut made = node(layer, *mode, 2, Content::Directory(Vec::new()));
                made.xattrs.extend(is_opaque.then(|| (b"trusted.overlay.opaque".to_vec(), b"y".to_vec())));
                tree.nodes.push(made);
                fill(tree, layer, (id, names), links);
                nlink += 1;
            }
        }
    }
    (tree.nodes[directory].nlink, tree.nodes[directory].content) = (nlink, Content::Directory(entries));
}

/// What is seen of the layers: of each directory from which layer it is, and its mode; of each file its layer and number.
#[derive(Debug)]
enum Seen {
    File(usize, u8),
    Directory(usize, u16, BTreeMap<String, Seen>),
}

/// Puts a layer on what is seen of those below.
fn put_on(below: &mut BTreeMap<String, Seen>, layer: usize, names: &Names) {
    for (name, item) in names {
        let seen = match (below.remove(name), item) {
            (_, Item::Whiteout) => continue,
            (_, Item::File(number)) => Seen::File(layer, *number),
            (old, Item::Directory { mode, is_opaque, names }) => {
                let mut inside = match old {
                    Some(Seen::Directory(_, _, inside)) if !is_opaque => inside,
                    _ => BTreeMap::new(),
                };
                put_on(&mut inside, layer, names);
                Seen::Directory(layer, *mode, inside)
            }
        };
        below.insert(name.clone(), seen);
    }
}

/// What an inode is, with the names of packs instead of numbers.
fn told(mode: u32, uid: u32, mtime: Timespec, xattrs: &[(Vec<u8>, Vec<u8>)], data: &str) -> String {
    let xattrs: Vec<_> = xattrs.iter().map(|(name, value)| format!("{}={value:?}", name.escape_ascii())).collect();
    format!("{mode:o} {uid} {}.{} {xattrs:?} {data}", mtime.sec, mtime.nsec)
}

fn expected(seen: &BTreeMap<String, Seen>, path: &str, found: &mut BTreeMap<String, String>) {
    for (name, seen) in seen {
        let path = format!("{path}/{name}");
        let (layer, node) = match seen {
            Seen::File(layer, number) => (*layer, file(*layer, *number)),
            Seen::Directory(layer, mode, inside) => {
                expected(inside, &path, found);
                (*layer, node(*layer, *mode, 2, Content::None))
            }
        };
        let name = |number: usize| packs(layer)[number].name;
        let data = match &node.content {
            Content::Inline(bytes) => format!("{bytes:?}"),
            Content::Layer { bytes, pack, block } => format!("{bytes} {} {block}", name(*pack)),
            Content::Chunks { chunks, .. } => {
                chunks.iter().map(|(pack, block)| format!("{} {block} ", name(*pack))).collect()
            }
            _ => String::new(),
        };
        let shown: Vec<_> =
            node.xattrs.into_iter().filter(|(name, _)| !name.starts_with(b"trusted.overlay.")).collect();
        found.insert(path, told(node.mode.into(), node.uid, node.mtime, &shown, &data));
    }
}

/// What an image shows by path, and the paths of each inode with several.
fn shown(image: &Image) -> (BTreeMap<String, String>, HashMap<Nid, Vec<String>>) {
    let (mut found, mut links) = (BTreeMap::new(), HashMap::<_, Vec<_>>::new());
    walk(image, image.root(), b"", |step, inode| -> ImageResult<()> {
        let name = |pack: usize| image.packs()[pack].name;
        let data = match inode.kind() {
            FileType::Symlink => format!("{:?}", image.link(inode)?),
            FileType::RegularFile => match image.data(inode)? {
                Data::Near(whole, rest) => format!("{:?}", [whole, rest].concat()),
                Data::Far { pack, block } => format!("{} {} {block}", inode.bytes, name(pack)),
                data => {
                    let pieces = data.pieces(inode.bytes).map(|piece| piece.expect("it is there"));
                    pieces.map(|piece| format!("{} {} ", name(piece.pack), piece.at / 4096)).collect()
                }
            },
            _ => String::new(),
        };
        let mut xattrs: Vec<_> = image.xattrs(inode)?.into_iter().map(|(name, value)| (name, value.to_vec())).collect();
        xattrs.sort_unstable();
        let path = String::from_utf8(step.path()).unwrap();
        if inode.kind() != FileType::Directory {
            links.entry(inode.nid).or_default().push(path.clone());
        }
        found.insert(path, told(inode.mode, inode.uid, inode.mtime, &xattrs, &data));
        Ok(())
    })
    .unwrap();
    found.remove("");
    (found, links)
}

/// The layers from the lowest to the highest.
fn images(layers: &[Names]) -> Vec<Image> {
    layers.iter().enumerate().rev().map(|(layer, names)| image(layer, names)).collect()
}

proptest! {
    #[test]
    fn the_merged_image_equals_its_layers(layers in prop::collection::vec(names(), 1..5), share in any::<bool>()) {
        let bytes = merged(&images(&layers), share).unwrap();
        prop_assert_eq!(&bytes, &merged(&images(&layers), share).unwrap(), "it is the same each time");
        let image = Image::from_bytes(bytes).unwrap();
        prop_assert_eq!(check(&image).findings, Vec::<String>::new());
        let mut seen = BTreeMap::new();
        layers.iter().enumerate().for_each(|(layer, names)| put_on(&mut seen, layer, names));
        let mut wanted = BTreeMap::new();
        expected(&seen, "", &mut wanted);
        let (found, links) = shown(&image);
        prop_assert_eq!(&found, &wanted);
        for (nid, paths) in links {
            let inode = image.inode(nid).unwrap();
            prop_assert_eq!(usize::try_from(inode.nlink).unwrap(), paths.len());
        }
        let needed = found.values().flat_map(|text| image.packs().iter().filter(|pack| text.contains(&pack.name.to_string())));
        let needed: HashSet<_> = needed.map(|pack| pack.name).collect();
        prop_assert_eq!(image.packs().len(), needed.len(), "packs of hidden files are not needed");
    }
}

#[test]
fn attributes_of_overlayfs_are_refused_with_their_name() {
    let layer = |name: &str, value: &[u8]| {
        let mut tree = Tree::default();
        tree.nodes.push(node(0, 0o040_755, 2, Content::Directory(vec![(Name::new(b"a").unwrap().to_buf(), 1)])));
        tree.nodes.push(node(0, 0o040_755, 2, Content::Directory(Vec::new())));
        tree.nodes[1].xattrs.push((name.as_bytes().to_vec(), value.to_vec()));
        Image::from_bytes(flat::write_layers(&tree, &[], &[0; 32], false).unwrap()).unwrap()
    };
    for (name, value) in [
        ("trusted.overlay.redirect", b"/b".as_slice()),
        ("trusted.overlay.metacopy", b""),
        ("trusted.overlay.whiteout", b""),
        ("trusted.overlay.opaque", b"x"),
        ("trusted.overlay.overlay.opaque", b"y"),
        ("trusted.overlay.later", b"y"),
    ] {
        for layers in [[layer(name, value), image(1, &Names::new())], [image(1, &Names::new()), layer(name, value)]] {
            let error = merged(&layers, false).expect_err(name).to_string();
            assert!(error.contains(name), "{error}");
        }
    }
    // Another attribute, and overlayfs's of a file system that is mounted without privileges.
    for name in ["trusted.other", "user.overlay.opaque"] {
        let image = Image::from_bytes(merged(&[layer(name, b"y")], false).unwrap()).unwrap();
        let (found, _) = shown(&image);
        assert!(found["/a"].contains(name), "{found:?}");
    }
    assert!(merged(&[], false).is_err());
}

#[test]
fn images_that_are_too_large_together_are_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let large = directory.path().join("large");
    fs::File::create(&large).unwrap().set_len(BYTES_MAX / 2 + 1).unwrap();
    let layer = (large, Algorithm::Blake3.of(b""));
    let error = merge(&[layer.clone(), layer], &directory.path().join("image"), false).unwrap_err().to_string();
    assert!(error.contains("256 MiB together, more than 256"), "{error}");
}

#[test]
fn a_damaged_image_is_refused() {
    let mut bytes = image(0, &Names::from([("a".into(), Item::File(1))])).as_bytes().to_vec();
    let root = SUPER_OFFSET + size_of::<Super>() + 2 * size_of::<crate::format::erofs::DeviceSlot>();
    for at in root..bytes.len().min(root + 400) {
        let good = bytes[at];
        for bit in 0..8 {
            bytes[at] = good ^ 1 << bit;
            if let Ok(image) = Image::from_bytes(bytes.clone()) {
                let _ = merged(&[image], true);
            }
        }
        bytes[at] = good;
    }
}

proptest! {
    #[test]
    fn images_that_are_damaged_in_several_places_are_refused_or_merged(
        names in names(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
    ) {
        let mut bytes = image(0, &names).as_bytes().to_vec();
        // The magic number and the size of blocks stay.
        let from = SUPER_OFFSET + 13;
        for (at, byte) in changes {
            let at = from + at.index(bytes.len() - from);
            bytes[at] = byte;
        }
        if let Ok(damaged) = Image::from_bytes(bytes)
            && let Ok(bytes) = merged(&[damaged, image(1, &names)], true)
        {
            Image::from_bytes(bytes).expect("what is made can be read");
        }
    }
}

//! Layers of any kind of member, again and again by the same names, through links, and whiteouts: the image has what a simple model of
//! layers has, and is refused where that cannot go on. A test compares the same with umoci.
#![no_main]

mod build;
#[path = "../../sources/image/tests/archives/model.rs"]
mod model;
#[path = "../../sources/image/tests/archives/random.rs"]
mod random;

use std::collections::BTreeMap;
use std::fs;

use ferry_image::{Flaw, Layout, Source, walk};
use ferry_vfs::FileType;
use libfuzzer_sys::fuzz_target;
use model::{Model, Shown};
use random::{Choices, Member};
use serde_json::json;
use sha2::{Digest, Sha256};

/// Each byte is a choice; when there are none left, all choices are the first.
struct Bytes<'a>(&'a [u8]);

impl Choices for Bytes<'_> {
    fn below(&mut self, end: usize) -> usize {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(*first) % end
    }
}

fuzz_target!(|bytes: &[u8]| {
    let layers = random::layers(&mut Bytes(bytes));
    let directory = build::directory().join("oci");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(directory.join("blobs/sha256")).expect("directories can be made");
    let blob = |bytes: &[u8], kind: &str| {
        let name: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(directory.join("blobs/sha256").join(&name), bytes).expect("files can be written");
        json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": format!("sha256:{name}"), "size": bytes.len()})
    };
    let archives = layers.iter().map(|layer| layer.iter().flat_map(archived).chain([0; 1024]).collect::<Vec<_>>());
    let named: Vec<_> = archives.map(|archive| blob(&archive, "layer.v1.tar")).collect();
    let plain: Vec<_> = named.iter().map(|layer| layer["digest"].clone()).collect();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": plain}}).to_string();
    let config = blob(config.as_bytes(), "config.v1+json");
    let manifest = blob(json!({"config": config, "layers": named}).to_string().as_bytes(), "manifest.v1+json");
    fs::write(directory.join("index.json"), json!({"manifests": [manifest]}).to_string()).expect("files can be written");
    fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).expect("files can be written");
    let mut source = std::ffi::OsString::from("oci:");
    source.push(&directory);
    build::check_source(source.as_ref(), Layout::Flat, None);
    let image = build::directory().join("image");
    let model = Model::of(&layers);
    assert_eq!(image.exists(), model.is_some(), "{layers:#?}");
    let Some(model) = model else { return };
    let source = Source::open(&image, &build::directory().join("store"), None).expect("it was built");
    compare(&source, &model, &layers);
});

fn compare(source: &Source, model: &Model, layers: &[Vec<Member>]) {
    let image = source.image();
    let mut found = BTreeMap::new();
    walk::<Flaw>(image, image.root(), b"/", |step, inode| {
        let nlink = usize::try_from(inode.nlink).expect("it fits");
        let what = match inode.kind() {
            FileType::RegularFile => {
                let mut bytes = vec![0; usize::try_from(inode.bytes).expect("it fits")];
                source.read_at(inode.nid, 0, &mut bytes).expect("it can be read");
                (bytes, nlink)
            }
            FileType::Symlink => (image.link(inode)?, nlink),
            _ => (Vec::new(), 0),
        };
        found.insert(String::from_utf8(step.path()[1..].to_vec()).expect("names here are text"), what);
        Ok(())
    })
    .expect("what was built is whole");
    found.remove("");
    let expected: BTreeMap<String, (Vec<u8>, usize)> = model
        .shown()
        .into_iter()
        .map(|(path, shown)| match shown {
            Shown::Dir => (path, (Vec::new(), 0)),
            Shown::File(bytes, nlink) => (path, (bytes.to_vec(), nlink)),
            Shown::Symlink(target, nlink) => (path, (target.as_bytes().to_vec(), nlink)),
        })
        .collect();
    assert_eq!(found, expected, "{layers:#?}");
}

/// A member as an archive has it.
fn archived(member: &Member) -> Vec<u8> {
    let mut header = [0; 512];
    header[..member.path.len()].copy_from_slice(member.path.as_bytes());
    header[100..124].copy_from_slice(b"0000755\x000000000\x000000000\0");
    header[124..148].copy_from_slice(format!("{:011o}\x0000000000000\0", member.data.len()).as_bytes());
    header[156] = member.kind;
    header[157..][..member.target.len()].copy_from_slice(member.target.as_bytes());
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let padding = vec![0; member.data.len().next_multiple_of(512) - member.data.len()];
    [&header[..], &member.data, &padding].concat()
}

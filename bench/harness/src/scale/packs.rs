//! Builds with stores of many packs.

use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use ferry_image::{Algorithm, BuildOptions, Index, Object, Store, build};

use super::case::{Case, Figure, Measure};
use super::place::Place;

/// Objects of each pack, and how long they are: each takes two blocks.
const OBJECTS: u64 = 100;
const OBJECT_BYTES: u64 = 5000;
const BLOCKS: u64 = 2;

pub const CASES: &[Case] = &[Case {
    name: "build of one file that the store has",
    of: "packs in the store",
    sizes: &[50, 500, 2000],
    quick_max: 2000,
    figures: &[Figure { name: "", unit: "ms", growth_max: None }],
    prepare: prepare_build,
}];

/// A pack as a build leaves it; nobody reads its bytes here, so they are a hole.
fn add_pack(packs: &Path, number: u64) -> Result<()> {
    let object = |at: u64| {
        let digest = Algorithm::Blake3.of(&(number * OBJECTS + at).to_le_bytes());
        Object { block: at * BLOCKS, skip: 0, bytes: OBJECT_BYTES, padding: 0, digest }
    };
    let objects = (0..OBJECTS).map(object).collect();
    let index = Index { pack: Algorithm::Blake3.of(&[]), objects, blocks: OBJECTS * BLOCKS, verity: None, layer: None };
    let bytes = index.to_bytes();
    let name = Algorithm::Blake3.of(&bytes).hex();
    File::create(packs.join(&name))?.set_len(OBJECTS * BLOCKS * 4096)?;
    Ok(fs::write(packs.join(format!("{name}.index")), bytes)?)
}

fn prepare_build(place: &Place, count: u64) -> Result<Measure> {
    let directory = &place.directory;
    let (tree, image, store) = (directory.join("tree"), directory.join("image"), directory.join("store"));
    fs::create_dir(&tree)?;
    fs::write(tree.join("file"), vec![7; 5000])?;
    let options = BuildOptions { threads: 1, ..BuildOptions::default() };
    let run = move || -> Result<()> {
        build(&tree, &image, Store::create(&store)?, &options, &|_, _| {})?;
        Ok(())
    };
    run()?;
    let packs = place.directory.join("store/packs");
    (1..count).try_for_each(|number| add_pack(&packs, number))?;
    // The first build after a change of the store is not what is measured.
    run()?;
    Ok(Box::new(move || {
        let begin = Instant::now();
        run()?;
        Ok(vec![begin.elapsed().as_secs_f64() * 1e3])
    }))
}

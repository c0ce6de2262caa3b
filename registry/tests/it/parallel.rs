//! Concurrent pulls of one image into one store: each byte is fetched once.
use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::{Place, Request};
use ferry_image::{BuildOptions, Image, Layout, Objects, Store};
use ferry_registry::{PullOptions, pull};

const PULLS: usize = 6;

fn each_byte_is_fetched_once(layout: Layout) {
    let place = Place::laid_out(layout);
    // Long enough for all pulls to overlap.
    place.fake.fault(|request, reply| {
        if request.range().is_some() {
            thread::sleep(Duration::from_millis(20));
        }
        reply
    });
    let begin = Arc::new(Barrier::new(PULLS));
    let store = place.at("copy");
    let fetched: u64 = thread::scope(|scope| {
        let one = |number: usize| {
            let (place, begin, store) = (&place, Arc::clone(&begin), &store);
            scope.spawn(move || {
                let _held = Store::create(store).unwrap();
                let options = PullOptions { jobs: 2, ..PullOptions::default() };
                begin.wait();
                let output = place.at(&format!("image-{number}"));
                pull(&place.fake.remote(), &output, store, &options, &|_, _| {}).unwrap().fetched_bytes
            })
        };
        let pulls: Vec<_> = (0..PULLS).map(one).collect();
        pulls.into_iter().map(|pull| pull.join().unwrap()).sum()
    });
    let data = place.built.data_bytes;
    let asked: usize = place.fake.requests().iter().filter_map(Request::range).map(|(from, to)| to - from).sum();
    assert_eq!(fetched, data, "{layout:?}");
    assert!(asked as u64 >= data && asked as u64 <= data + (1 << 20), "{layout:?}: {asked} of {data}");
    for number in 0..PULLS {
        let image = Image::open(&place.at(&format!("image-{number}")), Some(place.built.digest)).unwrap();
        Objects::open(&image, &store).unwrap().verify_all().unwrap();
    }
    let directory = if layout == Layout::Flat { "packs" } else { "objects" };
    assert_eq!(files(&store.join(directory)), files(&place.at("store").join(directory)), "{layout:?}");
}

/// Returns the number of files, and their disk usage in bytes, rounded to MiB.
fn files(directory: &std::path::Path) -> (usize, u64) {
    let (mut count, mut blocks, mut left) = (0, 0, vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let found = entry.metadata().unwrap();
            if found.is_dir() {
                left.push(entry.path());
            } else {
                (count, blocks) = (count + 1, blocks + found.blocks());
            }
        }
    }
    (count, blocks / 2048)
}

#[test]
fn parallel_pulls_of_one_image_fetch_each_byte_once() {
    each_byte_is_fetched_once(Layout::Flat);
}

#[test]
fn parallel_pulls_of_one_composefs_image_fetch_each_byte_once() {
    each_byte_is_fetched_once(Layout::Composefs { version: None });
}

/// Two images that have a pack in common, pulled at a time: what they share is fetched once, and neither takes harm (moby issue 9718).
#[test]
fn parallel_pulls_of_images_that_share_a_pack_fetch_it_once() {
    let place = Place::new();
    fs::write(place.at("tree/new"), vec![5; 300_000]).unwrap();
    let (second, store) = (place.at("second"), place.at("store"));
    let open = || Store::create(&store).unwrap();
    let built = ferry_image::build(&place.at("tree"), &second, open(), &BuildOptions::default(), &|_, _| {}).unwrap();
    assert!(built.packs.len() == 2 && built.packs.contains(&place.built.packs[0]), "{built:?}");
    let remotes = [place.fake.remote(), place.fake.remote_as("2", Duration::from_secs(60))];
    ferry_registry::push(&remotes[1], &second, None, &open(), &store, 2, &|_, _| {}).unwrap();
    place.fake.requests();
    place.fake.fault(|request, reply| {
        if request.range().is_some() {
            thread::sleep(Duration::from_millis(20));
        }
        reply
    });
    let begin = Barrier::new(2);
    thread::scope(|scope| {
        for (number, remote) in remotes.iter().enumerate() {
            let (place, begin) = (&place, &begin);
            scope.spawn(move || {
                let _held = Store::create(&place.at("copy")).unwrap();
                begin.wait();
                let output = place.at(&format!("image-{number}"));
                pull(remote, &output, &place.at("copy"), &PullOptions::default(), &|_, _| {}).unwrap();
            });
        }
    });
    let asked: usize = place.fake.requests().iter().filter_map(Request::range).map(|(from, to)| to - from).sum();
    let most = place.built.data_bytes + 300_000 + (1 << 20);
    assert!(asked as u64 <= most, "{asked} bytes, of which {most} would be enough");
    for number in 0..2 {
        let image = Image::open(&place.at(&format!("image-{number}")), None).unwrap();
        Objects::open(&image, &place.at("copy")).unwrap().verify_all().unwrap();
    }
}

//! Many images in one store: what goes, what stays, what they share, what is another, and who does it at the same time.

use crate::common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Bench, bytes, fill};
use ferry_image::{
    BuildOptions, Change, ChangeKind, Digests, ExclusiveStore, Flaw, GcReport, Image, ImageUsage, Layout, LiveSet,
    Source, Store, Total, Usage, build, diff, object_locations,
};
use ferry_vfs::FileType;

/// An hour, as people have it.
const HOUR: Duration = Duration::from_secs(3600);

fn open(bench: &Bench, name: &str) -> Image {
    Image::open(&bench.path(name), None).expect("what was built can be opened")
}

fn needed(bench: &Bench, names: &[&str]) -> LiveSet {
    let mut needed = LiveSet::default();
    names.iter().for_each(|name| needed.add(&open(bench, name)).expect("the image is sound"));
    needed
}

fn collect(bench: &Bench, names: &[&str], grace: Duration, dry: bool) -> GcReport {
    let sole = ExclusiveStore::lock(&bench.store(), &|| {}).expect("the store is there");
    sole.collect(&needed(bench, names), grace, dry).expect("it can be collected")
}

/// Reads every byte of an image, proved.
fn read_all(bench: &Bench, image: &Path) {
    let source = Source::open(image, &bench.store(), None).expect("the image and its packs are there");
    let (image, objects) = (source.image(), ferry_image::Objects::open(source.image(), &bench.store()));
    let objects = objects.expect("the packs are there");
    let mut left = vec![image.root()];
    while let Some(nid) = left.pop() {
        let inode = image.inode(nid).expect("the image is sound");
        match inode.kind() {
            FileType::Directory => {
                let names = image.entries(&inode, 0).expect("the image is sound").map(|name| name.expect("a name"));
                left.extend(names.filter(|name| !matches!(name.name, b"." | b"..")).map(|name| name.nid));
            }
            FileType::RegularFile => {
                let data = image.data(&inode).expect("the image is sound");
                objects.verify_file(data, inode.bytes).expect("the object is sound");
            }
            _ => {}
        }
    }
}

/// Three images: the second has most of the first, the third nothing of them.
fn three() -> Bench {
    let bench = Bench::new();
    for number in 0..5 {
        fs::write(bench.tree().join(number.to_string()), bytes(number, 10_000)).expect("files can be made");
    }
    bench.build("first");
    fs::remove_file(bench.tree().join("0")).expect("files can be removed");
    fs::write(bench.tree().join("5"), bytes(5, 5000)).expect("files can be made");
    bench.build("second");
    for number in 1..6 {
        fs::remove_file(bench.tree().join(number.to_string())).expect("files can be removed");
    }
    fs::write(bench.tree().join("other"), bytes(6, 50_000)).expect("files can be made");
    bench.build("third");
    bench
}

/// Who may write to a store may put anything there, and root may open it.
#[test]
fn links_in_a_store_lead_nowhere() {
    let bench = three();
    let (store, victim, new) = (bench.store(), bench.path("victim"), bench.path("new"));
    fs::set_permissions(&store, fs::Permissions::from_mode(0o777)).expect("it is ours");
    fs::write(&victim, "its bytes").expect("files can be made");
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).expect("it is ours");
    let lock = store.join("lock");
    let put = |make: &dyn Fn()| {
        fs::remove_file(&lock).expect("it is there");
        make();
    };
    for (name, target) in [("a file", &victim), ("nothing", &new)] {
        put(&|| std::os::unix::fs::symlink(target, &lock).expect("links can be made"));
        ferry_image::Store::open(&store).expect_err(name);
        ferry_image::ExclusiveStore::lock(&store, &|| ()).expect_err(name);
    }
    put(&|| {
        rustix::fs::mknodat(rustix::fs::CWD, &lock, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("it can be made")
    });
    ferry_image::Store::open(&store).expect_err("a fifo");
    put(&|| fs::hard_link(&victim, &lock).expect("links can be made"));
    drop(ferry_image::Store::open(&store).expect("it can be locked"));
    let found = fs::metadata(&victim).expect("it is there");
    assert_eq!((found.permissions().mode() & 0o777, found.len(), new.exists()), (0o600, 9, false));
}

/// Another user of the store puts them there.
#[test]
fn files_of_a_store_that_are_no_files_are_errors() {
    let bench = three();
    let store = ferry_image::Store::open(&bench.store()).expect("a store");
    let image = ferry_image::Image::open(&bench.path("first"), None).expect("an image");
    let pack = image.packs()[0].name;
    let whole = store.pack_path(pack);
    let index = whole.with_extension("index");
    let kept = fs::read(&index).expect("an index");
    let fifo = |path: &std::path::Path| {
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    };
    let sparse = |path: &std::path::Path| {
        fs::File::create(path).and_then(|file| file.set_len(1 << 31)).expect("a file");
    };
    let zeros = |path: &std::path::Path| std::os::unix::fs::symlink("/dev/zero", path).expect("a link");
    for make in [&fifo as &dyn Fn(&std::path::Path), &sparse, &zeros] {
        fs::remove_file(&index).expect("it is there");
        make(&index);
        store.index(pack).expect_err("no index");
        fs::remove_file(&index).expect("it is there");
        fs::write(&index, &kept).expect("a file");
        fs::rename(&whole, bench.path("pack")).expect("it is there");
        make(&whole);
        Source::open(&bench.path("first"), &bench.store(), None).map(drop).expect_err("no pack");
        fs::remove_file(&whole).expect("it is there");
        fs::rename(bench.path("pack"), &whole).expect("it is there");
        let table = bench.store().join("packs/table");
        let _ = fs::remove_file(&table);
        make(&table);
        let _ = ferry_image::Store::open(&bench.store()).expect("a store").packs();
    }
    Source::open(&bench.path("first"), &bench.store(), None).expect("all is as it was");
}

/// Who may write to a store and may not lock it would use packs while they are removed.
#[test]
fn a_writable_store_is_locked_by_its_lock_or_not_used() {
    use rustix::process::{Gid, Uid};
    const GROUP: u32 = 300;
    const USER: u32 = 1000;
    let bench = three();
    if !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("only root can act as two users");
    }
    let (store, packs) = (bench.store(), bench.store().join("packs"));
    let open_as_user = || {
        std::thread::scope(|scope| {
            let open = || {
                let (uid, gid) = (Uid::from_raw(USER), Gid::from_raw(USER));
                rustix::thread::set_thread_groups(&[Gid::from_raw(GROUP)]).expect("we are root");
                rustix::thread::set_thread_res_gid(gid, gid, gid).expect("we are root");
                rustix::thread::set_thread_res_uid(uid, uid, uid).expect("we are root");
                ferry_image::Store::open(&store).map(drop).map_err(|error| error.to_string())
            };
            scope.spawn(open).join().expect("it ends")
        })
    };
    fs::set_permissions(bench.directory.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    for directory in [&store, &packs] {
        std::os::unix::fs::chown(directory, None, Some(GROUP)).expect("we are root");
        fs::set_permissions(directory, fs::Permissions::from_mode(0o775)).expect("it is ours");
    }
    fs::set_permissions(store.join("lock"), fs::Permissions::from_mode(0o660)).expect("it is ours");
    let refusal = open_as_user().expect_err("it is another group's");
    assert!(refusal.ends_with("store/lock"), "{refusal}");
    for directory in [&store, &packs] {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    open_as_user().expect("who only reads needs no lock");
}

#[test]
fn only_unneeded_data_is_removed() {
    let bench = three();
    let packs = bench.store().join("packs");
    assert_eq!(collect(&bench, &["first", "second", "third"], Duration::ZERO, false).removed, []);
    // What killed builds and collections may leave, and what is none of ours.
    fs::write(packs.join(".new-abc"), "x").expect("files can be made");
    fs::create_dir_all(packs.join(".new-dir/blobs")).expect("directories can be made");
    fs::write(packs.join(".new-dir/blobs/a"), bytes(7, 200_000)).expect("files can be made");
    fs::File::open(packs.join(".new-dir/blobs/a")).and_then(|file| file.sync_all()).expect("it has its blocks");
    std::os::unix::fs::symlink("/proc", packs.join(".new-link")).expect("links can be made");
    fs::write(packs.join("0".repeat(64)), "x").expect("files can be made");
    fs::write(packs.join("README"), "x").expect("files can be made");
    let young = collect(&bench, &["first", "second"], HOUR, false);
    assert_eq!((young.removed.len(), young.young.len(), young.leftovers, young.kept), (0, 1, 0, 2));
    let dry = collect(&bench, &["first", "second"], Duration::ZERO, true);
    assert_eq!((dry.removed.len(), dry.leftovers, dry.kept), (1, 4, 2));
    assert_eq!(fs::read_dir(&packs).expect("it is there").count(), 11);
    let done = collect(&bench, &["first", "second"], Duration::ZERO, false);
    assert_eq!(done, dry);
    assert!((250_000..1_000_000).contains(&done.bytes), "{done:?}");
    let mut left: Vec<_> =
        fs::read_dir(&packs).expect("it is there").map(|entry| entry.expect("a name").file_name()).collect();
    left.sort_unstable();
    assert_eq!(left.len(), 5, "{left:?}");
    assert!(left.contains(&"README".into()));
    for image in ["first", "second"] {
        read_all(&bench, &bench.path(image));
    }
    let error = Source::open(&bench.path("third"), &bench.store(), None).expect_err("its pack is gone");
    assert!(error.to_string().contains("cannot open"), "{error}");
    let missing = collect(&bench, &["third"], HOUR, true).missing;
    assert_eq!(missing.iter().copied().collect::<BTreeSet<_>>(), needed(&bench, &["third"]).packs);
    // And is made again.
    bench.build("third");
    read_all(&bench, &bench.path("third"));
}

#[test]
fn a_pack_that_a_new_image_uses_is_young_again() {
    let bench = three();
    for entry in fs::read_dir(bench.store().join("packs")).expect("it is there") {
        let file = fs::File::open(entry.expect("a name").path()).expect("packs can be opened");
        file.set_modified(std::time::SystemTime::now() - 2 * HOUR).expect("times can be set");
    }
    assert_eq!(collect(&bench, &["first"], HOUR, true).removed.len(), 2);
    // Nothing new is stored, but the third image's pack is used.
    assert_eq!(bench.build("third again").new_bytes, 0);
    let found = collect(&bench, &["first"], HOUR, true);
    assert_eq!((found.removed.len(), found.young.len()), (1, 1));
}

#[test]
fn usage_counts_shared_data_once() {
    let bench = three();
    let mut usage = Usage::default();
    let all = ["first", "second"].map(|name| object_locations(&open(&bench, name)).expect("the image is sound"));
    all.iter().for_each(|image| usage.add(image));
    // Blocks of 4096: three for each of the five, two for the sixth.
    let blocks = |count: u64| count * 4096;
    assert_eq!(usage.of_image(&all[0]), ImageUsage { bytes: blocks(15), own_bytes: blocks(3) });
    assert_eq!(usage.of_image(&all[1]), ImageUsage { bytes: blocks(14), own_bytes: blocks(2) });
    let total = usage.total(&Store::open(&bench.store()).expect("a store")).expect("it can be read");
    let (live_bytes, garbage_bytes) = (blocks(17), blocks(13));
    assert_eq!(total, Total { packs: 3, objects: 0, bytes: blocks(30), live_bytes, garbage_bytes });
}

fn changes(bench: &Bench, old: &str, new: &str) -> Vec<(String, ChangeKind, Vec<&'static str>)> {
    let (old, new) = (open(bench, old), open(bench, new));
    let store = Store::open(&bench.store()).expect("a store");
    let mut digests = Digests::default();
    digests.add(&old, &store).expect("the indexes are there");
    digests.add(&new, &store).expect("the indexes are there");
    let mut found = Vec::new();
    diff::<Flaw>(&old, &new, &digests, &mut |Change { path, kind, what }| {
        found.push((String::from_utf8_lossy(&path).into_owned(), kind, what));
        Ok(())
    })
    .expect("both images are sound");
    found
}

#[test]
fn every_kind_of_change_is_listed() {
    let bench = Bench::new();
    let tree = bench.tree();
    fill(&tree);
    bench.build("old");
    assert_eq!(changes(&bench, "old", "old"), []);
    // Contents of the same length, far and near, with the same time.
    for name in ["file-4097", "file-63"] {
        let path = tree.join(name);
        let before = fs::metadata(&path).and_then(|found| found.modified()).expect("it is there");
        let mut content = fs::read(&path).expect("files can be read");
        content[10] ^= 1;
        fs::write(&path, content).expect("files can be written");
        fs::File::open(&path).and_then(|file| file.set_modified(before)).expect("times can be set");
    }
    fs::set_permissions(tree.join("file-8192"), fs::Permissions::from_mode(0o600)).expect("modes can be set");
    std::os::unix::fs::lchown(tree.join("link-2000"), Some(9), None).expect("owners can be set");
    rustix::fs::lsetxattr(tree.join("file-4096"), "user.one", b"2", rustix::fs::XattrFlags::empty()).expect("root may");
    fs::remove_dir_all(tree.join("many-100")).expect("directories can be removed");
    fs::remove_file(tree.join("file-1")).expect("files can be removed");
    fs::create_dir(tree.join("file-1")).expect("directories can be made");
    fs::write(tree.join("file-1/inner"), "x").expect("files can be made");
    let mut found = {
        bench.build("new");
        changes(&bench, "old", "new")
    };
    let removed = |found: &[(String, ChangeKind, Vec<&str>)]| {
        found.iter().filter(|(path, kind, _)| path.starts_with("/many-100") && *kind == ChangeKind::Removed).count()
    };
    // The directory and its hundred files.
    assert_eq!(removed(&found), 101);
    found.retain(|(path, ..)| !path.starts_with("/many-100") && path != "/");
    let changed = |path: &str, what: &[&'static str]| (path.to_owned(), ChangeKind::Changed, what.to_vec());
    let (inner, kinds) =
        (("/file-1/inner".to_owned(), ChangeKind::Added, Vec::new()), &["type", "mode", "owner", "time"]);
    assert_eq!(
        found,
        [
            changed("/file-1", kinds),
            inner,
            changed("/file-4096", &["attributes"]),
            changed("/file-4097", &["content"]),
            changed("/file-63", &["content"]),
            changed("/file-8192", &["mode"]),
            changed("/link-2000", &["owner"]),
        ]
    );
    let back = changes(&bench, "new", "old");
    assert!(back.contains(&("/file-1/inner".into(), ChangeKind::Removed, Vec::new())));
    assert_eq!(back.iter().filter(|(_, kind, _)| *kind == ChangeKind::Added).count(), 101);
}

#[test]
fn the_same_bytes_in_two_packs_are_the_same() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 9000)).expect("files can be made");
    bench.build("old");
    let old = Bench::new();
    fs::write(old.tree().join("file"), bytes(1, 9000)).expect("files can be made");
    fs::write(old.tree().join("a"), bytes(2, 9000)).expect("files can be made");
    old.build("new");
    // Both stores become one.
    for entry in fs::read_dir(old.store().join("packs")).expect("it is there") {
        let entry = entry.expect("a name");
        fs::copy(entry.path(), bench.store().join("packs").join(entry.file_name())).expect("packs can be copied");
    }
    fs::copy(old.path("new"), bench.path("new")).expect("images can be copied");
    let found = changes(&bench, "old", "new");
    assert_eq!(found.iter().filter(|(_, kind, _)| *kind == ChangeKind::Added).count(), 1, "{found:?}");
    assert!(!found.iter().any(|(_, _, what)| what.contains(&"content")), "{found:?}");
}

/// Builds of changing trees by two threads, while a third removes whatever the images of the moment do not need.
fn nothing_is_lost(layout: Layout) {
    let bench = Bench::new();
    let images = bench.path("images");
    fs::create_dir(&images).expect("directories can be made");
    drop(Store::create(&bench.store()).expect("a store can be made"));
    let done = AtomicBool::new(false);
    let removed = std::thread::scope(|scope| {
        let builders: Vec<_> = (0..2)
            .map(|builder| {
                let (bench, images) = (&bench, &images);
                scope.spawn(move || {
                    let tree = bench.path(&format!("tree-{builder}"));
                    fs::create_dir(&tree).expect("directories can be made");
                    for round in 0..15_usize {
                        // Some files are the other builder's, too; each image replaces the one before.
                        for file in 0..20 {
                            let number = if file % 2 == 0 { file + round } else { file * 1000 + round * 7 + builder };
                            fs::write(tree.join(file.to_string()), bytes(number, 6000)).expect("files can be made");
                        }
                        let store = Store::create(&bench.store()).expect("the store is there");
                        let image = images.join(format!("{builder}"));
                        build(
                            &tree,
                            &image,
                            store,
                            &BuildOptions { threads: 2, layout, ..BuildOptions::default() },
                            &|_, _| {},
                        )
                        .expect("it can be built");
                        read_all(bench, &image);
                    }
                })
            })
            .collect();
        let collector = scope.spawn(|| {
            let mut removed = 0;
            while !done.load(Ordering::Relaxed) {
                let sole = ExclusiveStore::lock(&bench.store(), &|| {}).expect("the store is there");
                let mut needed = LiveSet::default();
                for entry in fs::read_dir(&images).expect("it is there") {
                    let path = entry.expect("a name").path();
                    let image = Image::open(&path, None).expect("images are complete or not there");
                    needed.add(&image).expect("images are sound");
                }
                let collected = sole.collect(&needed, Duration::ZERO, false).expect("it can be collected");
                assert_eq!((collected.missing, collected.objects.missing), (Vec::new(), Vec::new()));
                removed += collected.removed.len() + collected.objects.removed;
            }
            removed
        });
        builders.into_iter().for_each(|builder| builder.join().expect("builders lose nothing"));
        done.store(true, Ordering::Relaxed);
        collector.join().expect("the collector removes nothing that is needed")
    });
    assert!(removed > 5, "{removed}");
    for builder in 0..2 {
        read_all(&bench, &images.join(builder.to_string()));
    }
}

#[test]
fn builds_at_once_and_beside_a_collection_lose_nothing() {
    nothing_is_lost(Layout::Flat);
}

#[test]
fn builds_of_objects_at_once_and_beside_a_collection_lose_nothing() {
    nothing_is_lost(Layout::Composefs { version: None });
}

/// Two images of composefs's layout with one object in common, each with two of its own, and an empty one.
fn of_objects() -> Bench {
    let bench = Bench::new();
    for (image, files) in [("one", 0..3), ("two", 2..5), ("none", 0..0)] {
        for entry in fs::read_dir(bench.tree()).expect("it is there") {
            fs::remove_file(entry.expect("a name").path()).expect("files can be removed");
        }
        for number in files {
            fs::write(bench.tree().join(number.to_string()), bytes(number, 10_000)).expect("files can be made");
        }
        let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
        let store = Store::create(&bench.store()).expect("a store can be made");
        build(&bench.tree(), &bench.path(image), store, &options, &|_, _| {}).expect("it can be built");
    }
    bench
}

fn objects_of(bench: &Bench) -> Vec<std::path::PathBuf> {
    let list = |path: &Path| fs::read_dir(path).expect("it is there").map(|entry| entry.expect("a name").path());
    list(&bench.store().join("objects"))
        .filter(|path| path.is_dir())
        .flat_map(|path| list(&path).collect::<Vec<_>>())
        .collect()
}

#[test]
fn only_unneeded_objects_are_removed() {
    let bench = of_objects();
    bench.build("flat");
    let objects = bench.store().join("objects");
    let others = ["README", "ab", "zz/file", "00/file", ".new-abc"];
    for name in others {
        let path = objects.join(name);
        fs::create_dir_all(path.parent().expect("it is in a directory")).expect("directories can be made");
        fs::write(path, "x").expect("files can be made");
    }
    let found = |done: &GcReport| (done.objects.removed, done.objects.young, done.objects.kept, done.leftovers);
    assert_eq!(found(&collect(&bench, &["one", "two"], Duration::ZERO, true)), (0, 0, 5, 1));
    assert_eq!(found(&collect(&bench, &["one"], HOUR, false)), (0, 2, 3, 0));
    let dry = collect(&bench, &["one"], Duration::ZERO, true);
    assert_eq!(found(&dry), (2, 0, 3, 1));
    assert!(dry.bytes >= 20_000, "{dry:?}");
    let mut usage = Usage::default();
    let (one, two) = (open(&bench, "one"), open(&bench, "two"));
    let (one, two) = (object_locations(&one).expect("it is sound"), object_locations(&two).expect("it is sound"));
    usage.add(&one);
    let total = usage.total(&Store::open(&bench.store()).expect("a store")).expect("it can be read");
    assert_eq!((total.objects, total.bytes, total.live_bytes, total.garbage_bytes), (5, 61_440, 36_864, 24_576));
    usage.add(&two);
    assert_eq!(usage.of_image(&one), ImageUsage { bytes: 36_864, own_bytes: 24_576 });
    let done = collect(&bench, &["one"], Duration::ZERO, false);
    assert_eq!(done, dry);
    // Three objects, and two files that are none.
    assert_eq!(objects_of(&bench).len(), 5);
    assert!(others[..4].iter().all(|name| objects.join(name).exists()) && !objects.join(".new-abc").exists());
    read_all(&bench, &bench.path("one"));
    let missing = collect(&bench, &["two"], HOUR, true).objects.missing;
    assert_eq!(missing.len(), 2);
    assert!(missing.iter().all(|path| path.len() == 65 && path[2] == b'/'));
}

#[test]
fn an_object_that_a_new_image_uses_is_young_again() {
    let bench = of_objects();
    for path in objects_of(&bench) {
        let file = fs::File::open(path).expect("objects can be opened");
        file.set_modified(std::time::SystemTime::now() - 2 * HOUR).expect("times can be set");
    }
    assert_eq!(collect(&bench, &["none"], HOUR, true).objects.removed, 5);
    fs::write(bench.tree().join("3"), bytes(3, 10_000)).expect("files can be made");
    let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("the store is there");
    let built = build(&bench.tree(), &bench.path("again"), store, &options, &|_, _| {}).expect("it can be built");
    assert_eq!(built.new_bytes, 0);
    let found = collect(&bench, &["none"], HOUR, true).objects;
    assert_eq!((found.removed, found.young), (4, 1));
}

/// A server that fetches a large object has a lock on what has come, and not on the store.
#[test]
fn packs_being_fetched_are_kept_at_any_age() {
    let bench = of_objects();
    let path = bench.store().join("objects").join(format!(".new-{}", "0".repeat(64)));
    fs::write(&path, "what has come").expect("files can be made");
    let file = fs::File::open(&path).expect("files can be opened");
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).expect("nobody has it");
    assert_eq!(collect(&bench, &["one", "two"], Duration::ZERO, false).leftovers, 0);
    assert!(path.exists());
    drop(file);
    assert_eq!(collect(&bench, &["one", "two"], Duration::ZERO, false).leftovers, 1);
    assert!(!path.exists());
}

#[test]
fn concurrent_removals_do_not_end_a_collection() {
    let bench = three();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for name in [".new-one", ".new-two"] {
            let (path, is_over) = (bench.store().join("packs").join(name), &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    // Collections remove it, too.
                    let _ = fs::write(&path, "some").and_then(|()| fs::remove_file(&path));
                }
            });
        }
        let sole = ExclusiveStore::lock(&bench.store(), &|| {}).expect("the store is there");
        let needed = needed(&bench, &["first", "second", "third"]);
        let outcome = (0..2000).try_for_each(|_| sole.collect(&needed, Duration::ZERO, false).map(drop));
        is_over.store(true, Ordering::Relaxed);
        outcome.expect("nothing is in the way");
    });
}

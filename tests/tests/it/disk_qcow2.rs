//! Images as `qemu-img` makes them, with each of its options: they are served rightly, which `qemu-img check` and `qemu-img
//! compare` say after random requests, or refused and not changed by a bit.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use ferry_disk::{Cache, Format, Options};
use ferry_tests::disks::model::Random;
use ferry_tests::disks::tool;
use ferry_tests::{Place, directory};
use ferry_vfs::{BlockRange, Disk};
use tempfile::TempDir;

const MIB: usize = 1 << 20;
const BYTES: usize = 4 * MIB;
/// What an image is made to hold here, so that it has compressed, shared and empty clusters next to each other.
const FILL: &[&str] = &["write -P 1 0 1M", "write -P 2 1100k 70k", "write -z 1280k 128k", "write -P 3 2M 1M"];

/// A directory with images, and the programs of QEMU that make and read them.
struct Images {
    directory: TempDir,
}

fn good(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Images {
    fn new(place: Place) -> Self {
        Self { directory: directory(place) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs a line of a shell, in the directory, that may use QEMU's programs.
    fn sh(&self, line: &str) -> Output {
        let programs = tool("qemu-img").parent().unwrap().display().to_string();
        let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
        Command::new("sh").args(["-ec", line]).env("PATH", path).current_dir(&self.directory).output().unwrap()
    }

    fn run(&self, line: &str) -> String {
        good(self.sh(line))
    }

    fn fill(&self, image: &str, commands: &[&str]) {
        let commands: String = commands.iter().map(|command| format!(" -c '{command}'")).collect();
        self.run(&format!("qemu-io -d unmap -f qcow2 {image} {commands}"));
    }

    /// What an image holds, by QEMU.
    fn content(&self, image: &str) -> Vec<u8> {
        self.run(&format!("qemu-img convert -f qcow2 -O raw {image} content"));
        fs::read(self.path("content")).unwrap()
    }

    /// Whether QEMU finds an image sound; `leaks`: clusters that nothing refers to are no fault.
    #[track_caller]
    fn check(&self, image: &str, leaks: bool) {
        let output = self.sh(&format!("qemu-img check -f qcow2 {image}"));
        let is_sound = output.status.success() || leaks && output.status.code() == Some(3);
        assert!(is_sound, "{image}: {}", String::from_utf8_lossy(&output.stdout));
    }

    #[track_caller]
    fn compare(&self, image: &str, model: &[u8]) {
        fs::write(self.path("model"), model).unwrap();
        let output = self.sh(&format!("qemu-img compare -f qcow2 -F raw {image} model"));
        assert!(output.status.success(), "{image}: {}", String::from_utf8_lossy(&output.stdout));
    }

    fn options(&self) -> Options {
        Options { format: Some(Format::Qcow2), backing_dir: Some(self.directory.path().into()), ..Options::default() }
    }

    fn open(&self, image: &str) -> Arc<dyn Disk> {
        ferry_disk::open(&self.path(image), &self.options()).unwrap()
    }

    /// All files of the directory, to see that none has changed.
    fn sums(&self) -> String {
        self.run("sha256sum -- *")
    }

    /// What is said of an image that is refused, and leaves everything as it is.
    #[track_caller]
    fn refused(&self, image: &str, options: &Options) -> String {
        let before = self.sums();
        let Err(error) = ferry_disk::open(&self.path(image), options) else { panic!("{image} is served") };
        let grown = ferry_disk::grow(&self.path(image), 64 << 20, options);
        assert!(options.read_only || grown.is_err(), "{image} was made larger");
        assert_eq!(self.sums(), before, "{image}: {error}");
        error.to_string()
    }

    /// Runs the command that an error names.
    fn take_advice(&self, said: &str) {
        let at = said.find("qemu-img ").unwrap_or_else(|| panic!("no advice: {said}"));
        let line = said[at..].split(" (--read-only").next().unwrap();
        self.run(line);
    }
}

fn read(disk: &dyn Disk, offset: usize, bytes: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let at = BlockRange { offset: offset as u64, bytes: bytes as u64, alignment: 1 };
    assert_eq!(disk.read(&at, &mut out).unwrap().bytes(), Some(bytes));
    out
}

fn write(disk: &dyn Disk, offset: usize, bytes: &[u8], durable: bool) {
    let at = BlockRange { offset: offset as u64, bytes: bytes.len() as u64, alignment: 1 };
    assert_eq!(disk.write(&at, durable, &mut &*bytes).unwrap().bytes(), Some(bytes.len()));
}

/// Random requests, and what the disk must hold after them.
fn work(disk: &dyn Disk, model: &mut [u8], requests: usize, random: &mut Random) {
    let sectors = model.len() / 512;
    for number in 0..requests {
        // Most are small, some as large as anything here.
        let longest = if random.below(8) == 0 { sectors } else { 200.min(sectors) };
        let count = 1 + random.below(longest);
        let first = random.below(sectors - count + 1);
        let (offset, bytes) = (first * 512, count * 512);
        let place = offset..offset + bytes;
        match random.below(10) {
            0 if disk.features().discard => {
                disk.discard(offset as u64, bytes as u64).unwrap();
                let now = read(disk, offset, bytes);
                for (sector, before) in now.chunks(512).zip(model[place.clone()].chunks(512)) {
                    assert!(sector == before || sector.iter().all(|byte| *byte == 0), "a discard shows something else");
                }
                model[place].copy_from_slice(&now);
            }
            1 | 2 => {
                disk.write_zeroes(offset as u64, bytes as u64, number % 2 == 0, random.below(4) == 0).unwrap();
                model[place].fill(0);
            }
            3 => assert!(disk.flush().unwrap().is_none()),
            4 | 5 => assert!(read(disk, offset, bytes) == model[place], "{offset} {bytes}"),
            _ => {
                let byte = u8::try_from(number % 250).unwrap() + 4;
                let data: Vec<u8> = (0..bytes).map(|at| byte ^ at.to_le_bytes()[1]).collect();
                write(disk, offset, &data, random.below(8) == 0);
                model[place].copy_from_slice(&data);
            }
        }
    }
    assert!(read(disk, 0, model.len()) == *model);
}

/// How an image is made.
#[derive(Clone, Copy)]
struct Row {
    /// Lines of a shell that make the image `image`, and files that it needs.
    make: &'static str,
    fills: bool,
}

const fn row(make: &'static str) -> Row {
    Row { make, fills: true }
}

const PLAIN: &[Row] = &[
    row("qemu-img create -q -f qcow2 image 4M"),
    row("qemu-img create -q -f qcow2 -o compat=0.10 image 4M"),
    row("qemu-img create -q -f qcow2 -o compat=v3,lazy_refcounts=on image 4M"),
    row("qemu-img create -q -f qcow2 -o preallocation=metadata image 4M"),
    row("qemu-img create -q -f qcow2 -o preallocation=falloc image 4M"),
    row("qemu-img create -q -f qcow2 -o preallocation=full,nocow=on image 4M"),
    row("qemu-img create -q -f qcow2 -o extent_size_hint=128k image 4M"),
];

const CLUSTERS: &[Row] = &[
    row("qemu-img create -q -f qcow2 -o cluster_size=512 image 4M"),
    row("qemu-img create -q -f qcow2 -o cluster_size=512,compat=0.10 image 4M"),
    row("qemu-img create -q -f qcow2 -o cluster_size=512,refcount_bits=64 image 4M"),
    row("qemu-img create -q -f qcow2 -o cluster_size=4k,preallocation=metadata image 4M"),
    row("qemu-img create -q -f qcow2 -o cluster_size=2M image 4M"),
];

const REFCOUNTS: &[Row] = &[
    row("qemu-img create -q -f qcow2 -o refcount_bits=1 image 4M"),
    row("qemu-img create -q -f qcow2 -o refcount_bits=2 image 4M"),
    row("qemu-img create -q -f qcow2 -o refcount_bits=4,cluster_size=1k image 4M"),
    row("qemu-img create -q -f qcow2 -o refcount_bits=8 image 4M"),
    row("qemu-img create -q -f qcow2 -o refcount_bits=32 image 4M"),
    row("qemu-img create -q -f qcow2 -o refcount_bits=64 image 4M"),
];

const EXTENDED: &[Row] = &[
    row("qemu-img create -q -f qcow2 -o extended_l2=on image 4M"),
    row("qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=16k image 4M"),
    row("qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=2M,preallocation=metadata image 4M"),
    row("qemu-img create -q -f qcow2 plain 4M; qemu-io -c 'write -P 9 0 4M' plain; \
         qemu-img create -q -f qcow2 -o extended_l2=on -b plain -F qcow2 image"),
];

/// Text that compresses well, and some that does not.
const CONTENT: &str = "{ head -c 1500000 /dev/urandom; yes text | head -c 2694304; } > raw;";

const COMPRESSED: &[Row] = &[
    Row { fills: false, ..row("qemu-img convert -c -f raw -O qcow2 raw image") },
    Row { fills: false, ..row("qemu-img convert -c -f raw -O qcow2 -o compat=0.10 raw image") },
    Row { fills: false, ..row("qemu-img convert -c -f raw -O qcow2 -o compression_type=zstd raw image") },
    Row {
        fills: false,
        ..row("qemu-img convert -c -f raw -O qcow2 -o compression_type=zstd,cluster_size=2M raw image")
    },
    Row {
        fills: false,
        ..row("qemu-img convert -c -f raw -O qcow2 -o extended_l2=on,compression_type=zstd raw image")
    },
    Row { fills: false, ..row("qemu-img convert -c -f raw -O qcow2 -o cluster_size=4k raw image") },
    row("qemu-img create -q -f qcow2 -o compression_type=zstd image 4M"),
];

const BACKED: &[Row] = &[
    row("truncate -s 3000000 base; tr '\\0' a < base > below; qemu-img create -q -f qcow2 -b below -F raw image 4M"),
    row("yes b | head -c 9000000 > below; qemu-img create -q -f qcow2 -o compat=0.10 -b below -F raw image 4M"),
    row("yes c | head -c 4M > raw; qemu-img convert -c -O qcow2 -o compression_type=zstd raw one; \
         qemu-img create -q -f qcow2 -o extended_l2=on -b one -F qcow2 two; \
         qemu-io -c 'write -P 7 500k 100k' two; \
         qemu-img create -q -f qcow2 -o cluster_size=4k -b two -F qcow2 image"),
];

const SNAPSHOTS: &[Row] = &[
    row("qemu-img create -q -f qcow2 image 4M; qemu-io -c 'write -P 9 0 2M' image; qemu-img snapshot -c one image"),
    row("qemu-img create -q -f qcow2 -o compat=0.10 image 4M; qemu-io -c 'write -P 9 0 2M' image; \
         qemu-img snapshot -c one image"),
    row("qemu-img create -q -f qcow2 -o extended_l2=on image 4M; qemu-io -c 'write -P 9 3k 2M' image; \
         qemu-img snapshot -c one image"),
    row("yes d | head -c 4M > raw; qemu-img convert -c -O qcow2 raw image; qemu-img snapshot -c one image"),
];

const CACHES: [Cache; 2] = [Cache::Writeback, Cache::None];

/// Serves each image once, with one cache or the other.
fn serve(rows: &[Row], requests: usize) {
    for (number, row) in rows.iter().enumerate() {
        serve_row(row, Place::Memory, requests, CACHES[number % 2], number as u64 + 1);
    }
}

fn serve_row(row: &Row, place: Place, requests: usize, cache: Cache, seed: u64) {
    let images = Images::new(place);
    if row.make.contains(" raw image") {
        images.run(CONTENT);
    }
    println!("{} ({cache:?})", row.make);
    images.run(row.make);
    let has_snapshot = row.make.contains("snapshot");
    let snapshot = if has_snapshot { images.content("-l one image") } else { Vec::new() };
    if row.fills {
        images.fill("image", FILL);
    }
    let mut model = images.content("image");
    let mut random = Random::new(seed);
    let options = Options { cache: Some(cache), ..images.options() };

    // Reads and empty writes change nothing.
    let before = images.sums();
    for read_only in [true, false] {
        let disk = ferry_disk::open(&images.path("image"), &Options { read_only, ..options.clone() }).unwrap();
        assert!(read(&*disk, 0, model.len()) == model, "{}", row.make);
    }
    assert_eq!(images.sums(), before);

    let disk = ferry_disk::open(&images.path("image"), &options).unwrap();
    work(&*disk, &mut model, requests, &mut random);
    assert!(disk.flush().unwrap().is_none());
    images.check("-U image", false);
    work(&*disk, &mut model, requests, &mut random);
    drop(disk);
    images.check("image", false);
    images.compare("image", &model);

    // QEMU goes on, and so does what was begun here.
    images.fill("image", &["write -P 5 300k 500k", "discard 1M 200k"]);
    let mut model = images.content("image");
    let grows = !(has_snapshot && row.make.contains("0.10"));
    let grow_to = grows.then_some(9 * MIB as u64 + 512);
    let disk = ferry_disk::open(&images.path("image"), &Options { grow_to, ..options }).unwrap();
    if grows {
        model.resize(9 * MIB + 512, 0);
    }
    assert_eq!(disk.geometry().bytes, model.len() as u64);
    work(&*disk, &mut model, requests, &mut random);
    drop(disk);
    images.check("image", false);
    images.compare("image", &model);
    if has_snapshot {
        // QEMU shows it as large as the disk is now.
        let now = images.content("-l one image");
        assert!(now.starts_with(&snapshot), "the snapshot has changed: {}", row.make);
    }
}

#[test]
fn plain_images_are_served() {
    if !ferry_alone::in_own_process() {
        return;
    }
    serve(PLAIN, 30);
}

#[test]
fn clusters_of_all_sizes_are_served() {
    if !ferry_alone::in_own_process() {
        return;
    }
    serve(CLUSTERS, 30);
}

#[test]
fn reference_counts_of_all_widths_are_served() {
    if !ferry_alone::in_own_process() {
        return;
    }
    serve(REFCOUNTS, 30);
}

#[test]
fn extended_l2_entries_are_served() {
    if !ferry_alone::in_own_process() {
        return;
    }
    serve(EXTENDED, 60);
}

#[test]
fn compressed_clusters_are_served() {
    if !ferry_alone::in_own_process() {
        return;
    }
    serve(COMPRESSED, 30);
}

#[test]
fn backing_files_are_served() {
    if !ferry_alone::in_own_process() {
        return;
    }
    serve(BACKED, 40);
}

#[test]
fn snapshots_stay_as_they_are() {
    if !ferry_alone::in_own_process() {
        return;
    }
    serve(SNAPSHOTS, 40);
}

#[test]
#[ignore = "long: make test-all"]
fn all_images_are_served_through_many_requests() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for rows in [PLAIN, CLUSTERS, REFCOUNTS, EXTENDED, COMPRESSED, BACKED, SNAPSHOTS] {
        for (number, row) in rows.iter().enumerate() {
            for cache in CACHES {
                serve_row(row, Place::Disk, 400, cache, number as u64 + 101);
            }
        }
    }
}

/// What is freed is used again, and what is reserved is given back: neither the file nor the counts grow without need.
#[test]
fn space_is_used_again() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let images = Images::new(Place::Disk);
    images.run("qemu-img create -q -f qcow2 -o lazy_refcounts=on image 64M");
    let length = || fs::metadata(images.path("image")).unwrap().len();
    let disk = images.open("image");
    let mut longest = Vec::new();
    for round in 0..6 {
        for number in 0..24 {
            write(&*disk, number * MIB / 2, &vec![round + 1; MIB / 2], false);
        }
        assert!(disk.flush().unwrap().is_none());
        images.check("-U image", false);
        longest.push(length());
        disk.discard(0, 12 << 20).unwrap();
        assert!(disk.flush().unwrap().is_none());
        let allocated = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(images.path("image")).unwrap()) * 512;
        assert!(allocated < 2 << 20, "{allocated} bytes stay allocated");
    }
    assert!(longest.iter().all(|bytes| *bytes == longest[0]), "{longest:?}");
    drop(disk);
    images.check("image", false);
    // What is compatible stays: other programs may go on with lazy reference counts.
    assert_eq!(fs::read(images.path("image")).unwrap()[72..88], [[0; 8], [0, 0, 0, 0, 0, 0, 0, 1]].concat());
}

/// Many at once, in the same clusters, each in sectors of its own.
#[test]
fn writers_in_the_same_clusters_keep_out_of_each_others_bytes() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const WRITERS: usize = 4;
    let images = Images::new(Place::Disk);
    for options in ["compat=0.10", "compat=1.1", "extended_l2=on", "cluster_size=4k"] {
        images.run(&format!(
            "rm -f *; yes e | head -c 4M > raw; qemu-img convert -c -O qcow2 raw below; \
             qemu-img create -q -f qcow2 -o {options} -b below -F qcow2 image; \
             qemu-io -c 'write -P 9 1M 1M' image; qemu-img snapshot -c one image"
        ));
        let base = images.content("image");
        let snapshot = images.content("-l one image");
        let disk = images.open("image");
        let parts: Vec<Vec<(usize, u8)>> = std::thread::scope(|scope| {
            let disk = &disk;
            let threads: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    scope.spawn(move || {
                        let mut random = Random::new(writer as u64 + 1);
                        let mut done = Vec::new();
                        for number in 0..60 {
                            let sector = random.below(BYTES / 512 / WRITERS) * WRITERS + writer;
                            let byte = u8::try_from(writer * 60 + number).unwrap();
                            match byte % 7 {
                                0 => disk.write_zeroes(sector as u64 * 512, 512, false, false).unwrap(),
                                1 => assert!(disk.flush().unwrap().is_none()),
                                _ => write(&**disk, sector * 512, &[byte; 512], false),
                            }
                            if byte % 7 != 1 {
                                done.push((sector, if byte % 7 == 0 { 0 } else { byte }));
                            }
                        }
                        done
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut model = base;
        for (sector, byte) in parts.into_iter().flatten() {
            model[sector * 512..][..512].fill(byte);
        }
        drop(disk);
        images.check("image", false);
        images.compare("image", &model);
        assert!(images.content("-l one image") == snapshot, "{options}");
    }
}

#[test]
fn encrypted_images_are_refused_and_stay_as_they_are() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for method in ["aes", "luks"] {
        let images = Images::new(Place::Memory);
        let secret = "--object secret,id=key,data=PASSWORD";
        let iterations = if method == "luks" { ",encrypt.iter-time=10" } else { "" };
        images.run(&format!(
            "qemu-img create -q {secret} -f qcow2 -o encrypt.format={method},encrypt.key-secret=key{iterations} image 4M; \
             qemu-io {secret} --image-opts driver=qcow2,encrypt.key-secret=key,file.filename=image -c 'write -P 7 0 1M'; \
             qemu-img create -q {secret} -u -f qcow2 -b image -F qcow2 above 4M; \
             qemu-img create -q -u -f qcow2 -b above -F qcow2 top 4M"
        ));
        for options in [images.options(), Options { read_only: true, ..images.options() }] {
            for image in ["image", "above", "top"] {
                let said = images.refused(image, &options);
                assert!(said.contains("/image is encrypted") && said.contains(&method.to_uppercase()), "{said}");
            }
        }
        images.take_advice(&images.refused("image", &images.options()));
        let disk = images.open("image.copy");
        assert!(read(&*disk, 0, MIB) == vec![7; MIB] && read(&*disk, MIB, MIB) == vec![0; MIB]);
    }
}

#[test]
fn separate_data_files_are_refused_and_stay_as_they_are() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for raw in ["off", "on"] {
        let images = Images::new(Place::Memory);
        images.run(&format!(
            "qemu-img create -q -f qcow2 -o data_file=data,data_file_raw={raw} image 4M; \
             qemu-io -c 'write -P 7 0 1M' image"
        ));
        let said = images.refused("image", &images.options());
        assert!(said.contains("has its data in another file, \"data\""), "{said}");
        images.refused("image", &Options { read_only: true, ..images.options() });
        images.take_advice(&said);
        assert!(read(&*images.open("image.copy"), 0, MIB) == vec![7; MIB]);
    }
}

/// The type of the backing format extension; other types are ignored.
const FORMAT: [u8; 4] = [0xe2, 0x79, 0x2a, 0xca];

#[test]
fn an_unsaid_backing_format_is_refused_with_advice_that_helps() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for compat in ["0.10", "1.1"] {
        let images = Images::new(Place::Memory);
        images.run(&format!(
            "qemu-img create -q -f qcow2 'b 1' 4M; qemu-io -c 'write -P 7 0 1M' 'b 1'; \
             qemu-img create -q -f qcow2 -o compat={compat} -b 'b 1' -F qcow2 image"
        ));
        let file = fs::File::options().write(true).open(images.path("image")).unwrap();
        let start = fs::read(images.path("image")).unwrap();
        let at = start.windows(4).position(|bytes| bytes == FORMAT).unwrap();
        file.write_all_at(&[0xe2, 0x79, 0x2a, 0xcb], at as u64).unwrap();
        let said = images.refused("image", &images.options());
        assert!(said.contains("does not say its format"), "{said}");
        images.take_advice(&said);
        assert!(read(&*images.open("image"), 0, MIB) == vec![7; MIB], "{compat}");
    }
}

/// Sets an incompatible feature of version 3, or an autoclear one.
fn set_bits(path: &Path, at: u64, bits: u8) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] | bits], at).unwrap();
}

#[test]
fn images_that_need_a_check_are_only_read() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for (bit, words) in [(1, "was not closed"), (2, "marked as corrupt")] {
        let images = Images::new(Place::Memory);
        images.run("qemu-img create -q -f qcow2 -o lazy_refcounts=on image 4M");
        images.fill("image", FILL);
        let content = images.content("image");
        set_bits(&images.path("image"), 79, bit);
        let said = images.refused("image", &images.options());
        assert!(said.contains(words), "{said}");
        let disk = ferry_disk::open(&images.path("image"), &Options { read_only: true, ..images.options() }).unwrap();
        assert!(read(&*disk, 0, BYTES) == content);
        drop(disk);
        images.take_advice(&said);
        assert!(read(&*images.open("image"), 0, BYTES) == content);
    }
}

#[test]
fn unknown_features_are_refused_by_name() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let images = Images::new(Place::Memory);
    images.run("qemu-img create -q -f qcow2 image 4M");
    set_bits(&images.path("image"), 72, 0x80);
    let said = images.refused("image", &images.options());
    assert!(said.contains("has the unknown feature 63"), "{said}");
}

/// Who does not know bitmaps says so to those who do, by clearing the autoclear bits, as soon as it writes and not before.
#[test]
fn bitmaps_are_left_unchanged() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let images = Images::new(Place::Memory);
    images.run("qemu-img create -q -f qcow2 image 4M; qemu-img bitmap --add image one");
    images.fill("image", FILL);
    set_bits(&images.path("image"), 88, 0x40);
    let autoclear = || fs::read(images.path("image")).unwrap()[88..96].to_vec();
    let before = images.sums();
    for read_only in [true, false] {
        let disk = ferry_disk::open(&images.path("image"), &Options { read_only, ..images.options() }).unwrap();
        read(&*disk, 0, BYTES);
        assert!(disk.flush().unwrap().is_none());
    }
    assert_eq!((images.sums(), autoclear()), (before, vec![0x40, 0, 0, 0, 0, 0, 0, 1]));
    let mut model = images.content("image");
    let disk = images.open("image");
    work(&*disk, &mut model, 20, &mut Random::new(3));
    drop(disk);
    assert_eq!(autoclear(), [0; 8]);
    // The clusters of the bitmaps are unreferenced now.
    images.check("image", true);
    images.compare("image", &model);
    let said = images.sh("qemu-img info image");
    let said = [said.stdout, said.stderr].concat();
    assert!(String::from_utf8_lossy(&said).contains("inconsistent"), "QEMU knows it");
}

//! Requests of far more bytes than negotiated, in chains whose descriptors all refer to the same memory. They cost the
//! guest nothing, so the server must not allocate memory for them, whatever its source. One test, because it measures
//! its process.

use std::sync::Arc;
use std::time::Duration;

use ferry_9p_client::{Client, Unix};
use ferry_driver::hostile;
use ferry_tests::{Place, directory};
use ferry_vfs::FileSystem;
use ferry_virtiofs::{Export, Options};

/// What the server may take beside: far below what each request asks for.
const MORE_KIB: u64 = 48 << 10;

/// The most memory that this process ever had.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn requests_beyond_the_negotiated_size_take_no_memory() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let place = directory(Place::Disk);
    let sized = ferry_mem::pmem::Options { size_bytes: Some(64 << 20), ..ferry_mem::pmem::Options::default() };
    let pmem = ferry_mem::pmem::open(&place.path().join("image"), &sized).unwrap();
    let mem = ferry_mem::Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap();
    let served = place.path().join("served");
    let behind: Arc<dyn FileSystem> = Arc::new(mem);
    let listener = std::os::unix::net::UnixListener::bind(&served).unwrap();
    let _server = ferry_ninep::Export::start(vec![listener.into()], behind, ferry_ninep::Options::default()).unwrap();
    let remote = Client::connect(Arc::new(Unix(served)), ferry_9p_client::Options::default()).unwrap();
    let sources: [(&str, Arc<dyn FileSystem>); 2] = [("pmem", Arc::new(pmem)), ("9p", Arc::new(remote))];
    for (name, source) in sources {
        let socket = place.path().join(name);
        let tag = Some("t".parse().unwrap());
        let _export = Export::listen(&socket, source, Options { tag, ..Options::default() }).unwrap();
        let options = hostile::Options { drop_after: Duration::from_millis(500), ..hostile::Options::default() };
        let cases = hostile::cases();
        // What stays, and what a good request takes.
        let good = cases.iter().find(|case| case.name == "chain/bytes-direct").unwrap();
        assert!(hostile::run(good, &socket, &options).passed, "{name}");
        let before = peak_kib();
        let aliased: Vec<_> = cases.iter().filter(|case| case.name.starts_with("chain/aliased-")).collect();
        assert_eq!(aliased.len(), 2);
        for case in aliased {
            let outcome = hostile::run(case, &socket, &options);
            assert!(outcome.passed, "{name}: {}: {:?}", outcome.name, outcome.problem);
        }
        let more = peak_kib() - before;
        assert!(more < MORE_KIB, "{name}: {more} KiB");
    }
}

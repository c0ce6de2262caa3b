//! What a 9P server keeps of clients that have gone.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_dir::Dir;
use ferry_ninep::{Export, Limits, Options};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{Case, Measure, resident_mib};

/// Fids of each connection, the one of the root beside them.
const FIDS: u64 = 25;
/// A server looks twice a second whether memory is to be given back.
const LATER: Duration = Duration::from_secs(2);
/// Eight thousand connections end at once.
const TIMEOUT: Duration = Duration::from_secs(60);
const RVERSION: u8 = 101;
const RATTACH: u8 = 105;
const RWALK: u8 = 111;

pub const CASES: &[Case] = &[Case {
    name: "memory that a 9P server keeps when its clients have gone, 25 fids for each connection",
    of: "fids",
    sizes: &[2_000, 20_000, 200_000],
    unit: "MiB",
    prepare,
}];

fn text(bytes: &str) -> Vec<u8> {
    [&u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_le_bytes()[..], bytes.as_bytes()].concat()
}

/// Sends a request and takes the reply, which is to be of this kind.
fn ask(stream: &mut UnixStream, kind: u8, body: &[u8]) -> Result<()> {
    let length = u32::try_from(7 + body.len())?;
    let tag = if kind == RVERSION { u16::MAX } else { 1 };
    let request = [&length.to_le_bytes()[..], &[kind - 1], &tag.to_le_bytes(), body].concat();
    stream.write_all(&request)?;
    let mut head = [0; 7];
    stream.read_exact(&mut head)?;
    let [a, b, c, d, found, ..] = head;
    let mut rest = vec![0; usize::try_from(u32::from_le_bytes([a, b, c, d]))?.saturating_sub(head.len())];
    stream.read_exact(&mut rest)?;
    ensure!(found == kind, "a reply of the kind {found}, not {kind}");
    Ok(())
}

/// A client with its fids, each of a file of its own.
fn client(socket: &Path) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    let none = u32::MAX.to_le_bytes();
    ask(&mut stream, RVERSION, &[&8192_u32.to_le_bytes()[..], &text("9P2000.L")].concat())?;
    ask(&mut stream, RATTACH, &[&[0; 4][..], &none, &text(""), &text(""), &[0; 4]].concat())?;
    for fid in 1..=u32::try_from(FIDS)? {
        let name = text(&fid.to_string());
        ask(&mut stream, RWALK, &[&[0; 4][..], &fid.to_le_bytes(), &1_u16.to_le_bytes(), &name].concat())?;
    }
    Ok(stream)
}

fn wait_for(is_so: impl Fn() -> bool) -> Result<()> {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        ensure!(Instant::now() < end, "connections do not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn prepare(folder: &Path, fids: u64) -> Result<Measure> {
    let connections = fids / FIDS;
    // Both ends of each connection are here.
    let wanted = 2 * connections + 1000;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
            .with_context(|| format!("{connections} connections take {wanted} descriptors"))?;
    }
    let (tree, socket) = (folder.join("tree"), folder.join("socket"));
    fs::create_dir(&tree)?;
    (1..=FIDS).try_for_each(|fid| fs::write(tree.join(fid.to_string()), ""))?;
    let source = Arc::new(Dir::open(&tree, ferry_dir::Options::default())?);
    let limits = Limits { connections_max: usize::try_from(connections)? + 10, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let export = Export::start(vec![UnixListener::bind(&socket)?.into()], source, options)?;
    // What the first client costs is not what is measured.
    drop(client(&socket)?);
    wait_for(|| export.usage().connections == 0)?;
    Ok(Box::new(move || {
        let begun = resident_mib()?;
        let clients = (0..connections).map(|_| client(&socket)).collect::<Result<Vec<_>>>()?;
        drop(clients);
        wait_for(|| export.usage().connections == 0 && export.usage().fids == 0)?;
        std::thread::sleep(LATER);
        Ok((resident_mib()? - begun).max(0.0))
    }))
}

//! Serves a directory on a unix socket until standard input ends: `serve DIR SOCKET`.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let (Some(dir), Some(socket)) = (args.next(), args.next()) else {
        return Err("usage: serve DIR SOCKET".into());
    };
    let source = Arc::new(ferry_dir::Dir::open(dir, ferry_dir::Options::default())?);
    let listener = UnixListener::bind(&socket)?;
    let export = ferry_ninep::Export::start(vec![listener.into()], source, ferry_ninep::Options::default())?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    export.stop();
    Ok(std::fs::remove_file(socket)?)
}

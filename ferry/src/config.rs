//! Reads shares and disks from a TOML file.

use std::error::Error;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::error::ErrorKind;
use ferry_control::{LogLevel, MetricsAddress, nearest};
use serde::Deserialize;

use crate::disk;
use crate::flags::{Share, parsed};
use crate::paths::start_dir;
use crate::sandbox::{Modcaps, Sandbox, SandboxFlags, Seccomp};
use crate::status::misuse;

/// The contents of a file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Its shares.
    #[serde(default, rename = "share")]
    pub shares: Vec<Share>,
    /// Its disks.
    #[serde(default, rename = "disk")]
    pub disks: Vec<disk::Args>,
    /// Where the metrics of the shares can be fetched; each disk has its own.
    #[serde(default, deserialize_with = "parsed")]
    pub metrics: Option<MetricsAddress>,
    /// The level of the log, unless a flag or the environment sets one.
    #[serde(default, deserialize_with = "parsed")]
    pub log: Option<LogLevel>,
    /// The tables of the shares and disks.
    #[serde(skip)]
    pub share_tables: Vec<toml::Table>,
    #[serde(skip)]
    pub disk_tables: Vec<toml::Table>,
    /// The confinement of their process.
    sandbox: Option<Sandbox>,
    seccomp: Option<Seccomp>,
    modcaps: Option<Modcaps>,
}

impl File {
    /// Returns the flags of the sandbox.
    pub fn sandbox_flags(&self) -> SandboxFlags {
        SandboxFlags { sandbox: self.sandbox, seccomp: self.seccomp, modcaps: self.modcaps.clone() }
    }
}

/// Reads a file. Relative paths in it are relative to the file's own directory.
pub fn read(path: &Path) -> Result<File> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the configuration file {}", path.display()))?;
    let directory = path.parent().unwrap_or(Path::new(""));
    let read = parse(&text, directory).with_context(|| format!("the configuration file {} is wrong", path.display()));
    let mut file = read.map_err(misuse)?;
    file.shares.iter_mut().for_each(|share| share.resolve_paths(start_dir()));
    Ok(file)
}

/// Parses the text of a file in this directory.
pub fn parse(text: &str, directory: &Path) -> Result<File> {
    let mut file: File = toml::from_str(text).map_err(|error| with_line_number(text, &error))?;
    if file.shares.is_empty() && file.disks.is_empty() {
        bail!(
            "it has no share or disk; add a [[share]] table with source and virtiofs, or source and mount, or a [[disk]] \
             table with file and vhost-user"
        );
    }
    let tables: toml::Table = toml::from_str(text)?;
    (file.share_tables, file.disk_tables) = (tables_of(&tables, "share"), tables_of(&tables, "disk"));
    file.metrics.iter_mut().for_each(|metrics| metrics.resolve(directory));
    for (number, share) in file.shares.iter_mut().enumerate() {
        check_numbers::<Share>(&tables["share"][number])
            .and_then(|()| share.check())
            .map_err(|why| anyhow::anyhow!("[[share]] number {}: {why}", number + 1))?;
        share.resolve_paths(directory);
        share.resolve_sockets(directory);
    }
    for (number, disk) in file.disks.iter_mut().enumerate() {
        check_numbers::<disk::Args>(&tables["disk"][number])
            .and_then(|()| disk.check())
            .map_err(|why| anyhow::anyhow!("[[disk]] number {}: {why}", number + 1))?;
        disk.resolve_paths(directory);
    }
    Ok(file)
}

/// Returns the tables of a list, with one name for each key.
fn tables_of(file: &toml::Table, list: &str) -> Vec<toml::Table> {
    let tables = file.get(list).and_then(toml::Value::as_array).into_iter().flatten();
    let renamed = |table: &toml::Table| {
        let name = |key: &String| if key == "dir" { "source".into() } else { key.clone() };
        table.iter().map(|(key, value)| (name(key), value.clone())).collect()
    };
    tables.filter_map(toml::Value::as_table).map(renamed).collect()
}

/// Checks the numbers in a table against the ranges in the table of flags.
fn check_numbers<T: clap::Args>(table: &toml::Value) -> std::result::Result<(), String> {
    let numbers = table.as_table().into_iter().flatten().filter_map(|(key, value)| Some((key, value.as_integer()?)));
    let mut numbers = numbers.peekable();
    if numbers.peek().is_none() {
        // The table of flags takes milliseconds.
        return Ok(());
    }
    let command = T::augment_args(clap::Command::new("table"));
    for (key, number) in numbers {
        let words = ["table", "source", &format!("--{key}={number}")];
        if let Err(error) = command.clone().try_get_matches_from(words)
            && let (ErrorKind::ValueValidation, Some(why)) = (error.kind(), error.source())
        {
            return Err(format!("{key} = {why}"));
        }
    }
    Ok(())
}

/// Returns the parser's message, with a suggestion.
fn explain_error(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().trim_end().replace('\n', " ");
    let mut names = message.split('`').skip(1).step_by(2);
    if message.starts_with("unknown field") {
        // The message goes on with all known fields.
        let unknown = names.next().unwrap_or_default();
        let keys: Vec<_> = names.collect();
        return match nearest(unknown, keys) {
            Some(key) => format!("unknown field `{unknown}`: did you mean `{key}`?"),
            None => message,
        };
    }
    let line = error.span().and_then(|span| text.get(span.start..)?.lines().next()).unwrap_or_default().trim();
    if message.starts_with("invalid type: map, expected a sequence") && !line.starts_with("[[") {
        let name = line.trim_matches(['[', ']']);
        return format!("[{name}] is one table: write [[{name}]], also for a single one");
    }
    message
}

/// Returns the parser's message with its line number, without its picture of the text.
fn with_line_number(text: &str, error: &toml::de::Error) -> anyhow::Error {
    let message = explain_error(text, error);
    match error.span() {
        Some(span) => {
            let line = 1 + text.bytes().take(span.start).filter(|&byte| byte == b'\n').count();
            anyhow::anyhow!("line {line}: {message}")
        }
        None => anyhow::anyhow!(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_is_a_key() {
        let text = r#"
            [[share]]
            dir = "/srv/a"
            virtiofs = "a.sock"
            tag = "a"
            read-only = true
            queues = 2
            cache = "none"
            writeback = true
            local-locks = true
            allow-idmap = true
            poll-us = 50
            allow-direct-io = true
            quota = "10G,files=5"

            [[share]]
            dir = "b"
            fd = 3

            [[share]]
            source = "pmem:p"
            mount = "mnt"
            size = "1G"
            tier2 = "cold"
            path = "uring"
            passthrough = "off"
            allow-other = true
            nonempty = true
            fsname = "p"
            handler-timeout = 0
            threads = 2
            depth = 4
            no-xattr = true

            [[share]]
            source = "mem"
            mount = "/m"
            huge = true

            [[share]]
            dir = "b"
            9p = "unix:n.sock"
            9p-remote = true
            9p-users = "only=0,5"
            9p-msize = "1M"
            9p-connections = 5
            9p-slow = 6
            9p-idle = 7
            9p-no-read-ahead = true

            [[share]]
            dir = "b"
            9p = "tls:[::]:564"
            tls-cert = "b.pem"
            tls-key = "/k/b.key"
            tls-client-ca = "ca.pem"

            [[share]]
            source = "9p:tls:host:564"
            mount = "/n"
            server-ca = "ca.pem"
            client-cert = "/k/me.pem"
            client-key = "me.key"
        "#;
        let shares = parse(text, Path::new("/etc/ferry")).expect("a good file").shares;
        assert_eq!(shares.len(), 7);
        assert_eq!(shares[0].source, Path::new("/srv/a"));
        assert_eq!(shares[0].virtiofs.as_deref(), Some(Path::new("/etc/ferry/a.sock")));
        assert!(shares[0].writeback && shares[0].local_locks && shares[0].allow_idmap);
        let limits = ferry_quota::Limits { bytes: 10 << 30, files: Some(5) };
        assert_eq!(shares[0].quota.map(|quota| quota.0), Some(limits));
        assert_eq!(shares[1].source, Path::new("/etc/ferry/b"));
        assert_eq!(shares[1].fd, Some(3));
        assert_eq!(shares[2].source, Path::new("pmem:/etc/ferry/p"));
        assert_eq!(shares[2].mount.as_deref(), Some(Path::new("/etc/ferry/mnt")));
        assert_eq!(shares[2].tier2.as_deref(), Some(Path::new("/etc/ferry/cold")));
        assert_eq!(shares[3].source, Path::new("mem"));
        assert_eq!(shares[4].ninep, Some("unix:/etc/ferry/n.sock".parse().unwrap()));
        assert_eq!(shares[4].ninep_users, Some("only=0,5".parse().unwrap()));
        assert_eq!(shares[4].ninep_msize.map(|size| size.0), Some(1 << 20));
        assert_eq!(
            (shares[4].ninep_connections, shares[4].ninep_slow, shares[4].ninep_idle),
            (Some(5), Some(6), Some(7))
        );
        assert!(shares[4].ninep_no_read_ahead);
        assert_eq!(shares[5].tls_cert.as_deref(), Some(Path::new("/etc/ferry/b.pem")));
        assert_eq!(shares[5].tls_key.as_deref(), Some(Path::new("/k/b.key")));
        assert_eq!(shares[5].tls_client_ca.as_deref(), Some(Path::new("/etc/ferry/ca.pem")));
        assert_eq!(shares[6].source, Path::new("9p:tls:host:564"));
        assert_eq!(shares[6].server_ca.as_deref(), Some(Path::new("/etc/ferry/ca.pem")));
        assert_eq!(shares[6].client_cert.as_deref(), Some(Path::new("/k/me.pem")));
        assert_eq!(shares[6].client_key.as_deref(), Some(Path::new("/etc/ferry/me.key")));
    }

    #[test]
    fn numbers_and_names_are_read() {
        let text = r#"
            [[share]]
            source = "/srv/a"
            virtiofs = "/s"
            cache = "metadata"
            negative-timeout = 5
            posix-acl = "always"
            inode-file-handles = "mandatory"
            announce-submounts = true
            translate-uid = ["map:0:100000:65536", "forbid-guest:70000:1"]
            translate-gid = ["squash-guest:0:5:10"]
            xattrmap = ":map::user.virtiofs.:"
            once = true

            [[share]]
            source = "/srv/b"
            virtiofs = "/t"
            map-user = "7:8"
        "#;
        let shares = parse(text, Path::new("/etc/ferry")).expect("a good file").shares;
        let rules: Vec<String> = shares[0].translate_uid.iter().map(ToString::to_string).collect();
        assert_eq!(rules, ["map:0:100000:65536", "forbid-guest:70000:1"]);
        assert_eq!(shares[0].xattrmap, Some(":map::user.virtiofs.:".parse().expect("a map")));
        assert!(shares[0].once && shares[0].announce_submounts && shares[0].negative_timeout == Some(5));
        assert_eq!(shares[1].ids(), Ok((ferry_idmap::Ids::of_one(7), ferry_idmap::Ids::of_one(8))));
        for (line, words) in [
            ("translate-uid = [\"map:0:1\"]", "is no translation"),
            ("translate-uid = [\"map:0:1:5\", \"guest:4:9:1\"]", "about the same numbers"),
            ("map-user = \"me\"", "is not a user"),
            ("map-user = \"auto\"\ntranslate-uid = [\"map:0:1:5\"]", "exclude each other"),
            ("xattrmap = \":ok:\"", "not whole"),
            ("entry-timeout = 99999999999", "is not in"),
            ("posix-acl = \"always\"\nno-xattr = true", "needs extended attributes"),
        ] {
            let text = format!("[[share]]\nsource = \"/srv/a\"\nvirtiofs = \"/s\"\n{line}");
            let error = format!("{:#}", parse(&text, Path::new("/")).expect_err(line));
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    #[test]
    fn disks_stand_beside_shares() {
        let text = r#"
            [[share]]
            source = "mem"
            mount = "/m"

            [[disk]]
            file = "disk.raw"
            vhost-user = "d.sock"
            cache = "writethrough"
            serial = "one"
            queues = 2
            poll-us = 0
            io = "sync"
            resize = "1G"

            [[disk]]
            file = "/srv/root.qcow2"
            format = "qcow2"
            backing-dir = "base"
            read-only = true
            fd = 7
        "#;
        let File { shares, disks, .. } = parse(text, Path::new("/etc/ferry")).expect("a good file");
        assert_eq!((shares.len(), disks.len()), (1, 2));
        assert_eq!(disks[0].file.as_deref(), Some(Path::new("/etc/ferry/disk.raw")));
        assert_eq!(disks[0].vhost_user.as_deref(), Some(Path::new("/etc/ferry/d.sock")));
        assert_eq!((disks[0].cache, disks[0].io), (Some(disk::Cache::Writethrough), disk::IoPath::Sync));
        assert!(disks[1].read_only && disks[0].resize.is_some_and(|size| size.0 == 1 << 30));
        assert_eq!((disks[1].fd, disks[1].format), (Some(7), Some(ferry_disk::Format::Qcow2)));
        assert_eq!(disks[1].backing_dir.as_deref(), Some(Path::new("/etc/ferry/base")));
        let image = "[[disk]]\nfile = \"image:a\"\nvhost-user = \"s\"\nstore = \"b\"";
        let disks = parse(image, Path::new("/etc/ferry")).expect("an image").disks;
        assert_eq!(disks[0].file.as_deref(), Some(Path::new("image:/etc/ferry/a")));
        assert_eq!(disks[0].store.as_deref(), Some(Path::new("/etc/ferry/b")));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, words) in [
            ("[[share]]\ndir = \"a\"\nsocket = \"s\"", "line 3: unknown field `socket`"),
            ("[[share]]\ndir = \"a\"\nreadonly = true", "line 3: unknown field `readonly`: did you mean `read-only`?"),
            ("[[disk]]\nfile = \"a\"\nvhost_user = \"s\"", "unknown field `vhost_user`: did you mean `vhost-user`?"),
            ("[share]\ndir = \"a\"\nvirtiofs = \"s\"", "line 1: [share] is one table: write [[share]]"),
            ("[disk]\nfile = \"a\"\nvhost-user = \"s\"", "line 1: [disk] is one table: write [[disk]]"),
            ("[[shares]]\ndir = \"a\"", "unknown field `shares`"),
            ("[[share]]\nvirtiofs = \"s\"", "it needs source"),
            ("[[share]]\ndir = \"a\"\nsource = \"b\"\nvirtiofs = \"s\"", "duplicate field"),
            ("[[share]]\ndir = \"a\"\nmount = \"m\"\nsize = \"1G\"", "size is for the sources mem"),
            ("[[share]]\nsource = \"mem\"\nmount = \"m\"\nsize = \"x\"", "line 4: \"x\" is not a size"),
            ("[[share]]\nsource = \"mem\"\nmount = \"m\"\ntier2 = \"x\"", "tier2 is for pmem"),
            ("[[share]]\nsource = \"pmem:a\"\nmount = \"m\"\ntier2-size = \"1G\"", "tier2-size needs tier2"),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\nallow-other = true", "allow-other is for mounts"),
            ("[[share]]\ndir = \"a\"\nmount = \"m\"\nwriteback = true\npassthrough = \"on\"", "exclude each other"),
            ("[[share]]\ndir = \"a\"\nmount = \"m\"\nquota = \"1X\"", "line 4: \"1X\" is not a quota"),
            ("[[share]]\nsource = \"mem\"\nmount = \"m\"\nquota = \"1G\"", "quota is for directories, and mem"),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\nquota = \"1G\"\ndax = \"2M\"", "quota and dax exclude each"),
            ("[[share]]\ndir = \"a\"\nmount = \"m\"\nthreads = 0", "threads = 0 is not in"),
            ("[[share]]\ndir = \"a\"\n9p = \"s\"", "not an address for 9P"),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\n9p-users = \"client\"", "9p-users is for 9P"),
            ("[[share]]\ndir = \"a\"\n9p = \"unix:s\"\n9p-slow = 0", "9p-slow = 0 is not in 1..=86400"),
            ("[[share]]\ndir = \"a\"\n9p = \"tls:h:1\"", "needs tls-cert and tls-key"),
            ("[[share]]\ndir = \"a\"\n9p = \"tcp:h:1\"\ntls-key = \"k\"", "tls-key is for 9P with TLS"),
            ("[[share]]\ndir = \"a\"", "number 1: it needs virtiofs"),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\nfd = 3", "both virtiofs and fd"),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\nqueues = 0", "queues = 0"),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\ntag = \"\"", "the tag \"\" has 0 bytes"),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\ncache = \"x\"", "unknown variant `x`"),
            ("[[share]]\ndir = \"a\"\ndir = \"b\"", "duplicate key"),
            ("[[disk]]\nvhost-user = \"s\"", "[[disk]] number 1: it needs file"),
            ("[[disk]]\nfile = \"a\"", "number 1: it needs vhost-user"),
            ("[[disk]]\nfile = \"a\"\nvhost-user = \"s\"\nfd = 3", "both vhost-user and fd"),
            ("[[disk]]\nfile = \"a\"\nvhost-user = \"s\"\nqueues = 257", "queues = 257 is not in 1..=256"),
            ("[[disk]]\nfile = \"a\"\nvhost-user = \"s\"\npoll-us = 1000001", "poll-us = 1000001"),
            ("[[disk]]\nfile = \"a\"\nvhost-user = \"s\"\nformat = \"vmdk\"", "not a known format"),
            ("[[disk]]\nfile = \"a\"\nvhost-user = \"s\"\njson = true", "unknown field `json`"),
            (
                "[[disk]]\nfile = \"a\"\nvhost-user = \"s\"\nread-only = true\nresize = \"1G\"",
                "resize and read-only exclude",
            ),
            ("[[disk]]\nfile = \"image:a\"\nvhost-user = \"s\"", "image:PATH needs store"),
            ("[[disk]]\nfile = \"a\"\nvhost-user = \"s\"\nstore = \"b\"", "store is for image:PATH"),
            (
                "[[disk]]\nfile = \"image:a\"\nvhost-user = \"s\"\nstore = \"b\"\nformat = \"raw\"",
                "format is for files",
            ),
            ("[[share]]\ndir = \"a\"\nvirtiofs = \"s\"\nlog = \"info\"", "line 4: unknown field `log`"),
            ("log = \"debgu\"\n[[share]]\ndir = \"a\"\nvirtiofs = \"s\"", "line 1: cannot log at \"debgu\""),
            ("", "it has no share or disk"),
        ] {
            let error = parse(text, Path::new("")).expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}

//! Flags that conflict with each other, the source or the exports. Each conflict is one sentence; for configuration files,
//! [`super::as_keys`] removes the dashes of the flags.

use std::fmt::Display;

use super::address::{Address, Users};
use super::share::Share;
use super::source::{Kind, Server};
use super::values::{Acl, Cache, FileHandles, MigrationMode, OnMigrationError, Passthrough, Watch};
use crate::size::Size;

/// The minimum cache of a 9P server: a smaller one would evict its own read-ahead.
const SERVER_CACHE_BYTES_MIN: u64 = 16 << 20;

impl Share {
    /// Returns the first conflict between the flags, this source and these exports.
    pub fn contradiction(&self) -> Option<String> {
        let source = self.source.display();
        let kind = self.kind();
        let of_memory = [
            (self.size.is_some(), "size"),
            (self.huge, "huge"),
            (self.tier2.is_some(), "tier2"),
            (self.tier2_size.is_some(), "tier2-size"),
        ];
        let of_mounts = [
            (self.path.is_some(), "path"),
            (self.passthrough.is_some(), "passthrough"),
            (self.allow_other, "allow-other"),
            (self.nonempty, "nonempty"),
            (self.fsname.is_some(), "fsname"),
            (self.handler_timeout.is_some(), "handler-timeout"),
            (self.threads.is_some(), "threads"),
            (self.depth.is_some(), "depth"),
        ];
        let of_fuse = [
            (self.local_locks, "local-locks"),
            (self.allow_idmap, "allow-idmap"),
            (self.entry_timeout.is_some(), "entry-timeout"),
            (self.attr_timeout.is_some(), "attr-timeout"),
            (self.negative_timeout.is_some(), "negative-timeout"),
        ];
        let of_tls = [
            (self.tls_cert.is_some(), "tls-cert"),
            (self.tls_key.is_some(), "tls-key"),
            (self.tls_client_ca.is_some(), "tls-client-ca"),
        ];
        match (&kind, given(&of_memory)) {
            (Kind::Dir(_), Some(flag)) => {
                return Some(format!("--{flag} is for the sources mem and pmem:PATH, and {source} is a directory"));
            }
            (Kind::Image(_), Some(flag)) => {
                return Some(format!("--{flag} is for the sources mem and pmem:PATH, and {source} is an image"));
            }
            (Kind::Layers(_), Some(flag)) => {
                return Some(format!("--{flag} is for the sources mem and pmem:PATH, and {source} has layers"));
            }
            (Kind::Ninep(_), Some(flag)) => {
                return Some(format!("--{flag} is for the sources mem and pmem:PATH, and {source} is on a server"));
            }
            _ => {}
        }
        let of_dirs = [
            (self.announce_submounts, "announce-submounts"),
            (self.inode_file_handles != FileHandles::default(), "inode-file-handles"),
            (self.watch != Watch::default(), "watch"),
            (self.quota.is_some(), "quota"),
            (self.allow_direct_io, "allow-direct-io"),
            // Files in memory publish what happens, and so may a server; others only a part of it.
            (self.events && !matches!(kind, Kind::Mem | Kind::Pmem(_) | Kind::Ninep(_)), "events"),
        ];
        if let (false, Some(flag)) = (matches!(kind, Kind::Dir(_)), given(&of_dirs)) {
            return Some(format!("--{flag} is for directories, and {source} is not one"));
        }
        if self.watch == Watch::Always && self.mount.is_none() {
            return Some(format!(
                "--watch always is for mounts, because only they can be notified: {source} has no mount"
            ));
        }
        if let Some(why) = self.guest_conflict().or_else(|| self.events_conflict()) {
            return Some(why);
        }
        let of_images =
            [(self.store.is_some(), "store"), (self.digest.is_some(), "digest"), (self.from.is_some(), "from")];
        let has_layers = matches!(kind, Kind::Layers(_));
        let of_registries = [
            (self.jobs.is_some(), "jobs"),
            (self.cache_size.is_some() && !matches!(kind, Kind::Ninep(_)), "cache-size"),
            (self.fetch_ahead.is_some() && !has_layers, "fetch-ahead"),
            (self.fetch_rate.is_some(), "fetch-rate"),
            (self.plain_http && !has_layers, "plain-http"),
        ];
        if let (None, Some(flag)) = (&self.from, given(&of_registries)) {
            return Some(format!("--{flag} applies to fetched data: add --from, or omit it"));
        }
        match (&kind, given(&of_images)) {
            (Kind::Image(_), _) if self.store.is_none() => {
                return Some(format!("{source} needs --store, the directory with the data of its files"));
            }
            (Kind::Image(_), _) | (_, None) => {}
            (_, Some(flag)) => return Some(format!("--{flag} is for image:PATH, and {source} is not one")),
        }
        if let Some(why) = self.ninep_server_conflict(&kind) {
            return Some(why);
        }
        if let Some(why) = self.ninep_client_conflict() {
            return Some(why);
        }
        let has_tls = matches!(self.ninep, Some(Address::Tls(..)));
        if let (false, Some(flag)) = (has_tls, given(&of_tls)) {
            return Some(format!(
                "--{flag} is for 9P with TLS, and {source} has no such address: add --9p tls:HOST:PORT"
            ));
        }
        if has_tls && (self.tls_cert.is_none() || self.tls_key.is_none()) {
            return Some(format!(
                "{source} is shared with TLS, which needs --tls-cert and --tls-key, both files in PEM"
            ));
        }
        let has_device = self.virtiofs.is_some() || self.fd.is_some();
        if let (false, Some(flag)) = (has_device || self.mount.is_some(), given(&of_fuse)) {
            return Some(format!(
                "--{flag} is for virtual machines and mounts, and {source} is shared with neither: 9P clients choose their own caches \
                 and locks"
            ));
        }
        match kind {
            Kind::Mem if self.tier2.is_some() => Some("--tier2 is for pmem:PATH; mem has one tier".into()),
            _ if self.tier2_size.is_some() && self.tier2.is_none() => Some("--tier2-size needs --tier2".into()),
            _ if self.writeback && self.passthrough == Some(Passthrough::On) => {
                Some("--writeback and --passthrough exclude each other; omit one".into())
            }
            _ if self.limit.is_some() && self.passthrough == Some(Passthrough::On) => Some(
                "--limit and --passthrough on exclude each other, because such data are not limited; omit one".into(),
            ),
            _ if self.limit.is_some() && self.dax.is_some_and(|window| window.0.is_some()) => {
                Some("--limit and --dax exclude each other, because mapped data are not limited; omit one".into())
            }
            _ if self.quota.is_some() && self.passthrough == Some(Passthrough::On) => Some(
                "--quota and --passthrough on exclude each other, because such data are not counted; omit one".into(),
            ),
            _ if self.quota.is_some() && self.dax.is_some_and(|window| window.0.is_some()) => {
                Some("--quota and --dax exclude each other, because mapped data are not counted; omit one".into())
            }
            _ if self.mount.is_none() => given(&of_mounts)
                .map(|flag| format!("--{flag} is for mounts, and {source} is not mounted: add --mount, or omit it")),
            _ if self.poll_us.is_some() && !has_device && self.ninep.is_none() => {
                Some(format!("--poll-us is for sockets, and {source} has none: mounts do not poll"))
            }
            _ => None,
        }
    }

    /// Returns a conflict about virtual machines or id translations.
    fn guest_conflict(&self) -> Option<String> {
        let source = self.source.display();
        let of_devices = given(&[
            (self.posix_acl != Acl::default() && self.ninep.is_none(), "posix-acl"),
            (self.security_label.is_some(), "security-label"),
            (self.once, "once"),
            (self.queues.is_some(), "queues"),
            // A virtio-9p device has a tag, too.
            (self.tag.is_some() && !matches!(self.ninep, Some(Address::VhostUser(_))), "tag"),
            (self.migration_on_error != OnMigrationError::default(), "migration-on-error"),
            (self.migration_mode != MigrationMode::default(), "migration-mode"),
            (self.migration_verify_handles, "migration-verify-handles"),
            (self.no_mmap, "no-mmap"),
            (self.no_readdirplus, "no-readdirplus"),
            (self.dax.is_some(), "dax"),
            (self.dax_files.is_some(), "dax-files"),
        ]);
        match of_devices {
            Some(flag) if self.virtiofs.is_none() && self.fd.is_none() => {
                Some(format!("--{flag} is for virtual machines, and {source} is not shared with one: add --virtiofs"))
            }
            _ if self.once && self.ninep.is_some() => Some(
                "--once and --9p exclude each other, because a server for 9P clients does not end: omit one".into(),
            ),
            _ if self.posix_acl == Acl::Always && self.no_xattr => {
                Some("--posix-acl always needs extended attributes; omit --no-xattr".into())
            }
            _ if self.security_label.is_some_and(|when| when != Acl::Never) && self.no_xattr => {
                Some("--security-label needs extended attributes; omit --no-xattr".into())
            }
            _ if self.socket_group.is_some() && !self.has_unix_socket() => Some(format!(
                "--socket-group is for unix sockets, and {source} has none: add --virtiofs, --9p unix:PATH or --9p \
                 vhost-user:SOCKET, or omit it"
            )),
            _ if self.map_user.is_some() && !(self.translate_uid.is_empty() && self.translate_gid.is_empty()) => {
                Some("--map-user and --translate-uid or --translate-gid exclude each other".into())
            }
            _ => self.ids().err(),
        }
    }

    /// Returns a conflict about what agents in guests and 9P clients are told.
    fn events_conflict(&self) -> Option<String> {
        let source = self.source.display();
        let has_guests = self.virtiofs.is_some() || self.fd.is_some();
        let has_clients = self.ninep.as_ref().is_some_and(|address| !matches!(address, Address::VhostUser(_)));
        match self.events {
            false => None,
            true if !has_guests && !has_clients => Some(format!(
                "--events is for virtual machines and for 9P clients that are Ferry, and {source} is shared with neither: \
                 add --virtiofs or --9p"
            )),
            true if has_guests
                && matches!(self.kind(), Kind::Ninep(_))
                && matches!(self.cache, Cache::Always | Cache::Metadata) =>
            {
                Some(format!(
                    "--events with --cache always or metadata is for files of this host: the connection to the server of {source} \
                     may end unnoticed for a while; use --cache auto"
                ))
            }
            true if self.writeback => Some(
                "--events and --writeback exclude each other: with it a guest believes its own lengths of files".into(),
            ),
            true if self.allow_idmap => Some(
                "--events and --allow-idmap exclude each other: with it the requests of an agent cannot be recognised"
                    .into(),
            ),
            true if self.watch == Watch::Never => {
                Some("--events needs to watch the directory: omit --watch never".into())
            }
            true => None,
        }
    }

    /// Returns a conflict about 9P clients.
    fn ninep_client_conflict(&self) -> Option<String> {
        let source = self.source.display();
        let of_sockets = given(&[
            (self.ninep_connections.is_some(), "9p-connections"),
            (self.ninep_slow.is_some(), "9p-slow"),
            (self.ninep_idle.is_some(), "9p-idle"),
        ]);
        let of_all = given(&[
            (self.ninep_remote, "9p-remote"),
            (self.ninep_users.is_some(), "9p-users"),
            (self.ninep_msize.is_some(), "9p-msize"),
            (self.ninep_no_read_ahead, "9p-no-read-ahead"),
        ]);
        match (&self.ninep, of_all.or(of_sockets), of_sockets) {
            (None, Some(flag), _) => {
                Some(format!("--{flag} is for 9P, and {source} is not shared over it: add --9p, or omit it"))
            }
            (Some(Address::VhostUser(_)), _, Some(flag)) => {
                Some(format!("--{flag} is for clients that connect, and a device has one guest: omit it"))
            }
            _ if matches!(self.ninep_users, Some(Users::Only(_))) && self.translates_ids() => Some(
                "--9p-users only=UID names users of this host, but --map-user, --translate-uid and --translate-gid change the ids of clients: \
                 write --9p-users UID:GID, or omit the others"
                    .into(),
            ),
            _ => {
                let Size(bytes) = self.ninep_msize.filter(|size| !ferry_ninep::MSIZE.contains(&size.0))?;
                Some(format!("--9p-msize = {bytes} is not from 4K to 16M"))
            }
        }
    }

    /// Returns a conflict about the 9P server that is the source.
    fn ninep_server_conflict(&self, kind: &Kind) -> Option<String> {
        let source = self.source.display();
        let of_tls = given(&[
            (self.server_ca.is_some(), "server-ca"),
            (self.client_cert.is_some(), "client-cert"),
            (self.client_key.is_some(), "client-key"),
        ]);
        let of_all = given(&[
            (self.msize.is_some(), "msize"),
            (self.in_flight.is_some(), "in-flight"),
            (self.connections.is_some(), "connections"),
            (self.ninep_user.is_some(), "9p-user"),
            (self.ninep_tree.is_some(), "9p-tree"),
            (self.patience.is_some(), "patience"),
        ]);
        let of_data = given(&[(self.writeback, "writeback"), (self.cache_size.is_some(), "cache-size")]);
        let Kind::Ninep(address) = kind else {
            return of_all.or(of_tls).map(|flag| format!("--{flag} is for 9p:SERVER, and {source} is not one"));
        };
        match (Server::of(address), of_tls) {
            (Err(why), _) => Some(why),
            (Ok(server), _) if server.has_tree() && self.ninep_tree.is_some() => {
                Some(format!("--9p-tree and the address {source} both name a tree: give one of the two"))
            }
            (Ok(server), Some(flag)) if !server.is_tls() => {
                Some(format!("--{flag} is for servers with TLS; write 9p:tls:HOST:PORT, or omit it"))
            }
            (Ok(server), _) if server.is_tls() && self.server_ca.is_none() => {
                Some(format!("{source} needs --server-ca, the authorities that sign server certificates, in PEM"))
            }
            _ if self.client_cert.is_some() != self.client_key.is_some() => {
                Some("--client-cert and --client-key are a pair; give both or none".into())
            }
            _ => self.cached_data_conflict(&source, of_data),
        }
    }

    /// Returns a conflict about the cached data of a 9P server.
    fn cached_data_conflict(&self, source: &impl Display, of_data: Option<&str>) -> Option<String> {
        if let (Some(flag), Cache::None | Cache::Metadata) = (of_data, self.cache) {
            let cache = if self.cache == Cache::None { "none" } else { "metadata" };
            return Some(format!(
                "--{flag} applies to cached data, and --cache {cache} caches none of {source}: choose --cache auto or always, \
                 or omit it"
            ));
        }
        let Size(bytes) = self.cache_size.filter(|size| size.0 < SERVER_CACHE_BYTES_MIN)?;
        Some(format!("--cache-size = {bytes} is too little for {source}: give 16M or more"))
    }

    /// Whether clients use other user or group ids than this host.
    fn translates_ids(&self) -> bool {
        self.map_user.is_some() || !(self.translate_uid.is_empty() && self.translate_gid.is_empty())
    }

    /// Whether it listens on the file of a unix socket.
    fn has_unix_socket(&self) -> bool {
        self.virtiofs.is_some() || matches!(self.ninep, Some(Address::Unix(_) | Address::VhostUser(_)))
    }
}

/// Returns the first flag that is given.
fn given(flags: &[(bool, &'static str)]) -> Option<&'static str> {
    flags.iter().find(|(on, _)| *on).map(|(_, flag)| *flag)
}

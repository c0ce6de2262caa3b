//! The log of requests.

use std::fmt;

use ferry_engine::requests::{LoggedRequest, Outcome, is_on};
use ferry_vfs::{Ino, Result};
use ferry_wire::ninep::{Fid, READ_HEAD_BYTES, Request};

use super::{Context, ReplyPlace};
use crate::carrier::NinepReply;

/// The fid that a request is about: for one about a name, the directory's.
pub(super) fn subject(request: &Request<'_>) -> Option<Fid> {
    match *request {
        Request::Read { fid, .. }
        | Request::Write { fid, .. }
        | Request::Walk { fid, .. }
        | Request::Getattr { fid, .. }
        | Request::Clunk { fid }
        | Request::Remove { fid }
        | Request::Open { fid, .. }
        | Request::Create { fid, .. }
        | Request::Readdir { fid, .. }
        | Request::Setattr { fid, .. }
        | Request::Readlink { fid }
        | Request::Statfs { fid }
        | Request::Fsync { fid, .. }
        | Request::Lock { fid, .. }
        | Request::Getlock { fid, .. }
        | Request::Rename { fid, .. }
        | Request::Xattrwalk { fid, .. }
        | Request::Xattrcreate { fid, .. }
        | Request::Events { fid, .. } => Some(fid),
        Request::Symlink { dir, .. }
        | Request::Mknod { dir, .. }
        | Request::Mkdir { dir, .. }
        | Request::Link { dir, .. }
        | Request::Unlinkat { dir, .. }
        | Request::Renameat { dir, .. } => Some(dir),
        _ => None,
    }
}

/// Serves a request with `serve`, and logs it if requests are.
pub(super) fn watched<C: NinepReply>(
    cx: &Context<'_>,
    (fid, request): (Option<Fid>, &dyn fmt::Debug),
    carrier: &mut C,
    serve: impl FnOnce(&mut C) -> Result<ReplyPlace>,
) -> Result<ReplyPlace> {
    if !is_on() {
        return serve(carrier);
    }
    let ino = fid.and_then(|fid| cx.session.get(fid).ok()).map_or(Ino::ROOT, |file| file.node.ino);
    let watched = LoggedRequest::begin(&cx.share.options.name, ino, None, request);
    let done = serve(carrier);
    if let Some(watched) = watched {
        watched.end(match done {
            Ok(ReplyPlace::Short) => Outcome::Bytes(carrier.short().len()),
            Ok(ReplyPlace::Long(bytes)) => Outcome::Bytes(bytes.saturating_sub(READ_HEAD_BYTES)),
            Ok(ReplyPlace::Parked | ReplyPlace::Later) => Outcome::Waits,
            Err(errno) => Outcome::Error(errno),
        });
    }
    done
}

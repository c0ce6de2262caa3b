//! SETUPMAPPING and REMOVEMAPPING.

use ferry_vfs::{Errno, Result};
use ferry_wire::fuse::abi::RemovemappingOne;
use ferry_wire::fuse::{Records, Reply};

use crate::active_request::DetachedRequest;
use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::mappings::{Mapping, MappingReply};
use crate::reply;
use crate::server::{Context, Server};

impl Server {
    /// Ignores the handle: Linux sends none.
    pub(crate) fn setupmapping(
        &mut self,
        cx: &Context<'_>,
        (offset, len, window_offset): (u64, u64, u64),
        (read, write): (bool, bool),
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let mappings = cx.session.mappings.as_ref().ok_or(Errno::NOSYS)?;
        let (by, ino) = (cx.caller.session, cx.ino);
        if !cx.session.knows(ino) {
            return Err(Errno::STALE);
        }
        if !read && !write {
            return Err(Errno::INVAL);
        }
        if write && self.share.read_only {
            return Err(Errno::ROFS);
        }
        let may_write = write || cx.session.writes_to(ino);
        let mapping = Mapping { by, ino, offset, len, window_offset, write, may_write };
        let reply = self.mapping_reply(cx, carrier);
        mappings.map(mapping, reply);
        Ok(ServeOutcome::Parked)
    }

    pub(crate) fn removemapping(
        &mut self,
        cx: &Context<'_>,
        ranges: &Records<'_, RemovemappingOne>,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let mappings = cx.session.mappings.as_ref().ok_or(Errno::NOSYS)?;
        let ranges = ranges.iter().map(|range| (range.moffset, range.len)).collect();
        let reply = self.mapping_reply(cx, carrier);
        mappings.unmap(cx.caller.session, ranges, reply);
        Ok(ServeOutcome::Parked)
    }

    /// Returns a function that replies to the request when the window has changed.
    pub(super) fn mapping_reply(&mut self, cx: &Context<'_>, carrier: &mut impl FuseCarrier) -> MappingReply {
        let (later, unique, negotiated) = (carrier.later(), cx.unique, *cx.session.negotiated());
        let request = DetachedRequest::new(self.active.take(), &self.share.metrics);
        Box::new(move |outcome| {
            later(reply::to_bytes(unique, &negotiated, outcome.map(|()| Reply::Empty)));
            request.end(outcome.map(|()| 0));
        })
    }
}

//! Files that are made shorter while clients of other exports have them in their memory.
//!
//! The source waits then ([`ferry_vfs::Windows`]), and for a virtual machine monitor that may itself wait for the queue that the request came
//! by. So another thread makes such a request.

use std::sync::Arc;

use ferry_vfs::{Errno, OFlags, Result};
use ferry_wire::ninep::{Fid, Reply, Request};

use super::Context;

impl Context<'_> {
    /// Has another thread serve the request if it would wait for clients' windows; answers whether it does.
    pub(super) fn shortened_aside(&self, request: &Request<'_>) -> bool {
        match *request {
            Request::Setattr { fid, ref set, .. } => {
                let Some(size) = set.size.filter(|size| self.waits(fid, *size)) else { return false };
                let set = ferry_vfs::SetAttr { size: Some(size), ..*set };
                self.aside(move |cx| cx.setattr(fid, &set));
            }
            Request::Open { fid, flags } => {
                if !flags.contains(OFlags::TRUNC) || !self.waits(fid, 0) {
                    return false;
                }
                self.aside(move |cx| cx.open(fid, flags));
            }
            _ => return false,
        }
        true
    }

    fn waits(&self, fid: Fid, size: u64) -> bool {
        // What is wrong with the fid is told where the request is served.
        let Ok(file) = self.session.get(fid) else { return false };
        self.share.source.shortening_waits(&self.caller(file.user, None), file.node.ino, size)
    }

    fn aside(&self, serve: impl FnOnce(&Context<'_>) -> Result<Reply<'static>> + Send + 'static) {
        let (share, session) = (Arc::clone(self.share), Arc::clone(self.session));
        let (client, ticket) = (Arc::clone(&self.client), self.ticket.clone());
        self.share.lane.run(move || {
            let cx = Context { share: &share, client: Arc::clone(&client), session: &session, ticket: &ticket };
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| serve(&cx)));
            let mut reply = Vec::new();
            served.unwrap_or(Err(Errno::IO)).unwrap_or_else(Reply::Error).encode(ticket.tag, &mut reply);
            // If nobody wants it any more, nobody is told.
            let _ = client.finish(&ticket, &reply);
        });
    }
}

//! Serves FUSE requests from a source, independently of the transport.
//!
//! A [`Share`] is a source as one export offers it, a [`SessionSlot`] holds the session of one client, and a
//! [`Server`] serves the requests of one worker. The export implements [`FuseCarrier`] for its transport (a
//! virtqueue's descriptor chains, the entries of an io_uring, `/dev/fuse`), passes each request to [`Server::serve`]
//! and acts on the [`ServeOutcome`]. All exports share what lies between: decoding, calls of the source, the client's
//! references and open files, cache policy, waiting locks, passthrough, and checks of the source's results.
//!
//! ```
//! use ferry_serve::*;
//! use ferry_vfs::FileSystem;
//! use std::sync::{Arc, mpsc};
//!
//! /// A message, the room for its reply, and a channel for late replies; it cannot transfer data.
//! struct Message { request: Vec<u8>, reply: [u8; 4096], late: mpsc::Sender<Vec<u8>> }
//!
//! impl ReplyBuffer for Message {
//!     fn room(&self) -> usize { self.reply.len() }
//!     fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
//!         self.reply[offset..][..bytes.len()].copy_from_slice(bytes);
//!         bytes.len()
//!     }
//! }
//!
//! impl Carrier for Message {
//!     fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
//!         let rest = self.request.get(offset..).unwrap_or_default();
//!         let count = rest.len().min(bytes.len());
//!         bytes[..count].copy_from_slice(&rest[..count]);
//!         count
//!     }
//!     fn transfer(&mut self, _: TransferRequest) { unimplemented!() }
//! }
//!
//! impl FuseCarrier for Message {
//!     fn request_bytes(&self) -> usize { self.request.len() }
//!     fn token(&self) -> u64 { 0 }
//!     fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static {
//!         let late = self.late.clone();
//!         move |reply| drop(late.send(reply))
//!     }
//! }
//!
//! /// Every method returns ENOSYS.
//! struct Nothing;
//! impl FileSystem for Nothing {}
//!
//! let share = Arc::new(Share::new(Arc::new(Nothing), &ShareOptions::default()));
//! let mut server = Server::new(share, Arc::new(SessionSlot::default()));
//! // INIT of FUSE 7.31: the header (length, opcode, number, inode, caller), then the client's offer.
//! let words = [56, 26, 2, 0, 1, 0, 0, 0, 0, 0, 7, 31, 1 << 20, 0];
//! let request = words.map(u32::to_le_bytes).concat();
//! let mut message = Message { request, reply: [0; 4096], late: mpsc::channel().0 };
//! let ServeOutcome::Reply(bytes) = server.serve_caught(&mut message) else { unreachable!("INIT is served at once") };
//! assert_eq!(bytes, 80);
//! assert_eq!(message.reply[..16], [80_u64, 2].map(u64::to_le_bytes).concat()); // length, no error, number
//! ```
//!
//! Inside, `dispatch.rs` calls the method in `operations/` that serves an opcode (one file per family), `session/`
//! holds the state of one client, and `persistence/` records that state for the next server.
#![forbid(unsafe_code)]

mod active_request;
mod blocking_locks;
mod carrier;
mod close_to_open;
mod dispatch;
pub mod events;
mod mappings;
mod open_file;
mod operations;
mod passthrough;
mod persistence;
mod policy;
mod rate;
mod readdirplus_auto;
mod reply;
mod request_text;
mod server;
mod session;
mod share;
mod usage;

pub use carrier::{FuseCarrier, HEADER_BYTES, ServeOutcome};
pub use ferry_engine::{Carrier, RatelimitedLog, ReplyBuffer, TransferRequest};
pub use mappings::{Mapping, MappingReply, Mappings};
pub use operations::DetachedTransfer;
pub use passthrough::Backings;
pub use persistence::RestoreError;
pub use policy::{Acl, Cache, EPOCH_MINOR, Timeout};
pub use rate::is_limited;
pub use server::Server;
pub use session::{Session, SessionSlot};
pub use share::{Share, ShareOptions};
pub use usage::Usage;

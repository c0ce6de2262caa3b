//! The data cache: read-ahead and write-behind.
//!
//! Source: "virtio-9p: coalescing" (2016), whose finding was that 9P is slow where it sends pages instead of ranges.
//!
//! One [`Cache`] per source bounds the memory and owns the buffers that writes leave in; one [`CachedFile`] per inode holds the
//! pages under a lock of its own. Messages are begun by whoever reads, writes or flushes, and by one thread of the cache; the
//! end of a message ([`Done::end`]) only notes what came, so a connection's thread never waits for the connection.
//!
//! What to know as its user:
//!
//! * The size is believed: nothing is asked beyond it. A file whose size says nothing (`/proc` at the server) is not for a cache.
//! * Pages are 4 KiB. What is written back of a page is one range, from the first to the last byte written; bytes between two
//!   writes go along. Writes that only touch part of a page do not fetch it, unless they leave a gap.
//! * A write-behind that fails is noted, for everybody who has the file open ([`ErrorCursor`]), and its data is let go, so
//!   that memory does not fill with what cannot be written: readers then see what the server has.

mod around;
mod buffers;
mod errors;
mod file;
mod limits;
mod pages;
mod pool;
mod reading;
mod remote;
mod state;
mod stream;
mod writing;

pub use errors::ErrorCursor;
pub use file::{CachedFile, SizeMark};
pub use limits::{Counts, Limits};
pub use pool::Cache;
pub use remote::{Done, Ended, Remote};

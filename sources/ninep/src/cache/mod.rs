//! The data cache: read-ahead and write-behind.
//!
//! Source: "virtio-9p: coalescing" (2016), whose finding was that 9P is slow where it sends pages instead of ranges.
//!
//! One [`Cache`] per source bounds the memory and owns the write buffers; one [`CachedFile`] per inode holds the pages
//! under its own lock. Callers that read, write or flush begin messages, as does the cache's thread. The end of a
//! message ([`Completion::end`]) only records its result, so a connection's thread never waits for the connection.
//!
//! For users of this module:
//!
//! * The size is trusted: nothing is requested beyond it. Files with a meaningless size (`/proc` on the server) must
//!   not be cached.
//! * Pages are 4 KiB. Each page keeps a single dirty range, from the first to the last byte written, including bytes
//!   between. Partial writes do not fetch the page, unless they leave a gap.
//! * A failed write-behind is recorded for every open handle of the file ([`ErrorCursor`]). Its data are dropped, so
//!   that unwritable data do not fill the memory; readers then see the server's data.

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
pub use remote::{Completion, OnCompletion, Remote};

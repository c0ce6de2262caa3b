//! A guide for authors of file systems. It contains no code.
//!
//! # Threads, and what may wait
//!
//! Every method may be called from many threads at once, and several times for one file. A client's kernel serializes
//! changes of names in one directory, and writes to one file that do not bypass its cache. Only the author serializes
//! what different clients do.
//!
//! A handler runs on a worker of the export (one per virtqueue or CPU), which has other requests to serve. So:
//!
//! * A lock may be held for some microseconds.
//! * Data that is in a file already is not read by the author but returned as an [`Extent`](crate::Extent), and `fsync`
//!   as a descriptor: the export waits for those without blocking other requests.
//! * [`syncfs`](crate::FileSystem::syncfs) and [`copy_file_range`](crate::FileSystem::copy_file_range) may take long:
//!   exports call them on separate threads.
//! * A handler does not wait for a lock that another client holds: it keeps the [`Waiter`](crate::Waiter).
//! * Anything else that blocks (a network, a slow disk) blocks its worker for some milliseconds. Then another thread
//!   takes over, on this host and in a guest. After two minutes a mount on this host returns `EIO` to the caller; a
//!   guest's caller waits.
//!
//! Start threads and child processes before the first request, not in a handler: a handler's scheduling is inherited,
//! which on this host means bound to a CPU at the lowest priority (`SCHED_IDLE`).
//!
//! # How to avoid deadlocks
//!
//! * A handler never uses its own mount: no path below it, no descriptor or mapping of a file in it, no child process
//!   that uses it and is waited for. The kernel may hold a lock of that directory until the handler returns.
//! * No lock of the author is held while waiting for something that only another handler can do.
//! * [`Changes::publish`](crate::Changes::publish) and [`Waiter::wake`](crate::Waiter::wake) are safe inside handlers:
//!   listeners only queue a change, and notify their clients from other threads. Release your own locks first, so that
//!   the clients find the change complete.
//! * [`forget`](crate::FileSystem::forget), [`release`](crate::FileSystem::release) and
//!   [`releasedir`](crate::FileSystem::releasedir) may come at any time, also long after the last name is removed, and
//!   from the export itself when a client has vanished.
//!
//! # Panics
//!
//! If a handler panics, its caller gets `EIO` and the next request is served. The author must keep the data consistent
//! that the handler was changing. A [`std::sync::Mutex`] that it held is poisoned, and `lock().unwrap()` then makes
//! every later handler panic too. Use `lock().unwrap_or_else(PoisonError::into_inner)` where a partial change does no
//! harm. With `panic = "abort"`, or without memory, the process ends, and its clients get `ENOTCONN`.
//!
//! # Sizes and units
//!
//! Lengths and offsets are in bytes, [`Attr::blocks`](crate::Attr::blocks) in units of 512 bytes whatever the block
//! size, [`Statfs`](crate::Statfs) in units of its `frsize`. A client may send any offset: compute with
//! [`IoRange::end`](crate::IoRange::end) or `checked_add`. Times have nanoseconds. One WRITE has at most 1 MiB,
//! one READ of Linux's client as much (an export accepts up to 16 MiB from others), the value of an extended attribute 64 KiB, a name
//! 255 bytes, a symbolic link 4,095 bytes. A longer result than requested is truncated.
//!
//! # Handles
//!
//! A [`Handle`](crate::Handle) is the result of `open`, and comes back with each request. A file system without state
//! for open files may return the same handle many times, such as the inode's number. [`Handles`](crate::Handles) is a
//! table for such state, and [`Locks`](crate::Locks) implements locks between clients.
//!
//! `O_APPEND` is for the client's kernel: the offset that arrives is the end of the file as the kernel knows it, and
//! the source must not append. Data that the kernel writes back from its page cache (mappings, a write-back cache)
//! comes without flags, through any open handle of the file. A short write of such data is an error for the client.
//!
//! # What is not written
//!
//! The methods return `ENOSYS` by default. Linux then mostly sends no more requests of that kind:
//!
//! | not written | what programs see |
//! | --- | --- |
//! | `open`, `opendir` | opening succeeds, the handle is 0, and the client caches what it reads: right for files that never change. A source with `write` needs `open` for `O_TRUNC` |
//! | `create` | the kernel calls `mknod` and `open` |
//! | `tmpfile`, `fallocate`, extended attributes | `EOPNOTSUPP` |
//! | `flush`, `fsync`, `fsyncdir`, `syncfs` | success |
//! | `lseek` | all bytes are data, the hole is at the end |
//! | `copy_file_range` | the kernel reads and writes |
//! | locks without [`Features`](crate::Features) | the client's kernel implements them, for its own programs |
//! | `rename` | `EINVAL` with flags, `ENOSYS` without |
//! | `link` | `EPERM`, as where a file system has no hard links |
//! | `ioctl` | `ENOTTY` |
//! | anything else | `ENOSYS`, "function not implemented". A read-only file system should set [`Features::read_only`](crate::Features::read_only): then it is `EROFS` |
//!
//! # Hints and mappings
//!
//! FUSE has no request for `posix_fadvise`, `madvise` and the like: they are for the client's page cache. Their effects
//! on Linux 6.18:
//!
//! | the program calls | what reaches the author |
//! | --- | --- |
//! | `posix_fadvise(WILLNEED)`, `readahead`, `madvise(WILLNEED)` | READs of the range, at once; the program's own reads then come from the cache |
//! | `posix_fadvise(SEQUENTIAL)`, `NORMAL` | READs that run ahead of the program |
//! | `posix_fadvise(RANDOM)` | READs of just the pages that the program reads |
//! | `posix_fadvise(DONTNEED)` | nothing now (first WRITEs of data in a write-back cache); later reads are READs again |
//! | `posix_fadvise(NOREUSE)`, `madvise(COLD)` | nothing |
//! | `mmap` and a read of the page | READ of the page and its neighbours |
//! | `mmap` and a write to the page | READ, and WRITE after `msync`, `munmap` or some time; its handle is any open handle of the inode |
//! | `O_DIRECT`, `O_SYNC`, `O_DSYNC`, `O_APPEND`, `O_NOATIME` | [`IoRange::flags`](crate::IoRange::flags), with each request that the program itself makes, also if set later by `fcntl` |
//! | `fallocate`, also with `KEEP_SIZE`, `PUNCH_HOLE` and `ZERO_RANGE` | [`fallocate`](crate::FileSystem::fallocate); with other flags Linux itself returns `EOPNOTSUPP` |
//! | `ioctl` | [`ioctl`](crate::FileSystem::ioctl), where the argument is plain data whose size is encoded in the command (`_IOR`, `_IOW`): pointers in it have no meaning here |
//! | `setxattr`, `setfacl` | [`setxattr`](crate::FileSystem::setxattr); ACLs as `system.posix_acl_access` and `_default`, which the client's kernel then enforces if [`Features::posix_acl`](crate::Features::posix_acl) is set |
//!
//! With `cache none` reads bypass the page cache, so the hints have no effect. For files in passthrough
//! ([`backing`](crate::FileSystem::backing)) the kernel applies all of this to the backing file, without the author.
//!
//! # Traits that most file systems do not need
//!
//! * [`Mappable`](crate::Mappable), offered by [`mappable`](crate::FileSystem::mappable): files mapped into a guest's
//!   memory (DAX).
//! * [`Migrate`](crate::Migrate), offered by [`migrate`](crate::FileSystem::migrate): a server that is restarted under
//!   its guests, and guests that migrate to another host.
//!
//! # Differences from libfuse
//!
//! * There are no reply objects, so a handler cannot reply after it returns. Only locks wait without a thread
//!   ([`Waiter`](crate::Waiter)). Anything else that takes long keeps its thread (see above), or is returned as an extent
//!   or a descriptor, for which the export waits.
//! * A source cannot write to the kernel's cache or read from it (`notify_store`, `notify_retrieve`):
//!   [`Changes`](crate::Changes) invalidate it, and the kernel then sends a request.
//! * A source does not set the kernel's queue limits (`max_background`, `congestion_threshold`, `max_read`,
//!   `max_write`): the exports choose them.
//! * There is no POLL, which is for character devices (nor CUSE): files are always ready, as Linux assumes without it.
//! * There is no BMAP, which is for file systems on a block device of the same kernel: extents and
//!   [`backing`](crate::FileSystem::backing) say where bytes are.

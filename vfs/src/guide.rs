//! A guide for authors of file systems. It contains no code.
//!
//! # Threads, and what may wait
//!
//! Every method may be called from many threads at once, and several times for one file. What one client's kernel keeps
//! apart on its own: changes of names in one directory, and writes to one file, unless they bypass its cache. What two
//! clients do is kept apart by nobody but the author.
//!
//! A handler runs on a worker of the export, which has other requests to serve: a virtqueue's, or a CPU's. So:
//!
//! * A lock held for some microseconds is fine.
//! * File data that is in a file already is not read by the author but answered as an [`Extent`](crate::Extent), and
//!   `fsync` as a descriptor: the export waits for those without holding anybody up.
//! * [`syncfs`](crate::FileSystem::syncfs) and [`copy_file_range`](crate::FileSystem::copy_file_range) may take as long
//!   as they like, for they are called on threads of their own.
//! * A lock that somebody else holds is not waited for: keep the [`Waiter`](crate::Waiter).
//! * Everything else that blocks (a network, a slow disk) holds its worker up for some milliseconds. Then another thread
//!   takes over, on this host and in a guest. After two minutes a mount on this host tells the caller `EIO`; a guest's
//!   caller waits.
//!
//! Threads and processes of the author's are started before the first request, not in a handler: there they inherit how
//! the worker is scheduled, which on this host means bound to a CPU and giving way to everybody (`SCHED_IDLE`).
//!
//! # How not to deadlock
//!
//! * A handler never uses its own mount: no path below it, no descriptor or mapping of a file in it, no child that
//!   does and is waited for. The kernel may be holding just that directory's lock until the handler has answered.
//! * No lock of the author's is held while waiting for something that only another handler can bring about.
//! * [`Changes::publish`](crate::Changes::publish) is safe inside handlers: listeners take a note, and tell their clients
//!   from threads of their own. So is [`Waiter::wake`](crate::Waiter::wake). Let go of your own locks first, so that
//!   whoever is told finds the change done.
//! * [`forget`](crate::FileSystem::forget), [`release`](crate::FileSystem::release) and
//!   [`releasedir`](crate::FileSystem::releasedir) come when they come, also long after the last name is gone, and from
//!   the export itself when a client has vanished.
//!
//! # Panics
//!
//! A handler that panics gives its caller `EIO`, and the next request is served as if nothing had happened. What the
//! handler was in the middle of changing is the author's to keep sound; a [`std::sync::Mutex`] that it held is
//! poisoned, and `lock().unwrap()` then makes every later handler panic too. Use
//! `lock().unwrap_or_else(PoisonError::into_inner)` where half a change does no harm. With `panic = "abort"`, or where
//! memory runs out, the process ends, and its clients get `ENOTCONN`.
//!
//! # Sizes and units
//!
//! Lengths and offsets are bytes, [`Attr::blocks`](crate::Attr::blocks) units of 512 bytes whatever the block size,
//! [`Statfs`](crate::Statfs) units of its `frsize`. Offsets of a client may be any number: compute with
//! [`IoRange::end`](crate::IoRange::end) or `checked_add`. Times have nanoseconds. One READ or WRITE has at most 1 MiB,
//! an extended attribute's value 64 KiB, a name 255 bytes, a symbolic link 4,095. What a handler answers beyond what was
//! asked for is cut off.
//!
//! # Handles
//!
//! A [`Handle`](crate::Handle) is what `open` answered, and comes back with each request. A file system that keeps
//! nothing for an open file may answer the same handle many times, such as the inode's number; one that keeps something
//! has a table for it in [`Handles`](crate::Handles), and one that wants locks of its clients to exclude each other has
//! them in [`Locks`](crate::Locks).
//!
//! `O_APPEND` is for the client's kernel: the offset that arrives is the end of the file as it knows it, and nothing is to
//! be appended again. Data that come out of its page cache later (mappings, a write-back cache) come without flags, by any
//! open handle of the file; of these less than the whole is an error to the client, whatever was answered.
//!
//! # What is not written
//!
//! `ENOSYS`, which the methods answer by default, means "never ask me again" to Linux in most cases:
//!
//! | not written | what programs see |
//! | --- | --- |
//! | `open`, `opendir` | opening succeeds, the handle is 0, and what was read is kept: right for files that never change. Whoever has `write` needs `open` for `O_TRUNC` |
//! | `create` | the kernel calls `mknod` and `open` |
//! | `tmpfile`, `fallocate`, extended attributes | `EOPNOTSUPP` |
//! | `flush`, `fsync`, `fsyncdir`, `syncfs` | success |
//! | `lseek` | all bytes are data, the hole is at the end |
//! | `copy_file_range` | the kernel reads and writes |
//! | locks without [`Features`](crate::Features) | the kernel keeps them, for its own programs |
//! | `rename` | `EINVAL` with flags, `ENOSYS` without |
//! | `link` | `EPERM`, as where a file system has no hard links |
//! | `ioctl` | `ENOTTY` |
//! | anything else | `ENOSYS`, "function not implemented". A file system that cannot be written to had better set [`Features::read_only`](crate::Features::read_only): then it is `EROFS` |
//!
//! # Hints and mappings
//!
//! FUSE has no request for `posix_fadvise`, `madvise` and the like: they are for the client's page cache. What of them
//! arrives, seen on Linux 6.18:
//!
//! | the program calls | what reaches the author |
//! | --- | --- |
//! | `posix_fadvise(WILLNEED)`, `readahead`, `madvise(WILLNEED)` | READs of the range, at once, whoever reads it or not; the program's own reads then ask no more |
//! | `posix_fadvise(SEQUENTIAL)`, `NORMAL` | READs that run ahead of the program |
//! | `posix_fadvise(RANDOM)` | READs of just the pages that the program reads |
//! | `posix_fadvise(DONTNEED)` | nothing now (WRITEs first, of what a write-back cache holds); later reads are READs again |
//! | `posix_fadvise(NOREUSE)`, `madvise(COLD)` | nothing |
//! | `mmap` and a look at the page | READ of the page and its neighbours |
//! | `mmap` and a change of the page | READ, and WRITE after `msync`, `munmap` or a while; its handle is of any open file of the inode |
//! | `O_DIRECT`, `O_SYNC`, `O_DSYNC`, `O_APPEND`, `O_NOATIME` | [`IoRange::flags`](crate::IoRange::flags), with each request that the program itself makes, also if set later by `fcntl` |
//! | `fallocate`, also with `KEEP_SIZE`, `PUNCH_HOLE` and `ZERO_RANGE` | [`fallocate`](crate::FileSystem::fallocate); with other flags Linux answers `EOPNOTSUPP` itself |
//! | `ioctl` | [`ioctl`](crate::FileSystem::ioctl), where number and argument are plain data whose size the number tells (`_IOR`, `_IOW`): pointers in it mean nothing here |
//! | `setxattr`, `setfacl` | [`setxattr`](crate::FileSystem::setxattr); ACLs as `system.posix_acl_access` and `_default`, which the client's kernel then enforces if [`Features::posix_acl`](crate::Features::posix_acl) is set |
//!
//! With `cache none` reads bypass the page cache, and the hints with it. Files that are passed through
//! ([`backing`](crate::FileSystem::backing)) have all of this done to the file below, without the author.
//!
//! # Traits that most file systems do without
//!
//! * [`Mappable`](crate::Mappable), offered by [`mappable`](crate::FileSystem::mappable): files mapped into a guest's
//!   memory (DAX).
//! * [`Migrate`](crate::Migrate), offered by [`migrate`](crate::FileSystem::migrate): a server that is restarted under its
//!   guests, and guests that migrate to another host.
//!
//! # What is not there
//!
//! For those who know libfuse, or the protocol:
//!
//! * No reply objects, and so no answer later than the handler's end. Only locks wait without a thread
//!   ([`Waiter`](crate::Waiter)); whatever else takes long keeps its thread (see above), or is answered as an extent or a
//!   descriptor, for which the export waits.
//! * No bytes put into the kernel's cache, or taken out of it, unasked (`notify_store`, `notify_retrieve`):
//!   [`Changes`](crate::Changes) make it forget, and it asks.
//! * No numbers for the kernel's queues (`max_background`, `congestion_threshold`, `max_read`, `max_write`): the exports
//!   choose them.
//! * No POLL, which is for character devices (CUSE is not there either): files are always ready, which is what Linux says
//!   where nobody answers.
//! * No BMAP, which is for file systems on a block device below the same kernel: where bytes live is said by extents and
//!   [`backing`](crate::FileSystem::backing).

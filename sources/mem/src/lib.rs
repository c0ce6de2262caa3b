//! The memory file system, volatile and persistent.

//! The FUSE export: a source, mounted on this host.

//! FUSE requests, served from a source, whatever carries them.

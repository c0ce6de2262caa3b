//! The integration tests, in one program: one for each file would take much longer to link.

mod connection;
mod folder;
mod full;
mod room;

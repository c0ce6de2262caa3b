//! The integration tests, in one program: one for each file would take much longer to link.

mod locks_model;
mod locks_scale;

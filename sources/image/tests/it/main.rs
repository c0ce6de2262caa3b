//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../archives/mod.rs"]
mod archives;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/toc_layers.rs"]
mod toc_layers;

mod changes;
mod composefs;
mod composefs_kernel;
mod composefs_rs;
mod damage;
mod flaws;
mod holes;
mod identities;
mod input;
mod kernel;
mod layers;
mod layout;
mod many_packs;
mod mend;
mod oci;
mod order;
mod peers;
mod pieces;
mod seal;
mod shared;
mod shares;
mod tar;
mod tools;
mod tree_digest;
mod unpack;

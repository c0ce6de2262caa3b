//! The structures and constants of FUSE protocol 7.45, in memory layout. Integers are in native byte order. virtio-fs
//! requires little-endian, so other targets do not compile.
//!
//! Field names are those of the protocol (except `kind` for `type`), so that its documentation applies.

#[allow(
    missing_debug_implementations,
    reason = "zerocopy's derives create hidden types; the structures here implement it"
)]
mod common;
mod flags;
#[allow(
    missing_debug_implementations,
    reason = "zerocopy's derives create hidden types; the structures here implement it"
)]
mod replies;
#[allow(
    missing_debug_implementations,
    reason = "zerocopy's derives create hidden types; the structures here implement it"
)]
mod requests;

pub use common::*;
pub use flags::*;
pub use replies::*;
pub use requests::*;

#[cfg(target_endian = "big")]
compile_error!("the FUSE codec reads native integers, but virtio-fs is little-endian");

/// Defines protocol structures, each with its size in bytes.
macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident ($size:literal) { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            #[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
            #[repr(C)]
            pub struct $name { $($(#[$field_doc])* pub $field: $kind,)* }

            const _: () = assert!(size_of::<$name>() == $size);

            impl $name {
                /// Every byte zero.
                pub const ZERO: Self = zerocopy::transmute!([0_u8; $size]);
            }
        )*
    };
}
use wire;

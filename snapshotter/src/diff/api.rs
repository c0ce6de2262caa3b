//! The messages of containerd's Diff API v1 (`api/services/diff/v1/diff.proto`).
#![allow(missing_docs, reason = "containerd's protocol file describes each field")]

use std::collections::BTreeMap;

use crate::api::Mount;

/// The service, as in the path of a call.
pub const DIFF_SERVICE: &str = "/containerd.services.diff.v1.Diff/";

/// `containerd.types.Descriptor`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Descriptor {
    #[prost(string, tag = "1")]
    pub media_type: String,
    #[prost(string, tag = "2")]
    pub digest: String,
    #[prost(int64, tag = "3")]
    pub size: i64,
    #[prost(btree_map = "string, string", tag = "5")]
    pub annotations: BTreeMap<String, String>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Any {
    #[prost(string, tag = "1")]
    pub type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ApplyRequest {
    #[prost(message, optional, tag = "1")]
    pub diff: Option<Descriptor>,
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
    #[prost(btree_map = "string, message", tag = "3")]
    pub payloads: BTreeMap<String, Any>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ApplyResponse {
    #[prost(message, optional, tag = "1")]
    pub applied: Option<Descriptor>,
}

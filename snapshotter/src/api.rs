//! The messages of containerd's Snapshots API v1 (`api/services/snapshots/v1/snapshots.proto`).
//!
//! They are written by hand, so that a build needs no protobuf compiler. The protocol is stable: field numbers never change.
#![allow(missing_docs, reason = "containerd's protocol file describes each field")]

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The service, as in the path of a call.
pub const SERVICE: &str = "/containerd.services.snapshots.v1.Snapshots/";

/// Labels, by name.
pub type Labels = BTreeMap<String, String>;

/// The kind of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Kind {
    Unknown = 0,
    View = 1,
    Active = 2,
    Committed = 3,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Mount {
    #[prost(string, tag = "1")]
    pub r#type: String,
    #[prost(string, tag = "2")]
    pub source: String,
    #[prost(string, tag = "3")]
    pub target: String,
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, prost::Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl Timestamp {
    /// Returns the time now. A clock before 1970 counts as 1970.
    #[must_use]
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        }
    }
}

/// `google.protobuf.FieldMask`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct FieldMask {
    #[prost(string, repeated, tag = "1")]
    pub paths: Vec<String>,
}

/// The request of Prepare and of View.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PrepareRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, tag = "2")]
    pub key: String,
    #[prost(string, tag = "3")]
    pub parent: String,
    #[prost(btree_map = "string, string", tag = "4")]
    pub labels: Labels,
}

/// The response of Prepare, View and Mounts.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct MountsResponse {
    #[prost(message, repeated, tag = "1")]
    pub mounts: Vec<Mount>,
}

/// The request of Mounts, Remove, Stat and Usage.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct KeyRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, tag = "2")]
    pub key: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CommitRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub key: String,
    #[prost(btree_map = "string, string", tag = "4")]
    pub labels: Labels,
    #[prost(string, tag = "5")]
    pub parent: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Info {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub parent: String,
    #[prost(enumeration = "Kind", tag = "3")]
    pub kind: i32,
    #[prost(message, optional, tag = "4")]
    pub created_at: Option<Timestamp>,
    #[prost(message, optional, tag = "5")]
    pub updated_at: Option<Timestamp>,
    #[prost(btree_map = "string, string", tag = "6")]
    pub labels: Labels,
}

/// The response of Stat and Update.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct InfoResponse {
    #[prost(message, optional, tag = "1")]
    pub info: Option<Info>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct UpdateRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(message, optional, tag = "2")]
    pub info: Option<Info>,
    #[prost(message, optional, tag = "3")]
    pub update_mask: Option<FieldMask>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, repeated, tag = "2")]
    pub filters: Vec<String>,
}

/// One message of the stream that List returns.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub info: Vec<Info>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct UsageResponse {
    #[prost(int64, tag = "1")]
    pub size: i64,
    #[prost(int64, tag = "2")]
    pub inodes: i64,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CleanupRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
}

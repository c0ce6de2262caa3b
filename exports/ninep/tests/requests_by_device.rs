//! The tests of `requests.rs`, with a guest's driver as the client.

#[path = "requests.rs"]
mod requests;

//! The counters of requests. An operation is half of a message's type, because types of requests are even.

use ferry_engine::metrics::Metrics;
use ferry_wire::ninep::kind;

pub(crate) fn metrics() -> Metrics {
    Metrics::new(|operation| name(u8::try_from(2 * operation).unwrap_or(0)).into())
}

/// The name of a message, without the `T` of requests.
fn name(message: u8) -> &'static str {
    match message {
        kind::TSTATFS => "statfs",
        kind::TLOPEN => "lopen",
        kind::TLCREATE => "lcreate",
        kind::TSYMLINK => "symlink",
        kind::TMKNOD => "mknod",
        kind::TRENAME => "rename",
        kind::TREADLINK => "readlink",
        kind::TGETATTR => "getattr",
        kind::TSETATTR => "setattr",
        kind::TXATTRWALK => "xattrwalk",
        kind::TXATTRCREATE => "xattrcreate",
        kind::TREADDIR => "readdir",
        kind::TFSYNC => "fsync",
        kind::TLOCK => "lock",
        kind::TGETLOCK => "getlock",
        kind::TLINK => "link",
        kind::TMKDIR => "mkdir",
        kind::TRENAMEAT => "renameat",
        kind::TUNLINKAT => "unlinkat",
        kind::TEVENTS => "events",
        kind::TAUTH => "auth",
        kind::TATTACH => "attach",
        kind::TWALK => "walk",
        kind::TREAD => "read",
        kind::TWRITE => "write",
        kind::TCLUNK => "clunk",
        kind::TREMOVE => "remove",
        // The connection serves these itself.
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_has_a_name_of_its_own() {
        let metrics = metrics();
        let served = kind::ALL.iter().filter(|message| ![kind::TVERSION, kind::TFLUSH].contains(*message));
        for message in served.clone() {
            let timer = metrics.begin(usize::from(*message) / 2);
            metrics.end(timer, Ok(1));
        }
        let mut names: Vec<_> = metrics.snapshot().operations.into_iter().map(|operation| operation.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), served.count(), "{names:?}");
        assert!(!names.contains(&"other".to_owned()), "{names:?}");
    }
}

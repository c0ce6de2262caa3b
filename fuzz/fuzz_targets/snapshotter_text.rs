//! What containerd's clients can send as text: filters of lists, maps of ids in labels. And the configuration file, and kubelet's pulls.
#![no_main]

use std::path::Path;

use ferry_snapshotter::api::{Info, Kind, Labels};
use ferry_snapshotter::cri_api::parse_pull;
use ferry_snapshotter::{Config, Filter, GID_LABEL, IdMaps, UID_LABEL};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let labels = Labels::from([(UID_LABEL.to_owned(), text.to_owned()), (GID_LABEL.to_owned(), "0:1:1".to_owned())]);
    if let Ok(Some(maps)) = IdMaps::of(&labels) {
        assert_eq!((maps.users.as_str(), maps.root.1), (text, 1));
    }
    let parts: Vec<&str> = text.split('\n').collect();
    if let Ok(filter) = Filter::parse(&parts) {
        let info = Info { name: text.into(), kind: Kind::View.into(), labels, ..Info::default() };
        assert!(filter.matches(&info) || !text.trim().is_empty());
    }
    let _ = Config::parse(text, Path::new("/etc"));
    let _ = parse_pull(text.as_bytes());
});

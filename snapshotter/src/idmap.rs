//! The labels that map users of a container to users of this host.
//!
//! A label is a list of `CONTAINER-ID:HOST-ID:SIZE`, separated by commas. The layers below are idmapped
//! ([`crate::idmapped`]); the upper directory is created for the container's root.

use crate::api::Labels;
use crate::error::{Error, Result};

/// The label with the map of users.
pub const UID_LABEL: &str = "containerd.io/snapshot/uidmapping";
/// The label with the map of groups.
pub const GID_LABEL: &str = "containerd.io/snapshot/gidmapping";

/// The maximum number of ranges in a map (`UID_GID_MAP_MAX_EXTENTS`).
const RANGES_MAX: usize = 340;

/// The id maps of a snapshot, in the form of mount options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdMaps {
    /// The map of users, as in the label.
    pub users: String,
    /// The map of groups, as in the label.
    pub groups: String,
    /// The user and group of this host to which the container's root maps.
    pub root: (u32, u32),
}

impl IdMaps {
    /// Parses the labels of a snapshot; `None`: it has neither.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`]: one is missing, or not a map with the container's root in it.
    pub fn of(labels: &Labels) -> Result<Option<Self>> {
        match (labels.get(UID_LABEL), labels.get(GID_LABEL)) {
            (None, None) => Ok(None),
            (Some(users), Some(groups)) => {
                let root = (root_of(UID_LABEL, users)?, root_of(GID_LABEL, groups)?);
                Ok(Some(Self { users: users.clone(), groups: groups.clone(), root }))
            }
            (users, _) => {
                let missing = if users.is_none() { UID_LABEL } else { GID_LABEL };
                Err(Error::InvalidArgument(format!(
                    "the label {missing} is missing: maps of users and of groups go together"
                )))
            }
        }
    }
}

/// Returns the id of this host to which the container's id 0 maps.
fn root_of(label: &str, map: &str) -> Result<u32> {
    let wrong = |why: String| Error::InvalidArgument(format!("the label {label}={map:?} is no map of ids: {why}"));
    let mut root = None;
    for (number, range) in map.split(',').enumerate() {
        if number == RANGES_MAX {
            return Err(wrong(format!("the kernel takes at most {RANGES_MAX} ranges")));
        }
        let ids: Vec<u32> = range.split(':').map_while(|id| id.trim().parse().ok()).collect();
        let [inside, outside, count] = ids[..] else {
            return Err(wrong(format!("{range:?} is not CONTAINER-ID:HOST-ID:SIZE")));
        };
        if range.split(':').count() != 3 {
            return Err(wrong(format!("{range:?} is not CONTAINER-ID:HOST-ID:SIZE")));
        }
        if count == 0 || inside.checked_add(count).is_none() || outside.checked_add(count).is_none() {
            return Err(wrong(format!("{range:?} has no ids, or more than there are")));
        }
        if inside == 0 {
            root = Some(outside);
        }
    }
    root.ok_or_else(|| wrong("the container's id 0 is not in it".into()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(users: Option<&str>, groups: Option<&str>) -> Labels {
        let label = |name: &str, value: Option<&str>| value.map(|value| (name.to_owned(), value.to_owned()));
        [label(UID_LABEL, users), label(GID_LABEL, groups)].into_iter().flatten().collect()
    }

    #[test]
    fn the_root_of_a_container_is_found() {
        assert_eq!(IdMaps::of(&Labels::new()).unwrap(), None);
        let maps = IdMaps::of(&labels(Some("0:100000:65536"), Some("1:5:1,0:7:1"))).unwrap().unwrap();
        assert_eq!((maps.root, &*maps.users, &*maps.groups), ((100_000, 7), "0:100000:65536", "1:5:1,0:7:1"));
    }

    #[test]
    fn invalid_maps_are_refused_with_a_reason() {
        let good = "0:1:1";
        for (users, groups, why) in [
            (Some(good), None, GID_LABEL),
            (None, Some(good), UID_LABEL),
            (Some(""), Some(good), "\"\" is not"),
            (Some("0:1"), Some(good), "\"0:1\" is not"),
            (Some("0:1:1:1"), Some(good), "is not CONTAINER-ID"),
            (Some("0:a:1"), Some(good), "is not CONTAINER-ID"),
            (Some(good), Some("0:1:0"), "has no ids"),
            (Some(good), Some("0:4294967295:2"), "more than there are"),
            (Some("1:1:1"), Some(good), "id 0 is not in it"),
            (Some(&[good; 341].join(",")), Some(good), "at most 340"),
        ] {
            let error = IdMaps::of(&labels(users, groups)).expect_err(why);
            assert!(matches!(error, Error::InvalidArgument(_)) && error.to_string().contains(why), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_text_is_a_map_or_refused(text in "[0-9:, a]{0,40}") {
            let _ = IdMaps::of(&labels(Some(&text), Some(&text)));
        }
    }
}

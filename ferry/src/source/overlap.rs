//! Shares of one tree with a quota.

use std::path::Path;

use super::Options;
use crate::flags::{Kind, Share};

/// Whether two shares have one tree of memory, if one process serves them.
pub fn share_memory(share: &Share, other: &Share) -> bool {
    share.kind() == Kind::Mem && other.kind() == Kind::Mem && Options::of(share) == Options::of(other)
}

/// Returns a conflict between shares: one would change the tree of another one's quota without being counted.
pub fn quota_conflict(shares: &[Share]) -> Option<String> {
    if shares.iter().all(|share| share.quota.is_none()) {
        // Nothing is looked at: the storage of a share may hang.
        return None;
    }
    let tree = |share: &Share| if let Kind::Dir(path) = share.kind().canonical() { Some(path) } else { None };
    let meets = |one: &Path, other: &Path| one.starts_with(other) || other.starts_with(one);
    let trees: Vec<_> = shares.iter().map(tree).collect();
    for (at, (share, path)) in shares.iter().zip(&trees).enumerate() {
        let Some(path) = path.as_ref().filter(|_| share.quota.is_some()) else { continue };
        let others = shares.iter().zip(&trees).enumerate().filter(|(other, _)| *other != at);
        for (_, (other, other_path)) in others {
            let Some(other_path) = other_path.as_ref().filter(|other_path| meets(path, other_path)) else { continue };
            let is_counted = other_path == path && Options::of(share) == Options::of(other);
            if !is_counted && !other.read_only && !share.read_only {
                return Some(format!(
                    "--quota: {} and {} share the same files with different flags, so one would not count what the other \
                     writes: give both the same flags for the source, or add --read-only to one",
                    share.source.display(),
                    other.source.display()
                ));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::tests::shares;

    #[test]
    fn shares_of_one_tree_count_together_or_are_refused() {
        for (line, is_refused) in [
            ("/usr --quota 1G --virtiofs a /usr --quota 1G --virtiofs b", false),
            ("/usr --quota 1G --virtiofs a /usr/bin --virtiofs b", true),
            ("/usr/bin --quota 1G --virtiofs a /usr --virtiofs b", true),
            ("/usr --quota 1G --virtiofs a /usr --virtiofs b", true),
            ("/usr --quota 1G --virtiofs a /usr --quota 2G --virtiofs b", true),
            ("/usr --quota 1G --virtiofs a /usr --quota 1G --writeback --virtiofs b", true),
            ("/usr --quota 1G --virtiofs a /usr --read-only --virtiofs b", false),
            ("/usr --quota 1G --virtiofs a /etc --virtiofs b mem --virtiofs c", false),
            ("/usr --virtiofs a /usr/bin --virtiofs b", false),
        ] {
            let found = quota_conflict(&shares(&format!("ferry share {line}")).expect(line));
            assert_eq!(found.is_some(), is_refused, "{line}: {found:?}");
        }
    }
}

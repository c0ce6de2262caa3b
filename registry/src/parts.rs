//! Parts for composefs's objects, cut at content-defined boundaries, so that images with mostly equal objects have
//! mostly equal parts.

use ferry_image::FileObject;

use crate::manifest::PART_BYTES;

/// The minimum size of a part in bytes: each part is a request, and an entry of the manifest.
const PART_BYTES_MIN: u64 = 4 << 20;
/// The average number of objects after which a part ends.
const OBJECTS: u16 = 1024;

/// Returns the lengths of the parts in bytes. Together they are all objects in order.
pub(crate) fn split(objects: &[FileObject]) -> Vec<u64> {
    let (mut parts, mut open) = (Vec::new(), 0);
    for object in objects {
        if open > 0 && open + object.bytes > PART_BYTES {
            parts.push(open);
            open = 0;
        }
        let mut left = object.bytes;
        while left > PART_BYTES {
            parts.push(PART_BYTES);
            left -= PART_BYTES;
        }
        open += left;
        let [.., high, low] = object.digest.bytes();
        if open >= PART_BYTES_MIN && u16::from_be_bytes([*high, *low]).is_multiple_of(OBJECTS) {
            parts.push(open);
            open = 0;
        }
    }
    parts.extend(Some(open).filter(|open| *open > 0));
    parts
}

#[cfg(test)]
mod tests {
    use ferry_image::Algorithm;

    use super::*;

    fn objects(count: u64, bytes: u64) -> Vec<FileObject> {
        let object = |seed: u64| FileObject { digest: Algorithm::Blake3.of(&seed.to_le_bytes()), bytes };
        (0..count).map(object).collect()
    }

    /// Returns the ends of parts by their objects.
    fn contents(objects: &[FileObject]) -> std::collections::HashSet<Vec<[u8; 32]>> {
        let mut left = objects.iter();
        let mut part = |bytes: u64| {
            let mut taken = Vec::new();
            let mut had = 0;
            while had < bytes {
                let Some(object) = left.next() else { break };
                had += object.bytes;
                taken.push(*object.digest.bytes());
            }
            taken
        };
        split(objects).into_iter().map(&mut part).collect()
    }

    #[test]
    fn parts_cover_all_bytes_within_their_limits() {
        assert_eq!(split(&[]), [0_u64; 0]);
        assert_eq!(split(&objects(3, 0)), [0_u64; 0]);
        assert_eq!(split(&objects(1, 1)), [1]);
        for (count, bytes) in [(20_000, 11_000), (5, PART_BYTES), (3, 3 * PART_BYTES + 1), (100, PART_BYTES / 3)] {
            let parts = split(&objects(count, bytes));
            assert_eq!(parts.iter().sum::<u64>(), count * bytes);
            assert!(parts.iter().all(|part| (1..=PART_BYTES).contains(part)), "{parts:?}");
        }
    }

    #[test]
    fn another_object_changes_one_or_two_parts() {
        let before = objects(20_000, 11_000);
        let mut after = before.clone();
        after.insert(7000, FileObject { digest: Algorithm::Blake3.of(b"new"), bytes: 9000 });
        let (before, after) = (contents(&before), contents(&after));
        assert!(before.len() > 8, "{}", before.len());
        assert!(after.difference(&before).count() <= 2, "{} of {}", after.difference(&before).count(), after.len());
    }
}

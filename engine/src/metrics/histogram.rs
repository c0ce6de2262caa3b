//! The buckets of latencies: four for each power of two from half a microsecond to half a minute, so that a latency is
//! known to a fourth.

/// Latencies up to 2^9 ns are in the first bucket: reading the clock twice takes a tenth of that.
const FIRST_BITS: u32 = 9;
/// Latencies above 2^35 ns, 34 s, are in the last bucket.
const LAST_BITS: u32 = 35;
/// Buckets for each power of two, as a power of two.
const PARTS_BITS: u32 = 2;
const PARTS: usize = 1 << PARTS_BITS;

/// The number of buckets.
pub const BUCKETS: usize = (LAST_BITS - FIRST_BITS) as usize * PARTS + 2;

/// Returns the bucket of a latency.
pub(super) fn bucket(ns: u64) -> usize {
    let Some(below) = ns.checked_sub(1).filter(|below| *below >= 1 << FIRST_BITS) else { return 0 };
    let bits = below.ilog2();
    if bits >= LAST_BITS {
        return BUCKETS - 1;
    }
    // The leading one, and below it the bits that number the part.
    let leading = usize::try_from(below >> (bits - PARTS_BITS)).expect("a number of three bits");
    (bits - FIRST_BITS) as usize * PARTS + leading % PARTS + 1
}

/// Returns the longest latency of a bucket in nanoseconds; `None`: it has no end.
#[must_use]
pub const fn bucket_end_ns(bucket: usize) -> Option<u64> {
    if bucket + 1 >= BUCKETS {
        return None;
    }
    if bucket == 0 {
        return Some(1 << FIRST_BITS);
    }
    let base = 1_u64 << (FIRST_BITS as usize + (bucket - 1) / PARTS);
    let part = (bucket - 1) % PARTS;
    Some(base + (base >> PARTS_BITS) * (part as u64 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_the_bucket_that_ends_behind_it() {
        let mut begin = 0;
        for at in 0..BUCKETS {
            let end = bucket_end_ns(at).unwrap_or(u64::MAX);
            assert_eq!((bucket(begin), bucket(end)), (at, at), "{begin} to {end}");
            assert!(begin <= 513 || end == u64::MAX || end - begin <= begin / 4, "{begin} to {end}");
            begin = end.wrapping_add(1);
        }
        assert_eq!(begin, 0);
        assert_eq!((bucket(0), bucket(1), bucket(512), bucket(513)), (0, 0, 0, 1));
    }
}

use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { bytes: 1 << 20, block_bytes: 512, read_only: false, discard: true };

fn header(kind: u32, sector: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    header
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn requests_are_decoded_or_refused() {
    let large = Limits { block_bytes: 4096, ..LIMITS };
    let read_only = Limits { read_only: true, ..LIMITS };
    let no_discard = Limits { discard: false, ..LIMITS };
    let past_end = |sector, bytes| Err(Refusal::PastEnd { sector, bytes });
    for (limits, kind, sector, readable, writable, outcome) in [
        (LIMITS, 0, 0, 16, 513, Ok(Request::Read { offset: 0, bytes: 512 })),
        (LIMITS, 0, 2047, 16, 513, Ok(Request::Read { offset: 2047 * 512, bytes: 512 })),
        (LIMITS, 0, 2047, 16, 1025, past_end(2047, 1024)),
        (LIMITS, 0, 2048, 16, 513, past_end(2048, 512)),
        (LIMITS, 0, u64::MAX, 16, 513, past_end(u64::MAX, 512)),
        (LIMITS, 0, u64::MAX / 512, 16, 513, past_end(u64::MAX / 512, 512)),
        (LIMITS, 0, 0, 16, 1, Err(Refusal::Length(0))),
        (LIMITS, 0, 0, 16, 512, Err(Refusal::Length(511))),
        (LIMITS, 0, 0, 16, (1 << 30) + 513, Err(Refusal::TooLong((1 << 30) + 512))),
        (LIMITS, 1, 0, 16 + (1 << 30) + 512, 1, Err(Refusal::TooLong((1 << 30) + 512))),
        (LIMITS, 0, 0, 16, 0, Err(Refusal::NoStatus)),
        (LIMITS, 0, 0, 15, 513, Err(Refusal::Short(15))),
        (LIMITS, 1, 8, 16 + 4096, 1, Ok(Request::Write { offset: 4096, bytes: 4096 })),
        (LIMITS, 1, 8, 16, 1, Err(Refusal::Length(0))),
        (LIMITS, 1, 2048, 16 + 512, 1, past_end(2048, 512)),
        (large, 1, 8, 16 + 4096, 1, Ok(Request::Write { offset: 4096, bytes: 4096 })),
        (large, 1, 8, 16 + 512, 1, Err(Refusal::Length(512))),
        (large, 0, 1, 16, 4097, Err(Refusal::Unaligned(1))),
        (read_only, 1, 0, 16 + 512, 1, Err(Refusal::ReadOnly)),
        (read_only, 11, 0, 32, 1, Err(Refusal::ReadOnly)),
        (read_only, 13, 0, 32, 1, Err(Refusal::ReadOnly)),
        (read_only, 4, 0, 16, 1, Ok(Request::Flush)),
        (LIMITS, 4, 9, 16, 1, Ok(Request::Flush)),
        (LIMITS, 5, 0, 16, 1, Ok(Request::Flush)),
        (LIMITS, 8, 0, 16, 21, Ok(Request::Id { bytes: 20 })),
        (LIMITS, 8, 0, 16, 4, Ok(Request::Id { bytes: 3 })),
        (LIMITS, 8, 0, 16, 4096, Ok(Request::Id { bytes: 20 })),
        (LIMITS, 11, 0, 32, 1, Ok(Request::Discard { ranges: 1 })),
        (LIMITS, 11, 0, 16 + 32 * 16, 1, Ok(Request::Discard { ranges: 32 })),
        (LIMITS, 11, 0, 16 + 33 * 16, 1, Err(Refusal::Ranges(528))),
        (LIMITS, 11, 0, 16, 1, Err(Refusal::Ranges(0))),
        (LIMITS, 13, 0, 47, 1, Err(Refusal::Ranges(31))),
        (LIMITS, 13, 0, 32, 1, Ok(Request::WriteZeroes { ranges: 1 })),
        (no_discard, 11, 0, 32, 1, Err(Refusal::Type(11))),
        (LIMITS, 14, 0, 32, 1, Err(Refusal::Type(14))),
        (LIMITS, u32::MAX, 0, 32, 1, Err(Refusal::Type(u32::MAX))),
    ] {
        let decoded = Request::decode(&header(kind, sector), Sizes { readable, writable }, &limits);
        assert_eq!(decoded, outcome, "type {kind}, sector {sector}, {readable} + {writable} bytes");
    }
}

#[test]
fn ranges_are_decoded_or_refused() {
    let whole = Range { offset: 0, bytes: 1 << 20, may_unmap: false };
    assert_eq!(Range::decode_discard(&range(0, 2048, 0), &LIMITS), Ok(vec![whole]));
    assert_eq!(Range::decode_write_zeroes(&range(0, 2048, 1), &LIMITS), Ok(vec![Range { may_unmap: true, ..whole }]));
    let twice = [range(0, 8, 0), range(4, 8, 0)].concat();
    assert_eq!(Range::decode_discard(&twice, &LIMITS).map(|ranges| ranges.len()), Ok(2), "overlapping ones are served");
    let large = Limits { bytes: 1 << 40, ..LIMITS };
    for (bytes, limits, refusal) in [
        (range(0, 2049, 0), LIMITS, Refusal::PastEnd { sector: 0, bytes: 2049 * 512 }),
        (range(u64::MAX, 1, 0), LIMITS, Refusal::PastEnd { sector: u64::MAX, bytes: 512 }),
        (range(0, 1, 2), LIMITS, Refusal::Flags(2)),
        (range(0, 1, 1), LIMITS, Refusal::Flags(1)),
        ([range(0, 1, 0), range(2048, 1, 0)].concat(), LIMITS, Refusal::PastEnd { sector: 2048, bytes: 512 }),
        (range(0, u32::MAX, 0), large, Refusal::RangeTooLong(u64::from(u32::MAX) * 512)),
        (vec![0; 15], LIMITS, Refusal::Ranges(15)),
        (vec![], LIMITS, Refusal::Ranges(0)),
    ] {
        assert_eq!(Range::decode_discard(&bytes, &limits), Err(refusal));
    }
    assert_eq!(Refusal::Flags(2).status(), Status::Unsupported);
    assert_eq!(Refusal::Type(14).status(), Status::Unsupported);
    assert_eq!(Refusal::Ranges(0).status(), Status::IoError);
}

#[test]
fn a_configuration_has_every_field_at_its_place() {
    let config = Config {
        limits: Limits { bytes: 5 << 30, ..LIMITS },
        physical_block_bytes: 4096,
        optimal_io_bytes: 64 << 10,
        discard_bytes: 4096,
        segments_max: 126,
        queues: 4,
        writeback: true,
    };
    let bytes = config.encode();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), 10 << 20);
    assert_eq!((word(12), word(20), bytes[24], word(28)), (126, 512, 3, 128));
    assert_eq!((bytes[32], bytes[34]), (1, 4));
    assert_eq!((word(36), word(40), word(44)), (2 << 20, 16, 8), "an array in Windows drivers has 16 entries");
    assert_eq!((word(48), word(52), bytes[56]), (128 << 10, 32, 1));
    let read_only = Config { limits: Limits { read_only: true, ..config.limits }, writeback: false, ..config }.encode();
    assert_eq!((read_only[32], &read_only[36..57]), (0, &[0; 21][..]));
}

proptest! {
    #[test]
    fn decoded_requests_lie_within_the_disk(
        header: [u8; HEADER_BYTES],
        kind in 0u32..16,
        sector in prop_oneof![0u64..4096, any::<u64>()],
        readable in 0usize..8192,
        writable in 0usize..8192,
        shift in 9u32..13,
    ) {
        let mut header = header;
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        let limits = Limits { block_bytes: 1 << shift, ..LIMITS };
        match Request::decode(&header, Sizes { readable, writable }, &limits) {
            Ok(Request::Read { offset, bytes }) => {
                prop_assert_eq!(bytes, writable - 1);
                prop_assert!(offset + bytes as u64 <= limits.bytes && offset.is_multiple_of(1 << shift));
            }
            Ok(Request::Write { offset, bytes }) => {
                prop_assert_eq!(bytes, readable - HEADER_BYTES);
                prop_assert!(offset + bytes as u64 <= limits.bytes && bytes > 0);
            }
            Ok(Request::Discard { ranges } | Request::WriteZeroes { ranges }) => {
                prop_assert_eq!(HEADER_BYTES + ranges * RANGE_BYTES, readable);
            }
            Ok(Request::Flush | Request::Id { .. }) => {}
            Err(refusal) => prop_assert_eq!(refusal == Refusal::NoStatus, writable == 0),
        }
    }

    #[test]
    fn ranges_lie_within_the_disk(bytes in prop::collection::vec(any::<u8>(), 0..600), low: bool) {
        let mut bytes = bytes;
        if low {
            for range in bytes.chunks_mut(RANGE_BYTES) {
                for (at, byte) in range.iter_mut().enumerate() {
                    *byte = if matches!(at, 0 | 8) { *byte } else { 0 };
                }
            }
        }
        for decoded in [Range::decode_discard(&bytes, &LIMITS), Range::decode_write_zeroes(&bytes, &LIMITS)] {
            for range in decoded.into_iter().flatten() {
                prop_assert!(range.offset + range.bytes <= LIMITS.bytes);
            }
        }
    }
}

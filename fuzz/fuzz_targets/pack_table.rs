//! Tables of packs: what is read of any bytes is written to the same bytes again, or refused. Sums are made right after changes, for
//! otherwise nothing behind them would be reached.
#![no_main]

use ferry_image::pack_table::{TableEntry, TablePack, read, write};
use ferry_image::{Algorithm, DIGEST_BYTES, Digest};
use libfuzzer_sys::fuzz_target;

/// As `sources/image/src/format/pack_table.rs` has them.
const BUCKETS: usize = 1 << 10;
const BUCKET_BYTES: usize = 12;
const FIXED_BYTES: usize = 16 + DIGEST_BYTES;
const PACK_BYTES: usize = DIGEST_BYTES + 4;
const ENTRY_BYTES: usize = DIGEST_BYTES + 8;

const PACKS_MAX: u8 = 8;
/// Bytes of the input for an entry, and for a change.
const TAKEN_BYTES: usize = 4;

/// What a byte stands for: some digests are equal but for their last byte.
fn digest(first: u8, last: u8) -> [u8; DIGEST_BYTES] {
    let mut digest = [0; DIGEST_BYTES];
    (digest[0], digest[DIGEST_BYTES - 1]) = (first, last);
    digest
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    let Some(([packs, usable, entries], rest)) = bytes.split_first_chunk() else { return };
    let packs: Vec<_> = (0..packs % (PACKS_MAX + 1))
        .map(|pack| TablePack {
            name: Digest::new(Algorithm::Blake3, digest(pack, 0)),
            is_usable: usable & (1 << (pack % 8)) != 0,
        })
        .collect();
    let (entries, changes) = rest.split_at((usize::from(*entries) * TAKEN_BYTES).min(rest.len()));
    let entries: Vec<_> = entries
        .chunks_exact(TAKEN_BYTES)
        .map(|taken| TableEntry { digest: digest(taken[0], taken[1]), pack: taken[2].into(), block: taken[3].into() })
        .collect();
    let Some(mut table) = write(&packs, entries.clone()) else { return };
    let is_sound = entries.iter().all(|entry| packs.get(entry.pack as usize).is_some_and(|pack| pack.is_usable));
    let mut sorted = entries;
    sorted.sort_unstable();
    assert_eq!(read(&table).ok(), is_sound.then_some((packs, sorted)));
    for change in changes.chunks_exact(TAKEN_BYTES) {
        let place = usize::from(u16::from_le_bytes([change[0], change[1]]));
        if let Some(byte) = table.get_mut(place) {
            *byte = change[2];
        }
        mend(&mut table);
        check(&table);
    }
});

fn check(bytes: &[u8]) {
    let Ok((packs, entries)) = read(bytes) else { return };
    assert_eq!(write(&packs, entries).as_deref(), Some(bytes));
}

/// Makes the sums right, as far as the table is as long as it says.
fn mend(table: &mut [u8]) {
    let Some(packs) = table[8..].first_chunk().map(|packs| u32::from_le_bytes(*packs) as usize) else { return };
    let buckets = FIXED_BYTES.saturating_add(packs.saturating_mul(PACK_BYTES));
    let body = buckets.saturating_add(BUCKETS * BUCKET_BYTES);
    if body > table.len() {
        return;
    }
    let mut from = 0;
    for bucket in 0..BUCKETS {
        let place = buckets + bucket * BUCKET_BYTES;
        let Some(end) = table[place..].first_chunk().map(|end| u32::from_le_bytes(*end) as usize) else { return };
        let bytes = body.saturating_add(from * ENTRY_BYTES)..body.saturating_add(end * ENTRY_BYTES);
        if let Some(bytes) = table.get(bytes) {
            let sum = *blake3::hash(bytes).as_bytes();
            table[place + 4..][..8].copy_from_slice(&sum[..8]);
        }
        from = end;
    }
    let sum = *blake3::hash(&table[FIXED_BYTES..body]).as_bytes();
    table[16..FIXED_BYTES].copy_from_slice(&sum);
}

//! Random numbers that no other process has.

use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};

use rustix::rand::{GetRandomFlags, getrandom};

/// Keyed hashes whose key no other process has. The keys of [`RandomState`] are those of the thread that forked: servers
/// that one process has started would make the same names, numbers and proofs for their clients.
#[derive(Clone, Debug)]
pub struct RandomKey {
    state: RandomState,
    own: u64,
}

impl RandomKey {
    /// Makes a new key.
    #[must_use]
    pub fn new() -> Self {
        let mut bytes = [0; 8];
        // If the call fails, only `RandomState` makes the key unpredictable.
        let _ = getrandom(&mut bytes, GetRandomFlags::empty());
        Self { state: RandomState::new(), own: u64::from_ne_bytes(bytes) }
    }
}

impl Default for RandomKey {
    fn default() -> Self {
        Self::new()
    }
}

impl BuildHasher for RandomKey {
    type Hasher = DefaultHasher;

    fn build_hasher(&self) -> DefaultHasher {
        let mut hasher = self.state.build_hasher();
        hasher.write_u64(self.own);
        hasher
    }
}

/// Returns an unpredictable number.
#[must_use]
pub fn random_u64() -> u64 {
    RandomKey::new().build_hasher().finish()
}

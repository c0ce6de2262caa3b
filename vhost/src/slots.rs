//! The chains that are being served.

use std::rc::Rc;

use crate::chain::Chain;
use crate::memory::Memory;

/// A chain whose answer is still to come, with the memory that it lies in.
struct Busy {
    chain: Chain,
    _memory: Rc<Memory>,
    parked: bool,
}

#[derive(Default)]
struct Slot {
    /// Tells the chains apart that had this slot one after another.
    generation: u32,
    busy: Option<Busy>,
}

/// Chains by token: a slot's number, and its generation so that a late message finds nothing instead of another's
/// chain.
#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    busy: usize,
    parked: usize,
}

impl Slots {
    /// The token that the next [`Self::put`] will use.
    pub(crate) fn next_token(&mut self) -> u64 {
        let index = match self.free.last() {
            Some(index) => *index,
            None => {
                let index = u32::try_from(self.slots.len()).expect("a ring has at most 1024 chains");
                self.slots.push(Slot::default());
                self.free.push(index);
                index
            }
        };
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    /// Keeps a chain under the token last given, and leaves an empty one in its place.
    pub(crate) fn put(&mut self, chain: &mut Chain, memory: &Rc<Memory>, spare: Chain, parked: bool) {
        let Some(index) = self.free.pop() else { return };
        let chain = std::mem::replace(chain, spare);
        self.slots[index as usize].busy = Some(Busy { chain, _memory: Rc::clone(memory), parked });
        self.busy += 1;
        self.parked += usize::from(parked);
    }

    /// Takes the chain of a token, if it is still there.
    pub(crate) fn take(&mut self, token: u64) -> Option<Chain> {
        let index = usize::try_from(token & u64::from(u32::MAX)).ok()?;
        let slot = self.slots.get_mut(index).filter(|slot| u64::from(slot.generation) == token >> 32)?;
        let busy = slot.busy.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(u32::try_from(index).expect("slots are counted in 32 bits"));
        self.busy -= 1;
        self.parked -= usize::from(busy.parked);
        Some(busy.chain)
    }

    /// Forgets the parked chains: their ring is gone.
    pub(crate) fn drop_parked(&mut self) {
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.busy.as_ref().is_some_and(|busy| busy.parked) {
                self.take(u64::from(slot.generation) << 32 | index as u64);
            }
        }
    }

    /// Whether as many chains as `limit` are being served.
    pub(crate) fn is_full(&self, limit: usize) -> bool {
        self.busy >= limit
    }

    /// Chains that will be answered without anybody else's doing.
    pub(crate) fn moving(&self) -> usize {
        self.busy - self.parked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_finds_its_own_chain_once() {
        let memory = Rc::new(Memory::default());
        let mut slots = Slots::default();
        let put = |slots: &mut Slots, head, parked| {
            let token = slots.next_token();
            slots.put(&mut Chain { head, ..Chain::default() }, &memory, Chain::default(), parked);
            token
        };
        let first = put(&mut slots, 1, false);
        let second = put(&mut slots, 2, true);
        assert_eq!(slots.moving(), 1);
        assert_eq!(slots.take(first).map(|chain| chain.head), Some(1));
        assert!(slots.take(first).is_none());
        let third = put(&mut slots, 3, false);
        assert_ne!(first, third);
        assert!(slots.take(first).is_none());
        slots.drop_parked();
        assert!(slots.take(second).is_none());
        assert_eq!(slots.take(third).map(|chain| chain.head), Some(3));
        assert_eq!((slots.moving(), slots.busy), (0, 0));
    }
}

//! The table of chains that are being served.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::chain::Chain;
use crate::memory::Memory;

/// A chain that is being served, with the memory that it lies in.
struct Busy {
    queue: usize,
    chain: Chain,
    memory: Arc<Memory>,
    parked: bool,
    /// Another thread has the chain; `chain` is a stub.
    away: bool,
}

struct Slot {
    /// Distinguishes the successive chains of this slot.
    generation: u32,
    busy: Option<Busy>,
}

/// Chains by token: a slot's number and its generation, so that a late message does not find another chain.
pub(crate) struct Slots<M> {
    slots: Vec<Slot>,
    free: Vec<u32>,
    busy: usize,
    parked: usize,
    /// Replies that are not delivered yet, in the order in which they came.
    replies: VecDeque<(u64, M)>,
}

impl<M> Default for Slots<M> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), busy: 0, parked: 0, replies: VecDeque::new() }
    }
}

impl<M> Slots<M> {
    /// Returns the token that the next [`Self::put`] will use.
    pub(crate) fn next_token(&mut self) -> u64 {
        let index = match self.free.last() {
            Some(index) => *index,
            None => {
                let index = u32::try_from(self.slots.len()).expect("a few rings have at most 1024 chains each");
                self.slots.push(Slot { generation: 0, busy: None });
                self.free.push(index);
                index
            }
        };
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    /// Stores a chain of a queue under the last returned token.
    pub(crate) fn put(&mut self, queue: usize, chain: Chain, memory: &Arc<Memory>, parked: bool) {
        let memory = Arc::clone(memory);
        self.insert(Busy { queue, chain, memory, parked, away: false });
    }

    /// Stores a stub while another thread has the chain.
    pub(crate) fn put_away(&mut self, queue: usize, stub: Chain, memory: &Arc<Memory>) {
        let memory = Arc::clone(memory);
        self.insert(Busy { queue, chain: stub, memory, parked: false, away: true });
    }

    fn insert(&mut self, busy: Busy) {
        let Some(index) = self.free.pop() else { return };
        self.busy += 1;
        self.parked += usize::from(busy.parked);
        self.slots[index as usize].busy = Some(busy);
    }

    fn busy_mut(&mut self, token: u64) -> Option<&mut Busy> {
        let index = usize::try_from(token & u64::from(u32::MAX)).ok()?;
        let slot = self.slots.get_mut(index).filter(|slot| u64::from(slot.generation) == token >> 32)?;
        slot.busy.as_mut()
    }

    /// Replaces a stub by its chain, which is still being served.
    pub(crate) fn fill(&mut self, token: u64, chain: Chain, parked: bool) {
        let Some(busy) = self.busy_mut(token) else { return };
        (busy.chain, busy.parked, busy.away) = (chain, parked, false);
        self.parked += usize::from(parked);
    }

    /// Adds a reply for the chain of this token.
    pub(crate) fn add_reply(&mut self, token: u64, reply: M) {
        self.replies.push_back((token, reply));
    }

    /// Takes the next reply. A reply whose chain another thread still has delays later ones, which may belong to its
    /// flushes.
    pub(crate) fn next_reply(&mut self) -> Option<(u64, M)> {
        let (token, _) = self.replies.front()?;
        if self.busy(*token).is_some_and(|busy| busy.away) {
            return None;
        }
        self.replies.pop_front()
    }

    /// Returns the memory that a token's chain lies in, if the chain is still here.
    pub(crate) fn memory(&self, token: u64) -> Option<&Arc<Memory>> {
        self.busy(token).map(|busy| &busy.memory)
    }

    /// Returns the queue of a token's chain, if it is still here.
    pub(crate) fn queue(&self, token: u64) -> Option<usize> {
        self.busy(token).map(|busy| busy.queue)
    }

    fn busy(&self, token: u64) -> Option<&Busy> {
        let index = usize::try_from(token & u64::from(u32::MAX)).ok()?;
        let slot = self.slots.get(index).filter(|slot| u64::from(slot.generation) == token >> 32)?;
        slot.busy.as_ref()
    }

    /// Removes the chain of a token, if it is still here; returns its queue, the chain, and its memory, which may
    /// have no other owner.
    pub(crate) fn take(&mut self, token: u64) -> Option<(usize, Chain, Arc<Memory>)> {
        let index = usize::try_from(token & u64::from(u32::MAX)).ok()?;
        let slot = self.slots.get_mut(index).filter(|slot| u64::from(slot.generation) == token >> 32)?;
        let busy = slot.busy.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(u32::try_from(index).expect("slots are counted in 32 bits"));
        self.busy -= 1;
        self.parked -= usize::from(busy.parked);
        busy.chain.set_parked(false);
        Some((busy.queue, busy.chain, busy.memory))
    }

    /// Drops the parked chains of a queue whose ring is gone.
    pub(crate) fn drop_parked(&mut self, queue: usize) {
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.busy.as_ref().is_some_and(|busy| busy.parked && busy.queue == queue) {
                self.take(u64::from(slot.generation) << 32 | index as u64);
            }
        }
    }

    /// Returns the ids of a queue's chains that are being served.
    pub(crate) fn of_queue(&self, queue: usize) -> impl Iterator<Item = u16> {
        let busy = self.slots.iter().filter_map(|slot| slot.busy.as_ref());
        busy.filter(move |busy| busy.queue == queue).map(|busy| busy.chain.id)
    }

    /// Returns the number of chains that will complete without an external event.
    pub(crate) fn active(&self) -> usize {
        self.busy - self.parked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_finds_its_own_chain_once() {
        let memory = Arc::new(Memory::default());
        let mut slots = Slots::<u8>::default();
        let put = |slots: &mut Slots<u8>, queue, head, parked| {
            let token = slots.next_token();
            slots.put(queue, Chain { id: head, ..Chain::default() }, &memory, parked);
            token
        };
        let head = |taken: Option<(usize, Chain, Arc<Memory>)>| taken.map(|(queue, chain, _)| (queue, chain.id));
        let first = put(&mut slots, 7, 1, false);
        let second = put(&mut slots, 7, 2, true);
        let other = put(&mut slots, 8, 9, true);
        assert_eq!((slots.active(), slots.queue(second)), (1, Some(7)));
        assert_eq!(head(slots.take(first)), Some((7, 1)));
        assert_eq!((head(slots.take(first)), slots.queue(first)), (None, None));
        let third = put(&mut slots, 7, 3, false);
        assert_ne!(first, third);
        assert!(slots.take(first).is_none());
        slots.drop_parked(7);
        assert!(slots.take(second).is_none());
        assert_eq!(head(slots.take(third)), Some((7, 3)));
        assert_eq!(head(slots.take(other)), Some((8, 9)));
        assert_eq!((slots.active(), slots.busy), (0, 0));
    }

    #[test]
    fn a_reply_waits_for_its_chain_and_those_behind_it_too() {
        let memory = Arc::new(Memory::default());
        let mut slots = Slots::default();
        let chain = |id| Chain { id, ..Chain::default() };
        let away = slots.next_token();
        slots.put_away(3, chain(5), &memory);
        let here = slots.next_token();
        slots.put(3, chain(6), &memory, true);
        assert_eq!((slots.active(), slots.of_queue(3).collect::<Vec<_>>()), (1, vec![5, 6]));
        slots.add_reply(away, "reply");
        slots.add_reply(here, "reply to its flush");
        assert_eq!(slots.next_reply(), None);
        slots.fill(away, chain(5), true);
        assert_eq!((slots.active(), slots.busy), (0, 2), "it is parked");
        assert_eq!(slots.next_reply(), Some((away, "reply")));
        assert_eq!(slots.next_reply(), Some((here, "reply to its flush")));
        assert_eq!(slots.next_reply(), None);
        assert!(slots.take(away).is_some() && slots.take(here).is_some());
        slots.add_reply(away, "late");
        assert_eq!(slots.next_reply(), Some((away, "late")), "a reply without a chain is not delayed");
        assert_eq!(slots.busy, 0);
    }
}

//! A balanced search tree in which each subtree has a summary of its items: a treap, its nodes in one vector.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// What a tree holds.
pub(super) trait Item: Copy + std::fmt::Debug {
    /// What items are ordered by; no two have the same.
    type Key: Copy + Ord;
    /// What is known of all items below a node.
    type Sum: Copy + std::fmt::Debug;

    fn key(&self) -> Self::Key;

    /// The summary of this item alone.
    fn sum(&self) -> Self::Sum;

    /// The summary of the items of both; which of them come first does not matter.
    fn join(one: &Self::Sum, other: &Self::Sum) -> Self::Sum;
}

/// No node.
const NIL: u32 = u32::MAX;

/// A node, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Link(u32);

#[derive(Clone, Copy, Debug)]
pub(super) struct Node<I: Item> {
    pub(super) item: I,
    /// Of the item and all below.
    pub(super) sum: I::Sum,
    /// What comes before the item, and behind it.
    pub(super) left: Link,
    pub(super) right: Link,
    /// No node has a greater one than the node above it.
    priority: u32,
}

#[derive(Debug)]
pub(super) struct Tree<I: Item> {
    nodes: Vec<Node<I>>,
    free: Vec<Link>,
    root: Link,
    /// Where priorities come from. Clients cannot know it, so they cannot unbalance the tree.
    random: u64,
}

impl<I: Item> Default for Tree<I> {
    fn default() -> Self {
        // Xorshift never leaves 0.
        let random = RandomState::new().hash_one(0) | 1;
        Self { nodes: Vec::new(), free: Vec::new(), root: Link(NIL), random }
    }
}

impl<I: Item> Tree<I> {
    pub(super) fn root(&self) -> Link {
        self.root
    }

    pub(super) fn node(&self, link: Link) -> Option<&Node<I>> {
        // There are never as many nodes as `NIL`.
        self.nodes.get(link.0 as usize)
    }

    pub(super) fn insert(&mut self, item: I) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let priority = u32::try_from(self.random >> 32).unwrap_or_default();
        let node = Node { item, sum: item.sum(), left: Link(NIL), right: Link(NIL), priority };
        let new = match self.free.pop() {
            Some(link) => {
                self.nodes[link.0 as usize] = node;
                link
            }
            None => {
                self.nodes.push(node);
                Link(u32::try_from(self.nodes.len() - 1).expect("locks are bounded far below 2^32"))
            }
        };
        self.root = self.insert_below(self.root, new);
    }

    /// Removes the item of a key; returns whether there was one.
    pub(super) fn remove(&mut self, key: I::Key) -> bool {
        let (root, removed) = self.remove_below(self.root, key);
        self.root = root;
        self.free.extend(removed);
        if self.root.0 == NIL {
            (self.nodes, self.free) = (Vec::new(), Vec::new());
        }
        removed.is_some()
    }

    fn at(&mut self, link: Link) -> &mut Node<I> {
        &mut self.nodes[link.0 as usize]
    }

    fn update(&mut self, link: Link) {
        let Node { item, left, right, .. } = *self.at(link);
        let mut sum = item.sum();
        for below in [left, right] {
            if let Some(node) = self.node(below) {
                sum = I::join(&sum, &node.sum);
            }
        }
        self.at(link).sum = sum;
    }

    fn insert_below(&mut self, at: Link, new: Link) -> Link {
        let Node { item, priority, .. } = *self.at(new);
        let Some(&Node { item: here, priority: above, left, right, .. }) = self.node(at) else { return new };
        if priority > above {
            (self.at(new).left, self.at(new).right) = self.split(at, item.key());
            self.update(new);
            return new;
        }
        if item.key() < here.key() {
            self.at(at).left = self.insert_below(left, new);
        } else {
            self.at(at).right = self.insert_below(right, new);
        }
        self.update(at);
        at
    }

    /// Two trees: of what comes before a key, and of what does not.
    fn split(&mut self, at: Link, key: I::Key) -> (Link, Link) {
        let Some(&Node { item, left, right, .. }) = self.node(at) else { return (at, at) };
        let parts = if item.key() < key {
            let (near, far) = self.split(right, key);
            self.at(at).right = near;
            (at, far)
        } else {
            let (near, far) = self.split(left, key);
            self.at(at).left = far;
            (near, at)
        };
        self.update(at);
        parts
    }

    fn remove_below(&mut self, at: Link, key: I::Key) -> (Link, Option<Link>) {
        let Some(&Node { item, left, right, .. }) = self.node(at) else { return (at, None) };
        let removed = match key.cmp(&item.key()) {
            std::cmp::Ordering::Equal => return (self.merge(left, right), Some(at)),
            std::cmp::Ordering::Less => {
                let (below, removed) = self.remove_below(left, key);
                self.at(at).left = below;
                removed
            }
            std::cmp::Ordering::Greater => {
                let (below, removed) = self.remove_below(right, key);
                self.at(at).right = below;
                removed
            }
        };
        if removed.is_some() {
            self.update(at);
        }
        (at, removed)
    }

    /// One tree of two, all of whose keys in `left` come before all in `right`.
    fn merge(&mut self, left: Link, right: Link) -> Link {
        let (Some(one), Some(other)) = (self.node(left), self.node(right)) else {
            return if self.node(left).is_some() { left } else { right };
        };
        let top = if one.priority > other.priority {
            let below = one.right;
            self.at(left).right = self.merge(below, right);
            left
        } else {
            let below = other.left;
            self.at(right).left = self.merge(left, below);
            right
        };
        self.update(top);
        top
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    impl Item for u16 {
        type Key = Self;
        type Sum = (usize, Self, Self);

        fn key(&self) -> Self {
            *self
        }

        fn sum(&self) -> Self::Sum {
            (1, *self, *self)
        }

        fn join(one: &Self::Sum, other: &Self::Sum) -> Self::Sum {
            (one.0 + other.0, one.1.min(other.1), one.2.max(other.2))
        }
    }

    /// The items in order, with each summary and priority checked; and the depth.
    fn walk(tree: &Tree<u16>, at: Link, items: &mut Vec<u16>) -> usize {
        let Some(node) = tree.node(at) else { return 0 };
        let begin = items.len();
        let left = walk(tree, node.left, items);
        items.push(node.item);
        let right = walk(tree, node.right, items);
        assert_eq!(node.sum, (items.len() - begin, items[begin], items[items.len() - 1]));
        assert!(
            [node.left, node.right].iter().all(|below| tree.node(*below).is_none_or(|b| b.priority <= node.priority))
        );
        1 + left.max(right)
    }

    proptest! {
        #[test]
        fn has_what_a_set_has_in_order_with_sums(steps in prop::collection::vec((any::<bool>(), 0..64_u16), 1..200)) {
            let (mut tree, mut set) = (Tree::default(), BTreeSet::new());
            for (adds, key) in steps {
                if adds {
                    if set.insert(key) {
                        tree.insert(key);
                    }
                } else {
                    prop_assert_eq!(tree.remove(key), set.remove(&key));
                }
                let mut items = Vec::new();
                walk(&tree, tree.root(), &mut items);
                prop_assert_eq!(&items, &set.iter().copied().collect::<Vec<_>>());
                prop_assert!(!set.is_empty() || tree.nodes.capacity() == 0, "memory goes with the last item");
            }
        }
    }

    #[test]
    fn is_shallow_whatever_the_order() {
        let mut tree = Tree::default();
        (0..=u16::MAX).for_each(|key| tree.insert(key));
        let depth = walk(&tree, tree.root(), &mut Vec::new());
        assert!(depth < 80, "{depth}");
    }
}

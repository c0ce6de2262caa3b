//! Treaps in which each subtree has a summary of its items. The nodes of all trees are in one vector.

use std::cmp::Ordering;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// An item of a tree.
pub(super) trait Item: Copy + std::fmt::Debug {
    /// The order of items; keys are unique.
    type Key: Copy + Ord;
    /// A summary of the items of a subtree.
    type Summary: Copy + std::fmt::Debug;

    /// Returns the key.
    fn key(&self) -> Self::Key;

    /// Returns the summary of this item alone.
    fn summary(&self) -> Self::Summary;

    /// Joins two summaries, in any order.
    fn join(one: &Self::Summary, other: &Self::Summary) -> Self::Summary;
}

/// A reference to a node, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NodeIndex(u32);

impl NodeIndex {
    /// No node: an empty tree.
    pub(super) const NONE: Self = Self(u32::MAX);
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node<I: Item> {
    pub(super) item: I,
    /// The summary of the subtree.
    pub(super) summary: I::Summary,
    /// The subtrees before and after the item.
    pub(super) left: NodeIndex,
    pub(super) right: NodeIndex,
    /// The parent; none for a root.
    parent: NodeIndex,
    /// Not greater than that of the parent.
    priority: u32,
}

/// Trees, identified by their roots. A node keeps its index until it is removed.
#[derive(Debug)]
pub(super) struct Forest<I: Item> {
    nodes: Vec<Node<I>>,
    free: Vec<NodeIndex>,
    /// The state of the generator of priorities. Clients cannot know it, so they cannot unbalance the trees.
    random: u64,
}

impl<I: Item> Default for Forest<I> {
    fn default() -> Self {
        // Xorshift never leaves 0.
        let random = RandomState::new().hash_one(0) | 1;
        #[cfg(test)]
        let random = steps::seed().unwrap_or(random);
        Self { nodes: Vec::new(), free: Vec::new(), random }
    }
}

impl<I: Item> Forest<I> {
    pub(super) fn node(&self, index: NodeIndex) -> Option<&Node<I>> {
        #[cfg(test)]
        steps::count();
        // The number of `NONE` is greater than any number of nodes.
        self.nodes.get(index.0 as usize)
    }

    /// Creates a tree of one item.
    pub(super) fn insert_root(&mut self, item: I) -> NodeIndex {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let priority = u32::try_from(self.random >> 32).unwrap_or_default();
        let none = NodeIndex::NONE;
        let node = Node { item, summary: item.summary(), left: none, right: none, parent: none, priority };
        if let Some(index) = self.free.pop() {
            *self.at(index) = node;
            return index;
        }
        self.nodes.push(node);
        NodeIndex(u32::try_from(self.nodes.len() - 1).expect("locks are bounded far below 2^32"))
    }

    /// Unites two trees without common keys; returns the root.
    pub(super) fn unite(&mut self, one: NodeIndex, other: NodeIndex) -> NodeIndex {
        let root = self.unite_below(one, other);
        self.set_root(root)
    }

    /// Removes the item of a key from a tree; returns the new root, and whether there was such an item.
    pub(super) fn remove_key(&mut self, root: NodeIndex, key: I::Key) -> (NodeIndex, bool) {
        let mut at = root;
        while let Some(node) = self.node(at) {
            at = match key.cmp(&node.item.key()) {
                Ordering::Equal => return (self.remove(at).1, true),
                Ordering::Less => node.left,
                Ordering::Greater => node.right,
            };
        }
        (root, false)
    }

    /// Removes a node; returns the previous and the new root of its tree.
    pub(super) fn remove(&mut self, at: NodeIndex) -> (NodeIndex, NodeIndex) {
        let Node { left, right, parent, .. } = *self.at(at);
        let below = self.merge(left, right);
        self.set_root(below);
        self.free.push(at);
        if self.free.len() == self.nodes.len() {
            (self.nodes, self.free) = (Vec::new(), Vec::new());
            return (at, NodeIndex::NONE);
        }
        if parent == NodeIndex::NONE {
            return (at, below);
        }
        let above = self.at(parent);
        if above.left == at {
            above.left = below;
        } else {
            above.right = below;
        }
        let mut root = parent;
        loop {
            self.update(root);
            match self.at(root).parent {
                NodeIndex::NONE => return (root, root),
                next => root = next,
            }
        }
    }

    /// Separates the subtrees of a root from it; returns their roots.
    pub(super) fn isolate(&mut self, root: NodeIndex) -> (NodeIndex, NodeIndex) {
        let Node { left, right, .. } = *self.at(root);
        (self.at(root).left, self.at(root).right) = (NodeIndex::NONE, NodeIndex::NONE);
        self.update(root);
        (self.set_root(left), self.set_root(right))
    }

    /// Returns the root of a node's tree.
    pub(super) fn root_of(&self, mut at: NodeIndex) -> NodeIndex {
        while let Some(node) = self.node(at).filter(|node| node.parent != NodeIndex::NONE) {
            at = node.parent;
        }
        at
    }

    fn at(&mut self, index: NodeIndex) -> &mut Node<I> {
        #[cfg(test)]
        steps::count();
        &mut self.nodes[index.0 as usize]
    }

    fn set_root(&mut self, root: NodeIndex) -> NodeIndex {
        if root != NodeIndex::NONE {
            self.at(root).parent = NodeIndex::NONE;
        }
        root
    }

    fn update(&mut self, index: NodeIndex) {
        let Node { item, left, right, .. } = *self.at(index);
        let mut summary = item.summary();
        for below in [left, right] {
            if below != NodeIndex::NONE {
                let node = self.at(below);
                node.parent = index;
                summary = I::join(&summary, &node.summary);
            }
        }
        self.at(index).summary = summary;
    }

    fn unite_below(&mut self, one: NodeIndex, other: NodeIndex) -> NodeIndex {
        let (Some(first), Some(second)) = (self.node(one), self.node(other)) else {
            return if one == NodeIndex::NONE { other } else { one };
        };
        let (top, rest) = if first.priority >= second.priority { (one, other) } else { (other, one) };
        let Node { item, left, right, .. } = *self.at(top);
        let (before, behind) = self.split(rest, item.key());
        let (left, right) = (self.unite_below(left, before), self.unite_below(right, behind));
        (self.at(top).left, self.at(top).right) = (left, right);
        self.update(top);
        top
    }

    /// Splits a tree in two: items before a key, and the others.
    fn split(&mut self, at: NodeIndex, key: I::Key) -> (NodeIndex, NodeIndex) {
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

    /// Merges two trees; all keys of `left` must precede those of `right`.
    fn merge(&mut self, left: NodeIndex, right: NodeIndex) -> NodeIndex {
        let (Some(one), Some(other)) = (self.node(left), self.node(right)) else {
            return if left == NodeIndex::NONE { right } else { left };
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

/// One tree.
#[derive(Debug)]
pub(super) struct Tree<I: Item> {
    forest: Forest<I>,
    root: NodeIndex,
}

impl<I: Item> Default for Tree<I> {
    fn default() -> Self {
        Self { forest: Forest::default(), root: NodeIndex::NONE }
    }
}

impl<I: Item> Tree<I> {
    pub(super) fn root(&self) -> NodeIndex {
        self.root
    }

    pub(super) fn node(&self, index: NodeIndex) -> Option<&Node<I>> {
        self.forest.node(index)
    }

    pub(super) fn insert(&mut self, item: I) {
        let new = self.forest.insert_root(item);
        self.root = self.forest.unite(self.root, new);
    }

    /// Removes the item of a key; returns whether there was such an item.
    pub(super) fn remove(&mut self, key: I::Key) -> bool {
        let (root, removed) = self.forest.remove_key(self.root, key);
        self.root = root;
        removed
    }
}

/// Counts visited nodes.
#[cfg(test)]
pub(super) mod steps {
    use std::cell::Cell;

    thread_local! {
        static STEPS: Cell<usize> = const { Cell::new(0) };
        static SEED: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Gives the forests of this thread the same priorities from now on, so that their steps are the same each time.
    pub(in crate::locks) fn same_shapes() {
        SEED.set(Some(0x9e37_79b9_7f4a_7c15));
    }

    pub(super) fn seed() -> Option<u64> {
        SEED.get()
    }

    pub(super) fn count() {
        STEPS.set(STEPS.get() + 1);
    }

    /// Returns the number of nodes that `run` visits on this thread.
    pub(in crate::locks) fn of(run: impl FnOnce()) -> usize {
        let before = STEPS.get();
        run();
        STEPS.get() - before
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    impl Item for u16 {
        type Key = Self;
        type Summary = (usize, Self, Self);

        fn key(&self) -> Self {
            *self
        }

        fn summary(&self) -> Self::Summary {
            (1, *self, *self)
        }

        fn join(one: &Self::Summary, other: &Self::Summary) -> Self::Summary {
            (one.0 + other.0, one.1.min(other.1), one.2.max(other.2))
        }
    }

    /// Collects the items in order, checks all summaries and priorities, and returns the depth.
    fn walk(tree: &Tree<u16>, at: NodeIndex, items: &mut Vec<u16>) -> usize {
        let Some(node) = tree.node(at) else { return 0 };
        let begin = items.len();
        let left = walk(tree, node.left, items);
        items.push(node.item);
        let right = walk(tree, node.right, items);
        assert_eq!(node.summary, (items.len() - begin, items[begin], items[items.len() - 1]));
        assert!(
            [node.left, node.right]
                .iter()
                .all(|below| tree.node(*below).is_none_or(|b| b.priority <= node.priority && b.parent == at))
        );
        1 + left.max(right)
    }

    proptest! {
        #[test]
        fn a_tree_equals_a_sorted_set_and_has_correct_summaries(steps in prop::collection::vec((any::<bool>(), 0..64_u16), 1..200)) {
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
                prop_assert!(!set.is_empty() || tree.forest.nodes.capacity() == 0, "memory is freed with the last item");
            }
        }
    }

    #[test]
    fn trees_are_united_and_isolated() {
        let mut forest = Forest::default();
        let mut roots = [NodeIndex::NONE; 3];
        let mut nodes = Vec::new();
        for key in 0..300_u16 {
            let new = forest.insert_root(key);
            let tree = usize::from(key) % 3;
            roots[tree] = forest.unite(roots[tree], new);
            nodes.push(new);
        }
        assert!(nodes.iter().enumerate().all(|(key, node)| forest.root_of(*node) == roots[key % 3]));
        let root = roots.into_iter().fold(NodeIndex::NONE, |root, other| forest.unite(root, other));
        let tree = Tree { forest, root };
        let mut items = Vec::new();
        walk(&tree, root, &mut items);
        assert_eq!(items, (0..300).collect::<Vec<_>>());
        let Tree { mut forest, .. } = tree;
        let top = forest.node(root).expect("a node").item;
        let (left, right) = forest.isolate(root);
        assert_eq!(forest.node(root).map(|node| node.summary), Some((1, top, top)));
        assert!((0_u16..).zip(&nodes).all(|(key, node)| {
            let expected = match key.cmp(&top) {
                Ordering::Less => left,
                Ordering::Equal => root,
                Ordering::Greater => right,
            };
            forest.root_of(*node) == expected
        }));
        let root = forest.unite(right, left);
        let other = nodes[(usize::from(top) + 1) % 300];
        let (before, after) = forest.remove(other);
        assert!(before == root && forest.node(after).is_some_and(|node| node.summary.0 == 298));
    }

    #[test]
    fn a_tree_is_shallow_after_sorted_insertions() {
        let mut tree = Tree::default();
        (0..=u16::MAX).for_each(|key| tree.insert(key));
        let depth = walk(&tree, tree.root(), &mut Vec::new());
        assert!(depth < 80, "{depth}");
    }
}

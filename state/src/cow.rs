//! [`CowMap`]: an ordered map that clones by one reference and copies what is written.
//!
//! Readers get a clone after most commands, and taking a snapshot must not stall `apply`. The map is
//! a trie over the bits of a path that each key has, sixteen ways a level and four bits at a time. A
//! clone is one reference. The first write to an entry after that copies the branches above it, at
//! most sixteen references each, and its leaf of a few entries. Paths spread the entries evenly, so
//! there are about as many levels as the number of entries has hexadecimal digits.

use std::sync::Arc;

/// Number of children of a branch.
const WAYS: usize = 16;
/// Number of bits of a path that select a child.
const BITS: u32 = WAYS.trailing_zeros();
/// Number of entries beyond which a leaf becomes a branch. Writes copy a leaf as a whole.
const LEAF_ENTRIES_MAX: usize = 4;

/// A key that determines its place in a map.
pub(crate) trait PathKey: Ord + Copy {
    /// Returns the path to the key, whose highest bits come first. Most keys should differ in the
    /// first few bits. Iteration visits keys in the order of paths, and keys of one path in theirs.
    fn path(&self) -> u64;
}

/// A copy-on-write map; see the module documentation.
#[derive(Debug, Clone)]
pub(crate) struct CowMap<K, V> {
    root: CowNode<K, V>,
    len: usize,
}

#[derive(Debug)]
enum CowNode<K, V> {
    Empty,
    /// Entries in the order of iteration.
    Leaf(Arc<Vec<(K, V)>>),
    Branch(Arc<[CowNode<K, V>; WAYS]>),
}

impl<K: PathKey, V: Clone> CowMap<K, V> {
    pub(crate) fn new() -> Self {
        Self {
            root: CowNode::Empty,
            len: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        let (mut node, mut rest) = (&self.root, key.path());
        loop {
            match node {
                CowNode::Empty => return None,
                CowNode::Leaf(entries) => {
                    let found = entries.iter().find(|(it, _)| it == key);
                    return found.map(|(_, value)| value);
                }
                CowNode::Branch(children) => {
                    node = &children[first_way(rest)];
                    rest <<= BITS;
                }
            }
        }
    }

    /// Inserts the value if the map lacks the key. Returns whether it did.
    pub(crate) fn insert_new(&mut self, key: K, value: V) -> bool {
        let is_new = self.get(&key).is_none();
        if is_new {
            self.root.insert(0, key, value);
            self.len += 1;
        }
        is_new
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        // The lookup comes first, because a miss must not copy anything.
        self.get(key)?;
        let (mut node, mut rest) = (&mut self.root, key.path());
        loop {
            match node {
                CowNode::Empty => return None,
                CowNode::Leaf(entries) => {
                    let mut entries = Arc::make_mut(entries).iter_mut();
                    let found = entries.find(|(it, _)| it == key);
                    return found.map(|(_, value)| value);
                }
                CowNode::Branch(children) => {
                    node = &mut Arc::make_mut(children)[first_way(rest)];
                    rest <<= BITS;
                }
            }
        }
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        self.get(key)?;
        let removed = self.root.remove(key.path(), key);
        self.len -= usize::from(removed.is_some());
        removed
    }

    /// Iterates over the entries by path, then by key.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        CowEntries {
            leaf: [].iter(),
            nodes: vec![std::slice::from_ref(&self.root).iter()],
        }
    }

    /// Iterates over the entries from `key` on, in the order of [`CowMap::iter`].
    pub(crate) fn iter_from(&self, key: K) -> impl Iterator<Item = (&K, &V)> {
        let mut entries = CowEntries {
            leaf: [].iter(),
            nodes: Vec::new(),
        };
        let (mut node, mut rest) = (&self.root, key.path());
        loop {
            match node {
                CowNode::Empty => return entries,
                CowNode::Leaf(leaf) => {
                    let from = leaf.partition_point(|(it, _)| place(it) < place(&key));
                    entries.leaf = leaf[from..].iter();
                    return entries;
                }
                CowNode::Branch(children) => {
                    let way = first_way(rest);
                    entries.nodes.push(children[way + 1..].iter());
                    node = &children[way];
                    rest <<= BITS;
                }
            }
        }
    }
}

impl<K: PathKey, V: Clone> CowNode<K, V> {
    /// Inserts a key that is not there below this node, `level` levels below the root.
    fn insert(&mut self, level: u32, key: K, value: V) {
        let way = |key: &K| first_way(key.path() << (level * BITS));
        match self {
            Self::Empty => *self = Self::Leaf(Arc::new(vec![(key, value)])),
            Self::Branch(children) => {
                Arc::make_mut(children)[way(&key)].insert(level + 1, key, value);
            }
            Self::Leaf(entries) => {
                let entries = Arc::make_mut(entries);
                let at = entries.partition_point(|(it, _)| place(it) < place(&key));
                entries.insert(at, (key, value));
                if entries.len() > LEAF_ENTRIES_MAX && level < u64::BITS / BITS {
                    let mut children = std::array::from_fn(|_| Self::Empty);
                    for (key, value) in std::mem::take(entries) {
                        children[way(&key)].insert(level + 1, key, value);
                    }
                    *self = Self::Branch(Arc::new(children));
                }
            }
        }
    }

    /// Removes a key below this node. `rest` is what is left of its path.
    fn remove(&mut self, rest: u64, key: &K) -> Option<V> {
        let removed;
        let is_empty = match self {
            Self::Empty => return None,
            Self::Leaf(entries) => {
                let at = entries.iter().position(|(it, _)| it == key)?;
                let entries = Arc::make_mut(entries);
                removed = Some(entries.remove(at).1);
                entries.is_empty()
            }
            Self::Branch(children) => {
                let children = Arc::make_mut(children);
                removed = children[first_way(rest)].remove(rest << BITS, key);
                children.iter().all(|it| matches!(it, Self::Empty))
            }
        };
        if is_empty {
            *self = Self::Empty;
        }
        removed
    }
}

impl<K, V> Clone for CowNode<K, V> {
    fn clone(&self) -> Self {
        match self {
            Self::Empty => Self::Empty,
            Self::Leaf(entries) => Self::Leaf(Arc::clone(entries)),
            Self::Branch(children) => Self::Branch(Arc::clone(children)),
        }
    }
}

/// Iterator over the entries of a map.
struct CowEntries<'a, K, V> {
    /// Next entries.
    leaf: std::slice::Iter<'a, (K, V)>,
    /// Nodes behind them, the nearest ones last.
    nodes: Vec<std::slice::Iter<'a, CowNode<K, V>>>,
}

impl<'a, K, V> Iterator for CowEntries<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((key, value)) = self.leaf.next() {
                return Some((key, value));
            }
            match self.nodes.last_mut()?.next() {
                None => {
                    self.nodes.pop();
                }
                Some(CowNode::Empty) => {}
                Some(CowNode::Leaf(entries)) => self.leaf = entries.iter(),
                Some(CowNode::Branch(children)) => self.nodes.push(children.iter()),
            }
        }
    }
}

/// Returns the child that the first bits of a path select.
fn first_way(path: u64) -> usize {
    (path >> (u64::BITS - BITS)) as usize
}

/// Returns by what iteration orders keys.
fn place<K: PathKey>(key: &K) -> (u64, K) {
    (key.path(), *key)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    // Eight keys have each path, so that some leaves cannot be split.
    impl PathKey for u16 {
        fn path(&self) -> u64 {
            u64::from(*self >> 3) << 51
        }
    }

    proptest! {
        #[test]
        fn cow_map_equals_a_btree_map_and_clones_do_not_change(
            steps in prop::collection::vec((0_u8..5, any::<u16>(), any::<u8>()), 0..200),
        ) {
            let mut map = CowMap::<u16, u8>::new();
            let mut model = BTreeMap::new();
            let mut clones = Vec::new();
            for (what, key, value) in steps {
                let key = key & 0xc0ff;
                match what {
                    0 | 1 => {
                        let is_new = !model.contains_key(&key);
                        prop_assert_eq!(map.insert_new(key, value), is_new);
                        model.entry(key).or_insert(value);
                    }
                    2 => prop_assert_eq!(map.remove(&key), model.remove(&key)),
                    3 => {
                        prop_assert_eq!(map.get(&key), model.get(&key));
                        if let Some(found) = map.get_mut(&key) {
                            *found = value;
                            model.insert(key, value);
                        }
                    }
                    _ => clones.push((map.clone(), model.clone())),
                }
                prop_assert!(map.iter_from(key).eq(model.range(key..)));
            }
            clones.push((map, model));
            for (map, model) in clones {
                prop_assert!(map.iter().eq(model.iter()));
                prop_assert_eq!(map.len(), model.len());
            }
        }
    }
}

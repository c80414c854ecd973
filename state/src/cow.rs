//! [`CowMap`]: a sharded ordered map that clones in microseconds and copies shards on write.
//!
//! Taking a snapshot must not stall `apply`. Cloning the map copies one pointer per branch of
//! [`SHARDS_PER_BRANCH`] shards. The first write to a branch after that copies its pointers, and
//! the first write to a shard copies that shard alone. More shards make each such pause shorter;
//! the two levels keep the clone short regardless.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// Number of shards in a branch. Cloning a map copies one pointer per branch.
pub(crate) const SHARDS_PER_BRANCH: usize = 64;

/// A key that determines its shard. Iteration visits the keys of one shard together.
pub(crate) trait ShardKey: Ord + Copy {
    /// Number of branches of a map with such keys.
    const BRANCHES: usize;

    /// Returns the index of the key's shard, below `BRANCHES * SHARDS_PER_BRANCH`.
    fn shard(&self) -> usize;
}

type CowShard<K, V> = Arc<BTreeMap<K, V>>;
type CowBranch<K, V> = Arc<[CowShard<K, V>; SHARDS_PER_BRANCH]>;

/// A sharded copy-on-write map; see the module documentation.
#[derive(Debug, Clone)]
pub(crate) struct CowMap<K, V> {
    branches: Vec<CowBranch<K, V>>,
    len: usize,
}

impl<K: ShardKey, V: Clone> CowMap<K, V> {
    pub(crate) fn new() -> Self {
        // All branches share one empty shard and one empty branch. The first write to each copies
        // it.
        let empty = CowShard::default();
        let branch = CowBranch::new(std::array::from_fn(|_| Arc::clone(&empty)));
        Self {
            branches: vec![branch; K::BRANCHES],
            len: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.shard(key).get(key)
    }

    /// Inserts the value if the map lacks the key. Returns whether it did.
    pub(crate) fn insert_new(&mut self, key: K, value: V) -> bool {
        match self.shard_mut(&key).entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(value);
                self.len += 1;
                true
            }
        }
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        // The lookup comes first, because a miss must not copy the shard.
        self.get(key)?;
        self.shard_mut(key).get_mut(key)
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        self.get(key)?;
        let removed = self.shard_mut(key).remove(key);
        self.len -= usize::from(removed.is_some());
        removed
    }

    /// Iterates over the entries by shard, then by key.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards_from(0).flat_map(BTreeMap::iter)
    }

    /// Iterates over the entries from `key` on, in the order of [`CowMap::iter`].
    pub(crate) fn iter_from(&self, key: K) -> impl Iterator<Item = (&K, &V)> {
        let rest = self.shards_from(key.shard() + 1).flat_map(BTreeMap::iter);
        self.shard(&key).range(key..).chain(rest)
    }

    fn shard(&self, key: &K) -> &BTreeMap<K, V> {
        let shard = key.shard();
        &self.branches[shard / SHARDS_PER_BRANCH][shard % SHARDS_PER_BRANCH]
    }

    fn shard_mut(&mut self, key: &K) -> &mut BTreeMap<K, V> {
        let shard = key.shard();
        let branch = Arc::make_mut(&mut self.branches[shard / SHARDS_PER_BRANCH]);
        Arc::make_mut(&mut branch[shard % SHARDS_PER_BRANCH])
    }

    fn shards_from(&self, first: usize) -> impl Iterator<Item = &BTreeMap<K, V>> {
        let (branch, within) = (first / SHARDS_PER_BRANCH, first % SHARDS_PER_BRANCH);
        let branches = self.branches.iter().skip(branch);
        branches
            .flat_map(|branch| branch.iter())
            .skip(within)
            .map(|shard| &**shard)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl ShardKey for u16 {
        const BRANCHES: usize = 2;

        fn shard(&self) -> usize {
            usize::from(*self >> 9)
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
                let key = key & 0xf00f;
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

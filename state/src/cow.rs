//! [`CowMap`]: a sharded ordered map that clones in microseconds and copies shards on write.
//!
//! Taking a snapshot must not stall `apply`, and readers get a clone after most commands. Cloning the
//! map copies one pointer per group of [`BRANCHES_PER_GROUP`] branches of [`SHARDS_PER_BRANCH`]
//! shards. The first write to a group or branch after that copies its pointers, and the first write
//! to a shard copies that shard alone. More shards make each such pause shorter; the levels above
//! them keep the clone short regardless.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// Number of shards in a branch.
pub(crate) const SHARDS_PER_BRANCH: usize = 64;
/// Largest number of branches in a group. Cloning a map copies one pointer per group.
const BRANCHES_PER_GROUP: usize = 32;

/// A key that determines its shard. Iteration visits the keys of one shard together.
pub(crate) trait ShardKey: Ord + Copy {
    /// Number of branches of a map with such keys.
    const BRANCHES: usize;

    /// Returns the index of the key's shard, below `BRANCHES * SHARDS_PER_BRANCH`.
    fn shard(&self) -> usize;
}

type CowShard<K, V> = Arc<BTreeMap<K, V>>;
type CowBranch<K, V> = Arc<[CowShard<K, V>; SHARDS_PER_BRANCH]>;
type CowGroup<K, V> = Arc<Vec<CowBranch<K, V>>>;

/// A sharded copy-on-write map; see the module documentation.
#[derive(Debug, Clone)]
pub(crate) struct CowMap<K, V> {
    groups: Vec<CowGroup<K, V>>,
    len: usize,
}

impl<K: ShardKey, V: Clone> CowMap<K, V> {
    pub(crate) fn new() -> Self {
        // All groups, branches and shards are one each at first. The first write to each copies it.
        let empty = CowShard::default();
        let branch = CowBranch::new(std::array::from_fn(|_| Arc::clone(&empty)));
        let group = CowGroup::new(vec![branch; K::BRANCHES.min(BRANCHES_PER_GROUP)]);
        Self {
            groups: vec![group; K::BRANCHES.div_ceil(BRANCHES_PER_GROUP)],
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
        let [group, branch, shard] = place(key.shard());
        &self.groups[group][branch][shard]
    }

    fn shard_mut(&mut self, key: &K) -> &mut BTreeMap<K, V> {
        let [group, branch, shard] = place(key.shard());
        let group = Arc::make_mut(&mut self.groups[group]);
        let branch = Arc::make_mut(&mut group[branch]);
        Arc::make_mut(&mut branch[shard])
    }

    fn shards_from(&self, first: usize) -> impl Iterator<Item = &BTreeMap<K, V>> {
        let [group, branch, shard] = place(first);
        let branches = self
            .groups
            .iter()
            .skip(group)
            .flat_map(|group| group.iter());
        let shards = branches.skip(branch).flat_map(|branch| branch.iter());
        shards.skip(shard).map(|shard| &**shard)
    }
}

/// Returns the places of a shard's group, of its branch there, and of the shard in its branch.
fn place(shard: usize) -> [usize; 3] {
    let branch = shard / SHARDS_PER_BRANCH;
    [
        branch / BRANCHES_PER_GROUP,
        branch % BRANCHES_PER_GROUP,
        shard % SHARDS_PER_BRANCH,
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl ShardKey for u16 {
        const BRANCHES: usize = 2 * BRANCHES_PER_GROUP;

        fn shard(&self) -> usize {
            usize::from(*self >> 4)
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

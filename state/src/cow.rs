//! [`CowMap`]: an ordered map in shards, cloned in microseconds and copied shard by shard on write.
//!
//! A snapshot of the state must not stop `apply`. Cloning a map this way copies one pointer per
//! shard; the first write to a shard after that copies that shard alone.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// A key that knows its shard. Keys of one shard are iterated together.
pub(crate) trait ShardKey: Ord + Copy {
    /// Number of shards.
    const SHARDS: usize;

    /// The key's shard, below `SHARDS`.
    fn shard(&self) -> usize;
}

/// A sharded map; see the module.
#[derive(Debug, Clone)]
pub(crate) struct CowMap<K, V> {
    shards: Vec<Arc<BTreeMap<K, V>>>,
    len: usize,
}

impl<K: ShardKey, V: Clone> CowMap<K, V> {
    pub(crate) fn new() -> Self {
        // One empty shard shared by all: the first write to each makes its own.
        Self {
            shards: std::iter::repeat_n(Arc::default(), K::SHARDS).collect(),
            len: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.shards[key.shard()].get(key)
    }

    /// Answers whether the key was free; otherwise nothing changed.
    pub(crate) fn insert_new(&mut self, key: K, value: V) -> bool {
        match Arc::make_mut(&mut self.shards[key.shard()]).entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(value);
                self.len += 1;
                true
            }
        }
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let shard = &mut self.shards[key.shard()];
        // Asked first: a miss must not copy the shard.
        if !shard.contains_key(key) {
            return None;
        }
        Arc::make_mut(shard).get_mut(key)
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let shard = &mut self.shards[key.shard()];
        if !shard.contains_key(key) {
            return None;
        }
        let removed = Arc::make_mut(shard).remove(key);
        self.len -= usize::from(removed.is_some());
        removed
    }

    /// By shard, then by key.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.iter())
    }

    /// Those at and after `key` in the order of [`CowMap::iter`].
    pub(crate) fn iter_from(&self, key: K) -> impl Iterator<Item = (&K, &V)> {
        let (first, rest) = self.shards[key.shard()..]
            .split_first()
            .expect("a key's shard is below SHARDS");
        first
            .range(key..)
            .chain(rest.iter().flat_map(|shard| shard.iter()))
    }
}

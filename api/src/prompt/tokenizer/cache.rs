//! Caches the tokens of text, up to a number of bytes.
//!
//! The cache has two generations. A hit moves the entry to the young one. When the young generation
//! would exceed half the bound, it replaces the old one, and an empty one takes its place. Recently
//! used entries thus stay, without updating an LRU list at each lookup.

use std::collections::HashMap;
use std::hash::RandomState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

/// Estimated overhead of an entry, in bytes.
const ENTRY_BYTES: usize = 64;

/// Key of a text under one salt in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TextKey(u128);

/// Cache of the tokens of texts, bounded in bytes.
#[derive(Debug)]
pub(super) struct TokenCache {
    bytes_max: usize,
    /// Random seed of the keys, so that clients cannot construct texts with equal keys.
    seed: u64,
    generations: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<TextKey, Arc<[u32]>>,
    old: HashMap<TextKey, Arc<[u32]>>,
    /// Size of the young generation, in bytes.
    bytes: usize,
}

impl TokenCache {
    /// Creates an empty cache of at most `bytes_max` bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        use std::hash::BuildHasher;
        Self {
            bytes_max,
            seed: RandomState::new().hash_one(0_u64),
            generations: Mutex::default(),
        }
    }

    /// Returns the key of `text` under `salt`. Keys depend on the salt so that the time to tokenize
    /// reveals nothing about texts under other salts.
    pub(super) fn key(&self, text: &[u8], salt: &str) -> TextKey {
        let seed = match salt {
            "" => self.seed,
            salt => xxh3_64_with_seed(salt.as_bytes(), self.seed),
        };
        TextKey(xxh3_128_with_seed(text, seed))
    }

    /// Returns the tokens cached under `key`, if any.
    pub(super) fn get(&self, key: TextKey) -> Option<Arc<[u32]>> {
        let mut generations = self.generations();
        if let Some(tokens) = generations.young.get(&key) {
            return Some(Arc::clone(tokens));
        }
        let tokens = generations.old.remove(&key)?;
        self.keep(&mut generations, key, &tokens);
        Some(tokens)
    }

    /// Caches `tokens` under `key`, unless they would fill more than half of the cache.
    pub(super) fn insert(&self, key: TextKey, tokens: &Arc<[u32]>) {
        self.keep(&mut self.generations(), key, tokens);
    }

    fn keep(&self, generations: &mut Generations, key: TextKey, tokens: &Arc<[u32]>) {
        let bytes = tokens.len() * size_of::<u32>() + ENTRY_BYTES;
        let young_max = self.bytes_max / 2;
        if bytes > young_max {
            return;
        }
        if generations.bytes + bytes > young_max {
            generations.old = std::mem::take(&mut generations.young);
            generations.bytes = 0;
        }
        if generations.young.insert(key, Arc::clone(tokens)).is_none() {
            generations.bytes += bytes;
        }
    }

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl TokenCache {
        fn bytes(&self) -> usize {
            let generations = self.generations();
            let entries = generations.young.values().chain(generations.old.values());
            entries.map(|tokens| tokens.len() * 4 + ENTRY_BYTES).sum()
        }
    }

    #[test]
    fn the_token_cache_keeps_used_entries_within_its_bound() {
        let cache = TokenCache::new(10_000);
        let tokens: Arc<[u32]> = vec![7; 34].into();
        let used = cache.key(b"used", "");
        cache.insert(used, &tokens);
        for number in 0..1000_u32 {
            cache.insert(cache.key(&number.to_le_bytes(), ""), &tokens);
            assert_eq!(cache.get(used), Some(Arc::clone(&tokens)));
            assert!(cache.bytes() <= 10_000);
        }
        assert_eq!(cache.get(cache.key(&0_u32.to_le_bytes(), "")), None);
        assert!(cache.get(cache.key(&999_u32.to_le_bytes(), "")).is_some());
    }

    #[test]
    fn an_entry_as_large_as_the_cache_is_not_kept() {
        let cache = TokenCache::new(1000);
        let key = cache.key(b"long", "");
        cache.insert(key, &vec![1; 1000].into());
        assert_eq!((cache.get(key), cache.bytes()), (None, 0));
    }

    #[test]
    fn token_cache_entries_are_separate_per_salt() {
        let cache = TokenCache::new(10_000);
        let tokens: Arc<[u32]> = vec![1].into();
        cache.insert(cache.key(b"text", "a"), &tokens);
        for salt in ["", "b"] {
            assert_eq!(cache.get(cache.key(b"text", salt)), None, "{salt}");
        }
        assert_eq!(cache.get(cache.key(b"text", "a")), Some(tokens));
    }
}

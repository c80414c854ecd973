//! The last output lengths of each pair of user and model. The number of pairs is bounded: beyond
//! it, the pair observed longest ago is forgotten.
//!
//! The pairs are stored in shards that are shared with the published view and copied on write. The
//! digest is a sum over the entries, kept incrementally: hashing all would take milliseconds.

use std::collections::BTreeMap;

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use super::{OUTPUT_TOKENS_MAX, PAIRS_MAX};
use crate::cow::{CowMap, PathKey};
use crate::encoding;
use crate::ids::{ModelKey, UserKey};

/// Number of last lengths that a prediction averages.
const LENGTHS: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
struct Pair {
    user: UserKey,
    model: ModelKey,
}

impl PathKey for Pair {
    // Keys are hashes, so any of their bits are uniform.
    fn path(&self) -> u64 {
        self.user.0 ^ self.model.0
    }
}

/// Last lengths of one pair. It holds nothing on the heap, because a shard is copied on write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
struct Recent {
    /// Last lengths, latest first; 0 beyond `count`.
    lengths: [u32; LENGTHS],
    /// Number of lengths in `lengths`, at least 1.
    count: u8,
    /// Observation count at the pair's last output, different for every pair.
    heard_at: u64,
}

/// Last lengths of all pairs, for readers. A clone costs one pointer per branch.
#[derive(Debug, Clone)]
pub(super) struct Pairs(CowMap<Pair, Recent>);

/// Last lengths of all pairs, for the writer.
#[derive(Debug, Clone, Default)]
pub(super) struct Recents {
    pairs: Pairs,
    /// Pairs by the observation count at their last output. Derived from `pairs`.
    order: BTreeMap<u64, Pair>,
    /// Wrapping sum of the entries' hashes. Derived from `pairs`.
    digest: u128,
}

impl Default for Pairs {
    fn default() -> Self {
        Self(CowMap::new())
    }
}

impl Pairs {
    /// Returns the mean of the last lengths of a pair, rounded up; `None` if there are none.
    pub(super) fn mean(&self, user: UserKey, model: ModelKey) -> Option<u32> {
        let recent = self.0.get(&Pair { user, model })?;
        let sum: u32 = recent.lengths.iter().sum();
        Some(sum.div_ceil(u32::from(recent.count).max(1)))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Recents {
    pub(super) fn observe(&mut self, user: UserKey, model: ModelKey, tokens: &[u32], at: u64) {
        let pair = Pair { user, model };
        let known = self.forget(pair);
        if known.is_none() && self.pairs.len() >= PAIRS_MAX {
            let oldest = self.order.values().next().copied();
            oldest.and_then(|oldest| self.forget(oldest));
        }
        let mut recent = known.unwrap_or(Recent {
            lengths: [0; LENGTHS],
            count: 0,
            heard_at: at,
        });
        for tokens in tokens {
            recent.add(*tokens);
        }
        recent.heard_at = at;
        self.keep(pair, recent);
    }

    pub(super) fn pairs(&self) -> &Pairs {
        &self.pairs
    }

    pub(super) fn digest(&self) -> u128 {
        self.digest
    }

    pub(super) fn check(&self, clock: u64) -> Result<(), String> {
        if self.pairs.len() > PAIRS_MAX {
            return Err(format!("{} pairs are kept", self.pairs.len()));
        }
        let is_ordered = |(pair, recent): (&Pair, &Recent)| {
            recent.heard_at <= clock && self.order.get(&recent.heard_at) == Some(pair)
        };
        if self.order.len() != self.pairs.len() || !self.pairs.0.iter().all(is_ordered) {
            return Err("the order of pairs differs from the pairs".to_owned());
        }
        let hashes = self.pairs.0.iter().map(|(pair, it)| hash(pair, it));
        if hashes.fold(0, u128::wrapping_add) != self.digest {
            return Err("the digest of pairs differs from the pairs".to_owned());
        }
        if !self.pairs.0.iter().all(|(_, recent)| recent.is_sound()) {
            return Err("a pair's lengths are out of bounds".to_owned());
        }
        Ok(())
    }

    fn keep(&mut self, pair: Pair, recent: Recent) {
        self.digest = self.digest.wrapping_add(hash(&pair, &recent));
        self.order.insert(recent.heard_at, pair);
        self.pairs.0.insert_new(pair, recent);
    }

    fn forget(&mut self, pair: Pair) -> Option<Recent> {
        let recent = self.pairs.0.remove(&pair)?;
        self.order.remove(&recent.heard_at);
        self.digest = self.digest.wrapping_sub(hash(&pair, &recent));
        Some(recent)
    }
}

impl Recent {
    fn add(&mut self, tokens: u32) {
        self.lengths.rotate_right(1);
        self.lengths[0] = tokens.min(OUTPUT_TOKENS_MAX);
        self.count = (self.count + 1).min(LENGTHS as u8);
    }

    fn is_sound(&self) -> bool {
        let count = usize::from(self.count);
        (1..=LENGTHS).contains(&count)
            && self.lengths[..count]
                .iter()
                .all(|it| *it <= OUTPUT_TOKENS_MAX)
            && self.lengths[count..].iter().all(|it| *it == 0)
    }
}

fn hash(pair: &Pair, recent: &Recent) -> u128 {
    xxh3_128(&encoding::to_bytes(&(pair, recent)))
}

impl Encode for Recents {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        (self.pairs.len() as u64).encode(encoder)?;
        self.order.values().try_for_each(|pair| {
            let recent = self.pairs.0.get(pair).expect("the order is of the pairs");
            (pair, recent).encode(encoder)
        })
    }
}

impl<C> Decode<C> for Recents {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let mut recents = Self::default();
        for _ in 0..u64::decode(decoder)? {
            let (pair, recent): (Pair, Recent) = Decode::decode(decoder)?;
            let is_new = recents.pairs.0.get(&pair).is_none()
                && !recents.order.contains_key(&recent.heard_at);
            if !is_new || recents.pairs.len() >= PAIRS_MAX {
                return Err(DecodeError::Other("pairs repeat, or are too many"));
            }
            recents.keep(pair, recent);
        }
        Ok(recents)
    }
}

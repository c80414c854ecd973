//! Sets of backend slots as bit masks: bit `slot % 64` of word `slot / 64`.

use crate::bounds::BACKENDS_MAX;

/// Number of words in a mask of all possible slots.
pub(crate) const WORDS_MAX: usize = BACKENDS_MAX.div_ceil(64);

/// Set of slots below `64 * W`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mask<const W: usize>(pub(crate) [u64; W]);

impl<const W: usize> Mask<W> {
    /// Set without slots.
    pub(crate) const EMPTY: Self = Self([0; W]);

    /// Adds `slot` to the set. Ignores one beyond the mask's width.
    #[inline]
    pub(crate) fn insert(&mut self, slot: u16) {
        if let Some(word) = self.0.get_mut(usize::from(slot) / 64) {
            *word |= 1 << (slot % 64);
        }
    }

    /// Removes `slot` from the set.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u16) {
        if let Some(word) = self.0.get_mut(usize::from(slot) / 64) {
            *word &= !(1 << (slot % 64));
        }
    }

    #[inline]
    pub(crate) fn contains(&self, slot: u16) -> bool {
        let word = self.0.get(usize::from(slot) / 64);
        word.is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    #[inline]
    pub(crate) fn and(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    #[inline]
    pub(crate) fn without(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    /// Calls `each` for every slot in the set, in ascending order.
    #[inline]
    pub(crate) fn for_each(&self, mut each: impl FnMut(u16)) {
        let mut base = 0_u16;
        for &word in &self.0 {
            let mut rest = word;
            while rest != 0 {
                each(base + rest.trailing_zeros() as u16);
                rest &= rest - 1;
            }
            base += 64;
        }
    }
}

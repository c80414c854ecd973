//! Draws random numbers, from the system or a seed.
//!
//! A simulation seeds the thread that it runs on. Election timeouts and the ids of stores and
//! clusters come from here; only the keys of encrypted connections do not.

use std::cell::Cell;
use std::convert::Infallible;

thread_local! {
    /// State of the thread's generator; `None` unless the thread is seeded.
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Seeds this thread, so that all its later draws follow from `seed`.
pub fn seed(seed: u64) {
    STATE.set(Some(seed));
}

/// Draws a number: the next one of the sequence on a seeded thread, otherwise one from the system.
#[must_use]
pub fn draw() -> u64 {
    let Some(state) = STATE.get() else {
        return rand::random();
    };
    let (state, number) = next(state);
    STATE.set(Some(state));
    number
}

/// Draws a nonzero number, for use as an id.
pub(crate) fn draw_id() -> u64 {
    loop {
        let id = draw();
        if id != 0 {
            return id;
        }
    }
}

/// Returns the next number and state of SplitMix64 (Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators", 2014).
fn next(state: u64) -> (u64, u64) {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (state, mixed ^ (mixed >> 31))
}

/// Adapter of [`draw`] to openraft's trait.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Generator;

impl rand_core::TryRng for Generator {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok((draw() >> 32) as u32)
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(draw())
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&draw().to_le_bytes()[..part.len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(count: usize) -> Vec<u64> {
        std::iter::repeat_with(draw).take(count).collect()
    }

    #[test]
    fn a_seed_determines_draws_of_its_thread_only() {
        seed(7);
        let first = draws(20);
        let elsewhere = std::thread::spawn(|| draws(20)).join().unwrap();
        seed(7);
        assert_eq!(draws(20), first);
        assert_ne!(elsewhere, first);
        seed(8);
        assert_ne!(draws(20), first);
    }

    #[test]
    fn random_numbers_match_the_published_reference() {
        seed(0);
        assert_eq!(draw(), 0xe220_a839_7b1d_cdaf);
    }
}

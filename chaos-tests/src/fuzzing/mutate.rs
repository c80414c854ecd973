//! Seeded mutations of real encodings, such as bit rot, cut connections, faulty peers and forged
//! lengths cause. The same seed yields the same mutations.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

/// Maximum length of a mutated input, in bytes.
pub const INPUT_BYTES_MAX: usize = 64 * 1024;
/// Maximum number of changes to one input.
const CHANGES_MAX: usize = 4;
/// Extreme values that replace lengths and counts.
const LIES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    // 8 GiB.
    0x2_0000_0000,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];

/// Generator of uniform random numbers from a seed.
#[derive(Debug, Clone)]
pub struct MutationRng(SplitMix64);

impl MutationRng {
    /// Creates the generator for `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns the next number below `end`, or 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        match end as u64 {
            0 => 0,
            end => (self.draw() % end) as usize,
        }
    }
}

/// Returns `original` with one to four changes, some of which insert parts of `others`, cut to
/// [`INPUT_BYTES_MAX`].
#[must_use]
pub fn mutated(original: &[u8], others: &[Vec<u8>], numbers: &mut MutationRng) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..=numbers.below(CHANGES_MAX) {
        change(&mut bytes, others, numbers);
    }
    bytes.truncate(INPUT_BYTES_MAX);
    bytes
}

fn change(bytes: &mut Vec<u8>, others: &[Vec<u8>], numbers: &mut MutationRng) {
    let at = numbers.below(bytes.len() + 1);
    let rest = bytes.len() - at;
    let length = numbers.below(rest.min(64) + 1);
    match numbers.below(10) {
        0 | 1 if rest > 0 => bytes[at] ^= 1 << numbers.below(8),
        2 if rest > 0 => bytes[at] = numbers.draw() as u8,
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..at + length)),
        5 => {
            let repeated = bytes[at..at + length].to_vec();
            let times = 1 + numbers.below(64);
            insert(bytes, at, &repeated.repeat(times));
        }
        6 => {
            let noise: Vec<u8> = (0..=numbers.below(16))
                .map(|_| numbers.draw() as u8)
                .collect();
            insert(bytes, at, &noise);
        }
        7 => {
            let Some(other) = others.get(numbers.below(others.len())) else {
                return;
            };
            let from = numbers.below(other.len() + 1);
            let until = from + numbers.below((other.len() - from).min(512) + 1);
            insert(bytes, at, &other[from..until]);
        }
        _ => lie(bytes, at, numbers),
    }
}

/// Overwrites the bytes at `at` with one of [`LIES`], fixed-width in either byte order, or LEB128.
fn lie(bytes: &mut Vec<u8>, at: usize, numbers: &mut MutationRng) {
    let number = LIES[numbers.below(LIES.len())];
    let written = match numbers.below(7) {
        0 => (number as u16).to_le_bytes().to_vec(),
        1 => (number as u16).to_be_bytes().to_vec(),
        2 => (number as u32).to_le_bytes().to_vec(),
        3 => (number as u32).to_be_bytes().to_vec(),
        4 => number.to_le_bytes().to_vec(),
        5 => number.to_be_bytes().to_vec(),
        _ => leb128(number),
    };
    let end = (at + written.len()).min(bytes.len());
    bytes.splice(at..end, written);
}

fn leb128(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn insert(bytes: &mut Vec<u8>, at: usize, part: &[u8]) {
    bytes.splice(at..at, part.iter().copied());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutations_are_bounded_and_determined_by_the_seed() {
        let original: Vec<u8> = (0..=255).cycle().take(3 * INPUT_BYTES_MAX / 2).collect();
        let others = [original.clone(), vec![7; 9], Vec::new()];
        let run = |seed| {
            let mut numbers = MutationRng::new(seed);
            let one = |_| mutated(&original[..300], &others, &mut numbers);
            (0..2000).map(one).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        let mut numbers = MutationRng::new(3);
        for _ in 0..100 {
            assert!(mutated(&original, &others, &mut numbers).len() <= INPUT_BYTES_MAX);
            let _grown = mutated(&[], &[], &mut numbers);
        }
    }
}

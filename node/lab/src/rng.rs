//! A small seeded generator: the same seed gives the same integers on every build and machine.
//!
//! Labels split it into streams for different purposes, so that more draws from one do not shift
//! the others.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

/// Seeded stream of random numbers.
#[derive(Debug, Clone)]
pub struct Rng(SplitMix64);

impl Rng {
    /// Creates the stream that belongs to `label` under `seed`.
    #[must_use]
    pub fn new(seed: u64, label: u64) -> Self {
        let start = seed ^ label.wrapping_mul(0xd6e8_feb8_6659_fd93);
        let mut rng = SplitMix64::seed_from_u64(start);
        rng.next_u64();
        Self(rng)
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a uniform number below `bound`, or 0 if the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next_u64()) * u128::from(bound);
        u64::try_from(wide >> 64).expect("a 128-bit product has 64 high bits")
    }

    /// Returns a uniform number from `least` to `most`, both included.
    pub fn within(&mut self, least: u32, most: u32) -> u32 {
        let drawn = self.below(u64::from(most.saturating_sub(least)) + 1);
        least + u32::try_from(drawn).expect("below a 32-bit bound")
    }

    /// Returns a uniform number in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns the microseconds to the next event of a Poisson process with rate `per_s`.
    pub fn gap_us(&mut self, per_s: f64) -> u64 {
        let seconds = -(1.0 - self.unit()).ln() / per_s;
        (seconds * 1e6) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs that were recorded by their seed must stay reproducible.
    #[test]
    fn random_numbers_of_a_seed_are_golden() {
        let mut rng = Rng::new(7, 3);
        let drawn = [rng.next_u64(), rng.next_u64(), rng.below(1_000_000)];
        assert_eq!(
            drawn,
            [4_645_842_228_912_645_062, 6_096_404_744_266_393_748, 1_601]
        );
    }

    #[test]
    fn random_streams_are_repeatable_and_distinct() {
        let draw = |seed, label| {
            let mut rng = Rng::new(seed, label);
            [rng.next_u64(), rng.below(1000), u64::from(rng.within(5, 9))]
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
        assert!((5..=9).contains(&draw(1, 2)[2]));
    }

    #[test]
    fn exponential_gaps_have_the_requested_mean() {
        let mut rng = Rng::new(7, 0);
        let mean = (0..20_000).map(|_| rng.gap_us(10.0)).sum::<u64>() / 20_000;
        assert!((97_000..103_000).contains(&mean), "{mean} us");
    }
}

//! One direction between two hosts: latency, loss, repetition and cuts.

use lab::rng::Rng;

/// Permille of messages that a bad link loses.
pub const LOSS_PERMILLE_BAD: u32 = 60;
/// Permille of messages that a bad link repeats.
pub const REPEATS_PERMILLE_BAD: u32 = 60;

/// What happens to messages while a link is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkCut {
    /// They arrive once it heals, as if TCP retransmitted them.
    Holds,
    /// They are lost.
    Drops,
}

/// One direction.
#[derive(Debug, Clone)]
pub struct Link {
    /// Minimum latency of a message.
    pub base_us: u64,
    /// Mean additional latency.
    pub jitter_us: u64,
    /// Permille of messages that take up to [`Link::stray_us`] longer.
    pub stray_permille: u32,
    /// Maximum extra latency, see [`Link::stray_permille`].
    pub stray_us: u64,
    /// `None` if the link is up.
    pub cut: Option<LinkCut>,
    /// Permille of messages that are lost.
    pub loss_permille: u32,
    /// Permille of calls that arrive twice.
    pub repeats_permille: u32,
}

impl Link {
    /// Draws a sound link from the seed: most are fast, one in eight is slow.
    pub fn draw(rng: &mut Rng) -> Self {
        let is_slow = rng.below(8) == 0;
        let scale = if is_slow { 20 } else { 1 };
        Self {
            base_us: (100 + rng.below(900)) * scale,
            jitter_us: (50 + rng.below(500)) * scale,
            stray_permille: [0, 0, 2, 10][rng.within(0, 3) as usize],
            stray_us: 1000 * u64::from(rng.within(5, 300)),
            cut: None,
            loss_permille: 0,
            repeats_permille: [0, 0, 2][rng.within(0, 2) as usize],
        }
    }

    /// Draws the latency of the next message.
    pub fn latency_us(&self, rng: &mut Rng) -> u64 {
        let jitter = self.jitter_us as f64 * -(1.0 - rng.unit()).ln();
        let mut latency = self.base_us + jitter as u64;
        if is_drawn(rng, self.stray_permille) {
            latency += rng.below(self.stray_us);
        }
        latency
    }
}

/// Draws whether an event of this probability happens.
pub(super) fn is_drawn(rng: &mut Rng, permille: u32) -> bool {
    permille > 0 && rng.below(1000) < u64::from(permille)
}

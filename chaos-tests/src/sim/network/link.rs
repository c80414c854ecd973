//! Links, each of which is one direction between two hosts: latency, loss, repetition and cuts.

use lab::rng::Rng;

/// Share of messages that a bad link loses, in thousandths.
pub const LOSS_PERMILLE_BAD: u32 = 60;
/// Share of calls that a bad link repeats, in thousandths.
pub const REPEATS_PERMILLE_BAD: u32 = 60;

/// Effect of a cut link on messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkCut {
    /// Messages arrive once the link heals, as if TCP retransmitted them.
    Holds,
    /// Messages are lost.
    Drops,
}

/// Properties of one direction between two hosts.
#[derive(Debug, Clone)]
pub struct Link {
    /// Minimum latency of a message, in microseconds.
    pub base_us: u64,
    /// Mean additional latency of a message, in microseconds.
    pub jitter_us: u64,
    /// Share of messages that take up to [`Link::stray_us`] longer, in thousandths.
    pub stray_permille: u32,
    /// Maximum extra latency of [`Link::stray_permille`] messages, in microseconds.
    pub stray_us: u64,
    /// Effect of the cut while the link is cut; `None` if the link is up.
    pub cut: Option<LinkCut>,
    /// Share of messages that are lost, in thousandths.
    pub loss_permille: u32,
    /// Share of calls that arrive twice, in thousandths.
    pub repeats_permille: u32,
}

impl Link {
    /// Draws the properties of a sound link. Most links are fast, one in eight is slow.
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

    /// Draws the latency of the next message, in microseconds.
    pub fn latency_us(&self, rng: &mut Rng) -> u64 {
        let jitter = self.jitter_us as f64 * -(1.0 - rng.unit()).ln();
        let mut latency = self.base_us + jitter as u64;
        if is_drawn(rng, self.stray_permille) {
            latency += rng.below(self.stray_us);
        }
        latency
    }
}

/// Draws whether an event with a probability of `permille` thousandths happens.
pub(super) fn is_drawn(rng: &mut Rng, permille: u32) -> bool {
    permille > 0 && rng.below(1000) < u64::from(permille)
}

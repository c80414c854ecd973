//! One direction between two hosts: how long messages take and what happens to them.

use lab::rng::Rng;

/// Messages of a thousand that a bad link loses.
pub const LOSS_PERMILLE_BAD: u32 = 60;
/// Messages of a thousand that a bad link repeats.
pub const REPEATS_PERMILLE_BAD: u32 = 60;

/// What becomes of messages while a link is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkCut {
    /// They come once it heals, as what TCP sends again.
    Holds,
    /// They are lost.
    Drops,
}

/// One direction.
#[derive(Debug, Clone)]
pub struct Link {
    /// Shortest time a message takes.
    pub base_us: u64,
    /// Mean of what comes on top.
    pub jitter_us: u64,
    /// Messages of a thousand that take up to [`Link::stray_us`] longer.
    pub stray_permille: u32,
    /// See [`Link::stray_permille`].
    pub stray_us: u64,
    /// `None`: it stands.
    pub cut: Option<LinkCut>,
    /// Messages of a thousand that are lost.
    pub loss_permille: u32,
    /// Calls of a thousand that arrive twice.
    pub repeats_permille: u32,
}

impl Link {
    /// A sound link, as the seed draws it: most are quick, one in eight is slow.
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

    /// How long the next message takes.
    pub fn latency_us(&self, rng: &mut Rng) -> u64 {
        let jitter = self.jitter_us as f64 * -(1.0 - rng.unit()).ln();
        let mut latency = self.base_us + jitter as u64;
        if is_drawn(rng, self.stray_permille) {
            latency += rng.below(self.stray_us);
        }
        latency
    }
}

/// Whether an event of this likelihood happens.
pub(super) fn is_drawn(rng: &mut Rng, permille: u32) -> bool {
    permille > 0 && rng.below(1000) < u64::from(permille)
}

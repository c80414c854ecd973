//! The schedule of faults, drawn from the seed.

use lab::rng::Rng;

/// Of so many faults one has a lie told beside it. It is drawn apart, so that what else goes wrong
/// under a seed is what went wrong before there were liars.
pub const LIES: u64 = 4;

/// One way for things to go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// A process is killed and its machine loses what was not synced; it starts again later.
    Crash,
    /// All of them at once.
    CrashAll,
    /// A process is killed and starts again at once.
    Bounce,
    /// A replica leaves in peace and comes back.
    Leave,
    /// A process is not scheduled for a while.
    Pause,
    /// A wall clock jumps, forth or back.
    ClockJump,
    /// The replicas fall into two halves.
    Halves,
    /// One replica is cut off.
    Isolate,
    /// The leader is cut off.
    IsolateLeader,
    /// Messages pass in one direction only.
    OneWay,
    /// No call reaches a replica, mostly the leader; its own calls are answered.
    Deafen,
    /// What is sent over some links comes later, all at once.
    Hold,
    /// Some links lose and repeat messages.
    BadLinks,
    /// Some links are slow.
    SlowLinks,
    /// Connections break in the middle of what they carry.
    CutStreams,
    /// A disk takes long to sync.
    SlowDisk,
    /// A disk takes no writes; it is mended and its replica started again.
    FailDisk,
    /// A new replica joins as a learner.
    Join,
    /// A learner is made a voter.
    Promote,
    /// A replica is removed.
    Remove,
    /// Leadership is handed over.
    Transfer,
    /// A snapshot is taken.
    Snapshot,
    /// A replica loses its state to a fault of memory.
    LoseState,
    /// A process has no descriptors left for a while: it can open no file.
    Descriptors,
    /// A disk is full for a while; nobody starts its replica again.
    FullDisk,
    /// A wall clock is wrong by hours or days for a long time; seldom all of them are.
    WrongClock,
    /// A member that is wrong, or a stranger, makes calls that no sound replica makes.
    Liar,
    /// A StatefulSet wants another number of replicas; its API server may not answer for a while.
    Scale,
    /// A replica is started with another build, which knows later formats or fewer.
    Upgrade,
}

impl Fault {
    /// All of them, with how often each is drawn. Lies come beside the others, see [`LIES`], and so
    /// does what befalls all replicas of some worlds (`fleet.rs`).
    pub const ALL: &[(Self, u32)] = &[
        (Self::Crash, 16),
        (Self::CrashAll, 3),
        (Self::Bounce, 8),
        (Self::Leave, 5),
        (Self::Pause, 10),
        (Self::ClockJump, 6),
        (Self::Halves, 6),
        (Self::Isolate, 6),
        (Self::IsolateLeader, 8),
        (Self::OneWay, 8),
        (Self::Deafen, 5),
        (Self::Hold, 8),
        (Self::BadLinks, 6),
        (Self::SlowLinks, 6),
        (Self::CutStreams, 8),
        (Self::SlowDisk, 6),
        (Self::FailDisk, 4),
        (Self::Join, 5),
        (Self::Promote, 8),
        (Self::Remove, 4),
        (Self::Transfer, 6),
        (Self::Snapshot, 6),
        (Self::LoseState, 3),
        (Self::Descriptors, 5),
        (Self::FullDisk, 5),
        (Self::WrongClock, 5),
        (Self::Liar, 0),
        (Self::Scale, 0),
        (Self::Upgrade, 0),
    ];

    /// The next one, of those that `only` names; of all when it is empty.
    pub fn draw(rng: &mut Rng, only: &[Self]) -> Self {
        let drawn = Self::ALL.iter().filter_map(|(fault, weight)| {
            // Named, it happens however seldom it does else.
            let weight = if only.is_empty() {
                *weight
            } else {
                (*weight).max(1)
            };
            let can = only.is_empty() || only.contains(fault);
            can.then_some((fault, weight))
        });
        let sum: u32 = drawn.clone().map(|(_, weight)| weight).sum();
        let mut left = rng.below(sum.into());
        for (fault, weight) in drawn {
            match left.checked_sub(u64::from(weight)) {
                Some(rest) => left = rest,
                None => return *fault,
            }
        }
        unreachable!("what is below the sum of all weights falls on one of them")
    }

    /// Whether whoever leads goes on to.
    #[must_use]
    pub fn lets_lead(self) -> bool {
        matches!(
            self,
            Self::ClockJump
                | Self::CutStreams
                | Self::Liar
                | Self::SlowDisk
                | Self::SlowLinks
                | Self::Snapshot
                | Self::WrongClock
        )
    }

    /// Whether a process ends by it: a state that was lost may be in its snapshot, and nobody knows
    /// of it when it starts again.
    #[must_use]
    pub fn ends_processes(self) -> bool {
        matches!(
            self,
            Self::Crash
                | Self::CrashAll
                | Self::Bounce
                | Self::Leave
                | Self::FailDisk
                | Self::Scale
                | Self::Upgrade
        )
    }

    /// The fault of this name, as it is displayed.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().map(|(fault, _)| *fault);
        all.find(|fault| fault.to_string() == name)
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = format!("{self:?}");
        for (at, letter) in name.char_indices() {
            if letter.is_uppercase() && at > 0 {
                f.write_str("-")?;
            }
            write!(f, "{}", letter.to_ascii_lowercase())?;
        }
        Ok(())
    }
}

/// What ends a fault.
#[derive(Debug, Clone)]
pub enum Remedy {
    /// The machine's process starts.
    Start(u8),
    /// It is killed.
    Kill(u8),
    /// It is scheduled again.
    Resume(u8),
    /// The wall clock is right again.
    RightClock(u8),
    /// Links stand again.
    Heal(Vec<(u8, u8)>),
    /// Calls reach it again.
    Hear(u8),
    /// Links that lose and repeat are as good as they were drawn.
    Soothe(Vec<(u8, u8)>),
    /// Slow links are.
    Quicken(Vec<(u8, u8)>),
    /// The disk is as quick as it was.
    QuickDisk(u8),
    /// There are descriptors and space again.
    EndShortage(u8),
    /// The disk is mended, and the replica that took itself out starts again.
    MendDisk(u8),
    /// The API server answers again.
    AnswerScale,
}

impl Remedy {
    /// Whether whoever leads goes on to while what this ends lasts.
    #[must_use]
    pub fn lets_lead(&self) -> bool {
        match self {
            Self::RightClock(_) | Self::Quicken(_) | Self::QuickDisk(_) | Self::AnswerScale => true,
            Self::Start(_)
            | Self::Kill(_)
            | Self::Resume(_)
            | Self::Heal(_)
            | Self::Hear(_)
            | Self::Soothe(_)
            | Self::EndShortage(_)
            | Self::MendDisk(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_drawn_and_has_a_name() {
        let mut rng = Rng::new(1, 0);
        let mut drawn = std::collections::BTreeSet::new();
        for _ in 0..10_000 {
            drawn.insert(Fault::draw(&mut rng, &[]));
        }
        for beside in [Fault::Liar, Fault::Scale, Fault::Upgrade] {
            drawn.insert(Fault::draw(&mut rng, &[beside]));
        }
        assert_eq!(drawn.len(), Fault::ALL.len());
        for fault in drawn {
            assert_eq!(Fault::named(&fault.to_string()), Some(fault));
        }
        assert_eq!(Fault::IsolateLeader.to_string(), "isolate-leader");
        let only = Fault::draw(&mut rng, &[Fault::Pause]);
        assert_eq!(only, Fault::Pause);
    }
}

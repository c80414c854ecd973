//! Kinds of faults and their ends, drawn from the seed.

use lab::rng::Rng;

/// Mean number of faults per forged call. Those are drawn separately, so that they do not change a seed's
/// other faults.
pub const FORGED_CALLS: u64 = 4;

/// Kind of fault in a simulated world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// A process is killed, and its machine loses unsynced data. The process restarts later.
    Crash,
    /// All processes crash at once.
    CrashAll,
    /// A process is killed and restarts immediately.
    Bounce,
    /// A replica leaves gracefully and comes back.
    Leave,
    /// A process is not scheduled for a while, as by SIGSTOP.
    Pause,
    /// A machine's wall clock jumps forwards or backwards.
    ClockJump,
    /// The replicas are partitioned into two halves.
    Halves,
    /// One replica is cut off from the others.
    Isolate,
    /// The leader is cut off from the others.
    IsolateLeader,
    /// Messages between some replicas pass in one direction only.
    OneWay,
    /// No call reaches a replica, mostly the leader. Its own calls are answered.
    Deafen,
    /// Messages on some links are delayed and then arrive all at once.
    Hold,
    /// Some links lose and repeat messages.
    BadLinks,
    /// Some links are slow.
    SlowLinks,
    /// Connections between some replicas break, perhaps in the middle of a transfer.
    CutStreams,
    /// A disk is slow to sync.
    SlowDisk,
    /// A disk accepts no writes until it is repaired and its replica restarted.
    FailDisk,
    /// A new replica joins as a learner.
    Join,
    /// A learner is promoted to voter.
    Promote,
    /// A member is removed.
    Remove,
    /// An operator transfers leadership.
    Transfer,
    /// A replica takes a snapshot.
    Snapshot,
    /// A follower loses its state to a memory fault.
    LoseState,
    /// A process has no file descriptors left for a while.
    Descriptors,
    /// A disk is full for a while. Its replica is not restarted.
    FullDisk,
    /// A wall clock, or seldom all of them, is wrong by hours or days for a long time.
    WrongClock,
    /// A faulty member, or a stranger, makes calls that no correct replica makes.
    Liar,
    /// A StatefulSet changes its number of replicas. Its API server may be unavailable for a while.
    Scale,
    /// A replica restarts with another build, which knows later formats or fewer formats.
    Upgrade,
}

impl Fault {
    /// All faults with their weights. Forged calls (see [`FORGED_CALLS`]) and changes to whole fleets (`fleet.rs`)
    /// have weight 0, because they are drawn separately.
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

    /// Draws the next fault from `only`, or from all faults if that is empty.
    pub fn draw(rng: &mut Rng, only: &[Self]) -> Self {
        let drawn = Self::ALL.iter().filter_map(|(fault, weight)| {
            // A fault in `only` happens even if its weight is zero or low.
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

    /// Returns whether the current leader keeps leading despite the fault.
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

    /// Returns whether the fault ends a process. A corrupted state may be in its snapshot, and the
    /// restarted process would not know.
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

    /// Returns the fault with this name, as it is displayed.
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

/// Action that ends a fault.
#[derive(Debug, Clone)]
pub enum Remedy {
    /// Starts the process of a machine.
    Start(u8),
    /// Kills the process of a machine.
    Kill(u8),
    /// Resumes the process of a machine.
    Resume(u8),
    /// Corrects the wall clock of a machine.
    RightClock(u8),
    /// Restores cut links.
    Heal(Vec<(u8, u8)>),
    /// Lets calls reach a replica again.
    Hear(u8),
    /// Restores the drawn quality of links that lose and repeat messages.
    Soothe(Vec<(u8, u8)>),
    /// Restores the drawn latency of slow links.
    Quicken(Vec<(u8, u8)>),
    /// Restores the speed of a machine's disk.
    QuickDisk(u8),
    /// Ends a machine's shortage of descriptors or disk space.
    EndShortage(u8),
    /// Repairs a machine's disk and restarts the replica, which had stopped itself.
    MendDisk(u8),
    /// Makes the API server of the StatefulSet available again.
    AnswerScale,
}

impl Remedy {
    /// Returns whether the current leader keeps leading while the fault that this ends lasts.
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
    fn every_fault_is_drawn_and_named() {
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

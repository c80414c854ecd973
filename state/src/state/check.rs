//! The numbered invariants of docs/ARCHITECTURE.md, and [`RouterState::check`].
//!
//! - **I1** Ownership is prefix-closed: a backend that owns a block owns every block before it.
//! - **I2** The published read view shows exactly the owned blocks.
//! - **I3** A backend owns at most its capacity, unless open leases pin more.
//! - **I4** Counters never fall, and what users were charged, forgotten ones included, adds up to
//!   all charges applied.
//! - **I5** No two backends share a slot, a name or a [`BackendRef`](crate::ids::BackendRef), and
//!   every open lease is on a present life of a backend and of a replica that has a session.
//! - **I6** A block's pins are the open leases that end in it plus the owned blocks right behind it.
//! - **I7** A user's requests in flight are the sum over replicas that have a session, and who is
//!   backlogged and who can be forgotten follows from it.
//! - **I8** The digest, kept as the state changes, equals one computed from scratch.
//! - **I9** The published registry and index are those of the state.
//!
//! I4's "never fall" is about time: a check of one moment cannot see it; the property tests do.

use super::RouterState;
use super::published::Registry;

/// An invariant of docs/ARCHITECTURE.md that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invariant {number} broken: {detail}")]
pub struct Broken {
    /// Number as in docs/ARCHITECTURE.md, `"I4"`.
    pub number: &'static str,
    /// With the values that break it.
    pub detail: String,
}

impl RouterState {
    /// Checks every invariant; for tests and `debug_assert`, slow on a large state.
    ///
    /// # Errors
    /// The first broken one.
    pub fn check(&self) -> Result<(), Broken> {
        self.check_ownership()?;
        self.check_leases()?;
        self.users.check()?;
        self.check_users_in_flight()?;
        self.check_published()
    }

    /// I1 to I3, I6 and ownership's part of I8.
    fn check_ownership(&self) -> Result<(), Broken> {
        let tips = self
            .leases
            .iter()
            .filter_map(|(_, lease)| Some((lease.backend.slot, lease.tip?)));
        self.ownership.check(tips)
    }

    /// I5, and the leases' part of I8.
    fn check_leases(&self) -> Result<(), Broken> {
        self.backends
            .check()
            .map_err(|detail| broken("I5", detail))?;
        for (holder, lease) in self.leases.iter() {
            if !self.backends.is_live(lease.backend) || !self.sessions.contains(holder.replica) {
                return Err(broken("I5", format!("{holder:?} holds {lease:?}")));
            }
        }
        ensure(
            self.leases.is_consistent(),
            "I8",
            "the digest of leases differs from the leases",
        )
    }

    /// I7's part that spans users and sessions.
    fn check_users_in_flight(&self) -> Result<(), Broken> {
        let stray = self
            .users
            .replicas_in_flight()
            .find(|it| !self.sessions.contains(*it));
        match stray {
            None => Ok(()),
            Some(replica) => Err(broken(
                "I7",
                format!("replica {replica} has requests but no session"),
            )),
        }
    }

    /// I9, and the small parts of I8.
    fn check_published(&self) -> Result<(), Broken> {
        ensure(
            self.cold_digest == self.hash_cold(),
            "I8",
            "the digest of the registry differs",
        )?;
        let registry = Registry::of(&self.config, &self.backends);
        ensure(
            *self.view.registry() == registry,
            "I9",
            "the published registry differs",
        )?;
        ensure(
            self.view.applied() == self.applied,
            "I9",
            "the published index differs",
        )
    }
}

fn ensure(holds: bool, number: &'static str, detail: &str) -> Result<(), Broken> {
    if holds {
        Ok(())
    } else {
        Err(broken(number, detail.to_owned()))
    }
}

fn broken(number: &'static str, detail: String) -> Broken {
    Broken { number, detail }
}

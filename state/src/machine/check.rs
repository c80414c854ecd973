//! The invariants of a state, numbered as in docs/internals/invariants.md, and their check
//! [`RouterState::check`].
//!
//! - **I1** Ownership is prefix-closed: a backend that owns a block owns every block before it.
//! - **I2** The published read view shows exactly the owned blocks.
//! - **I3** A backend owns at most its capacity, not counting what its engine reports, unless open
//!   leases pin more.
//! - **I4** Counters never fall. The charges of all users, forgotten ones included, add up to all
//!   charges applied.
//! - **I5** No two backends share a slot, a name or a [`BackendRef`](crate::ids::BackendRef). Every
//!   open lease is on a live incarnation and belongs to a replica with a session.
//! - **I6** A block's pins are the open leases that end in it plus the owned blocks directly behind
//!   it.
//! - **I7** A user's requests in flight and waiting are the sums over replicas with a session. The
//!   sets of backlogged, waiting and forgettable users follow from them.
//! - **I8** The incrementally kept digest equals one computed from scratch.
//! - **I9** The published registry, service figures, output lengths, ratios, users and index are
//!   those of the state.
//! - **I20** The models and pairs with output lengths stay within their bounds, the pairs' order
//!   and digest match the pairs, and the bins of every model ascend from above 0.
//! - **I22** For a backend whose KV events are followed, the reported blocks are exactly those that
//!   its ranks hold and that connect to a first block over such blocks; none while a rank is
//!   unknown. Counts, sums and bounds agree.
//! - **I74** Learned bytes per token, their number and their weights stay within their bounds.
//! - **I75** Block sizes stay within their bounds and belong to registered backends.
//! - **I100** Every secret of an API key leads to that key and no other, in the table and as
//!   published. The number of keys is within its bound, and no key has a revoked id.
//! - **I105** The settings of every user pass validation.
//! - **I113** The further ranks of an engine have consecutive numbers and follow its first rank.
//! - **I118** The reported leaves that have an age and no lease are in the order in which their
//!   engine evicts them, and nothing else is.
//! - **I132** Every backend recorded as registered by a source exists and has a valid source.
//! - **I165** A tree counts its sessions that have not ended. The places, the orders and the
//!   digest of sessions follow from the sessions and trees.
//! - **I168** The order and the digest of resumable streams follow from their records, whose number is
//!   within its bound.
//! - **I172** The rows of usage and what was dropped by age add up to all usage charged. The order and
//!   the digest follow from the rows, whose number is within its bound.
//! - **I173** A source of usage that has a name keeps it as long as a row has the source. The number of
//!   names without rows is within its bound.
//! - **I174** A model for which requests run or wait wants an engine. The demand and its number of
//!   models stay within their bounds, are published, and belong to replicas with a session.
//! - **I23** A block has exactly as many reports as ranks report it.
//!
//! The check sees one moment, so it cannot verify that counters never fall (I4). Property tests do.

use super::RouterState;
use crate::error::InvariantError;
use crate::ids::Slot;

impl RouterState {
    /// Checks every invariant. Slow on a large state, so only tests and debug assertions use it.
    ///
    /// # Errors
    /// Describes the first broken invariant.
    pub fn check(&self) -> Result<(), InvariantError> {
        self.check_ownership()?;
        self.check_exact()?;
        self.check_leases()?;
        self.users.check()?;
        self.check_users_in_flight()?;
        self.outputs
            .check()
            .map_err(|detail| broken("I20", detail))?;
        self.ratios
            .check()
            .map_err(|detail| broken("I74", detail))?;
        self.check_capacity()?;
        self.check_keys()?;
        self.trees
            .check()
            .map_err(|detail| broken("I165", detail))?;
        self.streams
            .check()
            .map_err(|detail| broken("I168", detail))?;
        self.usage
            .check()
            .map_err(|detail| broken("I172", detail))?;
        self.usage
            .check_sources()
            .map_err(|detail| broken("I173", detail))?;
        self.check_published()
    }

    /// Checks I174.
    fn check_capacity(&self) -> Result<(), InvariantError> {
        let sound = self.capacity.check();
        sound.map_err(|detail| broken("I174", detail))?;
        let mut replicas = self.capacity.replicas();
        if let Some(stray) = replicas.find(|it| !self.sessions.contains(*it)) {
            let detail = format!("replica {stray} has demand but no session");
            return Err(broken("I174", detail));
        }
        ensure(
            **self.view.capacity() == self.capacity.view(),
            "I174",
            "the published demand differs",
        )
    }

    /// Checks I100, for the table of keys and the published keys.
    fn check_keys(&self) -> Result<(), InvariantError> {
        self.keys.check().map_err(|detail| broken("I100", detail))?;
        ensure(
            self.keys.are(&self.view.keys()),
            "I100",
            "the published keys differ",
        )
    }

    /// Checks I1 to I3, I6, and the part of I8 that concerns ownership.
    fn check_ownership(&self) -> Result<(), InvariantError> {
        let tips = self
            .leases
            .iter()
            .filter_map(|(_, lease)| Some((lease.backend.slot, lease.tip?)));
        self.ownership.check(tips)?;
        let is_odd = |slot: &Slot| self.ownership.capacity(*slot) != self.capacity_blocks(*slot);
        match self.backends.iter().map(|it| it.handle.slot).find(is_odd) {
            Some(slot) => {
                let (is, must) = (self.ownership.capacity(slot), self.capacity_blocks(slot));
                let detail = format!("slot {slot} is bounded by {is:?}, expected {must:?}");
                Err(broken("I3", detail))
            }
            None => Ok(()),
        }
    }

    /// Checks I22, I23 and I176.
    fn check_exact(&self) -> Result<(), InvariantError> {
        let sound = self.exact.check();
        sound.map_err(|detail| broken("I22", detail))?;
        let mut followed = self.exact.conditions();
        if let Some((backend, _)) = followed.find(|(it, _)| !self.backends.is_live(*it)) {
            return Err(broken("I22", format!("{backend:?} is not there")));
        }
        self.tiers
            .check(&|level, slot| self.exact.reports(level, slot))?;
        let reports = |slot| self.exact.reports(0, slot);
        let held = self.ownership.check_reports(&reports);
        held.map_err(|detail| broken("I23", detail))
    }

    /// Checks I5, I75, I113, I132, the leases' part of I8, and that measured backends exist.
    fn check_leases(&self) -> Result<(), InvariantError> {
        self.backends
            .check()
            .map_err(|detail| broken("I5", detail))?;
        let ranks = self.backends.check_ranks();
        ranks.map_err(|detail| broken("I113", detail))?;
        self.block_sizes
            .check(&self.backends)
            .map_err(|detail| broken("I75", detail))?;
        self.discovered
            .check(|slot| self.backends.in_slot(slot).is_some())
            .map_err(|detail| broken("I132", detail))?;
        for (holder, lease) in self.leases.iter() {
            if !self.backends.is_live(lease.backend) || !self.sessions.contains(holder.replica) {
                return Err(broken("I5", format!("{holder:?} holds {lease:?}")));
            }
        }
        let mut measured = (self.service.slots())
            .chain(self.assumed.slots())
            .chain(self.beliefs.slots());
        if let Some(slot) = measured.find(|slot| self.backends.in_slot(*slot).is_none()) {
            return Err(broken("I5", format!("slot {slot} is empty and measured")));
        }
        ensure(
            self.leases.is_consistent(),
            "I8",
            "the digest of leases differs from the leases",
        )
    }

    /// Checks the part of I7 that spans users, sessions and time.
    fn check_users_in_flight(&self) -> Result<(), InvariantError> {
        let stray = self
            .users
            .replicas_open()
            .find(|it| !self.sessions.contains(*it));
        if let Some(replica) = stray {
            let detail = format!("replica {replica} has requests but no session");
            return Err(broken("I7", detail));
        }
        Ok(())
    }

    /// Checks the rest of I9, and the part of I8 that concerns rarely changing parts.
    fn check_published(&self) -> Result<(), InvariantError> {
        ensure(
            self.cold_digest == self.hash_cold(),
            "I8",
            "the digest of the registry differs",
        )?;
        let users = self.view.users();
        ensure(self.users.are(&users), "I9", "the published users differ")?;
        let registry = self.registry();
        ensure(
            *self.view.registry() == registry,
            "I9",
            "the published registry differs",
        )?;
        ensure(
            **self.view.service() == self.service_view(),
            "I9",
            "the published service differs",
        )?;
        ensure(
            self.view.outputs().is_of(&self.outputs),
            "I9",
            "the published output lengths differ",
        )?;
        ensure(
            **self.view.ratios() == self.ratios.view(),
            "I9",
            "the published ratios differ",
        )?;
        ensure(
            self.view.applied() == self.applied,
            "I9",
            "the published index differs",
        )
    }
}

fn ensure(holds: bool, number: &'static str, detail: &str) -> Result<(), InvariantError> {
    if holds {
        Ok(())
    } else {
        Err(broken(number, detail.to_owned()))
    }
}

fn broken(number: &'static str, detail: String) -> InvariantError {
    InvariantError { number, detail }
}

//! Commands of operators and the leader. A rejected command changes nothing. A command that takes
//! effect returns `Ok` and, except for [`RouterState::set_ranks`], adds an audit entry.

use super::{AuditAction, AuditEntry, RouterState};
use crate::backends::{BackendSpec, RANKS_MAX, SlotChange};
use crate::bounds::NAME_BYTES_MAX;
use crate::command::{Founding, Origin};
use crate::ids::{BackendRef, ReplicaId, SessionId, Slot};
use crate::policy::PolicyConfig;
use crate::reject::Rejection;
use crate::validate::ensure;

impl RouterState {
    pub(super) fn found(&mut self, origin: &Origin, founding: Founding) -> Result<(), Rejection> {
        if self.config.initialised {
            return Err(Rejection::AlreadyInitialised);
        }
        founding.validate()?;
        let subject = founding.policy.name().to_owned();
        self.config = super::ClusterConfig {
            initialised: true,
            hash_seed: founding.hash_seed,
            hash_secret: founding.hash_secret,
            policy: founding.policy,
            fairness: founding.fairness,
        };
        self.settings.routing = founding.routing;
        self.set_admission(founding.admission);
        self.users.set_defaults(founding.user_defaults);
        self.note(origin, AuditAction::FoundCluster, subject);
        Ok(())
    }

    pub(super) fn put_backend(
        &mut self,
        origin: &Origin,
        spec: BackendSpec,
    ) -> Result<(), Rejection> {
        spec.validate()?;
        let name = spec.id.clone();
        let before = self.backends.named(&name);
        let is_same = before.is_some_and(|it| it.spec == spec);
        let slot = self.set_backend(spec)?;
        let was_discovered = self.take_over(slot, &name);
        self.is_cold_changed = true;
        // Several replicas may register a backend of their config at the same time.
        if !is_same || was_discovered {
            self.note(origin, AuditAction::PutBackend, name);
        }
        Ok(())
    }

    /// Adds or updates the backend that a valid `spec` names. Returns its slot, or
    /// [`Rejection::TooManyBackends`].
    pub(super) fn set_backend(&mut self, spec: BackendSpec) -> Result<Slot, Rejection> {
        let name = spec.id.clone();
        let changes = self.backends.put(spec).ok_or(Rejection::TooManyBackends)?;
        self.follow(&changes);
        let begun = changes.iter().find_map(|change| match change {
            SlotChange::Begun(slot) => Some(*slot),
            SlotChange::Resized(_) | SlotChange::Gone(_) => None,
        });
        let named = self.backends.named(&name).map(|it| it.handle.slot);
        let slot = named.expect("it was put");
        match begun {
            Some(slot) => self.block_sizes.forget(slot),
            None => self.settle_block_sizes(slot),
        }
        Ok(slot)
    }

    pub(super) fn delete_backend(
        &mut self,
        origin: &Origin,
        name: String,
    ) -> Result<(), Rejection> {
        if !self.remove_backend(&name) {
            return Err(unknown_backend(name));
        }
        self.note(origin, AuditAction::DeleteBackend, name);
        Ok(())
    }

    /// Removes a backend and everything known about it. Returns whether the backend existed.
    pub(super) fn remove_backend(&mut self, name: &str) -> bool {
        let Some(changes) = self.backends.remove(name) else {
            return false;
        };
        self.follow(&changes);
        true
    }

    pub(super) fn set_draining(
        &mut self,
        origin: &Origin,
        name: String,
        (draining, moves_streams): (bool, bool),
    ) -> Result<(), Rejection> {
        if !self.backends.set_draining(&name, draining) {
            return Err(unknown_backend(name));
        }
        self.backends.move_streams(&name, moves_streams);
        if let Some(backend) = self.backends.named(&name) {
            self.discovered
                .drained_by_hand(backend.handle.slot, draining);
        }
        let action = match (draining, moves_streams) {
            (true, true) => AuditAction::DrainMovingStreams,
            (true, false) => AuditAction::Drain,
            (false, _) => AuditAction::Undrain,
        };
        self.note(origin, action, name);
        Ok(())
    }

    /// Sets the number of ranks that an engine reports. Ignores reports of earlier incarnations.
    pub(super) fn set_ranks(&mut self, backend: BackendRef, ranks: u16) -> Result<(), Rejection> {
        ensure((1..=RANKS_MAX).contains(&ranks), "ranks", "1 to 64")?;
        let live = self.backends.in_slot(backend.slot);
        let Some(engine) = live.filter(|it| it.handle == backend) else {
            return Ok(());
        };
        let is_first = !engine.is_further_rank();
        ensure(is_first, "backend", "the first rank of an engine")?;
        let changes = self.backends.set_ranks(backend.slot, ranks);
        let changes = changes.ok_or(Rejection::TooManyBackends)?;
        self.follow(&changes);
        self.is_cold_changed |= !changes.is_empty();
        Ok(())
    }

    pub(super) fn put_policy(
        &mut self,
        origin: &Origin,
        policy: PolicyConfig,
    ) -> Result<(), Rejection> {
        policy.validate()?;
        let subject = policy.name().to_owned();
        self.config.policy = policy;
        self.note(origin, AuditAction::PutPolicy, subject);
        Ok(())
    }

    /// Closes everything that the session of a replica has open. Ignores a session that is no
    /// longer current, because its leases are already closed.
    pub(super) fn expire_session(&mut self, replica: ReplicaId, session: SessionId) {
        if self.sessions.is_current(replica, session) {
            self.close_replica(replica);
            self.is_cold_changed = true;
        }
    }

    pub(super) fn note(&mut self, origin: &Origin, action: AuditAction, subject: String) {
        let (index, at_ms, replica) = (self.applied, self.stamped_ms, origin.replica);
        self.audit.push(AuditEntry {
            index,
            at_ms,
            replica,
            action,
            subject,
        });
        self.is_cold_changed = true;
    }
}

/// Returns the rejection of a command that names an unknown backend. Truncates `name`, which the
/// reply keeps, to the maximum length of a name.
pub(super) fn unknown_backend(mut name: String) -> Rejection {
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    Rejection::UnknownBackend { name }
}

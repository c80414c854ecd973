//! The stream of cluster events: `GET /admin/v1/events` and other subscribers.
//!
//! Most events are found by comparing two looks at the cluster ([`status_changes`]) or at the
//! registry ([`registry_changes`]); both are pure. [`follow`] takes the looks. A subscriber that
//! does not keep up loses the oldest events and is told how many.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use state::exact::{KvCondition, KvMode};
use state::ids::{ReplicaId, Slot};
use state::policy::{PolicyConfig, RoutingSettings};
use state::service::ServiceView;
use state::{Backend, Registry, StateView};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::ports::{Cluster, ClusterStatus};

/// Events kept for a subscriber that is behind.
pub const EVENTS_KEPT_MAX: usize = 1024;
/// From one look at the cluster to the next.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Something an operator may want to know.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum ClusterEvent {
    /// Another leader is followed, or none.
    Leader {
        /// The leader.
        leader: Option<ReplicaId>,
        /// Its term.
        term: u64,
    },
    /// This replica's role changed.
    Role {
        /// As [`ClusterStatus::role`].
        role: &'static str,
    },
    /// A quorum answers, or does so no longer.
    Quorum {
        /// Whether one does.
        has_quorum: bool,
    },
    /// A member came, went, or changed.
    Member {
        /// Which.
        id: ReplicaId,
        /// How.
        change: MemberChange,
    },
    /// This replica took or received a snapshot.
    Snapshot {
        /// Index it stands at.
        index: u64,
    },
    /// This replica's storage is at fault.
    Fault {
        /// In words.
        detail: String,
    },
    /// The registry changed.
    Backend {
        /// The backend's id.
        id: String,
        /// How.
        change: BackendChange,
    },
    /// A backend became healthy or unhealthy, as seen from this replica.
    BackendHealth {
        /// The backend's id.
        id: String,
        /// Whether it is healthy.
        is_healthy: bool,
        /// Why not.
        detail: Option<String>,
    },
    /// A backend's circuit opened or closed, as seen from this replica.
    BackendCircuit {
        /// The backend's id.
        id: String,
        /// Whether requests pass it over.
        is_open: bool,
    },
    /// Predictions of what a backend has cached are off beyond the bound, or no longer.
    BackendAccuracy {
        /// The backend's id.
        id: String,
        /// Whether they are off.
        is_off: bool,
        /// Predicted less cached, thousandths of the prompt tokens.
        error_permille: i32,
        /// What the capacity that its engine told is taken times, thousandths.
        correction_permille: u32,
    },
    /// What routing follows beside the policy was replaced.
    Routing {
        /// The new settings.
        config: RoutingSettings,
    },
    /// The ownership of a backend is known in another way, or another replica reads its KV events.
    Ownership {
        /// The backend's id.
        id: String,
        /// How it is known: `exact`, `degraded` or `lease`.
        mode: KvMode,
        /// Why it is not exact.
        reason: Option<String>,
        /// Who reads its KV events.
        reader: Option<ReplicaId>,
    },
    /// The routing policy was replaced.
    Policy {
        /// The new one.
        config: PolicyConfig,
    },
    /// A peer's state differs from this replica's at the same index: never right.
    DigestMismatch {
        /// The peer.
        peer: ReplicaId,
        /// Where.
        index: u64,
        /// This replica's digest, 32 hex digits.
        ours: String,
        /// The peer's.
        theirs: String,
    },
}

/// How a member changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemberChange {
    /// It is new.
    Added,
    /// It became a voter.
    Promoted,
    /// It is a voter no more.
    Demoted,
    /// It is gone.
    Removed,
    /// It is heard from.
    Connected,
    /// It is not heard from.
    Disconnected,
}

/// How a backend changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendChange {
    /// It is new.
    Added,
    /// An operator changed it, or its engine told other facts.
    Changed,
    /// A new incarnation began: another URL, or the engine restarted.
    Restarted,
    /// It takes no new requests.
    Draining,
    /// It takes requests again.
    Undrained,
    /// It is gone.
    Removed,
}

/// An event with its place in this replica's stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NumberedEvent {
    /// From 1, ascending by one, anew at each start of the replica.
    #[serde(skip)]
    pub number: u64,
    /// When it was noticed, unix milliseconds.
    pub at_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: ClusterEvent,
}

/// The stream of events of one replica. Cheap to clone; sending never waits.
#[derive(Clone)]
pub struct EventBus {
    sender: broadcast::Sender<Arc<NumberedEvent>>,
    /// The last number given; held until its event is sent, so that they come in order.
    last: Arc<Mutex<u64>>,
    clock: Clock,
}

impl Default for EventBus {
    fn default() -> Self {
        Self::new(Clock::default())
    }
}

impl EventBus {
    /// Nobody has subscribed; events are stamped by `clock`.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self {
            sender: broadcast::Sender::new(EVENTS_KEPT_MAX),
            last: Arc::default(),
            clock,
        }
    }

    /// Gives `event` to every subscriber.
    pub fn send(&self, event: ClusterEvent) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        let number = *last;
        let at_ms = self.clock.unix_ms();
        // Nobody listening is no fault.
        drop(self.sender.send(Arc::new(NumberedEvent {
            number,
            at_ms,
            event,
        })));
    }

    /// Every event from now on.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<NumberedEvent>> {
        self.sender.subscribe()
    }
}

impl ClusterEvent {
    /// Its name, the `event` field of an SSE event.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Leader { .. } => "leader",
            Self::Role { .. } => "role",
            Self::Quorum { .. } => "quorum",
            Self::Member { .. } => "member",
            Self::Snapshot { .. } => "snapshot",
            Self::Fault { .. } => "fault",
            Self::Backend { .. } => "backend",
            Self::BackendHealth { .. } => "backend-health",
            Self::BackendCircuit { .. } => "backend-circuit",
            Self::BackendAccuracy { .. } => "backend-accuracy",
            Self::Routing { .. } => "routing",
            Self::Ownership { .. } => "ownership",
            Self::Policy { .. } => "policy",
            Self::DigestMismatch { .. } => "digest-mismatch",
        }
    }
}

/// What happened between two looks at the cluster, in a fixed order.
#[must_use]
pub fn status_changes(before: &ClusterStatus, after: &ClusterStatus) -> Vec<ClusterEvent> {
    let mut events = Vec::new();
    if (before.leader, before.term) != (after.leader, after.term) {
        events.push(ClusterEvent::Leader {
            leader: after.leader,
            term: after.term,
        });
    }
    if before.role != after.role {
        events.push(ClusterEvent::Role { role: after.role });
    }
    if before.has_quorum != after.has_quorum {
        events.push(ClusterEvent::Quorum {
            has_quorum: after.has_quorum,
        });
    }
    if let Some(detail) = after.fault.clone().filter(|_| before.fault != after.fault) {
        events.push(ClusterEvent::Fault { detail });
    }
    if let Some(index) = after.snapshot_index
        && before.snapshot_index != after.snapshot_index
    {
        events.push(ClusterEvent::Snapshot { index });
    }
    member_changes(before, after, &mut events);
    events
}

fn member_changes(before: &ClusterStatus, after: &ClusterStatus, events: &mut Vec<ClusterEvent>) {
    let mut push = |id: ReplicaId, change| events.push(ClusterEvent::Member { id, change });
    for (&id, member) in &after.members {
        let Some(earlier) = before.members.get(&id) else {
            push(id, MemberChange::Added);
            continue;
        };
        match (earlier.is_voter, member.is_voter) {
            (false, true) => push(id, MemberChange::Promoted),
            (true, false) => push(id, MemberChange::Demoted),
            (false, false) | (true, true) => {}
        }
        match (earlier.is_connected, member.is_connected) {
            (false, true) => push(id, MemberChange::Connected),
            (true, false) => push(id, MemberChange::Disconnected),
            (false, false) | (true, true) => {}
        }
    }
    for &id in before.members.keys() {
        if !after.members.contains_key(&id) {
            push(id, MemberChange::Removed);
        }
    }
}

/// What happened between two looks at the registry, by slot.
#[must_use]
pub fn registry_changes(before: &Registry, after: &Registry) -> Vec<ClusterEvent> {
    let mut events = Vec::new();
    let mut push = |id: &str, change| {
        events.push(ClusterEvent::Backend {
            id: id.to_owned(),
            change,
        });
    };
    let (earlier, later) = (by_id(before), by_id(after));
    for id in earlier.keys().filter(|id| !later.contains_key(*id)) {
        push(id, BackendChange::Removed);
    }
    for backend in &after.backends {
        let id = &backend.spec.id;
        let Some(earlier) = earlier.get(id.as_str()) else {
            push(id, BackendChange::Added);
            continue;
        };
        if earlier.handle != backend.handle {
            push(id, BackendChange::Restarted);
        } else if (&earlier.spec, &earlier.facts) != (&backend.spec, &backend.facts) {
            push(id, BackendChange::Changed);
        }
        match (earlier.draining, backend.draining) {
            (false, true) => push(id, BackendChange::Draining),
            (true, false) => push(id, BackendChange::Undrained),
            (false, false) | (true, true) => {}
        }
    }
    ownership_changes(before, after, &mut events);
    if before.policy != after.policy {
        events.push(ClusterEvent::Policy {
            config: after.policy.clone(),
        });
    }
    if let Some(config) = after
        .routing
        .clone()
        .filter(|_| before.routing != after.routing)
    {
        events.push(ClusterEvent::Routing { config });
    }
    events
}

/// Whose predictions came to be off, or good again, between two looks, by slot.
#[must_use]
pub fn accuracy_changes(
    registry: &Registry,
    before: &ServiceView,
    after: &ServiceView,
) -> Vec<ClusterEvent> {
    let mut events = Vec::new();
    for backend in &registry.backends {
        let accuracy = |service: &ServiceView| {
            let served = service.get(backend.handle.slot);
            let served = served.filter(|served| served.backend == backend.handle);
            served.and_then(|served| served.accuracy)
        };
        let was_off = accuracy(before).is_some_and(|accuracy| accuracy.is_off);
        if let Some(now) = accuracy(after).filter(|now| now.is_off != was_off) {
            events.push(ClusterEvent::BackendAccuracy {
                id: backend.spec.id.clone(),
                is_off: now.is_off,
                error_permille: now.error_permille,
                correction_permille: now.correction_permille,
            });
        }
    }
    events
}

/// How a backend's ownership is known, and who reads its KV events.
type Knowledge = (Option<KvCondition>, Option<ReplicaId>);

fn ownership_changes(before: &Registry, after: &Registry, events: &mut Vec<ClusterEvent>) {
    let known = |registry: &Registry, slot: Slot| -> Knowledge {
        (registry.kv(slot), registry.reader(slot))
    };
    let earlier = by_id(before);
    for backend in &after.backends {
        let old = earlier.get(backend.spec.id.as_str());
        let old = old.map_or((None, None), |old| known(before, old.handle.slot));
        let (condition, reader) = known(after, backend.handle.slot);
        if old != (condition, reader) {
            events.push(ClusterEvent::Ownership {
                id: backend.spec.id.clone(),
                mode: condition.map_or(KvMode::Lease, |it| it.mode),
                reason: condition.and_then(|it| it.reason).map(|it| it.to_string()),
                reader,
            });
        }
    }
}

fn by_id(registry: &Registry) -> BTreeMap<&str, &Backend> {
    let backends = registry.backends.iter();
    backends.map(|b| (b.spec.id.as_str(), b)).collect()
}

/// Watches the cluster and the registry until `stop` and sends what changes to `events`.
pub async fn follow(
    cluster: Arc<dyn Cluster>,
    view: Arc<StateView>,
    events: EventBus,
    stop: CancellationToken,
) {
    let mut status = cluster.status();
    let mut registry = view.registry();
    let mut service = Arc::clone(&view.service());
    let mut ticks = tokio::time::interval(LOOK_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let status_after = cluster.status();
        let registry_after = view.registry();
        let mut found = status_changes(&status, &status_after);
        if !Arc::ptr_eq(&registry, &registry_after) {
            found.append(&mut registry_changes(&registry, &registry_after));
        }
        let service_after = Arc::clone(&view.service());
        if !Arc::ptr_eq(&service, &service_after) {
            let mut changes = accuracy_changes(&registry_after, &service, &service_after);
            found.append(&mut changes);
        }
        for event in found {
            events.send(event);
        }
        service = service_after;
        status = status_after;
        registry = registry_after;
    }
}

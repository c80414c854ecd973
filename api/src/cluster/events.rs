//! The stream of cluster events, for `GET /admin/v1/events` and other subscribers.
//!
//! Most events result from comparing two views of the cluster ([`status_changes`]) or of the
//! registry ([`registry_changes`]); both functions are pure. [`follow`] polls the views. A slow
//! subscriber loses the oldest events and learns how many. A subscriber that reconnects resumes
//! after the last event it received, as long as the later ones are kept.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use state::ids::{ReplicaId, Slot};
use state::kv_events::{KvCondition, KvMode};
use state::policy::{PolicyConfig, RoutingSettings};
use state::service::ServiceView;
use state::{Backend, Registry, StateView};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use crate::base::clock::Clock;
use crate::ports::{Cluster, ClusterStatus};

/// Maximum number of events kept for subscribers that are slow or reconnect.
pub const EVENTS_KEPT_MAX: usize = 1024;
/// Interval for polling the views of the cluster and of the registry.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// An event for operators.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum ClusterEvent {
    /// The leader or the term changed, or the leader was lost.
    Leader {
        /// Current leader; `null`: none is known.
        leader: Option<ReplicaId>,
        /// Current Raft term.
        term: u64,
    },
    /// This replica's role changed.
    Role {
        /// New role, as in [`ClusterStatus::role`].
        role: &'static str,
    },
    /// A quorum started or stopped responding.
    Quorum {
        /// Whether a quorum responds.
        has_quorum: bool,
    },
    /// A member was added, removed or changed.
    Member {
        /// Id of the member.
        id: ReplicaId,
        /// Kind of change.
        change: MemberChange,
    },
    /// This replica took or received a snapshot.
    Snapshot {
        /// Log index of the snapshot.
        index: u64,
    },
    /// This replica's storage has a fault.
    Fault {
        /// Description of the fault.
        detail: String,
    },
    /// The registry changed.
    Backend {
        /// Id of the backend.
        id: String,
        /// Kind of change.
        change: BackendChange,
    },
    /// A backend became healthy or unhealthy, as seen by this replica.
    BackendHealth {
        /// Id of the backend.
        id: String,
        /// Whether the backend is healthy.
        is_healthy: bool,
        /// Why the backend is unhealthy; `null`: it is healthy.
        detail: Option<String>,
    },
    /// A backend's circuit opened or closed, as seen by this replica.
    BackendCircuit {
        /// Id of the backend.
        id: String,
        /// Whether the circuit is open.
        is_open: bool,
    },
    /// A backend's cache predictions started or stopped exceeding the error bound.
    BackendAccuracy {
        /// Id of the backend.
        id: String,
        /// Whether the predictions exceed the error bound.
        is_off: bool,
        /// Predicted minus actually cached tokens, in thousandths of the prompt tokens; per cent in
        /// JSON.
        #[serde(rename = "error_percent", serialize_with = "state::readable::percent")]
        #[schemars(with = "f64")]
        error_permille: i32,
        /// Corrected capacity, in thousandths of what the engine reports; per cent in JSON.
        #[serde(
            rename = "correction_percent",
            serialize_with = "state::readable::percent"
        )]
        #[schemars(with = "f64")]
        correction_permille: u32,
    },
    /// The routing settings other than the policy were replaced.
    Routing {
        /// The new settings.
        config: RoutingSettings,
    },
    /// A backend's ownership changed: its mode, the reason for the mode, or the reader of its KV
    /// events.
    Ownership {
        /// Id of the backend.
        id: String,
        /// Mode of the ownership: `exact`, `degraded` or `lease`.
        mode: KvMode,
        /// Why the mode is not `exact`; `null`: it is, or no KV events have been reported.
        reason: Option<String>,
        /// Replica that reads the backend's KV events; `null`: none.
        reader: Option<ReplicaId>,
    },
    /// The routing policy was replaced.
    Policy {
        /// The new policy.
        config: PolicyConfig,
    },
    /// A peer's state differs from this replica's at the same index, which indicates a bug.
    DigestMismatch {
        /// Id of the peer.
        peer: ReplicaId,
        /// Log index of the comparison.
        index: u64,
        /// This replica's digest, 32 hex digits.
        ours: String,
        /// The peer's digest, 32 hex digits.
        theirs: String,
    },
}

/// Kind of a member's change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MemberChange {
    /// The member is new.
    Added,
    /// The member became a voter.
    Promoted,
    /// The member is no longer a voter.
    Demoted,
    /// The member was removed.
    Removed,
    /// The member connected to this replica.
    Connected,
    /// The member lost its connection to this replica.
    Disconnected,
}

/// Kind of a backend's change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackendChange {
    /// The backend is new.
    Added,
    /// An operator changed the backend, or the facts that its engine reports changed.
    Changed,
    /// A new incarnation of the backend started: another URL, or the engine restarted.
    Restarted,
    /// The backend accepts no new requests.
    Draining,
    /// The backend accepts requests again.
    Undrained,
    /// The backend was removed.
    Removed,
}

/// An event with its position in this replica's stream.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct NumberedEvent {
    /// Number of the event, from 1, ascending by one, and starting over when the replica restarts.
    #[serde(skip)]
    pub number: u64,
    /// When the event was noticed, in Unix milliseconds.
    pub at_ms: u64,
    /// The event itself.
    #[serde(flatten)]
    pub event: ClusterEvent,
}

/// The stream of events of one replica. Cheap to clone; sending never waits.
#[derive(Clone)]
pub struct EventBus {
    sender: broadcast::Sender<Arc<NumberedEvent>>,
    /// Newest events. The lock is held until an event is sent, so that events stay in order.
    kept: Arc<Mutex<KeptEvents>>,
    /// Number of leader events sent so far.
    leaders: Arc<AtomicU64>,
    clock: Clock,
}

/// The newest events.
#[derive(Default)]
struct KeptEvents {
    /// Last number assigned.
    last: u64,
    /// Events, at most [`EVENTS_KEPT_MAX`], the newest last.
    events: VecDeque<Arc<NumberedEvent>>,
}

/// A subscription that starts with kept events.
pub struct EventReceiver {
    /// Number of the event that precedes the subscription.
    pub after: u64,
    /// Number of requested events that are no longer kept.
    pub missed: u64,
    /// Requested events that are still kept. They precede those of `later`.
    pub earlier: VecDeque<Arc<NumberedEvent>>,
    /// Receiver of all later events.
    pub later: broadcast::Receiver<Arc<NumberedEvent>>,
}

impl Default for EventBus {
    fn default() -> Self {
        Self::new(Clock::default())
    }
}

impl EventBus {
    /// Creates a stream without subscribers, with events stamped by `clock`.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self {
            sender: broadcast::Sender::new(EVENTS_KEPT_MAX),
            kept: Arc::default(),
            leaders: Arc::default(),
            clock,
        }
    }

    /// Sends `event` to every subscriber.
    pub fn send(&self, event: ClusterEvent) {
        if matches!(
            event,
            ClusterEvent::Leader {
                leader: Some(_),
                ..
            }
        ) {
            self.leaders.fetch_add(1, Relaxed);
        }
        let mut kept = self.kept();
        kept.last += 1;
        let event = Arc::new(NumberedEvent {
            number: kept.last,
            at_ms: self.clock.unix_ms(),
            event,
        });
        if kept.events.len() == EVENTS_KEPT_MAX {
            kept.events.pop_front();
        }
        kept.events.push_back(Arc::clone(&event));
        // `send` fails only without subscribers, which is not a fault.
        drop(self.sender.send(event));
    }

    fn kept(&self) -> MutexGuard<'_, KeptEvents> {
        // Every change leaves the value well formed.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of observed leader changes.
    pub(crate) fn leader_changes(&self) -> u64 {
        self.leaders.load(Relaxed)
    }

    /// Subscribes to all future events.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<NumberedEvent>> {
        self.sender.subscribe()
    }

    /// Subscribes to all events after event `number`. Returns `None` if no event has had this number
    /// yet.
    #[must_use]
    pub fn subscribe_after(&self, number: u64) -> Option<EventReceiver> {
        let kept = self.kept();
        (number <= kept.last).then(|| self.receiver(&kept, number))
    }

    /// Subscribes to all future events, after the last `count` that are kept.
    #[must_use]
    pub fn subscribe_last(&self, count: usize) -> EventReceiver {
        let kept = self.kept();
        let count = count.min(kept.events.len()) as u64;
        self.receiver(&kept, kept.last - count)
    }

    fn receiver(&self, kept: &KeptEvents, after: u64) -> EventReceiver {
        let events = kept.events.iter();
        let earlier: VecDeque<_> = events.filter(|it| it.number > after).cloned().collect();
        EventReceiver {
            after,
            missed: kept.last - after - earlier.len() as u64,
            earlier,
            later: self.sender.subscribe(),
        }
    }
}

impl ClusterEvent {
    /// Returns the event's name, used as the `event` field of an SSE event.
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

/// Returns the events between two views of the cluster, in a fixed order.
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

/// Returns the events between two views of the registry, by slot.
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
        let earlier = earlier.get(id.as_str());
        match earlier {
            None => push(id, BackendChange::Added),
            Some(it) if it.handle != backend.handle => push(id, BackendChange::Restarted),
            Some(it) if (&it.spec, &it.facts) != (&backend.spec, &backend.facts) => {
                push(id, BackendChange::Changed);
            }
            Some(_) => {}
        }
        // Applies to a new backend too, which may be drained before the first poll.
        match (earlier.is_some_and(|it| it.draining), backend.draining) {
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
    if before.routing != after.routing {
        events.push(ClusterEvent::Routing {
            config: after.routing.clone(),
        });
    }
    events
}

/// Returns an event for each backend whose predictions started or stopped exceeding the error
/// bound.
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

/// Condition of a backend's ownership, and the reader of its KV events.
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

/// Watches the cluster and the registry from this call until `stop` and sends changes to `events`.
pub fn follow(
    cluster: Arc<dyn Cluster>,
    view: Arc<StateView>,
    events: EventBus,
    stop: CancellationToken,
) -> impl Future<Output = ()> + Send {
    // The views are read here, because a task may first run long after it is spawned.
    let status = cluster.status();
    let registry = view.registry();
    let service = Arc::clone(&view.service());
    async move {
        watch(
            &*cluster,
            &view,
            &events,
            &stop,
            (status, registry, service),
        )
        .await;
    }
}

async fn watch(
    cluster: &dyn Cluster,
    view: &StateView,
    events: &EventBus,
    stop: &CancellationToken,
    (mut status, mut registry, mut service): (ClusterStatus, Arc<Registry>, Arc<ServiceView>),
) {
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

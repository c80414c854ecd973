//! A source of dozens of engines, with the product's plan for it. Every replica polls the source,
//! and the leader acts.
//!
//! The source replaces a part of its engines, one at a time. It omits others now and then, and
//! sometimes returns nothing. Replicas that believe they lead also act, as in a cluster whose
//! leader was just cut off.

use std::collections::BTreeMap;
use std::time::Duration;

use api::base::clock::LogTime;
use lab::rng::Rng;
use state::command::{BackendSpec, Command};
use state::discovery::{Discovery, EngineCondition, ListedEngine, SourcePlan};

use super::{ReplicaHandles, operator};
use crate::oracle::fleet::{self, FLAPPING, ROLLING, SOURCE, STEADY};

/// Label of the source's draws, which separates them from those of other kinds of clients.
const KIND: u64 = 10;
/// Interval at which a replica polls the source.
const LOOK_EVERY: Duration = Duration::from_millis(150);
/// Interval at which the source replaces an engine, in microseconds.
const ROLL_EVERY_US: u64 = 250_000;
/// Maximum number of changes before the source is polled again.
const CHANGES_AT_ONCE: usize = 32;
/// Pause between checks while a committed change is not yet applied at this replica.
const APPLY_PAUSE: Duration = Duration::from_millis(2);

/// Returns whether a world of this seed has such a source. Other worlds are unchanged.
pub(super) fn is_in(seed: u64) -> bool {
    seed % 8 == 3
}

/// Polls the source and acts on its responses until the workload is over.
pub(super) async fn follow(handles: ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0);
    let client = handles.context.next_client();
    let time = LogTime::default();
    while !handles.context.is_over() {
        tokio::time::sleep(LOOK_EVERY).await;
        if !handles.context.is_over() {
            let told = told(&mut rng, handles.now_us());
            let status = handles.cluster.status();
            if status.leader == Some(status.id) {
                act(&handles, client, &told, &time).await;
            }
        }
    }
}

/// Acts on the source's last response until this replica has exactly the engines that it lists.
pub(super) async fn settle(handles: &ReplicaHandles, client: u32) {
    if !is_in(handles.context.seed) {
        return;
    }
    let time = LogTime::default();
    let told: Vec<ListedEngine> = fleet::last().iter().zip(20_000..).map(engine).collect();
    while !matches!(
        act(handles, client, &told, &time).await,
        PlanProgress::Settled | PlanProgress::Never
    ) {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Outcome of acting on a response of the source.
enum PlanProgress {
    /// More changes are needed, at this replica or at the leader.
    Going,
    /// No change is needed.
    Settled,
    /// No change was or can be accepted, because a member's earlier build could not read it.
    Never,
}

/// Acts on a response of the source if this replica leads, or if it has no registered backend.
async fn act(
    handles: &ReplicaHandles,
    client: u32,
    told: &[ListedEngine],
    time: &LogTime,
) -> PlanProgress {
    let (registry, status) = (handles.view.registry(), handles.cluster.status());
    if !registry.initialised || !status.caught_up {
        return PlanProgress::Going;
    }
    let now_ms = time.present_ms(handles.view.now_ms());
    let held = registry.fleet();
    let plan = SourcePlan::of(&fleet::rules(), told, &held, now_ms);
    let is_lost = held.discovered.values().any(|it| it.lost.is_some());
    if plan.changes.is_empty() && plan.withheld == 0 && !is_lost {
        return PlanProgress::Settled;
    }
    if status.leader != Some(status.id) && !held.discovered.is_empty() {
        return PlanProgress::Going;
    }
    for change in plan.changes.into_iter().take(CHANGES_AT_ONCE) {
        let source = SOURCE.to_owned();
        let command = Command::Discover(Box::new(Discovery { source, change }));
        let Some(committed) = operator::submit(handles, client, command).await else {
            let is_new = handles.view.registry().fleet().discovered.is_empty();
            return if is_new {
                PlanProgress::Never
            } else {
                PlanProgress::Going
            };
        };
        while handles.view.applied() < committed.index {
            tokio::time::sleep(APPLY_PAUSE).await;
        }
    }
    PlanProgress::Going
}

/// Draws the source's response to a poll at the time `now_us`.
fn told(rng: &mut Rng, now_us: u64) -> Vec<ListedEngine> {
    if rng.below(6) == 0 {
        return Vec::new();
    }
    let leaves_out = rng.below(4) == 0;
    let flapping = (0..FLAPPING).filter(|_| !leaves_out || rng.below(2) == 0);
    let first = now_us / ROLL_EVERY_US;
    let names = (0..STEADY)
        .map(|number| (fleet::name("steady", number), number))
        .chain(flapping.map(|number| (fleet::name("flapping", number), 1000 + number)))
        .chain((first..first + ROLLING).map(|number| (fleet::name("roll", number), 2000 + number)));
    names
        .map(|(name, number)| engine((&name, number)))
        .collect()
}

/// Returns an engine of the source at its own address. No request is for its model.
fn engine((name, number): (&String, u64)) -> ListedEngine {
    let (high, low) = (number / 250, number % 250);
    let spec = BackendSpec {
        id: name.clone(),
        url: format!("http://10.2.{high}.{low}:8000"),
        models: vec!["unasked".to_owned()],
        labels: BTreeMap::new(),
        capacity_blocks: Some(24),
        kv_events: None,
        kv_replay: None,
        role: state::command::BackendRole::Both,
    };
    ListedEngine {
        spec,
        condition: EngineCondition::Ready,
    }
}

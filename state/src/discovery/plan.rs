//! The changes that bring the registry in line with the engines that a source lists.
//!
//! A source may be wrong: its response may lack running engines, or be empty. So additions take
//! effect at once, and removals slowly: a backend that is no longer listed drains, keeps what it
//! owns, and is removed only after a while. At most a fraction of a source's backends is lost at
//! once, not counting engines about to end. An empty response is ignored.

use std::collections::{BTreeMap, BTreeSet};

use super::{DiscoveredBackend, DiscoveryChange};
use crate::backends::{Backend, BackendSpec};
use crate::bounds::BACKENDS_MAX;
use crate::ids::Slot;

/// Identity and limits of a source that is followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceRules {
    /// Id of the source.
    pub source: String,
    /// Time from a backend's loss to its removal, in milliseconds.
    pub remove_after_ms: u64,
    /// Maximum share of a source's backends that may be lost at once, in thousandths.
    pub lost_permille_max: u32,
}

/// Entry of a source's response: one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedEngine {
    /// Description with which the engine is registered as a backend.
    pub spec: BackendSpec,
    /// Condition of the engine, as reported by the source.
    pub condition: EngineCondition,
}

/// Condition of an engine, as reported by its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineCondition {
    /// The engine takes requests.
    Ready,
    /// The engine takes no requests now. It is not registered; if it already is, it drains.
    NotReady,
    /// The engine is about to end. It drains at once, regardless of the share that is lost.
    Leaving,
    /// The entry is unusable, so a registered backend stays as it is. Only the id of `spec` counts.
    Unclear,
}

/// The backends of a cluster, as published.
#[derive(Debug, Clone, Copy)]
pub struct KnownFleet<'a> {
    /// All backends, in ascending order of slots.
    pub backends: &'a [Backend],
    /// Sources and losses of the backends that sources registered, by slot.
    pub discovered: &'a BTreeMap<Slot, DiscoveredBackend>,
}

/// An engine that cannot be registered, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedEngine {
    /// Id of the engine, or its name or address at the source.
    pub engine: String,
    /// Reason for the refusal.
    pub reason: String,
}

/// Changes that follow from one response of a source.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourcePlan {
    /// Changes, in the order in which they apply.
    pub changes: Vec<DiscoveryChange>,
    /// Engines that the response lists and that cannot be registered.
    pub refused: Vec<RefusedEngine>,
    /// Number of backends that the source does not list, or not as ready, and that stay because too
    /// many others are lost.
    pub withheld: usize,
}

/// Backends that one source registered, with their discovery state, by id.
type HeldBackends<'a> = BTreeMap<&'a str, (&'a Backend, &'a DiscoveredBackend)>;

/// Engines of a response that may be registered, by id.
type AcceptedEngines<'a> = BTreeMap<&'a str, &'a ListedEngine>;

impl SourcePlan {
    /// Determines the changes for the response `listed`. An empty response changes nothing.
    #[must_use]
    pub fn of(
        rules: &SourceRules,
        listed: &[ListedEngine],
        fleet: &KnownFleet<'_>,
        now_ms: u64,
    ) -> Self {
        let mut plan = Self::default();
        if listed.is_empty() {
            return plan;
        }
        let held = held(&rules.source, fleet);
        let (accepted, refused) = EngineJudge::new(rules, fleet, &held).judge(listed);
        plan.refused = refused;
        plan.find(&accepted, &held);
        // A refused engine is listed nevertheless, so a backend with its id is not lost.
        let ids: BTreeSet<&str> = listed.iter().map(|engine| &*engine.spec.id).collect();
        plan.lose(rules, (&accepted, &ids), &held);
        plan.forget(rules, &ids, &held, now_ms);
        plan
    }

    /// Registers ready engines that are new, have changed or have returned.
    fn find(&mut self, accepted: &AcceptedEngines<'_>, held: &HeldBackends<'_>) {
        for (id, engine) in accepted {
            let is_as_told = held.get(id).is_some_and(|(backend, known)| {
                known.lost.is_none() && backend.spec == engine.spec
            });
            if engine.condition == EngineCondition::Ready && !is_as_told {
                self.changes
                    .push(DiscoveryChange::Found(engine.spec.clone()));
            }
        }
    }

    /// Drains backends that are leaving and, up to the allowed share, those that are not listed or
    /// not ready. `self.changes` already contains the backends that return.
    fn lose(
        &mut self,
        rules: &SourceRules,
        (accepted, listed): (&AcceptedEngines<'_>, &BTreeSet<&str>),
        held: &HeldBackends<'_>,
    ) {
        let condition = |id: &str| accepted.get(id).map(|engine| engine.condition);
        let changed = self.changes.iter();
        let returns = changed
            .filter_map(|change| held.get(change.backend()))
            .filter(|(_, known)| known.lost.is_some());
        let lost = held.values().filter(|(_, known)| known.lost.is_some());
        let mut room = loss_limit(rules, held.len()).saturating_sub(lost.count() - returns.count());
        let present = held.iter().filter(|(_, (_, known))| known.lost.is_none());
        let (leaving, others): (Vec<_>, Vec<_>) =
            present.partition(|(id, _)| condition(id) == Some(EngineCondition::Leaving));
        room = room.saturating_sub(leaving.len());
        let missing = others.into_iter().filter(|(id, _)| {
            condition(id) == Some(EngineCondition::NotReady) || !listed.contains(*id)
        });
        let missing: Vec<_> = missing.collect();
        self.withheld = missing.len().saturating_sub(room);
        let lose = leaving.into_iter().chain(missing.into_iter().take(room));
        self.changes
            .extend(lose.map(|(id, _)| DiscoveryChange::Lost {
                name: (*id).to_owned(),
            }));
    }

    /// Removes backends that were lost for long enough and are not listed, at most the share that
    /// may be lost at once.
    fn forget(
        &mut self,
        rules: &SourceRules,
        listed: &BTreeSet<&str>,
        held: &HeldBackends<'_>,
        now_ms: u64,
    ) {
        let is_due = |known: &DiscoveredBackend| {
            known
                .lost
                .is_some_and(|lost| now_ms.saturating_sub(lost.since_ms) >= rules.remove_after_ms)
        };
        let due = held
            .iter()
            .filter(|(id, (_, known))| is_due(known) && !listed.contains(*id))
            .take(loss_limit(rules, held.len()));
        self.changes
            .extend(due.map(|(id, _)| DiscoveryChange::Forgotten {
                name: (*id).to_owned(),
            }));
    }
}

/// Returns how many of a source's `backends` may be lost at once.
fn loss_limit(rules: &SourceRules, backends: usize) -> usize {
    let permille = usize::try_from(rules.lost_permille_max).unwrap_or(usize::MAX);
    backends.saturating_mul(permille) / 1000
}

fn held<'a>(source: &str, fleet: &KnownFleet<'a>) -> HeldBackends<'a> {
    let own = fleet.backends.iter().filter_map(|backend| {
        let known = fleet.discovered.get(&backend.handle.slot)?;
        (known.source == source).then_some((&*backend.spec.id, (backend, known)))
    });
    own.collect()
}

/// State that determines which engines of one response may be registered.
struct EngineJudge<'a> {
    rules: &'a SourceRules,
    held: &'a HeldBackends<'a>,
    /// Ids of other backends, with the source that registered each; `None` for an operator.
    holders: BTreeMap<&'a str, Option<&'a str>>,
    /// Ids of backends that this source did not register, by URL.
    urls: BTreeMap<&'a str, &'a str>,
    /// Number of free slots in the registry.
    room: usize,
}

impl<'a> EngineJudge<'a> {
    fn new(rules: &'a SourceRules, fleet: &KnownFleet<'a>, held: &'a HeldBackends<'a>) -> Self {
        let others = || {
            // A further rank belongs to its engine, which is in the list too.
            let all = fleet.backends.iter().filter(|it| !it.is_further_rank());
            all.filter(|backend| !held.contains_key(&*backend.spec.id))
        };
        let source = |backend: &Backend| fleet.discovered.get(&backend.handle.slot);
        Self {
            rules,
            held,
            holders: others()
                .map(|it| (&*it.spec.id, source(it).map(|known| &*known.source)))
                .collect(),
            urls: others().map(|it| (&*it.spec.url, &*it.spec.id)).collect(),
            room: BACKENDS_MAX.saturating_sub(fleet.backends.len()),
        }
    }

    /// Returns the engines that may be registered, by id, and the refused ones with the reasons.
    /// Ignores entries that are unclear.
    fn judge(mut self, listed: &[ListedEngine]) -> (AcceptedEngines<'_>, Vec<RefusedEngine>) {
        let mut accepted = BTreeMap::new();
        let mut refused = Vec::new();
        let mut urls: BTreeMap<&str, &str> = BTreeMap::new();
        let is_clear = |engine: &&ListedEngine| engine.condition != EngineCondition::Unclear;
        let mut sorted: Vec<&ListedEngine> = listed.iter().filter(is_clear).collect();
        // Responses come in any order, but the same engines must be refused each time.
        sorted.sort_by(|a, b| (&a.spec.id, &a.spec.url).cmp(&(&b.spec.id, &b.spec.url)));
        for engine in sorted {
            let (id, url) = (&*engine.spec.id, &*engine.spec.url);
            let judged = self.judge_alone(engine).and_then(|()| {
                if accepted.contains_key(id) {
                    return Err(format!("{id} is listed twice"));
                }
                match urls.get(url) {
                    Some(other) if engine.condition != EngineCondition::Leaving => {
                        Err(format!("its url is that of {other}"))
                    }
                    Some(_) | None => self.take_room(engine),
                }
            });
            match judged {
                Ok(()) => {
                    // The address of a leaving engine may already belong to another engine.
                    if engine.condition != EngineCondition::Leaving {
                        urls.insert(url, id);
                    }
                    accepted.insert(id, engine);
                }
                Err(reason) => refused.push(RefusedEngine {
                    engine: id.to_owned(),
                    reason,
                }),
            }
        }
        (accepted, refused)
    }

    fn judge_alone(&self, engine: &ListedEngine) -> Result<(), String> {
        let spec = &engine.spec;
        spec.validate().map_err(|reject| reject.to_string())?;
        match self.holders.get(&*spec.id) {
            Some(None) => return Err(format!("an operator registered the backend {}", spec.id)),
            Some(Some(other)) => return Err(format!("the source {other} registered {}", spec.id)),
            None => {}
        }
        match self.urls.get(&*spec.url) {
            Some(other) => Err(format!("its url is that of the backend {other}")),
            None => Ok(()),
        }
    }

    /// Reserves a free slot of the registry if `engine` is new and ready.
    ///
    /// # Errors
    /// If no slot is free.
    fn take_room(&mut self, engine: &ListedEngine) -> Result<(), String> {
        let is_new = !self.held.contains_key(&*engine.spec.id);
        if !is_new || engine.condition != EngineCondition::Ready {
            return Ok(());
        }
        let left = self.room.checked_sub(1);
        self.room = left.ok_or_else(|| {
            let source = &self.rules.source;
            format!("{source} lists more engines than the {BACKENDS_MAX} that a cluster can have")
        })?;
        Ok(())
    }
}

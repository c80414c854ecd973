//! What happens to the replicas of some worlds as a whole: a StatefulSet scales them, or they are
//! replaced by other builds one after the other.
//!
//! It is drawn apart from the other faults and comes beside them, so that what else goes wrong under a
//! seed is what went wrong before. In such a world no operator changes the members.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use api::discovery::StatefulSetScale;
use api::ports::BoxFuture;
use lab::rng::Rng;
use node::app::scaling::ScaleSource;
use state::codec::FORMAT_VERSION;

use super::faults::Fault;
use super::plan::FleetKind;

/// What separates these draws from others under the same seed.
const RNG_LABEL: u64 = 0x666c_6565;
/// Of so many faults one has such a change beside it.
const CHANGES: u64 = 3;
/// The oldest format that a simulated build knows: that of the command that founds a cluster.
const FORMAT_MIN: u8 = 4;
/// What the simulated API server says of the StatefulSet. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct SimStatefulSet(Arc<StatefulSetState>);

#[derive(Debug, Default)]
struct StatefulSetState {
    replicas: AtomicU64,
    is_away: AtomicBool,
}

impl SimStatefulSet {
    /// How many it wants.
    pub(super) fn replicas(&self) -> u64 {
        self.0.replicas.load(Ordering::Relaxed)
    }

    /// Wants so many from now on.
    pub(super) fn scale_to(&self, replicas: u64) {
        self.0.replicas.store(replicas, Ordering::Relaxed);
    }

    /// Whether the server can be asked.
    pub(super) fn answers(&self, does: bool) {
        self.0.is_away.store(!does, Ordering::Relaxed);
    }
}

impl ScaleSource for SimStatefulSet {
    fn read(&self) -> BoxFuture<'_, Result<StatefulSetScale, String>> {
        let read = match self.0.is_away.load(Ordering::Relaxed) {
            true => Err("the API server is away".to_owned()),
            false => Ok(StatefulSetScale {
                first: 0,
                replicas: self.replicas(),
            }),
        };
        Box::pin(std::future::ready(read))
    }
}

/// What changes the replicas of a world, besides its faults.
pub(super) struct FleetDriver {
    pub(super) rng: Rng,
    pub(super) set: Option<SimStatefulSet>,
    /// Formats that the builds of replicas know that are not this one.
    pub(super) formats: BTreeMap<u8, u8>,
    /// Those of the builds that were installed and have not started yet.
    pub(super) next: BTreeMap<u8, u8>,
}

impl FleetDriver {
    pub(super) fn new(seed: u64, kind: FleetKind, voters: u8) -> Self {
        let mut rng = Rng::new(seed, RNG_LABEL);
        let set = (kind == FleetKind::Scaled).then(SimStatefulSet::default);
        if let Some(set) = &set {
            set.scale_to(voters.into());
        }
        let mut formats = BTreeMap::new();
        if kind == FleetKind::Mixed {
            let later = u64::from(FORMAT_VERSION - FORMAT_MIN);
            for id in 1..=voters {
                formats.insert(id, FORMAT_MIN + rng.below(later) as u8);
            }
        }
        Self {
            rng,
            set,
            formats,
            next: BTreeMap::new(),
        }
    }

    /// The newest format that the build of a replica knows.
    pub(super) fn format(&self, id: u8) -> u8 {
        self.formats.get(&id).copied().unwrap_or(FORMAT_VERSION)
    }

    /// What happens beside the next fault, if anything.
    pub(super) fn draw(&mut self, kind: FleetKind) -> Option<Fault> {
        let change = match kind {
            FleetKind::Plain => return None,
            FleetKind::Scaled => Fault::Scale,
            FleetKind::Mixed => Fault::Upgrade,
        };
        (self.rng.below(CHANGES) == 0).then_some(change)
    }
}

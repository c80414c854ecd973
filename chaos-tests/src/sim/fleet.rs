//! Changes to whole fleets: in some worlds, a StatefulSet scales the replicas, or other builds
//! replace them one at a time.
//!
//! These changes are drawn separately from faults and come beside them, so that a seed's other
//! faults stay the same. In such a world, no operator changes the members.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use api::engines::discovery::StatefulSetScale;
use api::ports::BoxFuture;
use lab::rng::Rng;
use node::app::scaling::ScaleSource;
use state::codec::{FORMAT_VERSION, FORMAT_VERSION_FIRST};

use super::faults::Fault;
use super::plan::FleetKind;

/// Label of these draws, which separates them from others under the same seed.
const RNG_LABEL: u64 = 0x666c_6565;
/// Mean number of faults per change of the fleet.
const CHANGES: u64 = 3;
/// The StatefulSet as the simulated API server reports it. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct SimStatefulSet(Arc<StatefulSetState>);

#[derive(Debug, Default)]
struct StatefulSetState {
    replicas: AtomicU64,
    is_away: AtomicBool,
}

impl SimStatefulSet {
    /// Returns the number of replicas that the StatefulSet requests.
    pub(super) fn replicas(&self) -> u64 {
        self.0.replicas.load(Ordering::Relaxed)
    }

    /// Sets the number of replicas that the StatefulSet requests.
    pub(super) fn scale_to(&self, replicas: u64) {
        self.0.replicas.store(replicas, Ordering::Relaxed);
    }

    /// Sets whether the API server is available.
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

/// Driver of the changes to a world's fleet, in addition to its faults.
pub(super) struct FleetDriver {
    pub(super) rng: Rng,
    pub(super) set: Option<SimStatefulSet>,
    /// Newest formats known to replicas, by id. Replicas that are missing run this build.
    pub(super) formats: BTreeMap<u8, u8>,
    /// Newest formats known to builds that are installed at replicas but have not started yet.
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
            let later = u64::from(FORMAT_VERSION - FORMAT_VERSION_FIRST);
            for id in 1..=voters {
                formats.insert(id, FORMAT_VERSION_FIRST + rng.below(later) as u8);
            }
        }
        Self {
            rng,
            set,
            formats,
            next: BTreeMap::new(),
        }
    }

    /// Returns the newest format that a replica's build knows.
    pub(super) fn format(&self, id: u8) -> u8 {
        self.formats.get(&id).copied().unwrap_or(FORMAT_VERSION)
    }

    /// Draws the change of the fleet that comes with the next fault, if any.
    pub(super) fn draw(&mut self, kind: FleetKind) -> Option<Fault> {
        let change = match kind {
            FleetKind::Plain => return None,
            FleetKind::Scaled => Fault::Scale,
            FleetKind::Mixed => Fault::Upgrade,
        };
        (self.rng.below(CHANGES) == 0).then_some(change)
    }
}

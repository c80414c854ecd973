//! The plan of a world: everything that a seed decides before the run starts.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use lab::rng::Rng;
use node::config::{self, Config, Formation, Origin};
use state::policy::PolicyConfig;

use super::network::address_of;

/// Label of the plan's draws, which separates them from others under the same seed.
const RNG_LABEL: u64 = 0x706c_616e;
/// Label of the draw of the fleet's kind, which must not change the plan's other draws.
const FLEET_LABEL: u64 = 0x6b69_6e64;
/// Mean times between faults to choose from, in milliseconds.
const FAULT_GAPS_MS: [u64; 4] = [300, 600, 1000, 2000];
/// Numbers of log entries between snapshots to choose from. Small values purge logs while replicas
/// are down.
const SNAPSHOT_EVERY: [u32; 5] = [20, 60, 200, 600, 10_000];
/// Number of tokens per block, or of bytes for text.
pub const BLOCK_SIZE: u32 = 16;

/// Kind of change that a world makes to its whole fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetKind {
    /// No change of the whole fleet: an operator adds and removes single replicas.
    Plain,
    /// A StatefulSet scales the replicas.
    Scaled,
    /// Replicas run different builds, which change.
    Mixed,
}

/// Properties of a world that its seed decides.
#[derive(Debug, Clone)]
pub struct WorldPlan {
    /// Seed from which the plan was drawn.
    pub seed: u64,
    /// Number of replicas that found the cluster, with ids counted from 1.
    pub voters: u8,
    /// Mean time between faults, in milliseconds.
    pub fault_gap_ms: u64,
    /// Number of clients per replica that send requests.
    pub clients: u8,
    /// Whether messages can overtake each other by much, and be lost, during the whole run.
    pub is_network_bad: bool,
    /// Seed of all hashes of the cluster.
    pub hash_seed: u64,
    /// Kind of change to the whole fleet.
    pub fleet: FleetKind,
    /// Settings of the config that are not at their defaults, as flags.
    pub knobs: Vec<String>,
    snapshot_every: u32,
    snapshot_every_bytes: u64,
    heartbeat_ms: u64,
    election_ms: Range<u64>,
    flush_ms: u64,
    /// Index of the policy in [`PolicyConfig::defaults`].
    policy: usize,
    /// Minimum duration of a disk sync, in microseconds; the maximum is four times as long.
    sync_us: u64,
}

impl WorldPlan {
    /// Draws the plan for `seed`, with values of the config too if it `varies` them.
    #[must_use]
    pub fn of(seed: u64, varies: bool) -> Self {
        let mut rng = Rng::new(seed, RNG_LABEL);
        let mut one_of = |bound: usize| rng.within(0, bound as u32 - 1) as usize;
        let (heartbeat_ms, election_ms) =
            [(50, 150..300), (50, 200..400), (100, 300..600)][one_of(3)].clone();
        Self {
            seed,
            voters: [3, 3, 5][one_of(3)],
            fault_gap_ms: FAULT_GAPS_MS[one_of(FAULT_GAPS_MS.len())],
            clients: [2, 3, 5][one_of(3)],
            is_network_bad: one_of(4) == 0,
            snapshot_every: SNAPSHOT_EVERY[one_of(SNAPSHOT_EVERY.len())],
            snapshot_every_bytes: [64 << 10, 1 << 20, 64 << 20][one_of(3)],
            heartbeat_ms,
            election_ms,
            flush_ms: [20, 20, 50][one_of(3)],
            policy: one_of(PolicyConfig::defaults().len()),
            sync_us: [50, 300, 2_000, 8_000][one_of(4)],
            hash_seed: rng.next_u64(),
            fleet: match Rng::new(seed, FLEET_LABEL).below(8) {
                0 | 1 => FleetKind::Scaled,
                2 | 3 => FleetKind::Mixed,
                _ => FleetKind::Plain,
            },
            knobs: match varies {
                true => super::knobs::draw(seed),
                false => Vec::new(),
            },
        }
    }

    /// Returns the maximum number of voters to which a leader promotes by itself.
    #[must_use]
    pub fn voters_max(&self) -> u8 {
        self.voters + 2
    }

    /// Returns the config of replica `id`. The replica joins the cluster of `members` if `joins` is
    /// set, and otherwise founds one with them.
    ///
    /// # Errors
    /// If a setting is out of bounds, which is a bug in this file.
    pub fn config(
        &self,
        id: u8,
        dir: &Path,
        members: &[u8],
        joins: bool,
    ) -> anyhow::Result<Config> {
        let mut flags = self.knobs.clone();
        flags.extend([
            format!(
                "routing.policy={}",
                PolicyConfig::defaults()[self.policy].name()
            ),
            format!("node.id={id}"),
            format!("node.data_dir={}", dir.display()),
            format!("listen.advertise=10.0.0.{id}"),
        ]);
        let origin = Origin {
            flags,
            ..Origin::default()
        };
        let mut config = config::load(&origin)?.config;
        let timeout = self.election_ms.start..self.election_ms.end;
        let ms = Duration::from_millis;
        config.cluster.heartbeat = ms(self.heartbeat_ms);
        config.cluster.election_timeout = ms(timeout.start)..ms(timeout.end);
        config.cluster.flush_interval = ms(self.flush_ms);
        config.cluster.snapshot_every = self.snapshot_every;
        config.cluster.snapshot_every_bytes = self.snapshot_every_bytes;
        if self.fleet == FleetKind::Scaled {
            config.cluster.auto_promote = true;
            config.cluster.promote_after = ms(1000);
            config.cluster.voters_max = self.voters_max();
            config.cluster.statefulset.name = Some("quorate".to_owned());
            config.cluster.statefulset.remove_absent_after = ms(3000);
        }
        config.models = vec![ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load(TokenizerSpec::Engine, None).context("tokenizer")?,
            block_size: Some(BLOCK_SIZE),
            pairs: Default::default(),
        }];
        let peers: Vec<String> = members.iter().map(|id| address_of(*id)).collect();
        config.formation = match joins {
            true => Formation::Join(peers),
            false => Formation::Peers {
                expect: peers.len(),
                peers,
            },
        };
        Ok(config)
    }

    /// Returns the speed of a disk according to the plan.
    #[must_use]
    pub fn pace(&self) -> DiskSpeed {
        DiskSpeed {
            sync_us: Arc::new(AtomicU64::new(self.sync_us)),
            sound_us: self.sync_us,
        }
    }
}

/// Current speed of a disk's syncs. Clones share it.
#[derive(Debug, Clone)]
pub struct DiskSpeed {
    sync_us: Arc<AtomicU64>,
    sound_us: u64,
}

impl DiskSpeed {
    /// Sets the minimum duration of a sync, to slow the disk down.
    pub fn slow_to_us(&self, sync_us: u64) {
        self.sync_us.store(sync_us, Ordering::Relaxed);
    }

    /// Restores the original speed of the disk.
    pub fn recover(&self) {
        self.slow_to_us(self.sound_us);
    }

    /// Returns the duration of a sync, between the minimum and four times that, chosen by `draw`.
    pub fn sync(&self, draw: u64) -> Duration {
        let least = self.sync_us.load(Ordering::Relaxed);
        Duration::from_micros(least + draw % (3 * least + 1))
    }
}

//! The plan of a run: everything a seed decides before it starts.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use lab::rng::Rng;
use node::config::{self, Config, Formation, Origin, Parsed};
use state::policy::PolicyConfig;

use super::network::address_of;

/// What separates these draws from others under the same seed.
const RNG_LABEL: u64 = 0x706c_616e;
/// What separates the draw of the fleet's kind, which came later.
const FLEET_LABEL: u64 = 0x6b69_6e64;
/// Time between faults, on average, milliseconds.
const FAULT_GAPS_MS: [u64; 4] = [300, 600, 1000, 2000];
/// Log entries between snapshots: the lesser ones have logs purged under replicas that are away.
const SNAPSHOT_EVERY: [u32; 5] = [20, 60, 200, 600, 10_000];
/// Tokens (or bytes, of text) per block.
pub const BLOCK_SIZE: u32 = 16;

/// What becomes of the replicas of a world as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FleetKind {
    /// An operator adds and removes some.
    Plain,
    /// A StatefulSet scales them.
    Scaled,
    /// They are of several builds, which change.
    Mixed,
}

/// What the seed decides of a world.
#[derive(Debug, Clone)]
pub struct WorldPlan {
    /// The seed.
    pub seed: u64,
    /// Replicas that form the cluster: ids from 1.
    pub voters: u8,
    /// Mean time between faults, milliseconds.
    pub fault_gap_ms: u64,
    /// Clients that send requests, per replica.
    pub clients: u8,
    /// Whether two messages sent at once can overtake each other by much, and be lost, at all
    /// times.
    pub is_network_bad: bool,
    /// Seed of all hashes of the cluster.
    pub hash_seed: u64,
    /// What becomes of all replicas.
    pub fleet: FleetKind,
    snapshot_every: u32,
    snapshot_every_bytes: u64,
    heartbeat_ms: u64,
    election_ms: Range<u64>,
    flush_ms: u64,
    /// Which of [`PolicyConfig::defaults`].
    policy: usize,
    /// How long a disk takes to sync, microseconds: from this to four times as long.
    sync_us: u64,
}

impl WorldPlan {
    /// The plan of a seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
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
        }
    }

    /// Most voters that a leader makes by itself.
    #[must_use]
    pub fn voters_max(&self) -> u8 {
        self.voters + 2
    }

    /// How the replica `id` is configured; `joins` has it join what `members` have
    /// formed, else it forms a cluster with them.
    ///
    /// # Errors
    /// When a setting is out of bounds, which is a fault of this file.
    pub fn config(
        &self,
        id: u8,
        dir: &Path,
        members: &[u8],
        joins: bool,
    ) -> anyhow::Result<Config> {
        let flags = vec![
            format!("node.id={id}"),
            format!("node.data_dir={}", dir.display()),
            format!("listen.advertise=10.0.0.{id}"),
        ];
        let origin = Origin {
            flags,
            ..Origin::default()
        };
        let mut config = config::load(&origin)?.config;
        let timeout = self.election_ms.start..self.election_ms.end;
        let ms = Duration::from_millis;
        config.cluster.heartbeat = Parsed(ms(self.heartbeat_ms));
        config.cluster.election_timeout = Parsed(ms(timeout.start)..ms(timeout.end));
        config.cluster.flush_interval = Parsed(ms(self.flush_ms));
        config.cluster.snapshot_every = self.snapshot_every;
        config.cluster.snapshot_every_bytes = Parsed(self.snapshot_every_bytes);
        if self.fleet == FleetKind::Scaled {
            config.cluster.auto_promote = true;
            config.cluster.promote_after = Parsed(ms(1000));
            config.cluster.voters_max = self.voters_max();
            config.cluster.statefulset.name = Some("quorate".to_owned());
            config.cluster.statefulset.remove_absent_after = Parsed(ms(3000));
        }
        config.policy = PolicyConfig::defaults()[self.policy].clone();
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

    /// A disk's pace.
    #[must_use]
    pub fn pace(&self) -> DiskSpeed {
        DiskSpeed {
            sync_us: Arc::new(AtomicU64::new(self.sync_us)),
            sound_us: self.sync_us,
        }
    }
}

/// How long a disk takes to sync at present. Clones share it.
#[derive(Debug, Clone)]
pub struct DiskSpeed {
    sync_us: Arc<AtomicU64>,
    sound_us: u64,
}

impl DiskSpeed {
    /// Slows it down.
    pub fn slow_to_us(&self, sync_us: u64) {
        self.sync_us.store(sync_us, Ordering::Relaxed);
    }

    /// It is as it was.
    pub fn recover(&self) {
        self.slow_to_us(self.sound_us);
    }

    /// From this to four times as long, as `draw` says.
    pub fn sync(&self, draw: u64) -> Duration {
        let least = self.sync_us.load(Ordering::Relaxed);
        Duration::from_micros(least + draw % (3 * least + 1))
    }
}

//! The replicas of a dev cluster: started in this process, awaited and stopped.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use api::ports::{Cluster, ClusterStatus};
use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use http::Method;
use lab::engine::EngineOptions;
use lab::replay::ClusterUnderTest;
use lab::replay::client::ReplayClient;
use lab::replay::targets::Targets;
use state::command::{BackendSpec, Command, Reply};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::app::{Addresses, App, BoundSockets, ShutdownHandle};
use crate::config::{
    self, Config, ConfigError, ConfigErrors, Formation, ListenConfig, Origin, Place,
};
use crate::json_client::JsonClient;

/// Number of replicas, the fewest that tolerate the loss of one.
const REPLICAS: u8 = 3;
/// Default port of replica 1 for clients.
const FIRST_PORT: u16 = 8080;
/// Maximum time to wait for a leader and healthy engines.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// Interval at which awaited conditions are polled.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Settings that the fleet sets for each replica, in addition to those in `[listen]`.
const OWN_KEYS: [&str; 6] = [
    "node.id",
    "node.data_dir",
    "cluster.peers",
    "cluster.peers_dns",
    "cluster.join",
    "cluster.bootstrap_expect",
];

/// Options for starting the replicas.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FleetPlan<'a> {
    /// Folder for the state of the replicas; `None` for a temporary folder.
    pub(crate) data_dir: Option<&'a Path>,
    /// First port; `None` for the default ports, or free ones if those are taken.
    pub(crate) port: Option<u16>,
    /// Overrides of the replicas' config, each as `section.key=value`.
    pub(crate) settings: &'a [String],
    /// Whether prompts are identified by the engines' tokens, in blocks of the engines' size.
    pub(crate) has_tokens: bool,
}

/// A replica of the fleet.
pub(crate) struct FleetReplica {
    /// Listening addresses of the replica.
    pub(super) addresses: Addresses,
    /// Log, members and state of the replica.
    pub(super) cluster: Arc<dyn Cluster>,
    /// Config with the addresses that the replica listens at.
    config: Config,
    /// The replica's task and its end; `None` while it is killed.
    running: Option<(ShutdownHandle, JoinHandle<()>)>,
}

impl FleetReplica {
    async fn start(config: Config, sockets: BoundSockets) -> anyhow::Result<Self> {
        let running = App::on(config.clone(), sockets)?.start().await?;
        let shutdown = ShutdownHandle::new();
        let until = shutdown.clone();
        Ok(Self {
            addresses: running.addresses(),
            cluster: running.cluster(),
            config,
            running: Some((
                shutdown,
                tokio::spawn(async move { running.until(&until).await }),
            )),
        })
    }

    /// Stops the replica at once, without a drain, as if its process was killed.
    async fn kill(&mut self) {
        let Some((shutdown, task)) = self.running.take() else {
            return;
        };
        shutdown.abort();
        if let Err(error) = task.await {
            tracing::error!(%error, "replica failed while shutting down");
        }
    }
}

/// What a line typed into `quorate dev` asks for, with the id of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FleetKey {
    /// `k ID`: kill the replica.
    Kill(u8),
    /// `s ID`: start it again.
    Start(u8),
}

impl FleetKey {
    /// Reads a line; `None` if it is something else.
    pub(super) fn read(line: &str) -> Option<Self> {
        let (key, id) = line.trim().split_at_checked(1)?;
        let id = id.trim().parse().ok()?;
        match key {
            "k" => Some(Self::Kill(id)),
            "s" => Some(Self::Start(id)),
            _ => None,
        }
    }
}

/// The replicas of a dev cluster.
pub(crate) struct Fleet {
    /// Replicas by id, ascending from 1.
    pub(super) replicas: Vec<FleetReplica>,
    /// Why the replicas do not use the default ports, if none were requested and these are taken.
    pub(super) moved: Option<String>,
    /// Temporary folder, which is removed after the fleet has left or failed to start; `None` if
    /// the plan names a data directory.
    _temporary: Option<TemporaryFolder>,
}

/// A folder that is removed when this value is dropped.
struct TemporaryFolder(PathBuf);

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%error, dir = %self.0.display(), "remove temporary data");
        }
    }
}

impl Fleet {
    /// Starts the replicas, registers `backends` and waits until every replica can serve.
    pub(crate) async fn start(
        plan: FleetPlan<'_>,
        backends: &[BackendSpec],
    ) -> anyhow::Result<Self> {
        check_settings(plan.settings)?;
        let (data_dir, temporary) = match plan.data_dir {
            Some(dir) => (dir.to_owned(), None),
            None => {
                let dir = std::env::temp_dir().join(format!("quorate-dev-{}", std::process::id()));
                (dir.clone(), Some(TemporaryFolder(dir)))
            }
        };
        let (listens, moved) = ports(plan.port)?;
        let peers: Vec<String> = listens
            .iter()
            .map(|(_, addresses)| addresses.peer.to_string())
            .collect();
        let mut fleet = Self {
            replicas: Vec::new(),
            moved,
            _temporary: temporary,
        };
        let start_all = async |fleet: &mut Self| {
            for (id, (sockets, addresses)) in (1..).zip(listens) {
                let mut config = config_of(id, &data_dir, plan.settings)?;
                if plan.has_tokens {
                    config.models = vec![tokens_of_engines()?];
                }
                set_addresses(&mut config, addresses, &peers, backends);
                let replica = Box::pin(FleetReplica::start(config, sockets)).await;
                let replica = replica.with_context(|| format!("start replica {id}"))?;
                fleet.replicas.push(replica);
            }
            fleet.come_up(backends).await
        };
        if let Err(error) = Box::pin(start_all(&mut fleet)).await {
            // The replicas must stop before their folder is removed.
            fleet.leave().await;
            return Err(error);
        }
        Ok(fleet)
    }

    async fn come_up(&self, backends: &[BackendSpec]) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_DEADLINE;
        let formed = |status: &ClusterStatus| status.has_quorum && status.caught_up;
        while !self
            .replicas
            .iter()
            .all(|replica| formed(&replica.cluster.status()))
        {
            let waited = wait_on(deadline, "the replicas did not form a cluster").await;
            waited.with_context(|| self.join_blockers())?;
        }
        // Ids persist between runs, but an emulated engine may listen elsewhere now.
        for spec in backends {
            let committed = self.replicas[0]
                .cluster
                .submit(Command::PutBackend(spec.clone()));
            let committed = committed
                .await
                .with_context(|| format!("register {}", spec.id))?;
            if let Reply::Rejected(reject) = committed.reply {
                bail!("register {}: {reject}", spec.id);
            }
        }
        loop {
            let mut models = Vec::new();
            for index in 0..self.replicas.len() {
                models.push(self.model_at(index).await.is_ok());
            }
            if models.iter().all(|is_served| *is_served) {
                return Ok(());
            }
            if let Err(error) = wait_on(deadline, "no engine became healthy").await {
                return Err(error.context(self.unhealthy_engines().await));
            }
        }
    }

    /// Describes, for each replica, why it is not in a cluster.
    fn join_blockers(&self) -> String {
        let mut told = Vec::new();
        for replica in &self.replicas {
            let status = replica.cluster.status();
            let peers = status.peers.iter().filter(|peer| peer.is_hindrance);
            let peers = peers.map(|peer| format!("{}: {}", peer.address, peer.detail));
            let reasons = status.unjoined.iter().cloned().chain(peers);
            told.extend(reasons.map(|reason| format!("replica {}: {reason}", status.id)));
        }
        told.join("; ")
    }

    /// Describes the engines that replica 1 reports as not healthy.
    async fn unhealthy_engines(&self) -> String {
        let url = format!(
            "http://{}/admin/v1/backends",
            self.replicas[0].addresses.admin
        );
        let client = JsonClient::new(Duration::from_secs(5));
        let answer = client
            .call(Method::GET, &url, None)
            .await
            .unwrap_or_default();
        let backends = answer["backends"].as_array().into_iter().flatten();
        let each = backends.map(|backend| {
            let detail = backend["state"]["detail"]
                .as_str()
                .unwrap_or("no answer yet");
            format!("{}: {detail}", backend["url"].as_str().unwrap_or("-"))
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// Returns the first model that replica 1 lists.
    pub(crate) async fn first_model(&self) -> anyhow::Result<String> {
        self.model_at(0).await.context("ask for the models")
    }

    async fn model_at(&self, index: usize) -> anyhow::Result<String> {
        let targets = Targets::new(&self.data_urls())?;
        let client = ReplayClient::new(Duration::from_secs(5));
        Ok(client.first_model(targets.uri(index, "/v1/models")).await?)
    }

    /// Returns the URLs for clients, in order of id.
    pub(crate) fn data_urls(&self) -> Vec<String> {
        self.replicas
            .iter()
            .map(|replica| format!("http://{}", replica.addresses.data))
            .collect()
    }

    /// Returns the URLs of the admin API, in order of id.
    pub(super) fn admin_urls(&self) -> Vec<String> {
        let url = |replica: &FleetReplica| format!("http://{}", replica.addresses.admin);
        self.replicas.iter().map(url).collect()
    }

    /// Kills a running replica, or starts a killed one, as `key` says. Returns what was done.
    pub(super) async fn press(&mut self, key: FleetKey) -> anyhow::Result<String> {
        let (FleetKey::Kill(id) | FleetKey::Start(id)) = key;
        let count = self.replicas.len();
        let place = usize::from(id).checked_sub(1);
        let Some(replica) = place.and_then(|place| self.replicas.get_mut(place)) else {
            bail!("no replica has the id {id}; the ids are 1 to {count}");
        };
        match (key, replica.running.is_some()) {
            (FleetKey::Kill(_), true) => {
                replica.kill().await;
                Ok(format!("replica {id} is killed; `s {id}` starts it again"))
            }
            (FleetKey::Start(_), false) => {
                let config = replica.config.clone();
                let sockets = BoundSockets::bind(&config.listen)?;
                *replica = Box::pin(FleetReplica::start(config, sockets)).await?;
                Ok(format!("replica {id} is started"))
            }
            (FleetKey::Kill(_), false) => Ok(format!("replica {id} is killed already")),
            (FleetKey::Start(_), true) => Ok(format!("replica {id} runs")),
        }
    }

    /// Aborts all replicas at once, because no clients are left, and removes temporary files.
    pub(crate) async fn leave(mut self) {
        for (shutdown, _) in self.replicas.iter().filter_map(|it| it.running.as_ref()) {
            shutdown.abort();
        }
        for replica in &mut self.replicas {
            replica.kill().await;
        }
    }
}

impl ClusterUnderTest for Fleet {
    async fn start(settings: &[String], backends: &[BackendSpec]) -> anyhow::Result<Self> {
        let plan = FleetPlan {
            port: Some(0),
            settings,
            ..FleetPlan::default()
        };
        Box::pin(Self::start(plan, backends)).await
    }

    fn data_urls(&self) -> Vec<String> {
        self.data_urls()
    }

    async fn stop(self) {
        self.leave().await;
    }
}

/// Waits for one polling interval, or fails after the deadline.
pub(super) async fn wait_on(deadline: Instant, complaint: &'static str) -> anyhow::Result<()> {
    if Instant::now() >= deadline {
        bail!("{complaint} in time");
    }
    sleep(LOOK_INTERVAL).await;
    Ok(())
}

/// Sockets of each replica, with their addresses.
type Listens = Vec<(BoundSockets, Addresses)>;

/// Binds the sockets of every replica. If no port was requested and a default one is taken, binds
/// free ports and also returns the error.
fn ports(port: Option<u16>) -> anyhow::Result<(Listens, Option<String>)> {
    let all = |first| (1..=REPLICAS).map(|id| bind(id, first)).collect();
    match all(port.unwrap_or(FIRST_PORT)) {
        Err(error) if port.is_none() => Ok((all(0)?, Some(format!("{error:#}")))),
        Err(error) => Err(error),
        Ok(bound) => Ok((bound, None)),
    }
}

fn bind(id: u8, first: u16) -> anyhow::Result<(BoundSockets, Addresses)> {
    let at = |offset: u16| {
        let port = match first {
            0 => 0,
            first => first + 10 * u16::from(id - 1) + offset,
        };
        ([127, 0, 0, 1], port).into()
    };
    let listen = ListenConfig {
        data: at(0),
        admin: at(1),
        peer: at(2),
        metrics: None,
        picker: None,
        scaler: None,
        advertise: None,
    };
    let sockets = BoundSockets::bind(&listen)?;
    let addresses = sockets.addresses()?;
    Ok((sockets, addresses))
}

/// Rejects settings that the fleet sets for each replica, because one value for all would be wrong
/// or have no effect.
fn check_settings(settings: &[String]) -> Result<(), ConfigErrors> {
    let is_own = |key: &str| {
        let key = key.trim();
        key.starts_with("listen.") || OWN_KEYS.contains(&key)
    };
    let refused = settings.iter().filter_map(|setting| {
        let (key, _) = setting.split_once('=')?;
        is_own(key).then(|| ConfigError {
            message: format!("{} cannot be set for all replicas at once", key.trim()),
            expected: "another key: ids, addresses and peers follow from the command".to_owned(),
            place: Place::Flag(setting.clone()),
        })
    });
    match refused.collect::<Vec<_>>() {
        refused if refused.is_empty() => Ok(()),
        refused => Err(ConfigErrors::new(
            "flags".to_owned(),
            String::new(),
            refused,
        )),
    }
}

fn config_of(id: u8, data_dir: &Path, settings: &[String]) -> anyhow::Result<Config> {
    let dir = data_dir.join(format!("n{id}"));
    let mut flags = vec![
        format!("node.id={id}"),
        format!("node.data_dir={}", dir.display()),
        "drain.dns_ttl=0ms".to_owned(),
        "users.expose=full".to_owned(),
    ];
    flags.extend_from_slice(settings);
    let origin = Origin {
        flags,
        ..Origin::default()
    };
    Ok(config::load(&origin)?.config)
}

/// Returns model settings that match the tokenizer and block size of emulated engines.
fn tokens_of_engines() -> anyhow::Result<ModelSettings> {
    Ok(ModelSettings {
        name: "*".to_owned(),
        tokenizer: Tokenizer::load(TokenizerSpec::Engine, None)?,
        block_size: Some(EngineOptions::default().shape.block_size),
        pairs: Default::default(),
    })
}

/// Sets the addresses of a replica, its peers and the engines in `config`.
fn set_addresses(
    config: &mut Config,
    addresses: Addresses,
    peers: &[String],
    backends: &[BackendSpec],
) {
    config.listen = ListenConfig {
        data: addresses.data,
        admin: addresses.admin,
        peer: addresses.peer,
        metrics: None,
        picker: None,
        scaler: None,
        advertise: None,
    };
    config.formation = Formation::Peers {
        peers: peers.to_vec(),
        expect: usize::from(REPLICAS),
    };
    config.backends = backends.to_vec();
}

//! A cluster of real processes: replicas and engines, each with its own folder and log, on loopback
//! or on hosts of their own.
//!
//! Addresses are chosen once and kept, so that others find a restarted replica again. Everything
//! that a cluster started ends with it. If a cluster is dropped without [`ProcessCluster::stop`],
//! its test has failed, and the ends of its logs are printed.

pub mod access;
pub mod agreement;
mod binary;
pub mod checks;
mod child;
pub mod client_ledger;
pub mod engine_kills;
mod engines;
pub mod failover;
pub mod faults;
pub mod figures;
mod layout;
pub mod load;
mod observe;
mod options;
pub mod upgrade;
mod waiting;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use lab::connector::ReplicaConnector;
use lab::replay::targets::Targets;
use node::json_client::JsonClient;
use rustix::process::Signal;
use tempfile::TempDir;

use access::{ClientAccess, ClusterSecrets};
use child::{ChildProcess, ProcessLimits};
use layout::{Layout, ReplicaOrigin};
pub use options::{ClusterOptions, Site};
pub use waiting::{until, until_within};

use crate::command::run;
use crate::netns::NetnsNetwork;

/// Number of log lines that are printed when a test fails.
const LOG_LINES_SHOWN: usize = 25;
/// Maximum wait for a response of an admin API. Some calls block for a few seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for a replica to shut down, or to refuse to start.
const ENDING_PATIENCE: Duration = Duration::from_secs(60);

/// A running cluster of replicas and engines.
#[derive(Debug)]
pub struct ProcessCluster {
    // Dropped in this order: processes before the folder and the hosts.
    replicas: Vec<ReplicaProcess>,
    /// The engines; `None` for one that is down.
    engines: Vec<Option<ChildProcess>>,
    options: ClusterOptions,
    binary: PathBuf,
    layout: Layout,
    /// Targets of the load: the replicas, in order.
    targets: Arc<Targets>,
    client: JsonClient,
    /// Credentials of the cluster; `None` if it is not secure.
    secrets: Option<ClusterSecrets>,
    small_disk: Option<SmallDisk>,
    dir: TempDir,
    /// Whether [`ProcessCluster::stop`] was called. If not, the test has failed.
    has_passed: bool,
}

#[derive(Debug)]
struct ReplicaProcess {
    id: u8,
    origin: ReplicaOrigin,
    /// Process of the replica; `None` while it is down.
    child: Option<ChildProcess>,
    /// Whether the replica runs but is unreachable, because a signal stopped it or it has no link.
    is_silent: bool,
}

/// A folder on an in-memory disk of limited size, which is unmounted on drop.
#[derive(Debug)]
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(folder: &Path, megabytes: u32) -> anyhow::Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let size = format!("size={megabytes}m");
        let path = folder.display().to_string();
        run(&["mount", "-t", "tmpfs", "-o", &size, "tmpfs", &path])?;
        Ok(Self(folder.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = run(&["umount", "-l", &self.0.display().to_string()]);
    }
}

impl ProcessCluster {
    /// Starts all processes. Waits until every replica is ready and sees that every engine is
    /// healthy.
    ///
    /// # Errors
    /// If a process does not start in time.
    pub async fn start(options: ClusterOptions) -> anyhow::Result<Self> {
        Self::start_from(binary::quorate()?, options).await
    }

    /// Starts a cluster of the program `binary`, and waits as [`ProcessCluster::start`] does.
    async fn start_from(binary: PathBuf, options: ClusterOptions) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("quorate-chaos-")
            .tempdir()?;
        let layout = Layout::new(&options)?;
        let secrets = options
            .is_secure
            .then(|| ClusterSecrets::make(&binary, dir.path().join("secrets")))
            .transpose()?;
        let mut cluster = Self {
            targets: Arc::new(targets(&layout, secrets.as_ref())?),
            replicas: Vec::new(),
            engines: Vec::new(),
            options,
            binary,
            layout,
            client: client(secrets.as_ref()),
            secrets,
            small_disk: None,
            dir,
            has_passed: false,
        };
        for number in 0..usize::from(options.engines) {
            cluster.engines.push(None);
            cluster.start_engine(number)?;
        }
        let founders = usize::from(options.replicas);
        if let Some(megabytes) = options.small_disk_mb {
            let folder = cluster.data_dir(founders - 1);
            cluster.small_disk = Some(SmallDisk::mount(&folder, megabytes)?);
        }
        for number in 0..founders + usize::from(options.spares) {
            let is_spare = number >= founders;
            cluster.replicas.push(ReplicaProcess {
                id: u8::try_from(number + 1).context("too many replicas")?,
                origin: if is_spare {
                    ReplicaOrigin::Joiner
                } else {
                    ReplicaOrigin::Founder(options.replicas)
                },
                child: None,
                is_silent: false,
            });
            if is_spare {
                cluster.targets.set_up(number, false);
            } else {
                cluster.start_replica(number)?;
            }
        }
        for number in 0..founders {
            cluster.wait_ready(number).await?;
        }
        Ok(cluster)
    }

    /// Sets the program of replicas that start from now on.
    fn set_program(&mut self, binary: PathBuf) {
        self.binary = binary;
    }

    /// Returns the targets of a load: the replicas, of which those that are down are skipped.
    #[must_use]
    pub fn targets(&self) -> Arc<Targets> {
        self.targets.clone()
    }

    /// Returns the data URL of a replica.
    #[must_use]
    pub fn data_url(&self, number: usize) -> &str {
        self.targets.name(number)
    }

    /// Returns the data address of a replica.
    #[must_use]
    pub fn data_addr(&self, number: usize) -> SocketAddr {
        self.layout.replicas[number].data
    }

    /// Returns the addresses of the replicas' pickers, which listen with
    /// [`ClusterOptions::has_pickers`].
    #[must_use]
    pub fn picker_addrs(&self) -> Vec<SocketAddr> {
        self.layout.replicas.iter().map(|it| it.picker).collect()
    }

    /// Returns the access of clients to the cluster.
    #[must_use]
    pub fn access(&self) -> ClientAccess {
        let secrets = self.secrets.as_ref();
        secrets.map_or_else(ClientAccess::default, |it| it.access.clone())
    }

    /// Returns the access of a client whose certificate is from the cluster's authority but names
    /// no replica.
    ///
    /// # Errors
    /// If the certificate cannot be read.
    pub fn stranger(&self) -> anyhow::Result<ClientAccess> {
        let secrets = self.secrets.as_ref();
        secrets.map_or_else(|| Ok(ClientAccess::default()), ClusterSecrets::stranger)
    }

    /// Returns the admin API client of an operator.
    #[must_use]
    pub fn operator(&self) -> &JsonClient {
        &self.client
    }

    /// Returns the URL of a path in one replica's admin API.
    #[must_use]
    pub fn admin_url(&self, number: usize, path: &str) -> String {
        let scheme = scheme(self.secrets.as_ref());
        format!("{scheme}://{}{path}", self.admin_addr(number))
    }

    /// Returns the peer address of a replica.
    #[must_use]
    pub fn peer_addr(&self, number: usize) -> SocketAddr {
        self.layout.replicas[number].peer
    }

    /// Returns the admin address of a replica.
    #[must_use]
    pub fn admin_addr(&self, number: usize) -> SocketAddr {
        self.layout.replicas[number].admin
    }

    /// Returns the address that a replica announces to its peers.
    #[must_use]
    pub fn peer_name(&self, number: usize) -> String {
        self.layout.replicas[number].peer_name()
    }

    /// Returns the number of replicas, up or down, including spare ones.
    #[must_use]
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Returns the id of a replica in its cluster.
    #[must_use]
    pub fn id(&self, number: usize) -> u8 {
        self.replicas[number].id
    }

    /// Returns the process id of a replica; `None` if it is down.
    #[must_use]
    pub fn process_id(&self, number: usize) -> Option<u32> {
        self.replicas[number].child.as_ref().map(ChildProcess::id)
    }

    /// Returns the network of the replicas' hosts.
    ///
    /// # Errors
    /// If the cluster is on loopback.
    pub fn network(&mut self) -> anyhow::Result<&mut NetnsNetwork> {
        let network = self.layout.network.as_mut();
        network.context("this needs hosts in network namespaces")
    }

    /// Writes the current addresses of all replicas to the hosts file of one replica's host.
    ///
    /// # Errors
    /// If the hosts file cannot be written.
    pub fn write_hosts(&self, number: usize) -> anyhow::Result<()> {
        self.layout.write_hosts(number)
    }

    /// Kills a replica with SIGKILL. Its requests in flight count as lost, not as failed.
    ///
    /// # Errors
    /// If the replica is already down.
    pub fn kill(&mut self, number: usize) -> anyhow::Result<()> {
        let child = self.replicas[number].child.take();
        let child = child.with_context(|| format!("replica {} is down", number + 1))?;
        self.targets.set_up(number, false);
        child.kill()
    }

    /// Sends a signal to a running replica.
    ///
    /// # Errors
    /// If the replica is down, or the signal cannot be sent.
    pub fn signal(&self, number: usize, signal: Signal) -> anyhow::Result<()> {
        let child = self.replicas[number].child.as_ref();
        let child = child.with_context(|| format!("replica {} is down", number + 1))?;
        child.signal(signal)
    }

    /// Marks a replica as unreachable for a while, or waits until it is ready again. In the
    /// meantime it gets no load, and no check waits for it.
    ///
    /// # Errors
    /// If the replica does not become ready.
    pub async fn set_silent(&mut self, number: usize, is_silent: bool) -> anyhow::Result<()> {
        self.replicas[number].is_silent = is_silent;
        if !is_silent {
            self.wait_ready(number).await?;
        }
        self.targets.set_up(number, !is_silent);
        Ok(())
    }

    /// Waits until a replica has ended by itself, and returns its exit status.
    ///
    /// # Errors
    /// If the replica is already down, or does not end.
    pub async fn ended(&mut self, number: usize) -> anyhow::Result<ExitStatus> {
        let child = self.replicas[number].child.take();
        let mut child = child.with_context(|| format!("replica {} is down", number + 1))?;
        let what = format!("replica {} ends", number + 1);
        let status = child.ended(ENDING_PATIENCE).await.context(what)?;
        self.targets.set_up(number, false);
        Ok(status)
    }

    /// Deletes the disk contents of a killed replica.
    ///
    /// # Errors
    /// If the replica is up, or its files cannot be deleted.
    pub fn wipe(&self, number: usize) -> anyhow::Result<()> {
        self.ensure_down(number)?;
        let data_dir = self.data_dir(number);
        // The folder itself may be a mount point.
        for entry in fs::read_dir(&data_dir)? {
            let path = entry?.path();
            if path.is_dir() {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            }
            .with_context(|| format!("delete {}", path.display()))?;
        }
        Ok(())
    }

    /// Restarts killed replicas. Each takes load again once it is ready.
    ///
    /// # Errors
    /// If a replica is up, or does not start or become ready.
    pub async fn restart(&mut self, numbers: &[usize]) -> anyhow::Result<()> {
        for number in numbers {
            self.start_replica(*number)?;
        }
        for number in numbers {
            self.wait_ready(*number).await?;
            self.targets.set_up(*number, true);
        }
        Ok(())
    }

    /// Makes a replica that is down join under a new id.
    ///
    /// # Errors
    /// If the replica is up, or no id is left.
    pub fn renumber(&mut self, number: usize) -> anyhow::Result<()> {
        self.ensure_down(number)?;
        let highest = self.replicas.iter().map(|replica| replica.id).max();
        let next = highest.and_then(|id| id.checked_add(1));
        let replica = &mut self.replicas[number];
        replica.id = next.context("every number is used up")?;
        replica.origin = ReplicaOrigin::Joiner;
        Ok(())
    }

    /// Makes replicas that are down and have empty disks found a cluster together at their next
    /// start.
    ///
    /// # Errors
    /// If a replica is up.
    pub fn refound(&mut self, numbers: &[usize]) -> anyhow::Result<()> {
        let count = u8::try_from(numbers.len()).context("too many replicas")?;
        for number in numbers {
            self.ensure_down(*number)?;
            self.replicas[*number].origin = ReplicaOrigin::Founder(count);
        }
        self.layout.founders = numbers.to_vec();
        Ok(())
    }

    /// Moves a replica that is down to another peer address. Names do not change.
    ///
    /// # Errors
    /// If the replica is up, or the cluster is on loopback.
    pub fn move_replica(&mut self, number: usize) -> anyhow::Result<()> {
        self.ensure_down(number)?;
        self.layout.move_replica(number)
    }

    /// Returns the number of the replica with the small disk, if there is one.
    #[must_use]
    pub fn small_disk(&self) -> Option<usize> {
        let founders = usize::from(self.options.replicas);
        self.small_disk.as_ref().map(|_| founders - 1)
    }

    /// Runs a command of the program to its end with the config of a replica, such as `recover`.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn run_on(&self, number: usize, command: &str) -> anyhow::Result<()> {
        let config = self.write_config(number)?;
        let args = [command, "--config", &config];
        let mut child = self.spawn_replica(number, &args)?;
        let status = child.ended(ENDING_PATIENCE).await?;
        ensure!(status.success(), "quorate {command} ended with {status}");
        Ok(())
    }

    /// Runs a command of the program that calls a replica to its end.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn run(&self, args: &[&str]) -> anyhow::Result<()> {
        let log = self.dir.path().join("commands.log");
        let flags = self.secrets.as_ref().map(ClusterSecrets::flags);
        let flags = flags.unwrap_or_default();
        let args: Vec<&str> = args
            .iter()
            .copied()
            .chain(flags.iter().map(String::as_str))
            .collect();
        let mut child = ChildProcess::spawn(ProcessLimits::default(), &self.binary, &args, &log)?;
        let status = child.ended(ENDING_PATIENCE).await?;
        let said = fs::read_to_string(&log).unwrap_or_default();
        let last = said.lines().last().unwrap_or_default();
        ensure!(
            status.success(),
            "quorate {args:?} ended with {status}: {last}"
        );
        Ok(())
    }

    /// Starts a replica without waiting for it, because a test may expect it to refuse.
    ///
    /// # Errors
    /// If the replica is up, or the program cannot be started.
    pub fn start_replica(&mut self, number: usize) -> anyhow::Result<()> {
        self.ensure_down(number)?;
        let config = self.write_config(number)?;
        let child = self.spawn_replica(number, &["serve", "--config", &config])?;
        self.replicas[number].child = Some(child);
        Ok(())
    }

    /// Returns the folder of a replica's data.
    #[must_use]
    pub fn data_dir(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("replica-{}", number + 1))
    }

    /// Returns a folder for a test's files, which is removed with the cluster.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// Keeps the cluster's folder when the cluster ends, and returns its path.
    pub fn keep_folder(&mut self) -> PathBuf {
        self.dir.disable_cleanup(true);
        self.dir.path().to_owned()
    }

    /// Returns the log output of a replica.
    ///
    /// # Errors
    /// If the log file cannot be read.
    pub fn log(&self, number: usize) -> anyhow::Result<String> {
        let path = self.log_path(number);
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    }

    /// Stops all processes and marks the test as passed.
    pub fn stop(mut self) {
        self.has_passed = true;
    }

    fn spawn_replica(&self, number: usize, args: &[&str]) -> anyhow::Result<ChildProcess> {
        let bounds = ProcessLimits {
            namespace: self.layout.namespace(number),
            descriptors: self.options.descriptors,
        };
        ChildProcess::spawn(bounds, &self.binary, args, &self.log_path(number))
    }

    fn write_config(&self, number: usize) -> anyhow::Result<String> {
        let replica = &self.replicas[number];
        let who = (number, replica.id);
        let data_dir = self.data_dir(number);
        let secrets = self.secrets.as_ref();
        if let Some(secrets) = secrets {
            let own = &self.layout.replicas[number];
            secrets.certify(
                replica.id,
                &[own.data.ip().to_string(), own.peer_host.clone()],
            )?;
        }
        let with = (&self.options, secrets);
        let text = layout::config(&self.layout, who, replica.origin, &data_dir, with);
        let path = self.dir.path().join(format!("replica-{}.toml", number + 1));
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        Ok(path.display().to_string())
    }

    fn log_path(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("replica-{}.log", number + 1))
    }

    fn ensure_down(&self, number: usize) -> anyhow::Result<()> {
        let is_down = self.replicas[number].child.is_none();
        ensure!(is_down, "replica {} is up", number + 1);
        Ok(())
    }
}

fn scheme(secrets: Option<&ClusterSecrets>) -> &'static str {
    if secrets.is_some() { "https" } else { "http" }
}

/// Returns the targets of a load: the data URLs of all replicas.
fn targets(layout: &Layout, secrets: Option<&ClusterSecrets>) -> anyhow::Result<Targets> {
    let replicas = layout.replicas.iter();
    let urls: Vec<String> = replicas
        .map(|replica| format!("{}://{}", scheme(secrets), replica.data))
        .collect();
    Ok(match secrets.and_then(|it| it.access.of_targets()) {
        None => Targets::new(&urls)?,
        Some(access) => Targets::secure(&urls, access)?,
    })
}

/// Returns the admin API client of an operator.
fn client(secrets: Option<&ClusterSecrets>) -> JsonClient {
    let client = JsonClient::new(ANSWER_TIMEOUT);
    let Some(secrets) = secrets else {
        return client;
    };
    let connector = ReplicaConnector::new(secrets.access.tls().cloned());
    let authorization = Some(secrets.authorization.clone());
    client.through(&connector).authorized(authorization)
}

impl Drop for ProcessCluster {
    fn drop(&mut self) {
        if self.has_passed {
            return;
        }
        let Ok(files) = fs::read_dir(self.dir.path()) else {
            return;
        };
        for path in files.flatten().map(|file| file.path()) {
            if path.extension().is_some_and(|extension| extension == "log") {
                let text = fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                let end = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
                eprintln!("--- {} ---\n{}", path.display(), end.join("\n"));
            }
        }
    }
}

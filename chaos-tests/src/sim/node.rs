//! Simulated machines. Each has at most one process, which its disk and its clock outlive.
//!
//! A process is a tokio runtime of its own, on one thread with paused time. The world steps it to
//! the present. Dropping the runtime is a crash. Not stepping it is SIGSTOP; its clock jumps
//! afterwards.

use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::base::clock::Clock;
use api::cluster::figures::ReplicaFigures;
use node::app::replica_core::{ApplyObserver, CorePorts, ReplicaCore};
use node::app::scaling::ScaleSource;
use node::config::Config;
use raft::{MemoryDisk, Storage};
use state::ids::SessionId;
use state::prefix::HashSecret;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::{Instant, advance, sleep_until};

use super::network::SimNetwork;
use crate::oracle::observation::EPOCH_MS;

/// Simulated time in microseconds since the world began. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct SimTime(Arc<AtomicU64>);

impl SimTime {
    /// Returns the current simulated time, in microseconds.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the current simulated time, in microseconds.
    pub(super) fn set_us(&self, now_us: u64) {
        self.0.store(now_us, Ordering::Relaxed);
    }
}

/// A machine's wall clock: the world's time plus an error. Clones share it.
#[derive(Debug, Clone)]
pub struct WallClock {
    time: SimTime,
    error_ms: Arc<AtomicI64>,
}

impl WallClock {
    fn new(time: SimTime) -> Self {
        Self {
            time,
            error_ms: Arc::default(),
        }
    }

    /// Sets the error in milliseconds; 0 makes the clock right.
    pub fn set_error_ms(&self, error_ms: i64) {
        self.error_ms.store(error_ms, Ordering::Relaxed);
    }

    /// Returns the error in milliseconds.
    #[must_use]
    pub fn error_ms(&self) -> i64 {
        self.error_ms.load(Ordering::Relaxed)
    }

    /// Returns the time that the clock shows, in Unix milliseconds.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        let right = EPOCH_MS + self.time.now_us() / 1000;
        right.saturating_add_signed(self.error_ms())
    }
}

/// A machine with at most one process of a replica.
pub struct Machine {
    /// Id of the machine's replica.
    pub id: u8,
    /// Disk with the replica's log.
    pub disk: MemoryDisk,
    /// Wall clock of the machine.
    pub wall: WallClock,
    /// Config of the replica.
    pub config: Config,
    /// Number of processes started so far.
    pub runs: u32,
    process: Option<Process>,
}

/// Slot in which a starting process stores its core or its error.
type Starting = Arc<Mutex<Option<anyhow::Result<ReplicaCore>>>>;

/// A process on a machine.
struct Process {
    runtime: Runtime,
    origin: Instant,
    began_us: u64,
    /// Time up to which the process was stepped, in microseconds.
    reached_us: u64,
    is_paused: bool,
    starting: Starting,
    core: Option<ReplicaCore>,
    /// Flag that is set once a graceful shutdown is complete; `None` before a shutdown.
    left: Option<Arc<AtomicI64>>,
}

/// Outcome of a step.
#[derive(Debug)]
pub enum Stepped {
    /// Nothing happened that must be reported.
    On,
    /// The replica has started and is up.
    Up,
    /// The process ended by itself, with the reason why it could not start; `None` if gracefully.
    Ended(Option<String>),
}

/// Settings with which a process starts.
pub struct StartOptions {
    /// Session of the run.
    pub session: SessionId,
    /// Seed of the cluster's hashes, used if the replica founds it.
    pub hash_seed: u64,
    /// Newest log format that the process's build knows.
    pub format: u8,
    /// Source of the requested number of replicas, if there is one.
    pub scale: Option<Arc<dyn ScaleSource>>,
    /// Observer of the changes of the replica's state.
    pub observer: Arc<dyn ApplyObserver>,
}

impl Machine {
    /// Creates a machine that is off.
    #[must_use]
    pub fn new(id: u8, config: Config, disk: MemoryDisk, time: &SimTime) -> Self {
        Self {
            id,
            disk,
            wall: WallClock::new(time.clone()),
            config,
            runs: 0,
            process: None,
        }
    }

    /// Returns the folder of the replica's files on the simulated disk.
    #[must_use]
    pub fn dir(&self) -> &PathBuf {
        &self.config.node.data_dir
    }

    /// Starts a process.
    ///
    /// # Panics
    /// If the machine already has a process.
    pub fn start(&mut self, network: &SimNetwork, now_us: u64, start: StartOptions) {
        assert!(self.process.is_none(), "machine {} runs already", self.id);
        self.runs += 1;
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime without I/O needs nothing of the system");
        let transport = network.power_on(self.id, runtime.handle().clone());
        let wall = self.wall.clone();
        let ports = CorePorts {
            transport: Arc::new(transport),
            storage: Storage::Memory(self.disk.clone()),
            session: start.session,
            hash_seed: start.hash_seed,
            hash_secret: HashSecret::of_number(start.hash_seed),
            clock: Clock::of(move || wall.unix_ms()),
            dialer: api::engines::backends::EngineDialer::default(),
            format: start.format,
            scale: start.scale,
            observer: Some(start.observer),
        };
        let starting = Starting::default();
        let (config, started) = (self.config.clone(), Arc::clone(&starting));
        runtime.spawn(async move {
            let core = ReplicaCore::start(config, ports).await;
            if let Ok(core) = &core {
                // Fills in figures that production takes from its sockets.
                core.figures().set_own(&ReplicaFigures::default());
            }
            *started.lock().unwrap_or_else(PoisonError::into_inner) = Some(core);
        });
        let origin = runtime.block_on(async { Instant::now() });
        self.process = Some(Process {
            runtime,
            origin,
            began_us: now_us,
            reached_us: now_us,
            is_paused: false,
            starting,
            core: None,
            left: None,
        });
    }

    /// Advances the process to the time `now_us`, unless it is paused, and returns the outcome.
    pub fn step(&mut self, now_us: u64) -> Stepped {
        let Some(process) = &mut self.process else {
            return Stepped::On;
        };
        if process.is_paused {
            return Stepped::On;
        }
        process.step(now_us);
        if let Some(left) = &process.left
            && left.load(Ordering::Relaxed) != 0
        {
            return Stepped::Ended(None);
        }
        if process.core.is_some() || process.left.is_some() {
            return Stepped::On;
        }
        let started = process.starting.lock();
        match started.unwrap_or_else(PoisonError::into_inner).take() {
            None => Stepped::On,
            Some(Ok(core)) => {
                process.core = Some(core);
                Stepped::Up
            }
            Some(Err(error)) => Stepped::Ended(Some(format!("{error:#}"))),
        }
    }

    /// Returns whether the machine has a process, paused or not.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.process.is_some()
    }

    /// Returns whether the process is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.process.as_ref().is_some_and(|it| it.is_paused)
    }

    /// Returns the replica once it is up; `None` while its process is paused.
    #[must_use]
    pub fn core(&self) -> Option<&ReplicaCore> {
        let process = self.process.as_ref().filter(|it| !it.is_paused)?;
        process.core.as_ref()
    }

    /// Returns the replica once it is up, even while its process is paused.
    #[must_use]
    pub fn core_at_rest(&self) -> Option<&ReplicaCore> {
        self.process.as_ref()?.core.as_ref()
    }

    /// Returns the runtime handle of the process, for tasks in it.
    #[must_use]
    pub fn handle(&self) -> Option<&Handle> {
        Some(self.process.as_ref()?.runtime.handle())
    }

    /// Pauses the process, so that it is not stepped.
    pub fn pause(&mut self) {
        if let Some(process) = &mut self.process {
            process.is_paused = true;
        }
    }

    /// Resumes the process. Its clock jumps to the present, and everything due runs at once.
    pub fn resume(&mut self, now_us: u64) {
        let Some(process) = &mut self.process else {
            return;
        };
        if std::mem::replace(&mut process.is_paused, false) {
            let missed = Duration::from_micros(now_us - process.reached_us);
            process.runtime.block_on(advance(missed));
            process.reached_us = now_us;
        }
    }

    /// Starts a graceful shutdown, whose end [`Stepped::Ended`] reports.
    pub fn leave(&mut self) {
        let Some(process) = &mut self.process else {
            return;
        };
        let Some(core) = process.core.take() else {
            return;
        };
        let left = Arc::new(AtomicI64::new(0));
        process.left = Some(Arc::clone(&left));
        process.runtime.spawn(async move {
            core.stop().await;
            left.store(1, Ordering::Relaxed);
        });
    }

    /// Kills the process. Callers crash the disk and power off the host first.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            // Handles of the core are only valid within the runtime, so they are dropped first.
            drop(process.core);
            drop(process.starting);
            drop(process.runtime);
        }
    }
}

impl Process {
    fn step(&mut self, now_us: u64) {
        let until = self.origin + Duration::from_micros(now_us - self.began_us);
        self.runtime.block_on(async { sleep_until(until).await });
        self.reached_us = now_us;
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

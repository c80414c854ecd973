//! The engines of a cluster of processes, which can be killed and started again.

use std::net::SocketAddr;

use anyhow::{Context as _, ensure};

use super::ProcessCluster;
use super::child::{ChildProcess, ProcessLimits};

impl ProcessCluster {
    /// Returns the address of an engine.
    #[must_use]
    pub fn engine_addr(&self, number: usize) -> SocketAddr {
        self.layout.engines[number]
    }

    /// Starts an engine that is down, at its address. All engines have the same seed. Does not
    /// wait until the engine listens.
    ///
    /// # Errors
    /// If the engine is up, or the program cannot be started.
    pub fn start_engine(&mut self, number: usize) -> anyhow::Result<()> {
        let is_down = self.engines[number].is_none();
        ensure!(is_down, "engine {} is up", number + 1);
        let listen = self.layout.engines[number].to_string();
        let speed = self.options.engine_speed.to_string();
        let mut args = vec!["engine", "--listen", &listen, "--speed", &speed];
        args.extend(self.options.engine_args);
        let log = self.dir.path().join(format!("engine-{}.log", number + 1));
        let bounds = ProcessLimits {
            namespace: self.layout.engine_namespace(),
            descriptors: None,
        };
        let engine = ChildProcess::spawn(bounds, &self.binary, &args, &log)?;
        self.engines[number] = Some(engine);
        Ok(())
    }

    /// Kills an engine with SIGKILL, with all its requests.
    ///
    /// # Errors
    /// If the engine is already down.
    pub fn kill_engine(&mut self, number: usize) -> anyhow::Result<()> {
        let engine = self.engines[number].take();
        let engine = engine.with_context(|| format!("engine {} is down", number + 1))?;
        engine.kill()
    }
}

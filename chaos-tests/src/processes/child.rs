//! A process that dies with its owner.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context as _;

/// A running process whose output goes to a file.
#[derive(Debug)]
pub(super) struct Child {
    process: std::process::Child,
}

impl Child {
    /// Starts `program`; what it prints is appended to `log`.
    pub(super) fn spawn(program: &Path, args: &[&str], log: &Path) -> anyhow::Result<Self> {
        let output = OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open {}", log.display()))?;
        let errors = output.try_clone().context("share the log file")?;
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("QUORATE_") {
                command.env_remove(name);
            }
        }
        let process = command
            .args(args)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        Ok(Self { process })
    }

    /// SIGKILL; returns when the process is gone.
    pub(super) fn kill(mut self) -> anyhow::Result<()> {
        self.process.kill().context("kill")?;
        self.process.wait().context("wait for the killed process")?;
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may have ended on its own, and there is nobody to tell.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

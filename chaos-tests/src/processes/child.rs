//! A child process that is killed when its owner drops it.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{interval, timeout};

/// Interval at which an ending process is polled.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Namespace and limits of a process.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ProcessLimits<'a> {
    /// Network namespace in which the process runs; `None` for that of this process.
    pub(super) namespace: Option<&'a str>,
    /// Maximum number of file descriptors; `None` for the inherited limit.
    pub(super) descriptors: Option<u32>,
}

/// A running process whose output goes to a file. Dropping it kills the process.
#[derive(Debug)]
pub(super) struct ChildProcess {
    process: std::process::Child,
}

impl ChildProcess {
    /// Starts `program` and appends its output to `log`.
    pub(super) fn spawn(
        bounds: ProcessLimits<'_>,
        program: &Path,
        args: &[&str],
        log: &Path,
    ) -> anyhow::Result<Self> {
        let output = OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open {}", log.display()))?;
        let errors = output.try_clone().context("share the log file")?;
        // Each wrapper replaces itself by the program, so signals need not be forwarded.
        let mut words: Vec<String> = Vec::new();
        if let Some(namespace) = bounds.namespace {
            words.extend(["ip", "netns", "exec", namespace].map(str::to_owned));
        }
        if let Some(descriptors) = bounds.descriptors {
            let script = format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"");
            words.extend(["sh".to_owned(), "-c".to_owned(), script]);
        }
        words.push(program.display().to_string());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
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

    /// Returns the process id.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends SIGKILL and waits until the process is gone.
    pub(super) fn kill(mut self) -> anyhow::Result<()> {
        self.process.kill().context("kill")?;
        self.process.wait().context("wait for the killed process")?;
        Ok(())
    }

    /// Sends a signal to the process.
    pub(super) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.process.id())
            .ok()
            .and_then(Pid::from_raw);
        let pid = pid.context("no process id")?;
        kill_process(pid, signal).with_context(|| format!("send {signal:?}"))
    }

    /// Waits until the process has ended by itself, at most for `patience`.
    pub(super) async fn ended(&mut self, patience: Duration) -> anyhow::Result<ExitStatus> {
        let ended = async {
            let mut looks = interval(LOOK_EVERY);
            loop {
                looks.tick().await;
                if let Some(status) = self.process.try_wait().context("wait for a process")? {
                    return anyhow::Ok(status);
                }
            }
        };
        timeout(patience, ended)
            .await
            .with_context(|| format!("not ended within {} s", patience.as_secs()))
            .flatten()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // It may have ended on its own; errors have no one to report to.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

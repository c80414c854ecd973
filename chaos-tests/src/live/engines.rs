//! Engines of a live run: queries, and starts and restarts if a command is given.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http::Method;
use node::json_client::JsonClient;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::chats::WORDS;

/// Maximum time for an engine to become healthy.
const START_MAX: Duration = Duration::from_secs(300);
/// Interval between two polls of an engine.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A real engine under test.
#[derive(Debug)]
pub(super) struct Engine {
    number: usize,
    pub(super) address: SocketAddr,
    /// Process of the engine; `None` if this program did not start it.
    process: Option<Child>,
}

/// Properties that an engine reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineFacts {
    pub(super) model: String,
    /// Number of tokens per block.
    pub(super) block: u64,
    /// Number of blocks in the engine's cache.
    pub(super) blocks: u64,
}

/// Means to start engines: the command, and a folder for their output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Starter<'a> {
    /// Shell command with `$N` for the engine's number; `None` if the engines already run.
    pub(super) command: Option<&'a str>,
    /// Folder for the output of started engines.
    pub(super) logs: &'a Path,
    pub(super) http: &'a JsonClient,
}

impl Engine {
    /// Uses the engine at this address, or starts one if there is no healthy engine.
    pub(super) async fn take(
        starter: Starter<'_>,
        number: usize,
        address: SocketAddr,
    ) -> anyhow::Result<Self> {
        let mut engine = Self {
            number,
            address,
            process: None,
        };
        if !engine.is_healthy(starter.http).await {
            engine.start(starter)?;
        }
        Ok(engine)
    }

    /// Returns whether this program started the engine and so can restart it.
    pub(super) fn is_ours(&self) -> bool {
        self.process.is_some()
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn start(&mut self, starter: Starter<'_>) -> anyhow::Result<()> {
        let command = starter.command.with_context(|| {
            format!(
                "no engine answers at {}, and no --start says how to start one",
                self.address
            )
        })?;
        let log = starter.logs.join(format!("engine-{}.log", self.number));
        let output = File::options().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        let errors = output.try_clone().context("share the log file")?;
        // Engines have children of their own, and the whole group is killed.
        let process = Command::new("sh")
            .args(["-c", command])
            .env("N", self.number.to_string())
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {command}"))?;
        self.process = Some(process);
        Ok(())
    }

    /// Kills the engine and starts another in its place.
    pub(super) async fn restart(&mut self, starter: Starter<'_>) -> anyhow::Result<()> {
        self.kill();
        self.start(starter)?;
        self.wait_healthy(starter.http).await
    }

    async fn is_healthy(&self, http: &JsonClient) -> bool {
        let answer = http.send(Method::GET, &self.url("/health"), None).await;
        answer.is_ok_and(|answer| answer.status.is_success())
    }

    /// Waits until the engine is healthy.
    pub(super) async fn wait_healthy(&self, http: &JsonClient) -> anyhow::Result<()> {
        let begin = Instant::now();
        while !self.is_healthy(http).await {
            let secs = START_MAX.as_secs();
            ensure!(
                begin.elapsed() < START_MAX,
                "no engine at {} within {secs} s",
                self.address
            );
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Resets the engine's cache, which works only without requests in flight. Returns whether the
    /// engine supports it (vLLM: with `VLLM_SERVER_DEV_MODE=1`). Then sends a short request, so
    /// that the engine publishes the reset as a KV event.
    pub(super) async fn reset(&self, http: &JsonClient, model: &str) -> anyhow::Result<bool> {
        let url = self.url("/reset_prefix_cache");
        let answer = http.send(Method::POST, &url, Some(&json!({}))).await?;
        if !answer.status.is_success() {
            return Ok(false);
        }
        let body = json!({ "model": model, "prompt": "word", "max_tokens": 1 });
        let url = self.url("/v1/completions");
        http.call(Method::POST, &url, Some(&body)).await?;
        Ok(true)
    }

    /// Queries the engine's model, block size and number of blocks.
    pub(super) async fn facts(&self, http: &JsonClient) -> anyhow::Result<EngineFacts> {
        let models = http
            .call(Method::GET, &self.url("/v1/models"), None)
            .await?;
        let model = models["data"][0]["id"]
            .as_str()
            .context("it lists no model")?;
        let metrics = http.send(Method::GET, &self.url("/metrics"), None).await?;
        let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
        let told = |label: &str| -> anyhow::Result<u64> {
            let config = metrics
                .lines()
                .find(|it| it.starts_with("vllm:cache_config_info{"));
            let config = config.context("it tells no vllm:cache_config_info")?;
            let (_, value) = config
                .split_once(&format!("{label}=\""))
                .with_context(|| format!("it tells no {label}"))?;
            let value = value.split('"').next().unwrap_or_default();
            value.parse().with_context(|| format!("{label} is {value}"))
        };
        Ok(EngineFacts {
            model: model.to_owned(),
            block: told("block_size")?,
            blocks: told("num_gpu_blocks_override").or_else(|_| told("num_gpu_blocks"))?,
        })
    }

    /// Returns the token ids of the words for responses, each with a leading space. An untrained
    /// model would produce texts that tokenize differently when they come back.
    pub(super) async fn words(&self, http: &JsonClient, model: &str) -> anyhow::Result<Vec<u64>> {
        let mut tokens = Vec::new();
        for word in WORDS {
            let body = json!({ "model": model, "prompt": format!(" {word}"), "add_special_tokens": false });
            let answer = http
                .call(Method::POST, &self.url("/tokenize"), Some(&body))
                .await?;
            if let Some([Value::Number(one)]) = answer["tokens"].as_array().map(Vec::as_slice) {
                tokens.extend(one.as_u64());
            }
        }
        Ok(tokens)
    }

    fn kill(&mut self) {
        let Some(mut process) = self.process.take() else {
            return;
        };
        let group = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        if let Some(group) = group {
            // They may have ended on their own.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = process.wait();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.kill();
    }
}

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
/// Assumed size of the cache of an engine that does not tell it, in tokens.
const OTHER_TOKENS: u64 = 8_192;
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

/// A kind of engine, as far as the check treats it differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EngineKind {
    Vllm,
    Sglang,
    Other,
}

/// Properties that an engine reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineFacts {
    pub(super) kind: EngineKind,
    pub(super) model: String,
    /// Number of tokens per block; `None` if the engine does not tell.
    pub(super) block: Option<u64>,
    /// Number of tokens in the engine's cache.
    pub(super) tokens: u64,
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
        for path in ["/reset_prefix_cache", "/flush_cache"] {
            let url = self.url(path);
            let answer = http.send(Method::POST, &url, Some(&json!({}))).await?;
            if answer.status.is_success() {
                self.complete(http, model, "word").await?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets the engine complete a prompt by one token.
    pub(super) async fn complete(
        &self,
        http: &JsonClient,
        model: &str,
        prompt: &str,
    ) -> anyhow::Result<()> {
        let body = json!({ "model": model, "prompt": prompt, "max_tokens": 1 });
        let url = self.url("/v1/completions");
        http.call(Method::POST, &url, Some(&body)).await?;
        Ok(())
    }

    /// Queries the engine's model, block size and size of the cache.
    pub(super) async fn facts(&self, http: &JsonClient) -> anyhow::Result<EngineFacts> {
        let models = http
            .call(Method::GET, &self.url("/v1/models"), None)
            .await?;
        let model = models["data"][0]["id"]
            .as_str()
            .context("it lists no model")?;
        let metrics = http.send(Method::GET, &self.url("/metrics"), None).await?;
        let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
        let (kind, block, tokens) = if let Some(sizes) = vllm_sizes(&metrics)? {
            let [block, blocks] = sizes;
            (EngineKind::Vllm, Some(block), block * blocks)
        } else if let Ok(info) = http
            .call(Method::GET, &self.url("/server_info"), None)
            .await
        {
            let number = |name: &str| {
                let value = info[name].as_u64();
                value.with_context(|| format!("/server_info has no {name}"))
            };
            let tokens = number("max_total_num_tokens")?;
            (EngineKind::Sglang, Some(number("page_size")?), tokens)
        } else {
            (EngineKind::Other, None, OTHER_TOKENS)
        };
        Ok(EngineFacts {
            kind,
            model: model.to_owned(),
            block,
            tokens,
        })
    }

    /// Returns the token ids of the words for responses, each with a leading space. An untrained
    /// model would produce texts that tokenize differently when they come back.
    pub(super) async fn words(&self, http: &JsonClient, model: &str) -> anyhow::Result<Vec<u64>> {
        let mut tokens = Vec::new();
        for word in WORDS {
            let body = json!({ "model": model, "prompt": format!(" {word}"), "add_special_tokens": false });
            let answer = http
                .send(Method::POST, &self.url("/tokenize"), Some(&body))
                .await?;
            // Not every engine has this endpoint, or takes this body.
            let answer = answer.success().unwrap_or_default();
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

/// Returns the number of tokens per block and of blocks in vLLM's metrics; `None` if these are not
/// vLLM's.
fn vllm_sizes(metrics: &str) -> anyhow::Result<Option<[u64; 2]>> {
    let mut lines = metrics.lines();
    let Some(config) = lines.find(|it| it.starts_with("vllm:cache_config_info{")) else {
        return Ok(None);
    };
    let told = |label: &str| -> anyhow::Result<u64> {
        let (_, value) = config
            .split_once(&format!("{label}=\""))
            .with_context(|| format!("it tells no {label}"))?;
        let value = value.split('"').next().unwrap_or_default();
        value.parse().with_context(|| format!("{label} is {value}"))
    };
    let blocks = told("num_gpu_blocks_override").or_else(|_| told("num_gpu_blocks"))?;
    Ok(Some([told("block_size")?, blocks]))
}

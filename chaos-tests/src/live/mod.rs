//! Checks predictions against real engines: three replicas in front of given engines (vLLM on a CPU
//! is enough). Each way to track a cache gets a load of chats that need five times its size. The
//! check compares the predicted tokens of every request with the engine's own `cached_tokens`.
//!
//! It is not part of `cargo test`, because it needs engines. See docs/guide/engines.md.

mod chats;
mod endpoints;
mod engines;
mod load;
mod starts;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, ensure};
use http::Method;
use node::json_client::JsonClient;
use serde::Serialize;
use serde_json::json;
use tokio::time::sleep;

use crate::processes::{ClusterOptions, ProcessCluster, until};
use chats::{Answers, Chats};
use endpoints::{ALL, COMMON, PROSE, RESTRICTABLE, Way};
use engines::{Engine, EngineFacts, EngineKind, Starter};
use load::{Load, Target};

/// Maximum wait for a response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Factor by which the chats exceed the size of the caches.
const PRESSURE: u64 = 5;
/// Maximum error of a prediction by characters, in percent of the prompt.
const NEAR_PERCENT: u64 = 10;
/// Time for which a killed replica stays down.
const DEAD: Duration = Duration::from_secs(2);

/// Options of a live run.
#[derive(Debug, Clone)]
pub struct LiveOptions {
    /// Addresses of the engines.
    pub engines: Vec<SocketAddr>,
    /// Shell command that starts engine number `$N`; `None` if the engines already run.
    pub start: Option<String>,
    /// Folder for the output of started engines.
    pub logs: PathBuf,
    /// Endpoints of engine `$N` for KV events and replays; `None` if the engine reports them.
    pub kv_events: Option<[String; 2]>,
    /// Path of the model's `tokenizer.json`; `None` to skip the rows that need it.
    pub tokenizer: Option<PathBuf>,
    /// Number of responses to compare per row.
    pub requests: u64,
    /// Minimum time from a response to the next turn of its chat.
    pub pause: Duration,
    /// File to which each response is appended, as a line of JSON.
    pub record: Option<PathBuf>,
    /// Text that the names of the rows to run contain; `None` to run all rows.
    pub only: Option<String>,
}

/// Source of the replicas' knowledge about engines' caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knowledge {
    Events,
    Leases,
}

/// Way in which the replicas tokenize prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tokens {
    File,
    Engine,
    Characters,
}

/// What a row counts as right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Right {
    /// Predictions that are correct to the token.
    Equal,
    /// Predictions whose error is at most a tenth of the prompt.
    Near,
    /// Requests that get a response.
    Answered,
    /// Starts of a cluster after which all engines are followed exactly in time.
    ExactInTime,
}

/// One row of the table, which is one load on a new cluster.
#[derive(Debug, Clone, Copy)]
struct Row {
    name: &'static str,
    knowledge: Knowledge,
    tokens: Tokens,
    answers: Answers,
    /// Ways in which the clients send their chats.
    ways: &'static [Way],
    /// Number of concurrent requests.
    lanes: usize,
    /// Whether all engines serve the load, or only the first one.
    has_all_engines: bool,
    has_faults: bool,
    right: Right,
    /// Minimum share of what is right, in hundredths of a percent.
    goal: u64,
    /// The same for engines of SGLang, which evict whole leaves of their tree and put a prompt
    /// into it only after its prefill.
    goal_sglang: u64,
}

const ROWS: [Row; 10] = [
    Row {
        has_all_engines: true,
        ..row("precise, 3 at once", 3, 9_990)
    },
    Row {
        answers: Answers::Words,
        ways: RESTRICTABLE,
        has_faults: true,
        has_all_engines: true,
        ..row("precise, 3 at once, words, faults", 3, 9_995)
    },
    Row {
        has_all_engines: true,
        goal_sglang: 9_800,
        ..row("precise, 12 at once", 12, 9_950)
    },
    Row {
        answers: Answers::Words,
        ways: RESTRICTABLE,
        has_all_engines: true,
        goal_sglang: 9_800,
        ..row("precise, 12 at once, words", 12, 9_950)
    },
    Row {
        knowledge: Knowledge::Leases,
        ..row("leases, huggingface", 3, 9_700)
    },
    Row {
        knowledge: Knowledge::Leases,
        answers: Answers::Words,
        ways: RESTRICTABLE,
        ..row("leases, huggingface, words", 3, 9_700)
    },
    Row {
        knowledge: Knowledge::Leases,
        tokens: Tokens::Engine,
        ..row("leases, engine", 3, 9_500)
    },
    Row {
        knowledge: Knowledge::Leases,
        tokens: Tokens::Characters,
        ways: PROSE,
        right: Right::Near,
        ..row("leases, character", 3, 9_900)
    },
    Row {
        knowledge: Knowledge::Leases,
        ways: COMMON,
        right: Right::Answered,
        ..row("no request fails", 6, 10_000)
    },
    Row {
        has_all_engines: true,
        right: Right::ExactInTime,
        ..row("fresh starts", 1, 10_000)
    },
];

const fn row(name: &'static str, lanes: usize, goal: u64) -> Row {
    Row {
        name,
        knowledge: Knowledge::Events,
        tokens: Tokens::File,
        answers: Answers::Model,
        ways: ALL,
        lanes,
        has_all_engines: false,
        has_faults: false,
        right: Right::Equal,
        goal,
        goal_sglang: 9_950,
    }
}

impl Row {
    /// Returns the share of a report that is right, as parts and whole.
    fn right(&self, report: &RowReport) -> (u64, u64) {
        match self.right {
            Right::Equal | Right::ExactInTime => (report.equal, report.requests),
            Right::Near => (report.near, report.requests),
            Right::Answered => (report.requests, report.requests + report.failed),
        }
    }

    fn goal(&self, kind: EngineKind) -> u64 {
        match kind {
            EngineKind::Sglang if self.right == Right::Equal => self.goal.min(self.goal_sglang),
            _ => self.goal,
        }
    }
}

/// Result of a row.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RowReport {
    /// Name of the row.
    pub name: &'static str,
    /// Number of engines that served the load.
    pub engines: usize,
    /// Number of responses whose predictions were compared.
    pub requests: u64,
    /// Number of requests without a response, because a replica or engine was down.
    pub failed: u64,
    /// Number of predictions that were correct to the token.
    pub equal: u64,
    /// Number of predictions whose error is at most a tenth of the prompt.
    pub near: u64,
    /// Number of predictions above and number of predictions below the actual value.
    pub off: [u64; 2],
    /// Number of prompt tokens in the compared responses.
    pub prompt_tokens: u64,
    /// Number of prompt tokens found in caches.
    pub cached_tokens: u64,
    /// Number of prompt tokens that were predicted wrongly, in either direction.
    pub wrong_tokens: u64,
    /// Descriptions of the injected faults.
    pub faults: Vec<String>,
    /// Minimum share of what the row counts as right, in hundredths of a percent: predictions that
    /// are equal, near ones if they are made by characters, responses, or starts.
    pub goal: u64,
    /// Whether the goal was met.
    pub is_met: bool,
    /// Duration of the load, in seconds.
    pub took_s: f64,
}

/// Runs the selected rows, one after another. Passes the result of each to `told`.
///
/// # Errors
/// If an engine or a replica does not start, or a response has no prediction.
pub async fn run(
    options: &LiveOptions,
    mut told: impl FnMut(&RowReport),
) -> anyhow::Result<Vec<RowReport>> {
    let http = JsonClient::new(ANSWER_TIMEOUT);
    let starter = Starter {
        command: options.start.as_deref(),
        logs: &options.logs,
        http: &http,
    };
    let rows: Vec<&Row> = ROWS.iter().filter(|row| is_wanted(row, options)).collect();
    let needs_all = rows.iter().any(|row| row.has_all_engines);
    let count = if needs_all { options.engines.len() } else { 1 };
    let mut engines = Vec::new();
    for (number, address) in options.engines.iter().take(count).enumerate() {
        engines.push(Engine::take(starter, number, *address).await?);
    }
    for engine in &engines {
        engine.wait_healthy(&http).await?;
    }
    ensure!(!engines.is_empty(), "no --engine");
    let facts = engines[0].facts(&http).await?;
    let words = engines[0].words(&http, &facts.model).await?;
    let mut reports = Vec::new();
    for row in rows {
        let serving = if row.has_all_engines {
            engines.len()
        } else {
            1
        };
        let scene = Scene {
            row,
            options,
            starter,
            facts: &facts,
            words: &words,
        };
        let report = scene
            .play(&mut engines[..serving])
            .await
            .context(row.name)?;
        told(&report);
        reports.push(report);
    }
    Ok(reports)
}

fn is_wanted(row: &Row, options: &LiveOptions) -> bool {
    let is_named = options
        .only
        .as_ref()
        .is_none_or(|only| row.name.contains(only));
    let needs_file = row.tokens == Tokens::File && row.knowledge == Knowledge::Leases;
    is_named && (!needs_file || options.tokenizer.is_some())
}

/// A row with its environment: options, engines and words.
struct Scene<'a> {
    row: &'a Row,
    options: &'a LiveOptions,
    starter: Starter<'a>,
    facts: &'a EngineFacts,
    words: &'a [u64],
}

impl Scene<'_> {
    async fn play(&self, engines: &mut [Engine]) -> anyhow::Result<RowReport> {
        let (row, http) = (self.row, self.starter.http);
        for engine in engines.iter() {
            engine.reset(http, &self.facts.model).await?;
        }
        let mut report = match row.right {
            Right::ExactInTime => self.start_often(engines).await?,
            _ => self.compare(engines).await?,
        };
        report.name = row.name;
        report.engines = engines.len();
        report.goal = row.goal(self.facts.kind);
        let (right, whole) = row.right(&report);
        report.is_met = right * 10_000 >= whole * report.goal && whole > 0;
        Ok(report)
    }

    /// Sends chats to a new cluster, and compares.
    async fn compare(&self, engines: &mut [Engine]) -> anyhow::Result<RowReport> {
        let (row, http) = (self.row, self.starter.http);
        let mut cluster = self.start_cluster(engines).await?;
        let mut block = 0;
        for replica in 0..cluster.replicas() {
            block = self.wait_known(&cluster, replica).await?;
        }
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let room = self.facts.tokens * engines.len() as u64;
        let seed = since.as_secs();
        let chats = Chats::new(
            &self.facts.model,
            (row.answers, self.words),
            row.ways,
            (PRESSURE * room, seed),
            self.options.pause,
        );
        let urls = (0..cluster.replicas()).map(|number| cluster.data_url(number).to_owned());
        let target = match row.tokens {
            Tokens::Characters => Target::Share,
            Tokens::File | Tokens::Engine => Target::Tokens(block),
        };
        let record = self.options.record.as_deref().map(append).transpose()?;
        let load = Load::new(http, urls.collect(), chats, target, (room, seed), record);
        let begin = Instant::now();
        let faults = RefCell::new(Vec::new());
        let under_load = load.run(row.lanes, self.options.requests);
        if row.has_faults {
            let disturbed = self.disturb(&load, &mut cluster, engines, &faults);
            tokio::try_join!(under_load, disturbed)?;
        } else {
            under_load.await?;
        }
        let mut report = load.report();
        report.took_s = begin.elapsed().as_secs_f64();
        report.faults = faults.into_inner();
        cluster.stop();
        Ok(report)
    }

    /// Waits until a replica divides prompts into blocks as the engines do, and knows the caches of
    /// all engines. Returns the number of tokens of its blocks.
    async fn wait_known(&self, cluster: &ProcessCluster, replica: usize) -> anyhow::Result<u64> {
        let Row {
            knowledge, tokens, ..
        } = *self.row;
        let body = json!({ "model": self.facts.model, "prompt": "a word" });
        let asked = json!({ "path": "/v1/completions", "headers": {}, "body": body });
        let url = cluster.admin_url(replica, "/admin/v1/explain");
        let block = Cell::new(0);
        until("every engine is known", async || {
            let explained = cluster.operator().call(Method::POST, &url, Some(&asked));
            block.set(explained.await?["tokens_per_block"].as_u64().unwrap_or(0));
            let is_cut_alike = self.facts.block.is_none_or(|own| own == block.get());
            Ok((is_cut_alike || tokens == Tokens::Characters)
                && (knowledge == Knowledge::Leases || is_exact(cluster, replica).await?))
        })
        .await?;
        Ok(block.get())
    }

    async fn start_cluster(&self, engines: &[Engine]) -> anyhow::Result<ProcessCluster> {
        let tokenizer = match (self.row.tokens, &self.options.tokenizer) {
            (Tokens::File, Some(file)) => format!("huggingface:{}", absolute(file)?.display()),
            (Tokens::Engine, _) | (Tokens::File, None) => "engine".to_owned(),
            (Tokens::Characters, _) => "character".to_owned(),
        };
        let config = format!("[[models]]\nname = \"*\"\ntokenizer = {tokenizer:?}\n");
        let addresses: Vec<SocketAddr> = engines.iter().map(|it| it.address).collect();
        let backend_config = match (self.row.knowledge, &self.options.kv_events) {
            (Knowledge::Events, None) => "kv_events = \"auto\"".to_owned(),
            (Knowledge::Events, Some([events, replay])) => {
                format!("kv_events = {events:?}\nkv_replay = {replay:?}")
            }
            (Knowledge::Leases, _) => String::new(),
        };
        // Options are constants everywhere else, so the values made here are leaked.
        ProcessCluster::start(ClusterOptions {
            is_secure: false,
            engines: 0,
            outside_engines: Vec::leak(addresses),
            config: String::leak(config),
            backend_config: String::leak(backend_config),
            ..ClusterOptions::default()
        })
        .await
    }

    /// Injects faults into replicas and engines, one after another, until the load ends.
    async fn disturb(
        &self,
        load: &Load<'_>,
        cluster: &mut ProcessCluster,
        engines: &mut [Engine],
        faults: &RefCell<Vec<String>>,
    ) -> anyhow::Result<()> {
        let (goal, turn) = (self.options.requests, Cell::new(0_u64));
        let note = |what: String| {
            faults
                .borrow_mut()
                .push(format!("{} at {}", what, load.ended()));
        };
        // The first third fills the caches; then a fault follows after each tenth.
        while load.wait_for(goal / 3 + turn.get() * goal / 10).await {
            let number = turn.get();
            turn.set(number + 1);
            let engine = usize::try_from(number)? % engines.len();
            match number % 3 {
                0 => {
                    let reader = reader_of(cluster, engine).await?;
                    note(format!("reader {} killed", reader + 1));
                    load.set_up(reader, false);
                    cluster.kill(reader)?;
                    sleep(DEAD).await;
                    cluster.restart(&[reader]).await?;
                    load.set_up(reader, true);
                }
                1 => {
                    let idle = load.pause().await;
                    let is_reset = engines[engine]
                        .reset(self.starter.http, &self.facts.model)
                        .await?;
                    drop(idle);
                    note(format!(
                        "cache {engine} {}",
                        if is_reset { "reset" } else { "cannot be reset" }
                    ));
                }
                _ if engines[engine].is_ours() => {
                    note(format!("engine {engine} restarted"));
                    engines[engine].restart(self.starter).await?;
                }
                _ => note(format!("engine {engine} is not ours to restart")),
            }
        }
        Ok(())
    }
}

/// Returns whether a replica follows the caches of all engines exactly.
async fn is_exact(cluster: &ProcessCluster, replica: usize) -> anyhow::Result<bool> {
    let backends = cluster.get(replica, "/admin/v1/backends").await?;
    let list = backends["backends"].as_array().context("no backends")?;
    Ok(list.iter().all(|it| it["ownership"]["mode"] == "exact"))
}

fn append(file: &Path) -> anyhow::Result<File> {
    let options = File::options().create(true).append(true).open(file);
    options.with_context(|| format!("open {}", file.display()))
}

fn absolute(file: &Path) -> anyhow::Result<PathBuf> {
    file.canonicalize()
        .with_context(|| format!("find {}", file.display()))
}

/// Returns the number of the replica that reads an engine's events.
async fn reader_of(cluster: &ProcessCluster, engine: usize) -> anyhow::Result<usize> {
    let backends = cluster.get(0, "/admin/v1/backends").await?;
    let reader = backends["backends"][engine]["ownership"]["reader"].as_u64();
    let reader = reader
        .filter(|id| *id > 0)
        .context("nobody reads the engine's events")?;
    Ok(usize::try_from(reader - 1)?)
}

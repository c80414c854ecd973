//! Precise mode with real processes: three replicas, four engines that publish KV events and evict
//! hard, and a load of chats. The replica that reads two of the engines is killed in the middle.
//!
//! What must hold: others read on where it was, no request fails elsewhere, nearly every prediction
//! is what the engine then found, and when all is quiet the replicas believe of every prompt and
//! every engine exactly what the engine's cache holds.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use chaos_tests::processes::load::{LoadOptions, RunningLoad};
use chaos_tests::processes::{ClusterOptions, ProcessCluster, until};
use http::Method;
use lab::replay::chats::ChatsOptions;
use node::json_client::JsonClient;
use serde_json::{Value, json};

/// Together the chats need more blocks than the engines have.
const LOAD: LoadOptions = LoadOptions {
    senders: 3,
    pause: Duration::from_millis(1),
    timeout: ANSWER_TIMEOUT,
    chats: ChatsOptions {
        users: 1,
        chats: 36,
        systems: 3,
        system_bytes: 400,
        message_bytes: 600,
        reply_tokens: 32,
        turns: 6,
        seed: 7,
    },
};
/// Requests before the reader is killed, and as many after.
const REQUESTS: u64 = 150;
/// Tokens of an engine's block.
const BLOCK: u64 = 32;
/// Blocks that an engine of 320 holds at least once it has evicted: some hold nothing findable, and
/// some the same.
const ENGINE_BLOCKS_FULL: u64 = 240;
/// Prompts of the last requests that beliefs are compared for.
const PROMPTS: usize = 36;
/// Longest wait for one answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Predictions that must be right, in hundredths.
const RIGHT_PERCENT_MIN: u64 = 99;

/// Mode and reader of every engine's ownership, as one replica shows them.
async fn ownership(cluster: &ProcessCluster, replica: usize) -> anyhow::Result<Vec<(String, u64)>> {
    let backends = cluster.ask(replica, "/admin/v1/backends").await?;
    let list = backends["backends"].as_array().context("no backends")?;
    let of = |backend: &Value| {
        let ownership = &backend["ownership"];
        let mode = ownership["mode"].as_str().unwrap_or_default().to_owned();
        (mode, ownership["reader"].as_u64().unwrap_or(0))
    };
    Ok(list.iter().map(of).collect())
}

async fn wait_exact(cluster: &ProcessCluster, replica: usize, without: u64) -> anyhow::Result<()> {
    until("every engine is read and exact", async || {
        let shown = ownership(cluster, replica).await?;
        Ok(shown
            .iter()
            .all(|(mode, reader)| mode == "exact" && *reader != without && *reader != 0))
    })
    .await
}

/// Compares what a replica believes of the last prompts with what the engines hold.
async fn check_beliefs(
    http: &JsonClient,
    admin: SocketAddr,
    engines: &BTreeMap<String, String>,
    bodies: &[Value],
) -> anyhow::Result<u64> {
    let mut compared = 0;
    for body in bodies {
        let asked = json!({ "path": "/v1/chat/completions", "headers": {}, "body": body });
        let url = format!("http://{admin}/admin/v1/explain");
        let explained = http.call(Method::POST, &url, Some(&asked)).await?;
        let matchable = explained["blocks_matchable"]
            .as_u64()
            .context("no blocks")?;
        for backend in explained["backends"].as_array().context("no backends")? {
            let id = backend["id"].as_str().context("no id")?;
            let url = &engines[id];
            let url = format!("{url}/debug/prefix");
            let held = http.call(Method::POST, &url, Some(body)).await?;
            let held = held["blocks"].as_u64().context("no blocks")?.min(matchable);
            let believed = backend["matched"].as_u64().context("no match")?;
            ensure!(
                believed == held,
                "{id} holds {held} blocks, {believed} are believed"
            );
            compared += 1;
        }
    }
    Ok(compared)
}

async fn start() -> anyhow::Result<ProcessCluster> {
    ProcessCluster::start(ClusterOptions {
        engine_speed: 4.0,
        engine_args: &[
            "--num-gpu-blocks",
            "320",
            "--kv-events",
            "tcp://127.0.0.1:0",
            "--kv-replay",
            "tcp://127.0.0.1:0",
        ],
        config: "[[models]]\nname = \"*\"\ntokenizer = \"engine\"\nblock_size = 32\n",
        backend_config: "kv_events = \"auto\"",
        ..ClusterOptions::default()
    })
    .await
}

/// Waits until what is believed is what the engines hold, and checks that the replicas agree and
/// the engines have evicted; answers how many beliefs were compared.
async fn check_at_rest(
    cluster: &ProcessCluster,
    witness: usize,
    bodies: &[Value],
) -> anyhow::Result<u64> {
    let http = JsonClient::new(ANSWER_TIMEOUT);
    let backends = cluster.ask(witness, "/admin/v1/backends").await?;
    let backends = backends["backends"].as_array().context("no backends")?;
    let engine = |it: &Value| {
        Some((
            it["id"].as_str()?.to_owned(),
            it["url"].as_str()?.to_owned(),
        ))
    };
    let engines: BTreeMap<String, String> = backends.iter().filter_map(engine).collect();
    let admin = cluster.admin_addr(witness);
    // The last events may be on their way.
    let (compared, last) = (Cell::new(0), RefCell::new(None));
    let settled = until(
        "beliefs and caches are the same",
        async || match check_beliefs(&http, admin, &engines, bodies).await {
            Ok(count) => {
                compared.set(count);
                Ok(true)
            }
            Err(error) => {
                last.replace(Some(error));
                Ok(false)
            }
        },
    );
    settled
        .await
        .with_context(|| format!("{:?}", last.borrow()))?;
    cluster.check_digests().await?;
    for url in engines.values() {
        let body = json!({ "model": "emulated", "prompt": "" });
        let url = format!("{url}/debug/prefix");
        let held = http.call(Method::POST, &url, Some(&body)).await?;
        let held = held["cached_hashes"].as_u64().context("no count")?;
        ensure!(
            held >= ENGINE_BLOCKS_FULL,
            "an engine of 320 blocks holds {held}: none was evicted"
        );
    }
    Ok(compared.get())
}

#[tokio::test(flavor = "multi_thread")]
async fn another_replica_reads_on_and_nothing_is_wrongly_owned() -> anyhow::Result<()> {
    let mut cluster = start().await?;
    wait_exact(&cluster, 0, 0).await?;
    let load = RunningLoad::start(&cluster, LOAD);
    load.after(REQUESTS).await?;

    // The reader of the first engine goes in the middle of the load.
    let reader = ownership(&cluster, 0).await?[0].1;
    let killed = usize::try_from(reader)? - 1;
    let witness = (killed + 1) % cluster.replicas();
    cluster.kill(killed)?;
    let since = Instant::now();
    wait_exact(&cluster, witness, reader).await?;
    let took = since.elapsed();
    load.after(REQUESTS).await?;
    let book = load.stop().await?;

    ensure!(book.failed == 0, "{:?}", book.failures);
    let ended = book.predictions.len();
    let is_right = |(matched, cached): &&(u64, u64)| matched * BLOCK == *cached;
    let right = book.predictions.iter().filter(is_right).count();
    ensure!(
        ended as u64 >= 2 * REQUESTS && right as u64 * 100 >= ended as u64 * RIGHT_PERCENT_MIN,
        "{right} of {ended} predictions are what the engine found"
    );
    let recent = book.recent(PROMPTS);
    let bodies = recent.iter().map(|it| serde_json::from_slice(&it.body));
    let bodies = bodies.collect::<Result<Vec<Value>, _>>()?;
    wait_exact(&cluster, witness, reader).await?;
    cluster.wait_idle().await?;
    let compared = check_at_rest(&cluster, witness, &bodies).await?;
    cluster.stop();
    println!(
        "{right} of {ended} predictions right; another replica was exact after {took:?}; {compared} beliefs compared"
    );
    Ok(())
}

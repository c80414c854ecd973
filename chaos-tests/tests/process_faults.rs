//! A few faults that need no root, on three replicas under load, each followed by every check. A
//! gateway sends half of the load as pickers decide. The program `faults` runs the other faults,
//! and many of each.

use chaos_tests::processes::access::key;
use chaos_tests::processes::faults::{FaultContext, FaultKind, cluster_options_for};
use chaos_tests::processes::load::{LoadOptions, RunningLoad};
use chaos_tests::processes::{ClusterOptions, ProcessCluster, Site, checks, until};
use std::future::pending;

use http::Method;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Faults to inject, in order: those that renumber replicas come last.
const KINDS: &[FaultKind] = &[
    FaultKind::PauseLeader,
    FaultKind::TransferLeader,
    FaultKind::AwayForSnapshot,
    FaultKind::RollingRestart,
    FaultKind::CorruptLog,
    FaultKind::TruncateSnapshot,
    FaultKind::JoinAndRemove,
];

/// Requests answered before the first fault.
const WARM_UP: u64 = 100;

#[tokio::test(flavor = "multi_thread")]
async fn process_faults_affect_no_other_requests_or_state() -> anyhow::Result<()> {
    let options = ClusterOptions {
        has_pickers: true,
        ..cluster_options_for(Site::Loopback)
    };
    let cluster = ProcessCluster::start(options).await?;
    let options = LoadOptions {
        asks_pickers: true,
        ..LoadOptions::default()
    };
    let load = RunningLoad::start(&cluster, options);
    load.wait_for_requests(WARM_UP).await?;
    let mut stage = FaultContext {
        cluster,
        load,
        random: SmallRng::seed_from_u64(6),
    };
    for kind in KINDS {
        let started = std::time::Instant::now();
        let outcome = stage.run(*kind).await;
        outcome.map_err(|error| error.context(kind.name()))?;
        println!("{}: {:?}", kind.name(), started.elapsed());
    }
    let book = stage.load.stop().await?;
    println!("{} requests answered, {} lost", book.answered, book.lost);
    stage.cluster.stop();
    Ok(())
}

/// Descriptors of each replica's process: about 80 clients fit beside the reserved ones.
const DESCRIPTORS: u32 = 320;
/// Connections to each replica's data, admin and peer listeners: far more than all descriptors. The
/// admin listener reserves some for operators.
const CROWD: [usize; 3] = [400, 60, 200];

/// Opens connections that stay open: those to the data port begin a chat, the others are silent.
async fn crowd(cluster: &ProcessCluster, number: usize) -> anyhow::Result<JoinSet<()>> {
    let data = cluster.data_addr(number);
    let (admin, peer) = (cluster.admin_addr(number), cluster.peer_addr(number));
    let access = cluster.access();
    let chat = json!({
        "model": "emulated",
        "stream": true,
        "max_tokens": 64,
        "messages": [{ "role": "user", "content": "hello" }],
    });
    let chat = chat.to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {data}\r\n\
         authorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{chat}",
        key("greedy"),
        chat.len()
    );
    let mut open = JoinSet::new();
    for (address, count) in [data, admin, peer].into_iter().zip(CROWD) {
        for _ in 0..count {
            let stream = TcpStream::connect(address).await?;
            let (access, request) = (access.clone(), request.clone());
            open.spawn(async move {
                // The replica may reject the handshake, or not read the request.
                if address == data
                    && let Ok(mut stream) = access.secure(stream, address).await
                    && stream.write_all(request.as_bytes()).await.is_ok()
                {
                    pending::<()>().await;
                }
                pending::<()>().await;
            });
        }
    }
    Ok(open)
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_stay_ready_when_clients_exhaust_descriptors() -> anyhow::Result<()> {
    // This process holds the other ends of all connections.
    node::descriptors::raise();
    let options = ClusterOptions {
        descriptors: Some(DESCRIPTORS),
        ..ClusterOptions::default()
    };
    let cluster = ProcessCluster::start(options).await?;
    let mut crowds = Vec::new();
    for number in cluster.up() {
        crowds.push(crowd(&cluster, number).await?);
    }
    // An election writes `log.mark`, which must work without a free descriptor.
    until("leadership moves", async || {
        let path = "/admin/v1/cluster/transfer-leader";
        let told = cluster.send(0, Method::POST, path, Some(&json!({}))).await;
        Ok(told.is_ok())
    })
    .await?;
    drop(crowds);
    for number in cluster.up() {
        cluster.wait_ready(number).await?;
        let status = cluster.get(number, "/admin/v1/cluster").await?;
        anyhow::ensure!(status["fault"].is_null(), "storage fault: {status}");
    }
    cluster.wait_idle().await?;
    cluster.check_digests().await?;
    let load = RunningLoad::start(&cluster, LoadOptions::default());
    load.wait_for_requests(WARM_UP).await?;
    checks::check_failures(&load)?;
    load.stop().await?;
    cluster.stop();
    Ok(())
}

//! Whole replicas in one process: real raft, real sockets on loopback, emulated engines.

#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

#[path = "cluster/alike.rs"]
mod alike;
#[path = "cluster/backups.rs"]
mod backups;
#[path = "cluster/blocks.rs"]
mod blocks;
#[path = "cluster/client.rs"]
mod client;
#[path = "cluster/config.rs"]
mod config_file;
#[path = "cluster/continued.rs"]
mod continued;
#[path = "cluster/decisions.rs"]
mod decisions;
#[path = "cluster/dialects.rs"]
mod dialects;
#[path = "cluster/disaggregated.rs"]
mod disaggregated;
#[path = "cluster/discovery.rs"]
mod discovery;
#[path = "cluster/engine_check.rs"]
mod engine_check;
#[path = "cluster/everywhere.rs"]
mod everywhere;
#[path = "cluster/gateway.rs"]
mod gateway;
#[path = "cluster/learnt.rs"]
mod learnt;
#[path = "cluster/log_order.rs"]
mod log_order;
#[path = "cluster/lora.rs"]
mod lora;
#[path = "cluster/metrics.rs"]
mod metrics;
#[path = "cluster/operation.rs"]
mod operation;
#[path = "shared/otlp.rs"]
mod otlp;
#[path = "cluster/permits.rs"]
mod permits;
#[path = "cluster/ranks.rs"]
mod ranks;
#[path = "cluster/recordings.rs"]
mod recordings;
#[path = "cluster/scaling.rs"]
mod scaling;
#[path = "../../chaos-tests/src/gateway/mod.rs"]
pub mod stand_in;
#[path = "cluster/tenants.rs"]
mod tenants;
#[path = "cluster/tls.rs"]
mod tls;
#[path = "cluster/tracing.rs"]
mod tracing;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use client::Http;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lab::engine::{EmulatedEngine, EngineHandle, EngineOptions};
use node::app::{Addresses, App, BoundSockets, ShutdownHandle};
use node::config::{Config, ListenConfig, Origin, load};
use node::json_client::JsonClient;
use serde_json::{Value, json};
use state::command::{Command, UserSettings};
use state::policy::PolicyConfig;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Limit of every wait: a broken cluster fails the test after this time.
const PATIENCE: Duration = Duration::from_secs(30);
/// System prompt of several blocks of 128 bytes, so that a prefix can match.
const SYSTEM: &str = "You are the keeper of a lighthouse. Answer in one sentence, in plain words, \
    without naming the sea. If somebody asks for the weather, tell the time instead. If somebody \
    asks for the time, tell them that the lamp is lit, and that it has been lit all night long. \
    Never say who built the tower, how tall it is, or how many steps lead up to the lamp room.";

/// Waits for a condition that stays true once it is.
async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let met = async {
        let mut looks = tokio::time::interval(Duration::from_millis(20));
        while !condition().await {
            looks.tick().await;
        }
    };
    assert!(
        tokio::time::timeout(PATIENCE, met).await.is_ok(),
        "not in time: {what}"
    );
}

async fn engines(count: usize) -> Vec<EngineHandle> {
    let mut engines = Vec::new();
    for seed in 0..count {
        let options = EngineOptions {
            speed: 50.0,
            seed: seed as u64,
            ..EngineOptions::default()
        };
        engines.push(EmulatedEngine::start(options).await.unwrap());
    }
    engines
}

fn config(id: usize, peers: &[String], engines: &[EngineHandle], dir: &Path) -> Config {
    let mut text = format!(
        "[node]\nid = {id}\ndata_dir = {:?}\n[listen]\ndata = \"127.0.0.1:0\"\n\
         admin = \"127.0.0.1:0\"\npeer = \"127.0.0.1:0\"\n[cluster]\npeers = {peers:?}\n\
         [users]\nexpose = \"full\"\n[drain]\ndns_ttl = \"0s\"\ndeadline = \"5s\"\n",
        dir.join(format!("n{id}"))
    );
    for (nth, engine) in engines.iter().enumerate() {
        text += &format!(
            "[[backends]]\nid = \"engine-{nth}\"\nurl = {:?}\n",
            engine.url()
        );
    }
    let file = dir.join(format!("n{id}.toml"));
    std::fs::write(&file, text).unwrap();
    read(file).unwrap()
}

/// Reads a config file like a replica, or returns its faults.
fn read(file: PathBuf) -> Result<Config, String> {
    let origin = Origin {
        file: Some(file),
        ..Origin::default()
    };
    let loaded = load(&origin).map_err(|faults| faults.to_string());
    loaded.map(|loaded| loaded.config)
}

/// A replica that runs until asked to leave.
struct Replica {
    config: Config,
    addresses: Addresses,
    shutdown: ShutdownHandle,
    started: oneshot::Receiver<FromInside>,
    running: JoinHandle<anyhow::Result<()>>,
}

/// Access to a replica from inside its process.
struct FromInside {
    cluster: Arc<dyn api::ports::Cluster>,
    lose_state: Box<dyn Fn() + Send + Sync>,
}

impl Replica {
    fn run(config: Config, sockets: BoundSockets) -> Self {
        let app = App::on(config.clone(), sockets).unwrap();
        let (addresses, shutdown) = (app.addresses(), ShutdownHandle::new());
        let (tell, started) = oneshot::channel();
        let until = shutdown.clone();
        let running = tokio::spawn(async move {
            let running = app.start().await?;
            let (cluster, lose_state) = (running.cluster(), Box::new(running.state_loss()));
            // Few tests receive this.
            drop(tell.send(FromInside {
                cluster,
                lose_state,
            }));
            running.until(&until).await;
            Ok(())
        });
        Self {
            config,
            addresses,
            shutdown,
            started,
            running,
        }
    }

    /// Drains the replica and waits until it is gone.
    async fn leave(self) -> (Config, Addresses) {
        self.shutdown.drain();
        let left = tokio::time::timeout(PATIENCE, self.running).await;
        left.expect("the replica leaves in time").unwrap().unwrap();
        (self.config, self.addresses)
    }

    /// Starts a replica again at the same addresses.
    fn again((config, at): (Config, Addresses)) -> Self {
        let (data, admin, peer) = (at.data, at.admin, at.peer);
        let listen = ListenConfig {
            data,
            admin,
            peer,
            metrics: at.metrics,
            picker: at.picker,
            scaler: at.scaler,
            advertise: config.listen.advertise.clone(),
        };
        Self::run(config, BoundSockets::bind(&listen).unwrap())
    }
}

fn cluster(count: usize, engines: &[EngineHandle], dir: &TempDir) -> Vec<Replica> {
    cluster_with(count, engines, dir, |_| {})
}

/// Starts a cluster of one.
fn lone_replica(engines: &[EngineHandle], dir: &TempDir, set: impl FnMut(&mut Config)) -> Replica {
    cluster_with(1, engines, dir, set).remove(0)
}

fn cluster_with(
    count: usize,
    engines: &[EngineHandle],
    dir: &TempDir,
    mut set: impl FnMut(&mut Config),
) -> Vec<Replica> {
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listen = ListenConfig {
        data: any,
        admin: any,
        peer: any,
        metrics: None,
        picker: Some(any),
        scaler: None,
        advertise: None,
    };
    let sockets: Vec<_> = (0..count)
        .map(|_| BoundSockets::bind(&listen).unwrap())
        .collect();
    let peers: Vec<_> = sockets
        .iter()
        .map(|bound| bound.addresses().unwrap().peer.to_string())
        .collect();
    let start = |(nth, bound)| {
        let mut config = config(nth + 1, &peers, engines, dir.path());
        set(&mut config);
        Replica::run(config, bound)
    };
    sockets.into_iter().enumerate().map(start).collect()
}

/// Folder, engines, replicas, client and addresses of a cluster.
type Started<R, A> = (TempDir, Vec<EngineHandle>, R, Http, A);

/// Starts replicas in front of new engines, and waits until they are ready.
async fn started(count: usize, of_engines: usize) -> Started<Vec<Replica>, Vec<Addresses>> {
    started_with(count, of_engines, |_| {}).await
}

/// Starts replicas as [`started`] does, with changed configs.
async fn started_with(
    count: usize,
    of_engines: usize,
    set: impl FnMut(&mut Config),
) -> Started<Vec<Replica>, Vec<Addresses>> {
    let (dir, engines) = (TempDir::new().unwrap(), engines(of_engines).await);
    let replicas = cluster_with(count, &engines, &dir, set);
    let (http, at) = (Http::new(), addresses(&replicas));
    http.ready(&at).await;
    (dir, engines, replicas, http, at)
}

/// Starts a cluster of one replica, and waits until it is ready.
async fn started_alone(
    of_engines: usize,
    set: impl FnMut(&mut Config),
) -> Started<Replica, Addresses> {
    let (dir, engines, mut replicas, http, at) = started_with(1, of_engines, set).await;
    (dir, engines, replicas.remove(0), http, at[0])
}

/// Drains replicas one after another.
async fn leave(replicas: Vec<Replica>) {
    for replica in replicas {
        replica.leave().await;
    }
}

fn addresses(replicas: &[Replica]) -> Vec<Addresses> {
    replicas.iter().map(|replica| replica.addresses).collect()
}

/// Returns the number of leading blocks that the router predicted to be cached.
fn matched(headers: &HeaderMap) -> u32 {
    let prefix = headers["x-quorate-prefix"].to_str().unwrap();
    prefix.split_once('/').unwrap().0.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_share_learned_state() {
    let (_dir, _engines, replicas, http, at) = started_with(3, 2, |config| {
        // The cost policy may leave a short prompt's holder for an engine that looks less busy.
        config.policy = PolicyConfig::PrefixCache(Default::default());
    })
    .await;

    for user in ["ada", "bo", "cy"] {
        let first = http.chat(&at[0], user, "Is the lamp lit?").await;
        http.quiet(&at[0]).await;
        http.agree(&at).await;
        for (nth, other) in at.iter().enumerate() {
            let headers = http.chat(other, user, "What is the time?").await;
            assert_eq!(headers["x-quorate-replica"], (nth + 1).to_string().as_str());
            assert_eq!(
                headers["x-quorate-backend"], first["x-quorate-backend"],
                "{user}"
            );
            assert!(matched(&headers) >= 2, "{headers:?}");
        }
    }
    http.quiet(&at[0]).await;
    http.agree(&at).await;
    let (_, users) = http.admin(at[2].admin, "users").await;
    assert_eq!(users["users"].as_array().unwrap().len(), 3, "{users}");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_returning_replica_catches_up() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;

    // The leader leaves, and the others continue under a new one.
    let (_, cluster) = http.admin(at[0].admin, "cluster").await;
    let leader = usize::try_from(cluster["leader"].as_u64().unwrap()).unwrap() - 1;
    let gone = replicas.remove(leader).leave().await;
    let rest = addresses(&replicas);
    for _ in 0..3 {
        for other in &rest {
            http.chat(other, "bo", "Who is there?").await;
        }
    }
    http.ready(&rest).await;
    http.quiet(&rest[0]).await;
    http.agree(&rest).await;

    replicas.push(Replica::again(gone));
    http.ready(&at).await;
    http.agree(&at).await;
    let headers = http.chat(&at[leader], "bo", "Who is there?").await;
    assert!(matched(&headers) >= 2, "{headers:?}");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_replica_keeps_its_state_across_a_restart() {
    let (_dir, _engines, replica, http, at) = started_alone(1, |_| {}).await;
    let before = http.chat(&at, "ada", "Is the lamp lit?").await;
    assert_eq!(matched(&before), 0, "{before:?}");

    let replica = Replica::again(replica.leave().await);
    http.ready(&[at]).await;
    let after = http.chat(&at, "ada", "Is the lamp lit?").await;
    assert!(matched(&after) >= 2, "{after:?}");
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_without_state_recovers_it_from_the_others() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;
    http.quiet(&at[0]).await;
    http.agree(&at).await;

    let spoiled = (&mut replicas[2].started).await.unwrap();
    (spoiled.lose_state)();
    let lost = http.digest(&at[2]).await;
    assert_ne!(lost, http.digest(&at[0]).await);
    // Replicas compare their states once per `BOUNDARY_ENTRIES` entries.
    let writer = (&mut replicas[0].started).await.unwrap().cluster;
    for weight_milli in 1..=2 * u32::try_from(api::cluster::divergence::BOUNDARY_ENTRIES).unwrap() {
        let put = Command::configure_user("bo", UserSettings::of_weight(weight_milli));
        writer.submit(put).await.unwrap();
    }
    let is_mended = async || {
        let page = http.metrics(at[2].admin).await;
        page.contains("quorate_state_digest_mismatch_total")
            && !page.contains("quorate_state_digest_mismatch_total 0")
            && page.contains("quorate_state_is_minority 0")
    };
    until("the replica mends itself", is_mended).await;
    http.ready(&at).await;
    http.agree(&at).await;
    let headers = http.chat(&at[2], "ada", "What is the time?").await;
    assert!(matched(&headers) >= 2, "{headers:?}");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_prefixed_by_their_area() {
    let (_dir, _engines, replica, http, at) = started_alone(1, |_| {}).await;
    http.chat(&at, "ada", "Is the lamp lit?").await;
    let page = http.metrics(at.admin).await;
    let areas: BTreeSet<&str> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(['_', '{']).nth(1).unwrap_or(line))
        .collect();
    let expected = [
        "backend", "build", "prefix", "proxy", "raft", "route", "state", "users",
    ];
    let missing: Vec<_> = expected.iter().filter(|it| !areas.contains(*it)).collect();
    assert!(missing.is_empty(), "{missing:?} of {areas:?}");
    assert!(!areas.contains("quorate"), "{page}");
    let line = r#"quorate_proxy_requests_total{outcome="finished",code="200"} 1"#;
    assert!(page.contains(line), "{page}");
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_replica_finishes_its_requests() {
    let (_dir, _engines, replica, _http, at) = started_alone(1, |_| {}).await;

    let body = json!({ "model": "emulated", "prompt": SYSTEM, "max_tokens": 400, "stream": true });
    let request = Request::post(format!("http://{}/v1/completions", at.data))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut stream = client.request(request).await.unwrap().into_body();
    let first = stream.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.starts_with(b"data: "), "{first:?}");

    let leaving = tokio::spawn(replica.leave());
    let rest = stream.collect().await.unwrap().to_bytes();
    assert!(
        rest.ends_with(b"data: [DONE]\n\n"),
        "cut off after {} bytes",
        rest.len()
    );
    leaving.await.unwrap();
    let connect = tokio::net::TcpStream::connect(at.data).await;
    assert!(connect.is_err(), "the listener is closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_without_quorum_serves_degraded() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;
    http.quiet(&at[0]).await;
    http.agree(&at).await;
    for replica in replicas.drain(1..) {
        replica.shutdown.abort();
        replica.leave().await;
    }
    let is_degraded = async || {
        let (status, answer) = http.get(&format!("http://{}/readyz", at[0].admin)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer["status"] == "degraded"
    };
    until("the replica says degraded", is_degraded).await;
    // Blocks learnt before and after the loss of the quorum both match, although nothing can be
    // committed.
    for user in ["ada", "bo", "bo"] {
        let headers = http.chat(&at[0], user, "What is the time?").await;
        assert_eq!(headers["x-quorate-replica"], "1");
    }
    let headers = http.chat(&at[0], "bo", "What is the time?").await;
    assert!(matched(&headers) >= 2, "{headers:?}");
    let lone = replicas.remove(0);
    lone.shutdown.abort();
    lone.leave().await;
}

/// Returns a replica's explanation of a request, without its own parts: unreported updates and
/// round-robin turns.
async fn explained(http: &Http, at: &Addresses, request: &Value) -> Value {
    let url = format!("http://{}/admin/v1/explain", at.admin);
    let (status, _, mut answer) = http.send(Method::POST, &url, request).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let own = answer.as_object_mut().unwrap();
    own.remove("overlay_runs");
    own.remove("outbox");
    for backend in own["backends"].as_array_mut().unwrap() {
        backend.as_object_mut().unwrap().remove("here");
    }
    answer
}

/// Returns the load figures of each backend in an explanation. They come from the answering
/// replica's probes and from its peers, not from the log.
fn seen(answer: &Value) -> Vec<Value> {
    let of = |backend: &Value| {
        let names = [
            "engine_waiting",
            "engine_running",
            "kv_usage_percent",
            "cluster",
        ];
        json!(names.map(|name| backend[name].clone()))
    };
    answer["backends"]
        .as_array()
        .unwrap()
        .iter()
        .map(of)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_explain_a_request_equally_under_every_policy() {
    let (_dir, _engines, replicas, http, at) = started(3, 3).await;
    for (nth, user) in ["ada", "bo", "cy", "ada", "bo"].into_iter().enumerate() {
        http.chat(&at[nth % 3], user, "Is the lamp lit?").await;
    }
    http.quiet(&at[0]).await;
    let messages = json!([
        { "role": "system", "content": format!("{SYSTEM} You talk to ada.") },
        { "role": "user", "content": "Is the lamp lit? Say it again." },
    ]);
    let request = json!({
        "path": "/v1/chat/completions",
        "headers": { "x-request-id": "the-same", "x-quorate-session": "s-1" },
        "user": "ada",
        "body": { "model": "emulated", "messages": messages },
    });
    for policy in state::policy::POLICY_NAMES {
        let url = format!("http://{}/admin/v1/policy", at[0].admin);
        let (status, _, answer) = http
            .send(Method::PUT, &url, &json!({ "policy": policy }))
            .await;
        assert_eq!(status, StatusCode::OK, "{policy}: {answer}");
        let alike = async || {
            let mut answers = Vec::new();
            for replica in &at {
                answers.push(explained(&http, replica, &request).await);
            }
            let first = &answers[0];
            let is_same =
                |answer: &Value| answer["index"] == first["index"] && seen(answer) == seen(first);
            let is_live = first["policy"]["policy"] == *policy;
            if !is_live || !answers.iter().all(is_same) {
                return false;
            }
            // Each replica has its own turns.
            if *policy != "round-robin" {
                assert!(
                    answers.iter().all(|answer| answer == first),
                    "{policy}: {answers:#?}"
                );
            }
            assert!(first["choice"].is_string(), "{first:#}");
            true
        };
        until(&format!("all explain alike under {policy}"), alike).await;
        let last = explained(&http, &at[2], &request).await;
        let scored = last["backends"].as_array().unwrap();
        assert!(
            scored.iter().all(|backend| backend["score"].is_u64()),
            "{last:#}"
        );
    }
    leave(replicas).await;
}

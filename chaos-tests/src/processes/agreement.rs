//! Checks whether `explain`, the request that follows it, and the record of its decision agree.
//!
//! Random requests of random users, under random policies, go to random replicas, one at a time
//! beside other load. The check has each request explained by its replica, sends it there, and then
//! reads the record of its decision:
//!
//! - The decision reported to the client always equals the recorded one.
//! - User and model always equal the explained ones.
//! - If no input of the policy has changed in between, the decision is the explained one, with the
//!   same score for every backend.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lab::connector::ReplicaConnector;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Map, Value, json};
use state::policy::POLICY_NAMES;

use super::access::key;
use super::load::{LoadOptions, RunningLoad};
use super::{ClusterOptions, ProcessCluster, until};

/// Additional config of every replica.
const CONFIG: &str = "[routing]\nallow_override = true\n";
/// Number of users, including one without a name.
const USERS: u32 = 12;
/// Number of sessions, including one that stands for no session.
const SESSIONS: u32 = 6;
/// Number of different prompt prefixes.
const BEGINNINGS: u32 = 30;
/// Maximum number of words in a prompt.
const WORDS_MAX: u32 = 600;
/// Path that the requests are sent to.
const PATH: &str = "/v1/completions";

/// Results of the requests under one policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AgreementTally {
    /// Number of requests that were explained, decided and recorded alike.
    pub agreed: u64,
    /// Number of requests that were decided on other inputs than those explained.
    pub moved: u64,
}

/// A random request of a random user, under a random policy.
struct RandomRequest {
    id: String,
    policy: &'static str,
    headers: BTreeMap<String, String>,
    body: Value,
}

impl RandomRequest {
    fn new(number: u64, is_keyed: bool, random: &mut SmallRng) -> Self {
        let policy = POLICY_NAMES[random.random_range(0..POLICY_NAMES.len())];
        let id = format!("agree-{number}");
        let mut headers = BTreeMap::from([
            ("content-type".to_owned(), "application/json".to_owned()),
            ("x-request-id".to_owned(), id.clone()),
            ("x-quorate-policy".to_owned(), policy.to_owned()),
        ]);
        for (name, count) in [
            ("x-quorate-user", USERS),
            ("x-quorate-session", SESSIONS),
            ("x-quorate-priority", 4),
        ] {
            let drawn = random.random_range(0..count);
            if drawn > 0 {
                headers.insert(name.to_owned(), drawn.to_string());
            }
            if is_keyed && name == "x-quorate-user" {
                let bearer = format!("Bearer {}", key(&drawn.to_string()));
                headers.insert("authorization".to_owned(), bearer);
            }
        }
        let beginning = random.random_range(0..BEGINNINGS);
        let words = random.random_range(1..WORDS_MAX);
        let prompt: Vec<String> = (0..words)
            .map(|word| format!("{beginning}-{word}"))
            .collect();
        let body = json!({ "model": "emulated", "prompt": prompt.join(" "), "max_tokens": 2 });
        Self {
            id,
            policy,
            headers,
            body,
        }
    }
}

/// Sends `requests` requests to a new cluster and returns the results by policy.
///
/// # Errors
/// If two results contradict each other (with both), or a request fails.
pub async fn run(
    requests: u64,
    seed: u64,
    is_secure: bool,
) -> anyhow::Result<BTreeMap<&'static str, AgreementTally>> {
    let cluster = ProcessCluster::start(ClusterOptions {
        config: CONFIG,
        is_secure,
        ..ClusterOptions::default()
    })
    .await?;
    let beside = LoadOptions {
        senders: 2,
        pause: Duration::from_millis(250),
        ..LoadOptions::default()
    };
    let load = RunningLoad::start(&cluster, beside);
    let tallies = check(&cluster, requests, seed).await?;
    drop(load);
    cluster.stop();
    Ok(tallies)
}

async fn check(
    cluster: &ProcessCluster,
    requests: u64,
    seed: u64,
) -> anyhow::Result<BTreeMap<&'static str, AgreementTally>> {
    let access = cluster.access();
    let connector = ReplicaConnector::new(access.tls().cloned());
    let client = Client::builder(TokioExecutor::new()).build(connector);
    let mut random = SmallRng::seed_from_u64(seed);
    let mut tallies = BTreeMap::<_, AgreementTally>::new();
    for number in 0..requests {
        let replica = random.random_range(0..cluster.replicas());
        let request = RandomRequest::new(number, access.is_secure(), &mut random);
        let agreed = one(cluster, &client, replica, &request).await;
        let agreed = agreed.with_context(|| {
            let (id, policy) = (&request.id, request.policy);
            format!("{id} by {policy} at replica {}", replica + 1)
        })?;
        let tally = tallies.entry(request.policy).or_default();
        match agreed {
            true => tally.agreed += 1,
            false => tally.moved += 1,
        }
    }
    Ok(tallies)
}

async fn one(
    cluster: &ProcessCluster,
    client: &Client<ReplicaConnector, Full<Bytes>>,
    replica: usize,
    request: &RandomRequest,
) -> anyhow::Result<bool> {
    let would_be = json!({ "path": PATH, "headers": request.headers, "body": request.body });
    let explained = cluster
        .send(replica, Method::POST, "/admin/v1/explain", Some(&would_be))
        .await?;
    let told = send(cluster, client, replica, request).await?;
    let path = format!("/admin/v1/decisions/{}", request.id);
    let record = RefCell::new(Value::Null);
    until("the request is over", async || {
        let found = cluster.get(replica, &path).await?;
        let is_over = found["end"]["outcome"] == "finished";
        record.replace(found);
        Ok(is_over)
    })
    .await?;
    compare(&explained, &told, &record.into_inner())
}

async fn send(
    cluster: &ProcessCluster,
    client: &Client<ReplicaConnector, Full<Bytes>>,
    replica: usize,
    request: &RandomRequest,
) -> anyhow::Result<HeaderMap> {
    let url = format!("{}{PATH}", cluster.data_url(replica));
    let mut sent = Request::post(url);
    for (name, value) in &request.headers {
        sent = sent.header(name, value);
    }
    let body = Full::new(Bytes::from(request.body.to_string()));
    let (head, body) = client.request(sent.body(body)?).await?.into_parts();
    let body = body.collect().await?.to_bytes();
    let text = String::from_utf8_lossy(&body);
    ensure!(head.status == StatusCode::OK, "{}: {text}", head.status);
    Ok(head.headers)
}

/// Returns whether the decision equals the explained one; `false` if its inputs had changed.
///
/// # Errors
/// If response and record contradict each other, or results differ on equal inputs.
fn compare(explained: &Value, told: &HeaderMap, record: &Value) -> anyhow::Result<bool> {
    let decision = &record["decisions"][0];
    let header = |name: &str| told.get(name).and_then(|it| it.to_str().ok());
    let prefix = format!("{}/{}", decision["matched"], record["blocks_total"]);
    for (name, recorded) in [
        ("x-quorate-backend", text(&decision["choice"])),
        ("x-quorate-policy", text(&decision["policy"]["policy"])),
        ("x-quorate-prefix", prefix),
        ("x-quorate-index", decision["index"].to_string()),
    ] {
        let found = header(name);
        ensure!(
            found == Some(&recorded),
            "{name}: {found:?} was told, {recorded:?} is recorded"
        );
    }
    for member in ["user", "user_key", "user_source", "model", "blocks_total"] {
        let (then, now) = (&explained[member], &record[member]);
        ensure!(then == now, "{member}: {then} explained, {now} recorded");
    }
    let inputs = [explained, decision].map(|it| (of_request(it), numbers(it)));
    if inputs[0] != inputs[1] {
        return Ok(false);
    }
    for member in ["policy", "choice", "matched", "reason"] {
        if explained[member] != decision[member] {
            bail!("{member} differs: explained {explained}\nrecorded {decision}");
        }
    }
    let results = [explained, decision].map(results);
    ensure!(
        results[0] == results[1],
        "scores differ: explained {explained}\nrecorded {decision}"
    );
    Ok(true)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns the properties of a request that a policy reads.
fn of_request(decided: &Value) -> Value {
    let mut request = decided["request"].clone();
    if let Some(members) = request.as_object_mut() {
        // The source of the session name is not recorded.
        members.remove("session_source");
        members.insert("tokens".to_owned(), decided["tokens"].clone());
        members.insert("is_panic".to_owned(), decided["is_panic"].clone());
    }
    request
}

/// Returns the properties of backends that policies read, for the backends that passed the filters.
fn numbers(decided: &Value) -> Vec<Map<String, Value>> {
    candidates(decided, |backend| {
        // Explanations nest these under the replica's view of the cluster, and use null for
        // unknown.
        let load = backend.get("cluster").unwrap_or(backend);
        let known = |name: &str| backend[name].as_u64().unwrap_or(0).into();
        let used = backend["kv_usage_percent"].as_f64().unwrap_or(0.0).into();
        Map::from_iter([
            ("id".to_owned(), backend["id"].clone()),
            ("matched".to_owned(), backend["matched"].clone()),
            ("running".to_owned(), load["running"].clone()),
            (
                "pending_prefill_tokens".to_owned(),
                load["pending_prefill_tokens"].clone(),
            ),
            ("engine_waiting".to_owned(), known("engine_waiting")),
            ("kv_usage_percent".to_owned(), used),
            ("free_blocks".to_owned(), backend["free_blocks"].clone()),
            ("prices".to_owned(), backend["prices"].clone()),
        ])
    })
}

/// Returns the policy's results for the backends that passed the filters.
fn results(decided: &Value) -> Vec<Map<String, Value>> {
    let members = ["id", "tier", "score", "then", "would_be"];
    candidates(decided, |backend| {
        let result = members.map(|name| (name.to_owned(), backend[name].clone()));
        Map::from_iter(result)
    })
}

fn candidates(
    decided: &Value,
    shown: impl Fn(&Value) -> Map<String, Value>,
) -> Vec<Map<String, Value>> {
    let backends = decided["backends"].as_array().into_iter().flatten();
    let passed = backends.filter(|backend| backend["verdict"] == "candidate");
    passed.map(shown).collect()
}

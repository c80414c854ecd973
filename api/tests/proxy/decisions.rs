//! The prediction of `explain`, the behaviour of the data plane and the decision record agree.

use std::collections::BTreeMap;

use api::proxy::{ApiKeys, Expose, IdentifyBy, ProxySettings};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use state::command::Command;
use state::ids::ReplicaId;
use state::policy::PolicyConfig;

use super::client::{Answer, Client, chat, post};
use super::engine::{Engine, Step, json as answer_json};
use super::fleet::{Fleet, eventually};

/// Number of random requests of a test run; `QUORATE_DECISIONS` overrides it.
const REQUESTS: usize = 400;

const USAGE: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"}}],"usage":{"prompt_tokens":70,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}"#;

/// Starts an engine that answers at once, except for `/v1/completions`: these requests hang.
async fn engine() -> Engine {
    Engine::answering(|request| {
        if request.starts_with("POST /v1/completions") {
            vec![Step::Hang]
        } else {
            vec![answer_json("200 OK", USAGE)]
        }
    })
    .await
}

/// Returns settings of three replicas that identify users in different ways.
fn settings() -> Vec<ProxySettings> {
    let mut all = [1, 2, 3].map(|id| {
        let mut settings = ProxySettings::new(ReplicaId(id));
        settings.expose = Expose::Full;
        settings.priority_max = 5;
        settings
    });
    all[1].trusted_proxies = Vec::new();
    let mut keys = ApiKeys::default();
    keys.add("sk-ada", Some("ada".to_owned()));
    keys.add("sk-nameless", None);
    all[2].api_keys = Some(keys);
    all[2].identify_by = vec![
        IdentifyBy::Header("x-tenant".parse().unwrap()),
        IdentifyBy::BodyUser,
    ];
    all.to_vec()
}

/// A request, and the corresponding request to `explain`.
struct Asked {
    id: String,
    path: &'static str,
    headers: BTreeMap<String, String>,
    body: Value,
}

impl Asked {
    fn random(number: usize, rng: &mut StdRng) -> Self {
        let id = format!("r-{number}");
        let mut headers = BTreeMap::from([("x-request-id".to_owned(), id.clone())]);
        let long = "x".repeat(300);
        let mut may = |odds: f64, name: &str, values: &[&str]| {
            if rng.random_bool(odds) {
                let value = values.choose(rng).expect("there are values");
                headers.insert(name.to_owned(), (*value).to_owned());
            }
        };
        let names = [
            " ada ",
            "bo",
            "",
            "Åsa",
            "key-0123456789abcdef",
            "body:x",
            &long,
        ];
        may(0.4, "x-quorate-user", &names);
        may(0.3, "x-tenant", &names);
        let keys = [
            "Bearer sk-ada",
            "bearer sk-nameless",
            "Bearer sk-new",
            "Basic x",
        ];
        may(0.6, "authorization", &keys);
        may(0.2, "x-api-key", &["sk-ada", "sk-other"]);
        session_headers(&mut may, &long);
        may(0.2, "cookie", &["a=1; sid=s-3", "sid="]);
        may(0.2, "x-quorate-priority", &["3", "-70000", " 9 ", "high"]);
        may(0.5, "x-quorate-policy", state::policy::POLICY_NAMES);
        may(0.03, "x-quorate-policy", &["magic"]);
        may(
            0.1,
            "x-quorate-select",
            &["parity=1", "parity=0", "parity=2", "=="],
        );
        may(0.1, "x-request-timeout", &["30s", "2"]);
        may(0.02, "content-encoding", &["br"]);
        let path = match rng.random_range(0..20) {
            0 => "/v1/nothing",
            1 => "/v1/responses",
            _ => "/v1/chat/completions",
        };
        let turns = rng.random_range(1..6);
        let topic = rng.random_range(0..4);
        let turn = |turn| json!({"role": "user", "content": format!("{topic} {turn} {}", "la ".repeat(20))});
        let turns: Vec<Value> = (0..turns).map(turn).collect();
        let mut body = json!({"model": "m", "messages": turns, "input": turns});
        if rng.random_bool(0.4) {
            body["user"] = json!(names.choose(rng).expect("there are names"));
        }
        if rng.random_bool(0.3) {
            body["prompt_cache_key"] = json!("s-1");
        }
        match rng.random_range(0..30) {
            0 => body["model"] = json!("unknown"),
            1 => body["priority"] = json!(7),
            2 => body["kv_transfer_params"] = json!({}),
            3 => body["messages"] = json!(5),
            _ => {}
        }
        Self {
            id,
            path,
            headers,
            body,
        }
    }

    /// Returns the request on the wire.
    fn bytes(&self) -> String {
        let line = |(name, value): (&String, &String)| format!("{name}: {value}\r\n");
        let headers: String = self.headers.iter().map(line).collect();
        post(self.path, &headers, &self.body.to_string())
    }

    async fn explained(&self, replica: &Fleet) -> (u16, Value) {
        let asked = json!({
            "path": self.path,
            "headers": self.headers,
            "peer": "127.0.0.1",
            "body": self.body.to_string(),
        });
        replica.call("POST", "/admin/v1/explain", &asked).await
    }

    async fn recorded(&self, replica: &Fleet) -> (u16, Value) {
        let path = format!("/admin/v1/decisions/{}", self.id);
        replica.call("GET", &path, &Value::Null).await
    }
}

/// Adds headers that may name a session, each by chance with `may`.
fn session_headers(may: &mut impl FnMut(f64, &str, &[&str]), long: &str) {
    may(0.3, "x-quorate-session", &["s-1", "s-2", " "]);
    may(0.3, "x-quorate-parent-session", &["s-1", "s-3", long]);
    may(0.2, "x-claude-code-session-id", &["root", long]);
    may(0.1, "x-claude-code-agent-id", &["agent", "a\tb"]);
    may(0.2, "x-dynamo-session-id", &["s-1"]);
    may(0.2, "x-dynamo-session-final", &["true", "false"]);
}

/// Returns what both `explain` and a record contain about a backend, under the record's names.
fn explained_backend(backend: &Value) -> Value {
    let mut said = json!({
        "running": backend["cluster"]["running"],
        "pending_prefill_tokens": backend["cluster"]["pending_prefill_tokens"],
    });
    for name in SAME {
        said[name] = backend[name].clone();
    }
    if backend["verdict"] != "candidate" {
        // A record keeps only the candidates' numbers.
        for name in [
            "running",
            "pending_prefill_tokens",
            "matched",
            "engine_waiting",
        ] {
            said[name] = json!(0);
        }
        said["kv_usage_percent"] = json!(0.0);
        said["is_model_listed"] = json!(false);
        said["free_blocks"] = json!(0);
    }
    said
}

/// Fields of a backend that have the same name in `explain` and records.
const SAME: [&str; 12] = [
    "id",
    "verdict",
    "matched",
    "engine_waiting",
    "kv_usage_percent",
    "free_blocks",
    "is_model_listed",
    "prices",
    "tier",
    "score",
    "then",
    "would_be",
];

/// Compares the prediction with the response and with the record.
fn agree(asked: &Asked, explained: &Value, answer: &Answer, record: &Value) {
    let what = || format!("{}\n{explained:#}\n{answer:?}\n{record:#}", asked.bytes());
    for name in [
        "user",
        "user_key",
        "user_source",
        "priority",
        "model",
        "tokens",
        "blocks_total",
    ] {
        assert_eq!(explained[name], record[name], "{name}: {}", what());
    }
    for name in ["id", "parent", "final", "source"] {
        let (predicted, kept) = (&explained["session"][name], &record["session"][name]);
        assert_eq!(predicted, kept, "session {name}: {}", what());
    }
    assert_eq!(explained["labels"], record["labels"], "{}", what());
    assert_eq!(record["request_id"], asked.id, "{}", what());
    assert_eq!(record["end"]["status"], answer.status, "{}", what());
    if explained["choice"].is_null() {
        assert_eq!(record["decisions"], json!([]), "{}", what());
        assert_eq!(record["end"]["code"], answer.error_code(), "{}", what());
        assert!(!explained["refusal"].is_null(), "{}", what());
        return;
    }
    agree_on_decision(explained, answer, record);
}

/// Compares the predicted decision with the response and with the record.
fn agree_on_decision(explained: &Value, answer: &Answer, record: &Value) {
    let what = || format!("{explained:#}\n{answer:?}\n{record:#}");
    let header = |name: &str| json!(answer.header(name));
    let decision = &record["decisions"][0];
    assert_eq!(
        explained["choice"],
        header("x-quorate-backend"),
        "{}",
        what()
    );
    assert_eq!(
        explained["policy"]["policy"],
        header("x-quorate-policy"),
        "{}",
        what()
    );
    let prefix = format!("{}/{}", explained["matched"], explained["blocks_total"]);
    assert_eq!(json!(prefix), header("x-quorate-prefix"), "{}", what());
    assert_eq!(
        json!(explained["index"].to_string()),
        header("x-quorate-index"),
        "{}",
        what()
    );
    for name in [
        "choice",
        "matched",
        "reason",
        "index",
        "policy",
        "policy_source",
        "is_panic",
    ] {
        assert_eq!(explained[name], decision[name], "{name}: {}", what());
    }
    for name in ["prefix_key", "session", "turn", "user_tokens"] {
        let (predicted, kept) = (&explained["request"][name], &decision["request"][name]);
        assert_eq!(predicted, kept, "{name}: {}", what());
    }
    let backends = explained["backends"].as_array().expect("a list");
    let kept = decision["backends"].as_array().expect("a list");
    assert_eq!(backends.len(), kept.len(), "{}", what());
    for (predicted, kept) in backends.iter().zip(kept) {
        for (name, value) in explained_backend(predicted).as_object().expect("an object") {
            assert_eq!(*value, kept[name], "{name}: {}", what());
        }
    }
    assert_eq!(decision["status"], 200, "{}", what());
    assert_eq!(decision["outcome"]["end"], "finished", "{}", what());
    assert_eq!(
        decision["outcome"]["usage"],
        json!({"prompt_tokens": 70, "cached_tokens": 16, "completion_tokens": 3}),
        "{}",
        what()
    );
    assert_eq!(record["end"]["outcome"], "finished", "{}", what());
}

/// Loads the replicas differently, with requests that stay open while the returned clients exist.
async fn load(engines: &[&Engine], replicas: &[Fleet]) -> Vec<Client> {
    let mut staying = Vec::new();
    for (number, replica) in [0, 0, 1, 0, 2].into_iter().enumerate() {
        let mut client = replicas[replica].client().await;
        let body = format!(
            r#"{{"model":"m","prompt":"{}"}}"#,
            "na ".repeat(30 * number)
        );
        let key = "authorization: Bearer sk-ada\r\nx-quorate-policy: round-robin\r\n";
        client.send(post("/v1/completions", key, &body)).await;
        staying.push(client);
    }
    let sent = || {
        engines
            .iter()
            .map(|engine| engine.requests().len())
            .sum::<usize>()
    };
    eventually("the engines have all that stays", || sent() == 5).await;
    staying
}

#[tokio::test]
async fn explain_record_and_dispatch_agree() {
    let requests = std::env::var("QUORATE_DECISIONS").ok();
    let requests = requests.map_or(REQUESTS, |text| text.parse().expect("a number"));
    let engines = [
        engine().await,
        engine().await,
        engine().await,
        engine().await,
    ];
    let engines = [&engines[0], &engines[1], &engines[2], &engines[3]];
    let replicas = Fleet::replicas(&engines, settings()).await;
    let mut rng = StdRng::seed_from_u64(7);
    let _staying = load(&engines, &replicas).await;
    let at_rest: Vec<_> = replicas.iter().map(Fleet::running).collect();
    let mut clients: Vec<Client> = Vec::new();
    let (mut explained_all, mut refused_all) = (0, 0);
    for number in 0..requests {
        if number % 23 == 0 {
            let policies = PolicyConfig::defaults();
            let policy = policies.choose(&mut rng).expect("there are policies");
            replicas[0].apply(Command::PutPolicy(policy.clone()));
        }
        if number % 5 == 0 {
            replicas
                .choose(&mut rng)
                .expect("there are replicas")
                .flush()
                .await;
        }
        let asked = Asked::random(number, &mut rng);
        let at = rng.random_range(0..replicas.len());
        let replica = &replicas[at];
        let (status, explained) = asked.explained(replica).await;
        clients.clear();
        clients.push(replica.client().await);
        let answer = clients[0].ask(asked.bytes()).await;
        let is_settled = || {
            let staying = i64::from(at_rest[at]);
            replica.running() == at_rest[at] && replica.metrics.in_flight.get() == staying
        };
        eventually("the request is over", is_settled).await;
        let (kept, record) = asked.recorded(replica).await;
        if status == 200 {
            assert_eq!(kept, 200, "{record}");
            agree(&asked, &explained, &answer, &record);
            explained_all += 1;
        } else {
            assert_eq!(
                explained["data_plane_status"],
                answer.status,
                "{}",
                asked.bytes()
            );
            assert_eq!(
                explained["data_plane_code"],
                answer.error_code(),
                "{explained}"
            );
            assert_eq!(kept, 404, "what is not understood is not kept: {record}");
            refused_all += 1;
        }
    }
    assert!(explained_all > refused_all && refused_all > 0);
}

#[tokio::test]
async fn attempts_of_a_request_are_one_record() {
    let busy = Engine::always(vec![answer_json("503 Service Unavailable", "{}")]).await;
    let well = Engine::always(vec![answer_json("200 OK", USAGE)]).await;
    let fleet = Fleet::start(&[&busy, &well]).await;
    let mut client = fleet.client().await;
    let mut tries = 0;
    let record = loop {
        let id = format!("try-{tries}");
        let ask = chat("").replace("host:", &format!("x-request-id: {id}\r\nhost:"));
        assert_eq!(client.ask(ask).await.status, 200);
        fleet.is_idle().await;
        let path = format!("/admin/v1/decisions/{id}");
        let (_, record) = fleet.call("GET", &path, &Value::Null).await;
        if record["attempts"] == 2 {
            break record;
        }
        tries += 1;
        assert!(tries < 64, "ties are broken by the request's id");
    };
    let decisions = record["decisions"].as_array().unwrap();
    let of = |at: usize, name: &str| decisions[at][name].clone();
    assert_eq!(
        (of(0, "choice"), of(0, "status")),
        (json!("e0"), json!(503))
    );
    assert_eq!(decisions[0]["outcome"]["end"], "not-run");
    assert_eq!(
        (of(1, "choice"), of(1, "status")),
        (json!("e1"), json!(200))
    );
    assert_eq!(decisions[1]["backends"][0]["verdict"], "tried");
    assert_eq!(decisions[1]["filtered"]["tried"], 1);
    assert_eq!(record["last"]["backend"], "e1");
}

#[tokio::test]
async fn decisions_are_listed_newest_first_and_bounded() {
    let engine = Engine::always(vec![answer_json("200 OK", USAGE)]).await;
    let keep = |settings: &mut ProxySettings| settings.decisions_max = 5;
    let fleet = Fleet::start_with(&[&engine], std::time::Duration::from_secs(60), keep).await;
    let mut client = fleet.client().await;
    for number in 0..8 {
        let user = if number % 2 == 0 { "ada" } else { "bo" };
        let head = format!("x-request-id: r-{number}\r\nx-quorate-user: {user}\r\nhost:");
        client.ask(chat("").replace("host:", &head)).await;
    }
    fleet.is_idle().await;
    let list = async |query: &str| {
        let path = format!("/admin/v1/decisions{query}");
        let (status, page) = fleet.call("GET", &path, &Value::Null).await;
        assert_eq!(status, 200, "{page}");
        let ids = page["decisions"].as_array().unwrap().iter();
        let ids: Vec<_> = ids
            .map(|it| it["request_id"].as_str().unwrap().to_owned())
            .collect();
        (ids, page)
    };
    let (all, page) = list("").await;
    assert_eq!(all, ["r-7", "r-6", "r-5", "r-4", "r-3"]);
    assert_eq!((&page["kept"], &page["kept_max"]), (&json!(5), &json!(5)));
    assert_eq!(list("?user=ada").await.0, ["r-6", "r-4"]);
    assert_eq!(list("?backend=e0&model=m&limit=1").await.0, ["r-7"]);
    assert!(list("?backend=e1").await.0.is_empty());
    assert!(list("?model=other").await.0.is_empty());
    let (first, page) = list("?limit=2").await;
    let cursor = page["next_cursor"].as_str().unwrap();
    let (second, page) = list(&format!("?limit=3&cursor={cursor}")).await;
    assert_eq!([first, second].concat(), all);
    assert_eq!(page.get("next_cursor"), None);
    let gone = fleet
        .call("GET", "/admin/v1/decisions/r-0", &Value::Null)
        .await;
    assert_eq!((gone.0, &gone.1["replica"]), (404, &json!(1)));
    let wrong = fleet
        .call("GET", "/admin/v1/decisions?cursor=x", &Value::Null)
        .await;
    assert_eq!(wrong.0, 400, "{}", wrong.1);
}

#[tokio::test]
async fn a_decision_record_has_the_outcome_and_no_content() {
    let engine = Engine::always(vec![Step::Hang]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    let head = "x-request-id: left\r\nauthorization: Bearer sk-secret\r\n";
    let body = r#"{"model":"m","prompt":"a private prompt","max_tokens":9}"#;
    client.send(post("/v1/completions", head, body)).await;
    eventually("the engine has it", || engine.requests().len() == 1).await;
    let read = async || {
        fleet
            .call("GET", "/admin/v1/decisions/left", &Value::Null)
            .await
            .1
    };
    let running = read().await;
    assert_eq!(
        (&running["end"], &running["attempts"]),
        (&Value::Null, &json!(1))
    );
    drop(client);
    fleet.is_idle().await;
    let record = read().await;
    assert_eq!(record["end"]["outcome"], "client-left");
    assert_eq!(record["end"]["status"], Value::Null);
    assert_eq!(record["decisions"][0]["outcome"]["end"], "client-left");
    assert_eq!(record["max_tokens"], 9);
    let text = record.to_string();
    assert!(
        !text.contains("private") && !text.contains("secret"),
        "{text}"
    );
    // A request that no backend can take has a record too.
    let unknown = chat("").replace("\"m\"", "\"n\"");
    let mut client = fleet.client().await;
    let unknown = unknown.replace("host:", "x-request-id: n\r\nhost:");
    assert_eq!(client.ask(unknown).await.status, 404);
    let (_, record) = fleet
        .call("GET", "/admin/v1/decisions/n", &Value::Null)
        .await;
    assert_eq!(record["end"]["code"], "model_not_found");
    assert_eq!(record["decisions"], json!([]));
}

#[tokio::test]
async fn no_decisions_are_recorded_if_disabled() {
    let engine = Engine::always(vec![answer_json("200 OK", USAGE)]).await;
    let none = |settings: &mut ProxySettings| settings.decisions_max = 0;
    let fleet = Fleet::start_with(&[&engine], std::time::Duration::from_secs(60), none).await;
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
    fleet.is_idle().await;
    let (_, page) = fleet.call("GET", "/admin/v1/decisions", &Value::Null).await;
    assert_eq!((&page["kept"], &page["kept_max"]), (&json!(0), &json!(0)));
}

/// Returns a prompt of 64 common blocks, followed by `own`.
fn sharing(user: &str, own: &str) -> String {
    let prompt = format!("{}{}", "common text. ".repeat(200), own.repeat(40));
    let headers = format!("content-type: application/json\r\nx-quorate-user: {user}\r\n");
    let body = json!({"model": "m", "prompt": prompt}).to_string();
    post("/v1/completions", &headers, &body)
}

#[tokio::test]
async fn shared_prefixes_are_listed_with_their_owners() {
    let engine = Engine::always(vec![answer_json("200 OK", USAGE)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    for (user, own) in [("ada", "x"), ("bo", "y"), ("bo", "z")] {
        assert_eq!(client.ask(sharing(user, own)).await.status, 200);
    }
    fleet.is_idle().await;
    fleet.flush().await;
    let path = "/admin/v1/ownership/prefixes";
    let (status, told) = fleet.call("GET", path, &Value::Null).await;
    assert_eq!((status, &told["requests"]), (200, &json!(3)), "{told}");
    let prefixes = told["prefixes"].as_array().unwrap();
    assert_eq!(
        prefixes.len(),
        1,
        "told once, at its greatest depth: {told}"
    );
    let only = &prefixes[0];
    assert_eq!((&only["requests"], &only["users"]), (&json!(3), &json!(2)));
    assert_eq!(only["owners"], json!(["e0"]));
    let hash = only["hash"].as_str().unwrap();
    let (status, block) = fleet
        .call("GET", &format!("/admin/v1/blocks/{hash}"), &Value::Null)
        .await;
    assert_eq!(
        (status, &block["owners"][0]["backend"]),
        (200, &json!("e0"))
    );
}

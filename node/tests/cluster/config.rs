//! A config founds a cluster. Later configs change nothing by themselves: differences are reported,
//! and applied on demand.

use super::backups::quorate;
use super::*;

/// Returns the path of the config file.
fn file(dir: &TempDir) -> std::path::PathBuf {
    dir.path().join("n1.toml")
}

/// Replaces texts in the config file, appends to it, and reads it again.
fn changed(dir: &TempDir, replaced: &[(&str, &str)], appended: &str) -> Config {
    let file = file(dir);
    let mut text = std::fs::read_to_string(&file).unwrap();
    for (before, after) in replaced {
        assert!(text.contains(before), "{before} in {text}");
        text = text.replace(before, after);
    }
    text += appended;
    std::fs::write(&file, text).unwrap();
    read(file).unwrap()
}

async fn started(replica: &Replica) -> (Http, String) {
    let http = Http::new();
    http.ready(&[replica.addresses]).await;
    (
        http,
        format!("http://{}/admin/v1/config", replica.addresses.admin),
    )
}

/// Runs `quorate config ...` against the replica; returns its exit code and output.
async fn config_command(at: &Addresses, dir: &TempDir, args: &[&str]) -> (Option<i32>, String) {
    let path = file(dir);
    let args = [&["config"], args, &["--config", path.to_str().unwrap()]].concat();
    let output = quorate(at, &args).await;
    let mut told = String::from_utf8(output.stdout).unwrap();
    told += &String::from_utf8(output.stderr).unwrap();
    (output.status.code(), told)
}

const FOUNDING: &str = "[routing]\npolicy = \"least-request\"\n[admission]\norder = \"fcfs\"\n[users.defaults]\nweight_milli = 500\ncache = \"group:all\"\n";

/// Keys that differ in the second config of [`restarted`].
const DIFFERING: [&str; 6] = [
    "admission.max_queue",
    "admission.order",
    "backends.engine-0.url",
    "routing.policy",
    "users.defaults.budget.day",
    "users.defaults.cache",
];

/// Founds a cluster of one by a config with [`FOUNDING`], and restarts it with another config.
async fn restarted(dir: &TempDir, engines: &[EngineHandle]) -> Replica {
    // This call writes the file.
    drop(super::config(
        1,
        &["127.0.0.1:1".to_owned()],
        &engines[..1],
        dir.path(),
    ));
    let peers = "peers = [\"127.0.0.1:1\"]";
    let config = changed(dir, &[(peers, "")], FOUNDING);
    assert!(config.file.stated.len() > 2, "{:?}", config.file);
    let replica = Replica::run(config.clone(), BoundSockets::bind(&config.listen).unwrap());
    let (http, url) = started(&replica).await;
    let (_, told) = http.get(&url).await;
    assert_eq!(told["differences"], json!([]), "{told}");
    let keys = &told["keys"];
    assert_eq!(keys["admission.order"]["cluster"], "fcfs", "{told}");
    // Everything is set from the start, including defaults.
    assert_eq!(keys["admission.max_queue"]["cluster"], 4096, "{told}");
    assert_eq!(keys["routing.learn"]["cluster"], true, "{told}");
    assert_eq!(keys["node.id"]["in_effect"], 1, "{told}");
    let weight = &keys["users.defaults.weight_milli"];
    assert_eq!(weight["cluster"], 500, "{told}");
    assert_eq!(
        keys["users.defaults.cache"]["cluster"], "group:all",
        "{told}"
    );

    let (before, after) = (engines[0].url(), engines[1].url());
    let replaced = [
        ("policy = \"least-request\"", "policy = \"cost\""),
        ("order = \"fcfs\"", "order = \"rpm\"\nmax_queue = 7"),
        (before.as_str(), after.as_str()),
        (
            "cache = \"group:all\"\n",
            "cache = \"shared\"\n[users.defaults.budget]\nday = 9\n",
        ),
    ];
    let config = changed(
        dir,
        &replaced,
        "[routing.cost]\nwaiting_ns_per_request = 5\n",
    );
    let (_, at) = replica.leave().await;
    Replica::again((config, at))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_config_has_no_effect_until_applied() {
    let dir = TempDir::new().unwrap();
    let engines = engines(2).await;
    let replica = Box::pin(restarted(&dir, &engines)).await;
    let ((http, url), at) = (started(&replica).await, replica.addresses);
    let (_, told) = http.get(&url).await;
    assert_eq!(told["differences"], json!(DIFFERING), "{told}");
    assert_eq!(
        told["keys"]["admission.order"]["in_effect"], "fcfs",
        "{told}"
    );
    assert_eq!(
        told["keys"]["backends.engine-0.url"]["in_effect"],
        engines[0].url()
    );

    let (status, told) = config_command(&at, &dir, &["diff"]).await;
    assert_eq!(status, Some(1), "{told}");
    let (status, told) = config_command(&at, &dir, &["diff", "--json"]).await;
    let json: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(
        (status, json["differences"].as_array().map(Vec::len)),
        (Some(1), Some(6)),
        "{told}"
    );
    let order = json!({ "key": "admission.order", "file": "rpm", "cluster": "fcfs" });
    assert!(
        json["differences"].as_array().unwrap().contains(&order),
        "{told}"
    );

    // There is no terminal to ask on.
    let (status, told) = config_command(&at, &dir, &["apply"]).await;
    assert!(
        status == Some(2) && told.contains("--yes"),
        "{status:?} {told}"
    );
    let (status, told) = config_command(&at, &dir, &["apply", "--dry-run"]).await;
    assert!(
        status == Some(0) && told.contains("would send"),
        "{status:?} {told}"
    );
    let (_, unchanged) = http.get(&url).await;
    assert_eq!(unchanged["differences"], json!(DIFFERING), "{unchanged}");

    let (status, told) = config_command(&at, &dir, &["apply", "--yes", "--json"]).await;
    let json: Value = serde_json::from_str(&told).unwrap();
    let writes = json["writes"].as_array().unwrap();
    assert!(
        writes
            .iter()
            .all(|it| it["outcome"] == "committed" && it["index"].is_u64()),
        "{told}"
    );
    assert_eq!((status, writes.len()), (Some(0), 4), "{told}");
    let (_, applied) = http.get(&url).await;
    assert_eq!(applied["differences"], json!([]), "{applied}");
    let keys = &applied["keys"];
    assert_eq!(
        keys["routing.cost.waiting_ns_per_request"]["in_effect"], 5,
        "{applied}"
    );
    assert_eq!(
        keys["backends.engine-0.models"]["in_effect"],
        json!(["*"]),
        "{applied}"
    );
    assert_eq!(keys["users.defaults.weight_milli"]["in_effect"], 500);
    assert_eq!(keys["users.defaults.cache"]["in_effect"], "shared");
    let (status, told) = config_command(&at, &dir, &["diff"]).await;
    assert_eq!(status, Some(0), "{told}");
    replica.leave().await;
    let (status, told) = config_command(&at, &dir, &["diff"]).await;
    assert_eq!(status, Some(2), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_backend_does_not_return_with_a_restart() {
    let dir = TempDir::new().unwrap();
    let (engines, added) = (engines(2).await, engines(1).await);
    let replica = cluster(1, &engines, &dir).remove(0);
    let ((http, url), at) = (started(&replica).await, replica.addresses);
    let remove = format!("http://{}/admin/v1/backends/engine-0", at.admin);
    let (status, _, told) = http.send(Method::DELETE, &remove, &Value::Null).await;
    assert_eq!(status, StatusCode::OK, "{told}");
    let section = format!(
        "[[backends]]\nid = \"engine-2\"\nurl = {:?}\n",
        added[0].url()
    );
    let (_, place) = replica.leave().await;
    let replica = Replica::again((changed(&dir, &[], &section), place));
    // Backends are registered in the order of the file.
    let is_registered = async || {
        let (_, told) = http.get(&url).await;
        !told["keys"]["backends.engine-2.url"]["in_effect"].is_null()
    };
    until("the new backend is registered", is_registered).await;
    let (_, told) = http.get(&url).await;
    assert_eq!(
        told["differences"],
        json!(["backends.engine-0.url"]),
        "{told}"
    );
    let (status, told) = config_command(&at, &dir, &["apply", "--yes"]).await;
    assert_eq!(status, Some(0), "{told}");
    let (_, told) = http.get(&url).await;
    assert_eq!(told["differences"], json!([]), "{told}");
    replica.leave().await;
}

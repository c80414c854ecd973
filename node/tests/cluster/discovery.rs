//! Engines from a file: added, drained and removed with it, under load and across leaders.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use api::engines::discovery::{EngineScheme, EngineTemplate, SourceKind, SourceSettings};
use state::discovery::SourceRules;

use super::*;

/// Makes a replica follow the file, instead of `[[backends]]`.
fn follow(config: &mut Config, file: &Path) {
    config.backends.clear();
    config.discovery = vec![file_source(file)];
}

/// Returns a source that removes lost engines quickly.
pub(super) fn file_source(file: &Path) -> SourceSettings {
    SourceSettings {
        rules: SourceRules {
            source: "rack".to_owned(),
            remove_after_ms: 1000,
            lost_permille_max: 500,
        },
        template: EngineTemplate {
            source: "rack".to_owned(),
            models: vec!["*".to_owned()],
            labels: BTreeMap::new(),
            role: state::command::BackendRole::Both,
            scheme: EngineScheme::Http,
            kv_events_port: None,
            kv_replay_port: None,
        },
        kind: SourceKind::File(file.to_owned()),
    }
}

/// Writes the list of engines under another name and renames it, as a careful operator would.
fn write(file: &Path, engines: &[(usize, &EngineHandle)]) {
    let entries: Vec<_> = engines
        .iter()
        .map(|(nth, engine)| json!({ "id": format!("e{nth}"), "url": engine.url() }))
        .collect();
    write_text(file, &json!(entries).to_string());
}

fn write_text(file: &Path, text: &str) {
    let beside = file.with_extension("new");
    std::fs::write(&beside, text).unwrap();
    std::fs::rename(&beside, file).unwrap();
}

/// Returns the ids of the registered backends, with a `-` after draining ones.
async fn registered(http: &Http, at: &Addresses) -> Vec<String> {
    let url = format!("http://{}/admin/v1/backends", at.admin);
    let (_, answer) = http.get(&url).await;
    let backends = answer["backends"].as_array().unwrap().iter();
    let shown = backends.map(|backend| {
        let id = backend["id"].as_str().unwrap();
        match backend["state"]["is_draining"].as_bool().unwrap() {
            true => format!("{id}-"),
            false => id.to_owned(),
        }
    });
    shown.collect()
}

async fn have(http: &Http, at: &[Addresses], expected: &[&str]) {
    let all_have = async || {
        for replica in at {
            if registered(http, replica).await != expected {
                return false;
            }
        }
        true
    };
    until(&format!("all have {expected:?}"), all_have).await;
}

async fn source(http: &Http, at: &Addresses) -> Value {
    let url = format!("http://{}/admin/v1/discovery", at.admin);
    let (status, answer) = http.get(&url).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    answer["sources"][0].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discovered_backends_follow_the_file_and_survive_an_empty_one() {
    let (dir, engines) = (TempDir::new().unwrap(), engines(3).await);
    let file = dir.path().join("engines.json");
    write(&file, &[(0, &engines[0]), (1, &engines[1])]);
    let replica = lone_replica(&[], &dir, |config| follow(config, &file));
    let (http, at) = (Http::new(), [replica.addresses]);
    have(&http, &at, &["rack-e0", "rack-e1"]).await;
    http.ready(&at).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;

    // At most one of two may be lost at once, and an empty or broken file removes nothing.
    write_text(&file, "[]");
    let is_empty = async || source(&http, &at[0]).await["told"] == 0;
    until("the empty file is seen", is_empty).await;
    assert_eq!(registered(&http, &at[0]).await, ["rack-e0", "rack-e1"]);
    write_text(&file, "[");
    let is_broken = async || source(&http, &at[0]).await["error"].is_string();
    until("the broken file is told", is_broken).await;
    let page = http.metrics(at[0].admin).await;
    let failing = "\nquorate_discovery_is_failing{source=\"rack\"} ";
    assert!(page.contains(&format!("{failing}1\n")), "{page}");
    assert_eq!(registered(&http, &at[0]).await, ["rack-e0", "rack-e1"]);

    // All are replaced and one is rejected: entries that replace nothing are added at once.
    let list = json!([
        { "id": "e2", "url": engines[2].url() },
        { "id": "bad", "url": "ftp://x" },
    ]);
    write_text(&file, &list.to_string());
    have(&http, &at, &["rack-e2"]).await;
    let told = source(&http, &at[0]).await;
    assert_eq!(told["refused"][0]["engine"], "bad", "{told}");
    http.ready(&at).await;
    let headers = http.chat(&at[0], "ada", "Is the lamp lit?").await;
    assert_eq!(headers["x-quorate-backend"], "rack-e2");
    for line in [
        r#"quorate_discovery_is_failing{source="rack"} 0"#,
        r#"quorate_discovery_engines{source="rack",state="registered"} 1"#,
        r#"quorate_discovery_changes_total{source="rack",change="forgotten"} 2"#,
    ] {
        let is_shown = async || {
            let page = http.metrics(at[0].admin).await;
            page.contains(line)
        };
        until(line, is_shown).await;
    }
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_leader_continues_discovery() {
    let (dir, engines) = (TempDir::new().unwrap(), engines(4).await);
    let file = dir.path().join("engines.json");
    let all: Vec<_> = engines.iter().enumerate().collect();
    write(&file, &all);
    let mut replicas = cluster_with(3, &[], &dir, |config| {
        follow(config, &file);
        // Longer than an election takes.
        config.discovery[0].rules.remove_after_ms = 4000;
    });
    let (http, at) = (Http::new(), addresses(&replicas));
    have(&http, &at, &["rack-e0", "rack-e1", "rack-e2", "rack-e3"]).await;
    http.ready(&at).await;
    let first = http.chat(&at[0], "ada", "Is the lamp lit?").await;
    let kept = first["x-quorate-backend"].to_str().unwrap().to_owned();
    let nth: usize = kept.trim_start_matches("rack-e").parse().unwrap();

    // The engine is lost, the leader crashes, and the engine returns under the next leader.
    let rest: Vec<_> = all.iter().copied().filter(|(it, _)| *it != nth).collect();
    write(&file, &rest);
    let draining = format!("{kept}-");
    let is_lost = async || registered(&http, &at[0]).await.contains(&draining);
    until("it drains", is_lost).await;
    let (_, status) = http.admin(at[0].admin, "cluster").await;
    let leader = usize::try_from(status["leader"].as_u64().unwrap()).unwrap() - 1;
    let gone = replicas.remove(leader);
    gone.shutdown.abort();
    gone.leave().await;
    write(&file, &all);
    let left = addresses(&replicas);
    have(&http, &left, &["rack-e0", "rack-e1", "rack-e2", "rack-e3"]).await;
    http.ready(&left).await;
    let again = http.chat(&left[0], "ada", "Is the lamp lit?").await;
    assert_eq!(again["x-quorate-backend"], kept.as_str());
    assert!(matched(&again) >= 2, "{again:?}");
    leave(replicas).await;
}

/// Sends requests until stopped; every response must be successful.
fn load(at: Addresses, user: usize, stop: Arc<AtomicBool>) -> JoinHandle<u32> {
    tokio::spawn(async move {
        let (http, user) = (Http::new(), format!("user-{user}"));
        let mut answers = 0;
        while !stop.load(Ordering::Relaxed) {
            http.chat(&at, &user, &format!("Is the lamp lit? {answers}"))
                .await;
            answers += 1;
        }
        answers
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_engines_roll_under_load_during_a_leader_crash() {
    let (dir, engines) = (TempDir::new().unwrap(), engines(16).await);
    let file = dir.path().join("engines.json");
    let all: Vec<_> = engines.iter().enumerate().collect();
    write(&file, &all[..8]);
    let mut replicas = cluster_with(3, &[], &dir, |config| follow(config, &file));
    let (http, at) = (Http::new(), addresses(&replicas));
    let ids = |range: std::ops::Range<usize>| -> Vec<String> {
        let mut ids: Vec<_> = range.map(|nth| format!("rack-e{nth}")).collect();
        ids.sort();
        ids
    };
    let are = async |at: &[Addresses], expected: &[String]| {
        let expected: Vec<_> = expected.iter().map(String::as_str).collect();
        have(&http, at, &expected).await;
    };
    are(&at, &ids(0..8)).await;
    http.ready(&at).await;
    let (_, status) = http.admin(at[0].admin, "cluster").await;
    let leader = usize::try_from(status["leader"].as_u64().unwrap()).unwrap() - 1;
    let gone = replicas.remove(leader);
    let left = addresses(&replicas);
    let stop = Arc::<AtomicBool>::default();
    let loads: Vec<_> = (0..4)
        .map(|user| load(left[user % 2], user, Arc::clone(&stop)))
        .collect();
    let mut gone = Some(gone);
    for rolled in [2, 4, 6, 8] {
        write(&file, &all[rolled..rolled + 8]);
        if let Some(gone) = gone.take_if(|_| rolled == 4) {
            gone.shutdown.abort();
            gone.leave().await;
        }
        let is_known = async || {
            let known = registered(&http, &left[0]).await;
            known.contains(&format!("rack-e{}", rolled + 7))
        };
        until("the next engines are registered", is_known).await;
    }
    are(&left, &ids(8..16)).await;
    stop.store(true, Ordering::Relaxed);
    for load in loads {
        assert!(load.await.unwrap() > 0);
    }
    http.agree(&left).await;
    leave(replicas).await;
}

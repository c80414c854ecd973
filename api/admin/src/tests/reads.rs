//! Reads: content, index and paging.

use std::time::Duration;

use futures_util::FutureExt;
use state::command::{Charge, EngineFacts, Item};
use state::ids::{BackendRef, UserKey};
use tokio_util::sync::CancellationToken;

use super::*;
use api::cluster::events;
use api::cluster::events::ClusterEvent;

/// Dispatches one request of three blocks to `gpu-1`.
fn acquire(bench: &Bench, attempt: u32) {
    let backend = bench.admin.view.registry().backends[0].handle;
    let items = vec![Item::Acquire {
        attempt,
        backend,
        tip: None,
        new: vec![BlockHash(0xa1), BlockHash(0xa2), BlockHash(0xa3)],
    }];
    batch(bench, items);
}

pub(super) fn batch(bench: &Bench, items: Vec<Item>) {
    let command = Command::Batch {
        base_attempt: AttemptId(1),
        items,
    };
    let committed = bench.cluster.apply(Lane::Outbox, command);
    assert_eq!(
        committed.reply,
        Reply::Batch(state::command::BatchReply::default())
    );
}

#[tokio::test]
async fn backends_are_listed_with_all_known_facts() {
    let bench = Bench::with_backends();
    acquire(&bench, 0);
    let list = bench.get("/admin/v1/backends").await;
    assert_eq!(list["index"], 4);
    assert_eq!(list.get("next_cursor"), None);
    let mut first = list["backends"][0].clone();
    // Probes and engine figures are tested in detail elsewhere.
    let engine = first["engine"].take();
    assert_eq!(engine["waiting"], 2);
    assert_eq!(engine["kv_usage_percent"], 25.0);
    // Measurements and readers of KV events have their own tests.
    assert_eq!(first["service"]["capacity_blocks"], 100);
    assert_eq!(first["service"]["learnt"], json!(null));
    assert_eq!(first["circuit"]["is_open"], false);
    for part in ["engine", "service", "circuit", "ownership"] {
        let removed = first.as_object_mut().unwrap().remove(part);
        assert!(removed.is_some(), "{part}");
    }
    assert_eq!(
        first,
        json!({
            "id": "gpu-1",
            "url": "http://gpu-1:8000",
            "models": ["*"],
            "labels": {"zone": "a"},
            "kv_events": null,
            "kv_replay": null,
            "role": "both",
            "capacity_blocks": 100,
            "capacity": {
                "blocks": 100,
                "configured_blocks": 100,
                "engine_blocks": null,
                "engine_tokens": null,
            },
            "state": {
                "name": "healthy",
                "is_healthy": true,
                "is_draining": false, "moves_streams": false,
                "detail": null,
            },
            "in_flight": {
                "here": 0,
                "cluster": 0,
                "pending_prefill_tokens": 0,
                "share": null,
            },
            "owned_blocks": 3,
            "discovered": null,
            "slot": 0,
            "incarnation": first["incarnation"],
            "engine_info": {
                "kind": null,
                "version": null,
                "tells_cached_tokens": false,
                "ranks": null,
                "rank": null,
                "models": [],
            },
            "facts": {"models": null, "capacity_blocks": null, "started_at_s": null, "drops_last_block": null},
            "probes": {
                "total": 0,
                "failures_total": 0,
                "failures_in_row": 0,
                "seen_ms_ago": null,
                "metrics_detail": null,
            },
            "answers": { "all": 0, "client_errors": 0, "server_errors": 0 },
        })
    );
    assert_eq!(list["backends"][1]["state"]["name"], "unhealthy");
}

#[tokio::test]
async fn lists_come_in_pages() {
    let bench = Bench::new();
    for number in 0..7 {
        bench.apply(Command::PutBackend(spec(&format!("gpu-{number}"))));
        let put = format!("/admin/v1/users/user-{number}");
        let put = bench.call("PUT", &put, r#"{"weight_milli":1}"#).await;
        assert_eq!(put.status, StatusCode::OK);
    }
    for (list, name) in [("backends", "id"), ("users", "name")] {
        let mut seen = Vec::new();
        let mut path = format!("/admin/v1/{list}?limit=3");
        let mut pages = 0;
        loop {
            let page = bench.get(&path).await;
            pages += 1;
            for entry in page[list].as_array().unwrap() {
                seen.push(entry[name].as_str().unwrap().to_owned());
            }
            match page.get("next_cursor") {
                Some(cursor) => {
                    let cursor = cursor.as_str().unwrap();
                    path = format!("/admin/v1/{list}?limit=3&cursor={cursor}");
                }
                None => break,
            }
        }
        assert_eq!(pages, 3, "{list}");
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 7, "{list}");
    }
}

#[tokio::test]
async fn a_user_shows_its_charges() {
    let bench = Bench::new();
    let key: UserKey = state::prefix::user_key(1, "ann");
    let define = Item::DefineUser {
        key,
        name: "ann".to_owned(),
    };
    let charge = Item::Charge(Charge {
        user: key,
        input_uncached: 100,
        input_cached: 50,
        output: 10,
        started: 1,
        ended: 0,
        ..Charge::default()
    });
    batch(&bench, vec![define, charge]);
    let user = bench.get("/admin/v1/users/ann").await;
    assert_eq!(user["counter_milli_tokens"], 120_000);
    assert_eq!(user["in_flight"], 1);
    assert_eq!(user["total"]["input_cached"], 50);
    assert_eq!(user["key"], format!("{:016x}", key.0));
    let list = bench.get("/admin/v1/users").await;
    assert_eq!(list["virtual_time_milli_tokens"], 120_000);
}

#[tokio::test]
async fn blocks_and_ownership_are_shown() {
    let bench = Bench::with_backends();
    acquire(&bench, 0);
    let block = bench.get("/admin/v1/blocks/00000000000000a2").await;
    assert_eq!(
        block,
        json!({
            "index": 4,
            "hash": "00000000000000a2",
            "owners": [{"backend": "gpu-1", "slot": 0}],
        })
    );
    let nobody = bench.get("/admin/v1/blocks/00000000000000ff").await;
    assert_eq!(nobody["owners"], json!([]));
    let counts = bench.get("/admin/v1/ownership").await;
    assert_eq!(counts["owned_blocks"], 3);
    assert_eq!(counts["leases"], 1);
    assert_eq!(counts["backends"][1]["owned_blocks"], 0);
    assert_eq!(counts["models"], json!([]), "no engine was asked yet");
    let backend = |at: usize| bench.admin.view.registry().backends[at].handle;
    let serves = |at, models: &[&str]| Item::ObserveEngine {
        backend: backend(at),
        facts: EngineFacts {
            models: Some(models.iter().map(ToString::to_string).collect()),
            ..EngineFacts::default()
        },
    };
    let other = Item::Acquire {
        attempt: 1,
        backend: backend(1),
        tip: None,
        new: vec![BlockHash(0xb1), BlockHash(0xb2)],
    };
    batch(
        &bench,
        vec![serves(0, &["m"]), serves(1, &["m", "n"]), other],
    );
    let counts = bench.get("/admin/v1/ownership").await;
    assert_eq!(
        counts["models"],
        json!([
            {"model": "m", "owned_blocks": 3, "shared_blocks": 2},
            {"model": "n", "owned_blocks": 0, "shared_blocks": 2},
        ])
    );
}

#[tokio::test]
async fn the_cluster_is_shown() {
    let bench = Bench::new();
    let cluster = bench.get("/admin/v1/cluster").await;
    assert_eq!(cluster["role"], "leader");
    assert_eq!(cluster["members"]["2"]["lag"], 4);
    assert_eq!(cluster["applied_index"], 1);
    assert_eq!(cluster["failures_survived"], 0, "two voters of two");
    let with = |connected: [bool; 5]| {
        let mut status = status();
        let member = status.members[&ReplicaId(2)].clone();
        let members = (1..).map(ReplicaId).zip(connected);
        let members = members.map(|(id, is_connected)| {
            let member = api::ports::MemberStatus {
                is_connected,
                ..member.clone()
            };
            (id, member)
        });
        status.members = members.collect();
        status.failures_survived()
    };
    assert_eq!(with([true; 5]), Some(2));
    // A replica is no peer of itself.
    assert_eq!(with([false, true, true, true, false]), Some(1));
    assert_eq!(with([false, true, true, false, false]), Some(0));
}

#[tokio::test]
async fn recent_writes_are_shown_newest_first() {
    let bench = Bench::with_backends();
    let audit = bench.get("/admin/v1/audit?limit=2").await;
    assert_eq!(audit["index"], 3);
    let seen: Vec<_> = audit["writes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|write| (write["index"].clone(), write["subject"].clone()))
        .collect();
    assert_eq!(
        seen,
        [(json!(3), json!("gpu-2")), (json!(2), json!("gpu-1"))]
    );
    let page = ("GET", "/admin/v1/audit?cursor=1", "");
    bench.problem(page, 400, "invalid").await;
}

#[tokio::test]
async fn a_linearizable_read_waits_for_the_barrier() {
    let bench = Bench::with_backends();
    let explain = r#"{"path":"/v1/completions","body":{"model":"m","prompt":"p"}}"#;
    let reads = [
        ("GET", "/admin/v1/cluster", ""),
        ("GET", "/admin/v1/backends", ""),
        ("GET", "/admin/v1/backends/gpu-1", ""),
        ("GET", "/admin/v1/users", ""),
        ("GET", "/admin/v1/ownership", ""),
        ("GET", "/admin/v1/blocks/00000000000000a2", ""),
        ("GET", "/admin/v1/policy", ""),
        ("GET", "/admin/v1/audit", ""),
        ("GET", "/admin/v1/digest", ""),
        ("POST", "/admin/v1/explain", explain),
    ];
    for (asked, (method, path, body)) in reads.into_iter().enumerate() {
        let local = bench.call(method, path, body).await;
        assert_eq!(local.status, StatusCode::OK, "{path} {}", local.body);
        assert_eq!(*bench.cluster.barriers.lock().unwrap(), asked as u64);
        let path = format!("{path}?read=linearizable");
        let read = bench.call(method, &path, body).await;
        assert_eq!(read.status, StatusCode::OK, "{path} {}", read.body);
        assert_eq!(*bench.cluster.barriers.lock().unwrap(), asked as u64 + 1);
    }
    bench.set_fate(Fate::Unavailable);
    for (method, path, body) in reads {
        let path = format!("{path}?read=linearizable");
        bench.problem((method, &path, body), 503, "no-quorum").await;
    }
}

#[tokio::test]
async fn a_digest_is_that_of_the_requested_index() {
    let bench = Bench::new();
    let first = bench.get("/admin/v1/digest").await;
    assert_eq!(first["index"], 1);
    assert_eq!(first["digest"].as_str().unwrap().len(), 32);
    bench.apply(Command::PutBackend(spec("a")));
    // Kept because it was requested while it was the newest.
    assert_eq!(bench.get("/admin/v1/digest?index=1").await, first);
    let second = bench.get("/admin/v1/digest?index=2").await;
    assert_ne!(second["digest"], first["digest"]);
    bench.apply(Command::PutBackend(spec("b")));
    bench.apply(Command::PutBackend(spec("c")));
    let gone = ("GET", "/admin/v1/digest?index=3", "");
    let problem = bench.problem(gone, 404, "digest-not-kept").await;
    assert_eq!(problem["nearest_index"], 2);
    assert_eq!(problem["applied_index"], 4);
}

#[tokio::test]
async fn a_digest_of_a_future_index_is_waited_for() {
    let bench = Bench::new();
    let mut asking = Box::pin(bench.get("/admin/v1/digest?index=3"));
    assert_eq!((&mut asking).now_or_never(), None);
    bench.apply(Command::PutBackend(spec("a")));
    assert_eq!((&mut asking).now_or_never(), None);
    bench.apply(Command::PutBackend(spec("b")));
    bench.apply(Command::PutBackend(spec("c")));
    assert_eq!(asking.await["index"], 3);
}

#[tokio::test(start_paused = true)]
async fn a_digest_that_never_arrives_is_a_conflict() {
    let bench = Bench::new();
    let call = ("GET", "/admin/v1/digest?index=30", "");
    let problem = bench.problem(call, 409, "not-applied").await;
    assert_eq!(problem["applied_index"], 1);
}

#[tokio::test]
async fn explain_changes_nothing() {
    let bench = Bench::with_backends();
    let before = bench.get("/admin/v1/digest").await;
    let inner = r#"{"model": "m", "prompt": "the quick brown fox jumps over the lazy dog"}"#;
    let as_object = format!(r#"{{"path":"/v1/completions","body":{inner}}}"#);
    let as_text = json!({"path": "/v1/completions", "headers": {"X-Request-Id": "7"},
        "body": inner})
    .to_string();
    let object = bench.call("POST", "/admin/v1/explain", &as_object).await;
    assert_eq!(object.status, StatusCode::OK, "{}", object.body);
    let explained = object.json();
    assert_eq!(explained["read"], "local");
    assert_eq!(explained["model"], "m");
    assert_eq!(explained["choice"], "gpu-1");
    assert_eq!(explained["blocks_total"], 2);
    assert_eq!(explained["backends"][1]["verdict"], "unhealthy");
    assert_eq!(explained["tokenizer"], "character");
    assert_eq!(explained["unit"], "characters");
    assert_eq!(explained.get("token_ids"), None);
    let text = bench.call("POST", "/admin/v1/explain", &as_text).await;
    assert_eq!(text.json()["blocks"], explained["blocks"]);
    let ids = r#"{"path":"/v1/completions","token_ids":true,
        "body":{"model":"m","prompt":[1,2,3,4,5]}}"#;
    let ids = bench.call("POST", "/admin/v1/explain", ids).await.json();
    assert_eq!(ids["token_ids"], json!([1, 2, 3, 4, 5]));
    assert_eq!(
        (&ids["unit"], &ids["tokens"]),
        (&json!("tokens"), &json!(5))
    );
    assert_eq!(bench.get("/admin/v1/digest").await, before);
}

#[tokio::test]
async fn explain_finds_the_user_as_the_data_plane_does() {
    let bench = Bench::with_backends();
    let user = async |fields: Value| {
        let mut asked = json!({
            "path": "/v1/completions",
            "body": {"model": "m", "prompt": "p", "user": "bo"},
        });
        asked
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let answer = bench
            .call("POST", "/admin/v1/explain", &asked.to_string())
            .await;
        let answer = answer.json();
        (answer["user"].clone(), answer["user_source"].clone())
    };
    let header = json!({"x-quorate-user": " ada\t"});
    let found = user(json!({})).await;
    assert_eq!(found, (json!("body:bo"), json!("body:user")));
    let found = user(json!({"headers": header})).await;
    assert_eq!(found, (json!("ada"), json!("header:x-quorate-user")));
    let found = user(json!({"headers": header, "peer": "192.0.2.1"})).await;
    assert_eq!(found, (json!("header:ada"), json!("header:x-quorate-user")));
    let (name, source) = user(json!({"headers": {"authorization": "Bearer sk-1"}})).await;
    assert!(name.as_str().unwrap().starts_with("key-"), "{name}");
    assert_eq!(source, "api_key");
    let found = user(json!({"headers": header, "user": "key-0123456789abcdef"})).await;
    assert_eq!(found, (json!("key-0123456789abcdef"), json!("given")));
}

#[tokio::test]
async fn explain_refuses_what_the_data_plane_would_refuse() {
    let bench = Bench::with_backends();
    for (body, status) in [
        (r#"{"path":"/v1/models","body":{}}"#, 405),
        (r#"{"path":"/metrics","body":{"model":"m"}}"#, 404),
        (
            r#"{"path":"/v1/completions","headers":{"content-encoding":"br"},"body":{"model":"m"}}"#,
            415,
        ),
        (
            r#"{"path":"/v1/completions","headers":{"x-quorate-priority":"high"},"body":{"model":"m"}}"#,
            400,
        ),
        (
            r#"{"path":"/v1/completions","body":{"model":"m","kv_transfer_params":{}}}"#,
            400,
        ),
    ] {
        let asked = ("POST", "/admin/v1/explain", body);
        let problem = bench.problem(asked, 400, "invalid").await;
        assert_eq!(problem["data_plane_status"], status, "{problem}");
    }
}

#[tokio::test]
async fn event_streams_are_bounded_and_released() {
    let bench = Bench::new();
    let open = async || {
        let request = Request::get("/admin/v1/events")
            .body(Body::empty())
            .unwrap();
        bench.api.clone().oneshot(request).await.unwrap()
    };
    let mut streams = Vec::new();
    for _ in 0..STREAMS_MAX {
        streams.push(open().await);
    }
    assert_eq!(open().await.status(), StatusCode::SERVICE_UNAVAILABLE);
    streams.pop();
    assert_eq!(open().await.status(), StatusCode::OK);
}

#[tokio::test]
async fn state_changes_are_sent_as_events() {
    let bench = Bench::new();
    let events = bench.admin.events.clone();
    let mut stream = events.subscribe();
    let stop = CancellationToken::new();
    let following = tokio::spawn(events::follow(
        Arc::clone(&bench.admin.cluster),
        Arc::clone(&bench.admin.view),
        events,
        stop.clone(),
    ));
    // The task takes its first look when it first runs.
    tokio::task::yield_now().await;
    bench.apply(Command::PutBackend(spec("a")));
    bench.cluster.status.lock().unwrap().leader = None;
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let event = tokio::time::timeout(Duration::from_secs(30), stream.recv()).await;
        seen.push(event.unwrap().unwrap().event.name());
    }
    assert_eq!(seen, ["leader", "backend"]);
    stop.cancel();
    following.await.unwrap();
}

#[test]
fn metrics_distinguish_voters_from_learners() {
    let bench = Bench::new();
    let mut status = bench.cluster.status.lock().unwrap();
    status.members.get_mut(&ReplicaId(2)).unwrap().is_voter = false;
    drop(status);
    let page = bench.admin.metrics.encode_text();
    for (replica, votes) in [(1, 1), (2, 0)] {
        let line = format!("\nquorate_raft_member_is_voter{{replica=\"{replica}\"}} {votes}\n");
        assert!(page.contains(&line), "{page}");
    }
}

#[test]
fn status_changes_are_sent_in_order() {
    use api::cluster::events::{MemberChange, status_changes};
    let before = status();
    let mut after = before.clone();
    after.term = 4;
    after.leader = Some(ReplicaId(2));
    after.role = "follower";
    after.snapshot_index = Some(8);
    after.fault = Some("disk full".to_owned());
    let mut third = after.members.remove(&ReplicaId(2)).unwrap();
    third.is_voter = false;
    after.members.insert(ReplicaId(3), third);
    after.members.get_mut(&ReplicaId(1)).unwrap().is_connected = false;
    let member = |id, change| ClusterEvent::Member {
        id: ReplicaId(id),
        change,
    };
    assert_eq!(
        status_changes(&before, &after),
        [
            ClusterEvent::Leader {
                leader: Some(ReplicaId(2)),
                term: 4
            },
            ClusterEvent::Role { role: "follower" },
            ClusterEvent::Fault {
                detail: "disk full".to_owned()
            },
            ClusterEvent::Snapshot { index: 8 },
            member(1, MemberChange::Disconnected),
            member(3, MemberChange::Added),
            member(2, MemberChange::Removed),
        ]
    );
    assert_eq!(status_changes(&after, &after), []);
}

#[test]
fn registry_changes_are_sent_in_order() {
    use api::cluster::events::{BackendChange, registry_changes};
    let bench = Bench::with_backends();
    let before = bench.admin.view.registry();
    bench.apply(Command::DeleteBackend {
        name: "gpu-2".to_owned(),
    });
    bench.apply(Command::SetDraining {
        name: "gpu-1".to_owned(),
        draining: true,
        moves_streams: false,
    });
    bench.apply(Command::PutPolicy(PolicyConfig::Cost(Default::default())));
    let after = bench.admin.view.registry();
    let backend = |id: &str, change| ClusterEvent::Backend {
        id: id.to_owned(),
        change,
    };
    assert_eq!(
        registry_changes(&before, &after),
        [
            backend("gpu-2", BackendChange::Removed),
            backend("gpu-1", BackendChange::Draining),
            ClusterEvent::Policy {
                config: PolicyConfig::Cost(Default::default())
            },
        ]
    );
    let mut moved = spec("gpu-1");
    moved.url = "http://elsewhere:1".to_owned();
    bench.apply(Command::PutBackend(moved));
    let later = bench.admin.view.registry();
    let handle = |registry: &state::Registry| -> BackendRef { registry.backends[0].handle };
    assert_ne!(handle(&after), handle(&later));
    let changes = registry_changes(&after, &later);
    assert_eq!(changes[0], backend("gpu-1", BackendChange::Restarted));
    let empty = Bench::new().admin.view.registry();
    assert_eq!(
        registry_changes(&empty, &after)[..2],
        [
            backend("gpu-1", BackendChange::Added),
            backend("gpu-1", BackendChange::Draining),
        ]
    );
}

//! Tests of sessions and their trees.

use std::collections::BTreeSet;

use state::command::Item;
use state::ids::{AgentSessionKey, BackendRef, ModelKey, UserKey};
use state::prefix::{model_key, user_key};
use state::trees::{NewSession, SessionRef, SessionTurn, TurnUsage};

use super::reads::batch;
use super::*;

/// Begins a session of `user` with its first turn at `home`.
fn begin(bench: &Bench, user: &str, (key, parent): (u64, Option<u64>), home: BackendRef) {
    batch(
        bench,
        vec![Item::BeginSession(NewSession {
            key: AgentSessionKey(key),
            parent: parent.map(AgentSessionKey),
            user: user_key(1, user),
            model: model_key(1, "m"),
            home,
        })],
    );
}

fn turn(bench: &Bench, key: u64, usage: TurnUsage) {
    batch(
        bench,
        vec![Item::EndTurn(SessionTurn {
            session: SessionRef::Key(AgentSessionKey(key)),
            usage,
        })],
    );
}

fn id(key: u64) -> String {
    format!("{key:016x}")
}

fn ids(list: &Value) -> Vec<String> {
    let sessions = list["sessions"].as_array().unwrap().iter();
    sessions
        .map(|it| it["id"].as_str().unwrap().to_owned())
        .collect()
}

/// Returns a bench with a tree of three sessions of ada and one session of bo.
fn with_trees() -> (Bench, [BackendRef; 2]) {
    let bench = Bench::with_backends();
    bench.apply(Command::PutBackend(BackendSpec {
        models: vec!["m".to_owned()],
        ..spec("gpu-2")
    }));
    let registry = bench.cluster.view.registry();
    let [first, second, ..] = &registry.backends[..] else {
        panic!("two backends");
    };
    let homes = [first.handle, second.handle];
    let (key, name) = (user_key(1, "ada"), "ada".to_owned());
    batch(&bench, vec![Item::DefineUser { key, name }]);
    begin(&bench, "ada", (1, None), homes[0]);
    begin(&bench, "ada", (3, Some(1)), homes[1]);
    begin(&bench, "bo", (9, None), homes[1]);
    begin(&bench, "ada", (2, Some(3)), homes[0]);
    let usage = TurnUsage {
        input_uncached: 100,
        input_cached: 300,
        output: 20,
    };
    turn(&bench, 3, usage);
    (bench, homes)
}

#[tokio::test]
async fn sessions_are_listed_by_their_last_use() {
    let (bench, _) = with_trees();
    let all = bench.get("/admin/v1/sessions").await;
    assert_eq!(ids(&all), [3, 2, 9, 1].map(id));
    assert_eq!(
        (&all["sessions_total"], &all["trees_total"]),
        (&json!(4), &json!(2))
    );
    let shown = &all["sessions"][0];
    let (age_ms, idle_ms) = (shown["age_ms"].as_u64(), shown["idle_ms"].as_u64());
    assert!(age_ms > idle_ms && idle_ms == Some(0), "{shown}");
    let mut shown = shown.clone();
    shown.as_object_mut().unwrap().remove("age_ms");
    let expected = json!({
        "id": id(3), "parent": id(1), "root": id(1),
        "user": "ada", "user_key": format!("{:016x}", user_key(1, "ada").0),
        "model": "m", "home": "gpu-2", "idle_ms": 0, "turns": 1, "tokens": 420,
        "usage": {"input_uncached": 100, "input_cached": 300, "output": 20, "hit_percent": 75.0},
    });
    assert_eq!(shown, expected);
    let of_bo = bench.get("/admin/v1/sessions?user=bo").await;
    assert_eq!(ids(&of_bo), [id(9)]);
    assert_eq!(of_bo["sessions"][0]["user"], json!(null), "nobody knows bo");
    assert_eq!(of_bo["sessions"][0]["usage"]["hit_percent"], json!(null));
    let at_first = bench.get("/admin/v1/sessions?backend=gpu-1&user=ada").await;
    assert_eq!(ids(&at_first), [2, 1].map(id));
    for none in ["user=nobody", "backend=gpu-9"] {
        let none = bench.get(&format!("/admin/v1/sessions?{none}")).await;
        assert_eq!(ids(&none), Vec::<String>::new());
    }
}

#[tokio::test]
async fn pages_of_sessions_join_to_the_whole_list() {
    let bench = Bench::with_backends();
    let home = bench.cluster.view.registry().backends[0].handle;
    // Sessions of one command have the same last use.
    for round in 0..3 {
        let session = |nth: u64| {
            Item::BeginSession(NewSession {
                key: AgentSessionKey(nth * 7 + round),
                parent: None,
                user: UserKey(1),
                model: ModelKey(1),
                home,
            })
        };
        batch(&bench, (0..7).map(session).collect());
    }
    let whole = ids(&bench.get("/admin/v1/sessions").await);
    assert_eq!(whole.iter().collect::<BTreeSet<_>>().len(), 21);
    for limit in [1, 2, 5, 7, 20, 21] {
        let (mut joined, mut cursor) = (Vec::new(), String::new());
        loop {
            let path = format!("/admin/v1/sessions?limit={limit}{cursor}");
            let page = bench.get(&path).await;
            joined.extend(ids(&page));
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(joined, whole, "{limit}");
    }
    for cursor in ["7", "0-0", "x", "used-0-0"] {
        let path = format!("/admin/v1/sessions?cursor={cursor}");
        let problem = bench.problem(("GET", &path, ""), 400, "invalid").await;
        assert_eq!(problem["field"], "cursor");
    }
}

/// Returns the path of the tree with this root.
fn tree_path(root: u64) -> String {
    format!("/admin/v1/session-trees/{}", id(root))
}

#[tokio::test]
async fn a_session_is_shown_by_its_id() {
    let (bench, _) = with_trees();
    let shown = bench.get(&format!("/admin/v1/sessions/{}", id(3))).await;
    assert_eq!(
        (&shown["id"], &shown["parent"], &shown["root"]),
        (&json!(id(3)), &json!(id(1)), &json!(id(1)))
    );
    assert_eq!(
        (&shown["user"], &shown["tokens"]),
        (&json!("ada"), &json!(420))
    );
    let unknown = format!("/admin/v1/sessions/{}", id(7));
    bench.problem(("GET", &unknown, ""), 404, "not-found").await;
    let path = "/admin/v1/sessions/7";
    let problem = bench.problem(("GET", path, ""), 400, "invalid").await;
    assert_eq!(problem["field"], "id");
}

#[tokio::test]
async fn a_tree_is_shown_by_its_root_alone() {
    let (bench, _) = with_trees();
    let tree = bench.get(&tree_path(1)).await;
    assert_eq!(ids(&tree), [1, 3, 2].map(id), "parents first");
    assert_eq!(tree["root"], id(1));
    assert_eq!((&tree["user"], &tree["turns"]), (&json!("ada"), &json!(1)));
    assert_eq!(tree["sessions_total"], 3);
    assert_eq!(tree["usage"]["hit_percent"], 75.0);
    for method in ["GET", "DELETE"] {
        for other in [3, 7] {
            let path = tree_path(other);
            bench.problem((method, &path, ""), 404, "not-found").await;
        }
        let path = "/admin/v1/session-trees/7";
        let problem = bench.problem((method, path, ""), 400, "invalid").await;
        assert_eq!(problem["field"], "root");
    }
}

#[tokio::test]
async fn the_tree_of_a_root_that_begins_again_as_a_child_keeps_its_name() {
    let (bench, homes) = with_trees();
    // The root ends, its tree goes on, and the same name begins below another session.
    let root = SessionRef::Key(AgentSessionKey(1));
    batch(&bench, vec![Item::EndSession(root)]);
    begin(&bench, "ada", (1, Some(9)), homes[0]);
    let session = bench.get(&format!("/admin/v1/sessions/{}", id(1))).await;
    assert_eq!(session["root"], id(9));
    assert_eq!(ids(&bench.get(&tree_path(1)).await), [3, 2].map(id));
    assert_eq!(ids(&bench.get(&tree_path(9)).await), [9, 1].map(id));
    let ended = bench.call("DELETE", &tree_path(1), "").await;
    assert_eq!(ended.status, 200, "{}", ended.body);
    let path = tree_path(1);
    bench.problem(("GET", &path, ""), 404, "not-found").await;
    assert_eq!(ids(&bench.get(&tree_path(9)).await), [9, 1].map(id));
}

#[tokio::test]
async fn a_tree_is_shown_whole_in_spite_of_circular_parents() {
    let (bench, homes) = with_trees();
    // Each names the other, and a third names one that nobody began.
    begin(&bench, "eve", (20, Some(21)), homes[0]);
    begin(&bench, "eve", (21, Some(20)), homes[0]);
    begin(&bench, "eve", (22, Some(23)), homes[0]);
    let tree = bench.get(&tree_path(21)).await;
    assert_eq!(ids(&tree), [21, 20].map(id));
    let tree = bench.get(&tree_path(23)).await;
    assert_eq!((ids(&tree), &tree["root"]), (vec![id(22)], &json!(id(23))));
}

#[tokio::test]
async fn ending_a_tree_ends_its_sessions() {
    let (bench, _) = with_trees();
    let ended = bench.call("DELETE", &tree_path(1), "").await;
    assert_eq!(ended.status, 200, "{}", ended.body);
    assert_eq!(ids(&bench.get("/admin/v1/sessions").await), [id(9)]);
    let path = tree_path(1);
    bench.problem(("DELETE", &path, ""), 404, "not-found").await;
}

#[tokio::test]
async fn an_ended_parent_does_not_end_its_children() {
    let (bench, _) = with_trees();
    let root = SessionRef::Key(AgentSessionKey(1));
    batch(&bench, vec![Item::EndSession(root)]);
    let tree = bench.get(&tree_path(1)).await;
    assert_eq!(ids(&tree), [3, 2].map(id), "the tree outlives its root");
    assert_eq!(tree["root"], id(1));
}

#[tokio::test]
async fn trees_are_listed_with_their_homes_by_last_use_or_tokens() {
    let (bench, _) = with_trees();
    let roots = |list: &Value| -> Vec<String> {
        let trees = list["trees"].as_array().unwrap().iter();
        trees
            .map(|it| it["root"].as_str().unwrap().to_owned())
            .collect()
    };
    let used = bench.get("/admin/v1/session-trees").await;
    assert_eq!(roots(&used), [1, 9].map(id), "a child was used last");
    let counted = ["sessions_total", "trees_total", "trees_found"].map(|it| used[it].as_u64());
    assert_eq!(counted, [Some(4), Some(2), Some(2)]);
    let mut shown = used["trees"][0].clone();
    shown.as_object_mut().unwrap().remove("age_ms");
    let expected = json!({
        "root": id(1), "user": "ada", "user_key": format!("{:016x}", user_key(1, "ada").0),
        "idle_ms": 0, "sessions": 3, "turns": 1, "homes_total": 2,
        "usage": {"input_uncached": 100, "input_cached": 300, "output": 20, "hit_percent": 75.0},
        "homes": [{"backend": "gpu-1", "sessions": 2}, {"backend": "gpu-2", "sessions": 1}],
    });
    assert_eq!(shown, expected);
    let first = bench.get("/admin/v1/session-trees?limit=1").await;
    assert_eq!(
        (roots(&first), &first["trees_found"]),
        (vec![id(1)], &json!(2))
    );
    let cursor = first["next_cursor"]
        .as_str()
        .expect("there is another page");
    let second = format!("/admin/v1/session-trees?limit=1&cursor={cursor}");
    let second = bench.get(&second).await;
    assert_eq!(
        (roots(&second), &second["next_cursor"]),
        (vec![id(9)], &Value::Null)
    );
    let other = format!("/admin/v1/session-trees?order=tokens&cursor={cursor}");
    let problem = bench.problem(("GET", &other, ""), 400, "invalid").await;
    assert_eq!(problem["field"], "cursor", "it is of another order");
    let of_bo = bench.get("/admin/v1/session-trees?user=bo").await;
    assert_eq!(
        (roots(&of_bo), &of_bo["trees_found"]),
        (vec![id(9)], &json!(1))
    );
    let usage = TurnUsage {
        output: 9,
        ..TurnUsage::default()
    };
    turn(&bench, 9, usage);
    for (order, expected) in [("used", [9, 1]), ("tokens", [1, 9])] {
        let path = format!("/admin/v1/session-trees?order={order}");
        assert_eq!(roots(&bench.get(&path).await), expected.map(id), "{order}");
    }
}

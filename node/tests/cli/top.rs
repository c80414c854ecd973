//! `quorate top` and `--watch` while replicas fail.

use serde_json::Value;

use super::process::{Engine, Replica, free, get, program, until};
use super::terminal::OnTerminal;
use super::{quorate, text};

/// Starts a cluster of three replicas with an engine.
fn cluster() -> (Engine, Vec<Replica>) {
    let engine = Engine::start();
    let peers: [_; 3] = free();
    let list = peers.map(|peer| format!("\"{peer}\"")).join(", ");
    let config = format!(
        "[cluster]\npeers = [{list}]\n[[backends]]\nid = \"gpu-1\"\nurl = \"{}\"\n",
        engine.url
    );
    let replicas: Vec<_> = (1..=3)
        .zip(peers)
        .map(|(id, peer)| Replica::start(id, peer, &config))
        .collect();
    for replica in &replicas {
        replica.ready();
    }
    until("each tells the others its figures", || {
        replicas.iter().all(|replica| {
            let told = get(replica.admin, "/admin/v1/replicas").map(|it| it.json());
            let told = told.unwrap_or_default();
            let all = told["replicas"].as_array().cloned().unwrap_or_default();
            all.len() == 3 && all.iter().all(|it| it["figures"]["is_ready"] == true)
        })
    });
    (engine, replicas)
}

fn start(args: &[&str]) -> OnTerminal {
    OnTerminal::start(program(env!("CARGO_BIN_EXE_quorate"), args), 100)
}

#[test]
fn top_survives_the_loss_of_its_replica() {
    let (_engine, mut replicas) = cluster();
    let admin = replicas[0].admin.to_string();
    let once = quorate(&[
        "top",
        "--once",
        "--json",
        "--interval",
        "100ms",
        "--admin",
        &admin,
    ]);
    let shown: Value = serde_json::from_slice(&once.stdout).unwrap();
    assert_eq!(shown["replicas"].as_array().unwrap().len(), 3);
    assert_eq!(shown["backends"][0]["id"], "gpu-1");
    assert_eq!(shown["has_quorum"], true);

    let mut top = start(&["top", "--interval", "200ms", "--admin", &admin]);
    top.shows(&["(as reported by replica 1)"]);
    top.shows(&["gpu-1"]);
    drop(replicas.remove(0));
    // Another replica that it has discovered reports this.
    top.shows(&["gone", "not connected"]);
    top.press("q");
    assert_eq!(top.ended(), Some(0));

    let admin = replicas[0].admin.to_string();
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let mut top = start(&["top", "--admin", &admin]);
        top.shows(&["gpu-1"]);
        match signal {
            "INT" => top.press("\u{3}"),
            name => top.signal(name),
        }
        // The original screen is restored.
        top.shows(&["\u{1b}[?1049l"]);
        assert_eq!(top.ended(), Some(code));
    }
}

#[test]
fn top_reports_unreachable_replicas_and_bad_flags_at_once() {
    let [nobody] = free();
    let admin = nobody.to_string();
    let unreached = quorate(&["top", "--once", "--admin", &admin]);
    assert_eq!(unreached.status.code(), Some(1));
    assert!(text(&unreached.stderr).contains("cannot connect"));
    let piped = quorate(&["top", "--admin", &admin]);
    assert_eq!(piped.status.code(), Some(1));
    assert!(text(&piped.stderr).contains("`quorate top --once`"));
    let hasty = quorate(&["user", "--watch", "1ms", "--admin", &admin]);
    assert_eq!(hasty.status.code(), Some(2));
    assert!(text(&hasty.stderr).contains("expected 100ms or longer"));
}

#[test]
fn a_watched_command_continues_while_its_replica_restarts() {
    let [peer] = free();
    let replica = Replica::start(1, peer, "");
    until("it leads", || {
        let cluster = get(replica.admin, "/admin/v1/cluster").map(|it| it.json());
        cluster.unwrap_or_default()["role"] == "leader"
    });
    let admin = replica.admin.to_string();
    let mut watched = start(&["status", "--watch", "100ms", "--admin", &admin]);
    watched.shows(&["replica 1 is leader"]);
    drop(replica);
    watched.shows(&["cannot connect"]);
    watched.signal("TERM");
    assert_eq!(watched.ended(), None, "a signal ended it");
}

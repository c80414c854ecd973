//! A cluster that does not form reports why, peer by peer.

use std::net::TcpListener;
use std::process::Output;

use super::process::{Replica, free, get, private_file, program, until};
use super::{quorate, text};

#[test]
fn an_unformed_replica_names_each_peer_and_reason() {
    let [own, refused, other, same_id, other_secret] = free();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    let secret = |name: &str| {
        let file = private_file(dir.path(), name, &name.repeat(40));
        format!("secret_file = {file:?}\n")
    };
    let (ours, theirs) = (secret("a"), secret("b"));
    let unknown = "no..such.host:8082";
    let peers = format!(
        "[cluster]\npeers = [\"{refused}\", \"{unknown}\", \"{}\", \"{other}\", \"{same_id}\", \
         \"{other_secret}\"]\nbootstrap_expect = 6\n",
        silent.local_addr().unwrap()
    );
    let _others = [
        Replica::start(2, other, &format!("{peers}{ours}name = \"staging\"\n")),
        Replica::start(1, same_id, &format!("{peers}{ours}")),
        Replica::start(3, other_secret, &format!("{peers}{theirs}")),
    ];
    let replica = Replica::start(1, own, &format!("{peers}{ours}"));
    let found = [
        (refused.to_string(), "refused"),
        (unknown.to_owned(), "name-not-found"),
        (silent.local_addr().unwrap().to_string(), "timed-out"),
        (other.to_string(), "other-cluster"),
        (same_id.to_string(), "same-id"),
        (other_secret.to_string(), "wrong-secret"),
        (own.to_string(), "own-address-missing"),
    ];
    until("every peer is named with its reason", || {
        let Some(answer) = get(replica.admin, "/admin/v1/cluster") else {
            return false;
        };
        let cluster = answer.json();
        let peers = cluster["peers"].as_array().into_iter().flatten();
        let peers: Vec<_> = peers
            .map(|peer| {
                (
                    peer["address"].as_str().unwrap(),
                    peer["state"].as_str().unwrap(),
                )
            })
            .collect();
        found
            .iter()
            .all(|(address, state)| peers.contains(&(address, state)))
    });
    check_told(&replica, &found);
}

/// Checks that `quorate status`, `/readyz` and the log report what the API found.
fn check_told(replica: &Replica, found: &[(String, &str); 7]) {
    let told = quorate(&["status", "--admin", &replica.admin.to_string()]);
    assert_eq!(told.status.code(), Some(1));
    let readiness = get(replica.admin, "/readyz").unwrap();
    assert_eq!(readiness.status, 503);
    let waiting = "waiting for 6 replicas, found 1";
    let shown = text(&told.stdout);
    for (address, state) in found {
        let line = shown.lines().find(|line| line.contains(address.as_str()));
        assert!(line.is_some_and(|line| line.contains(state)), "{shown}");
        assert!(
            readiness.body.contains(&format!("peer {address}: ")),
            "{readiness:?}"
        );
    }
    assert!(
        shown.contains(waiting) && readiness.body.contains(waiting),
        "{shown}"
    );
    let addresses = found.each_ref().map(|(address, _)| address.as_str());
    replica.process.says(&["not in a cluster yet", waiting]);
    replica.process.says(&addresses);
    replica.process.says(&[
        "Connection refused",
        "name not found",
        "no response in time",
        "cluster \\\"staging\\\"",
        "another replica with node.id 1",
        "another cluster.secret_file",
        "not in cluster.peers",
    ]);
}

#[test]
fn a_member_without_a_quorum_names_each_peer_and_reason() {
    let peers: [_; 3] = free();
    let list = peers.map(|peer| format!("\"{peer}\"")).join(", ");
    let config = format!("[cluster]\npeers = [{list}]\n");
    let mut replicas: Vec<_> = (1..=3)
        .zip(peers)
        .map(|(id, peer)| Replica::start(id, peer, &config))
        .collect();
    let cluster = |replica: &Replica| get(replica.admin, "/admin/v1/cluster").map(|it| it.json());
    until("all are one cluster", || {
        replicas.iter().all(|replica| {
            let status = cluster(replica);
            status.is_some_and(|it| it["has_quorum"] == true && it["peers"].is_null())
        })
    });
    replicas.truncate(1);
    // Another process takes the place of one, and never responds.
    let _silent = TcpListener::bind(peers[2]).unwrap();
    let left = &replicas[0];
    let found = |address: &std::net::SocketAddr, state: &str| {
        let status = cluster(left).unwrap_or_default();
        let peers = status["peers"].as_array().cloned().unwrap_or_default();
        peers.iter().any(|peer| {
            peer["address"] == address.to_string()
                && peer["state"] == state
                && peer["is_hindrance"] == true
        })
    };
    until("each is named", || {
        found(&peers[1], "refused") && found(&peers[2], "timed-out")
    });
    let ready = get(left.admin, "/readyz").unwrap().body;
    let shown = quorate(&["status", "--admin", &left.admin.to_string()]);
    let shown = text(&shown.stdout);
    for line in ["leader   none", "replica 2 has ", "replica 3 has "] {
        assert!(shown.contains(line), "{shown}");
    }
    for (peer, state) in [(peers[1], "refused"), (peers[2], "timed-out")] {
        assert!(ready.contains(&format!("peer {peer}: ")), "{ready}");
        let mut lines = shown
            .lines()
            .filter(|line| line.contains(&peer.to_string()));
        assert!(lines.any(|line| line.contains(state)), "{shown}");
    }
    left.process
        .says(&["no quorum", &peers[1].to_string(), &peers[2].to_string()]);
    left.process
        .says(&["no quorum", "Connection refused", "no response in time"]);
}

#[test]
fn a_replica_with_a_lost_directory_rejoins_under_its_id() {
    let peers: [_; 3] = free();
    let list = peers.map(|peer| format!("\"{peer}\"")).join(", ");
    let config = format!(
        "[cluster]\npeers = [{list}]\nreplace_lost = true\n\
         [[backends]]\nid = \"a\"\nurl = \"http://127.0.0.1:1\"\n\
         [[backends]]\nid = \"b\"\nurl = \"http://127.0.0.1:2\"\n"
    );
    let mut replicas: Vec<_> = (1..=3)
        .zip(peers)
        .map(|(id, peer)| Replica::start(id, peer, &config))
        .collect();
    let all_vote = |replica: &Replica| {
        let status = get(replica.admin, "/admin/v1/cluster").map(|it| it.json());
        let status = status.unwrap_or_default();
        let members = status["members"].as_object();
        let voters = members.map(|all| all.values().filter(|it| it["is_voter"] == true).count());
        status["has_quorum"] == true && status["caught_up"] == true && voters == Some(3)
    };
    until("all are one cluster", || replicas.iter().all(all_vote));
    let has_all = |replica: &Replica| {
        let known = replica.admin("/admin/v1/backends");
        known["backends"].as_array().map(Vec::len) == Some(2)
    };
    until("both backends are registered", || {
        replicas.iter().all(has_all)
    });
    for replica in &replicas {
        let log = replica.process.log();
        assert!(
            !log.contains("the cluster's values differ from this config"),
            "{log}"
        );
    }
    drop(replicas.pop());
    // The directory moves with the replica, like a volume.
    let replica = Replica::start(3, peers[2], &config);
    until("it votes again", || all_vote(&replica));
    let said = replicas
        .iter()
        .any(|it| it.process.log().contains("lost its store"));
    assert!(said, "{}", replicas[0].process.log());
}

#[test]
fn a_lost_replica_comes_back_under_a_new_id_in_one_command() {
    let peers: [_; 3] = free();
    let list = peers.map(|peer| format!("\"{peer}\"")).join(", ");
    let config = format!("[cluster]\npeers = [{list}]\n");
    let mut replicas: Vec<_> = (1..=3)
        .zip(peers)
        .map(|(id, peer)| Replica::start(id, peer, &config))
        .collect();
    let voters = |replica: &Replica| {
        let status = get(replica.admin, "/admin/v1/cluster").map(|it| it.json());
        let status = status.unwrap_or_default();
        let members = status["members"].as_object().cloned().unwrap_or_default();
        let voters = members.into_iter().filter(|(_, it)| it["is_voter"] == true);
        voters.map(|(id, _)| id).collect::<Vec<_>>()
    };
    until("all are one cluster", || {
        replicas.iter().all(|it| voters(it) == ["1", "2", "3"])
    });
    let admin = replicas[0].admin.to_string();
    let replace = |old: &str| quorate(&["member", "replace", old, "--admin", &admin]);
    let refused = replace("3");
    let refused = text(&refused.stderr);
    assert!(refused.contains("replica 3 answers: stop it"), "{refused}");
    let refused = replace("9");
    let refused = text(&refused.stderr);
    assert!(refused.contains("the members are 1, 2, 3"), "{refused}");
    drop(replicas.pop());
    until("its end is noticed", || {
        let status = quorate(&["status", "--admin", &admin]);
        text(&status.stdout).contains("replica 3 has ")
    });
    // Another id and an empty directory; nothing else differs.
    replicas.push(Replica::start(4, peers[2], &config));
    let done = replace("3");
    let told = text(&done.stdout);
    assert!(done.status.success(), "{told}{}", text(&done.stderr));
    assert!(
        told.contains("replica 4 votes in place of replica 3"),
        "{told}"
    );
    until("all know it", || {
        replicas.iter().all(|it| voters(it) == ["1", "2", "4"])
    });
}

/// Runs the program with this host name; `None` if the system does not let tests set host names.
fn on_host(name: &str, args: &[&str]) -> Option<Output> {
    let rename = "hostname \"$0\" && exec \"$@\"";
    let unshare = [
        "--user",
        "--map-root-user",
        "--uts",
        "sh",
        "-c",
        rename,
        name,
    ];
    let program_args = [&unshare[..], &[env!("CARGO_BIN_EXE_quorate")], args].concat();
    let is_allowed = program(
        "unshare",
        &["--user", "--map-root-user", "--uts", "hostname", "a"],
    )
    .output()
    .is_ok_and(|output| output.status.success());
    is_allowed.then(|| program("unshare", &program_args).output().unwrap())
}

#[test]
fn the_host_name_determines_the_replica_id() {
    let dir = tempfile::TempDir::new().unwrap();
    let data_dir = format!("node.data_dir={}", dir.path().display());
    let settings = ["--set", "node.id=from-hostname", "--set", &data_dir];
    let recover = |host: &str| on_host(host, &[&["recover", "--json"], &settings[..]].concat());
    let Some(told) = recover("quorate-2") else {
        eprintln!("skipped: no namespaces of users here");
        return;
    };
    let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(told["id"], 3, "{told}");
    let refused = recover("gpu").unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let told = text(&refused.stderr);
    assert!(
        told.contains("this host is \\\"gpu\\\"") && told.contains("quorate-0"),
        "{told}"
    );
}

#[test]
fn dev_refuses_settings_its_replicas_cannot_share() {
    for setting in ["node.id=7", "listen.data=127.0.0.1:1", "cluster.join=a:1"] {
        let output = quorate(&["dev", "--once", "--set", setting]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        let key = setting.split_once('=').unwrap().0;
        assert!(told.contains(&format!("{key} cannot be set")), "{told}");
    }
}

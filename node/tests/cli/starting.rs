//! A replica before it has a state to serve from.

use std::os::unix::fs::PermissionsExt;

use super::process::{Engine, Replica, free, get, program, until};
use super::text as text_of;

#[test]
fn a_members_store_refuses_a_config_of_another_cluster() {
    let [peer] = free();
    let ours = "[cluster]\nname = \"production\"\nbootstrap_expect = 1\n";
    let replica = Replica::start(1, peer, ours);
    let cluster = || get(replica.admin, "/admin/v1/cluster").map(|it| it.json());
    until("it founds a cluster", || {
        cluster().is_some_and(|cluster| cluster["cluster_id"].is_string())
    });
    let cluster = cluster().unwrap();
    let id = cluster["cluster_id"].as_str().unwrap();
    let Replica { process, dir, .. } = replica;
    drop(process);

    let file = dir.path().join("config.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("\"production\"", "\"staging\"")).unwrap();
    let args = ["serve", "--config", file.to_str().unwrap()];
    let mut started = program(env!("CARGO_BIN_EXE_quorate"), &args);
    let ended = started.output().unwrap();
    let why = text_of(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{why}");
    for told in [
        "\"production\"",
        "\"staging\"",
        id,
        "data_dir",
        "cluster.name",
    ] {
        assert!(why.contains(told), "{told}: {why}");
    }
}

#[test]
fn an_unformed_replica_tells_clients_to_retry() {
    let engine = Engine::start();
    let peers: [_; 2] = free();
    let config = format!(
        "[cluster]\npeers = [\"{}\", \"{}\"]\nbootstrap_expect = 2\n\
         [[backends]]\nid = \"e\"\nurl = \"{}\"\nmodels = [\"emulated\"]\n",
        peers[0], peers[1], engine.url
    );
    let first = Replica::start(1, peers[0], &config);
    until("the data listener answers", || {
        get(first.data, "/livez").is_some()
    });
    let chat = first.chat("emulated", "");
    for answer in [
        chat,
        get(first.data, "/v1/models").unwrap(),
        get(first.data, "/v1/models/emulated").unwrap(),
    ] {
        assert_eq!(answer.status, 503, "{answer:?}");
        assert_eq!(answer.code(), "replica_starting");
        assert!(answer.head.contains("retry-after: 1"), "{answer:?}");
    }
    assert_eq!(get(first.data, "/health").unwrap().status, 503);

    let second = Replica::start(2, peers[1], &config);
    for replica in [&first, &second] {
        replica.ready();
        until("the engine serves", || {
            replica.chat("emulated", "").status == 200
        });
        let unknown = replica.chat("unknown", "");
        assert_eq!(
            (unknown.status, unknown.code()),
            (404, "model_not_found".into())
        );
        let listed = get(replica.data, "/v1/models").unwrap();
        assert_eq!(listed.json()["data"][0]["id"], "emulated", "{listed:?}");
        let data = replica.dir.path().join("data").metadata().unwrap();
        assert_eq!(data.permissions().mode() & 0o777, 0o700);
    }
}

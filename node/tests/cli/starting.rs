//! A replica before there is a state to answer from.

use std::os::unix::fs::PermissionsExt;

use super::process::{Engine, Replica, free, get, until};

#[test]
fn a_replica_in_no_cluster_asks_clients_to_come_back() {
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

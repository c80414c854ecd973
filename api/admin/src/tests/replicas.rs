//! Replicas' figures about themselves, and the identity of callers.

use state::ids::UserKey;
use tokio::time::Instant;

use super::*;
use api::cluster::figures::{LongestWait, RecentRates, ReplicaFigures};

fn figures() -> ReplicaFigures {
    ReplicaFigures {
        role: Some("follower"),
        applied_index: 40,
        has_quorum: true,
        is_ready: true,
        recent: RecentRates {
            requests_milli_per_s: 12_500,
            ttft_p50_us: 80_250,
            ..RecentRates::default()
        },
        waiting: 3,
        disk: Some((10, 100)),
        ..ReplicaFigures::default()
    }
}

#[tokio::test]
async fn replicas_are_shown_side_by_side() {
    let bench = Bench::with_backends();
    let alone = bench.get("/admin/v1/replicas").await;
    assert_eq!(
        (&alone["asked"], &alone["window_s"]),
        (&json!(1), &json!(10))
    );
    let ids = alone["replicas"].as_array().unwrap().iter();
    let ids: Vec<u64> = ids.map(|it| it["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [1, 2]);
    for replica in alone["replicas"].as_array().unwrap() {
        assert_eq!(replica["figures"], json!(null), "{replica}");
        assert_eq!(replica["heard_ms_ago"], json!(null), "{replica}");
    }
    let told = ReplicaFigures {
        longest: Some(LongestWait {
            user: UserKey(7),
            waited_ms: 1500,
        }),
        ..figures()
    };
    let board = &bench.admin.figures;
    board.set_own(&ReplicaFigures::default());
    board
        .receive(ReplicaId(2), &told.encode(), Instant::now())
        .unwrap();
    bench.admin.digests.record(0, 5);
    let claim = [&[1][..], &0_u64.to_le_bytes(), &5_u128.to_le_bytes()].concat();
    bench.admin.digests.receive(ReplicaId(2), &claim).unwrap();
    let both = bench.get("/admin/v1/replicas").await;
    let (own, other) = (&both["replicas"][0], &both["replicas"][1]);
    assert_eq!(own["is_asked"], true);
    assert_eq!(own["figures"]["ttft_p50_ms"], json!(null));
    assert_eq!(own["digest"], json!(null), "it is not compared with itself");
    assert_eq!(other["digest"], json!({"index": 0, "is_equal": true}));
    let told = &other["figures"];
    assert_eq!(told["role"], "follower");
    assert_eq!(told["requests_per_s"], 12.5);
    assert_eq!(told["ttft_p50_ms"], 80.25);
    assert_eq!(told["routing_p50_ms"], json!(null));
    assert_eq!(told["disk_size_bytes"], 100);
    let longest = json!({"user": null, "user_key": "0000000000000007", "waited_ms": 1500});
    assert_eq!(told["longest"], longest);
}

#[tokio::test]
async fn a_fresh_replica_has_no_waiting_requests_or_shares() {
    let bench = Bench::new();
    let waiting = bench.get("/admin/v1/waiting").await;
    let nobody = json!({"replica": 1, "requests": 0, "users": 0, "waiting": []});
    assert_eq!(waiting, nobody);
    let shared = bench.get("/admin/v1/ownership/prefixes?limit=5").await;
    assert_eq!(shared["prefixes"], json!([]));
    for path in [
        "/admin/v1/waiting?limit=0",
        "/admin/v1/ownership/prefixes?limit=1001",
    ] {
        bench.problem(("GET", path, ""), 400, "invalid").await;
    }
}

#[tokio::test]
async fn a_caller_learns_its_identity() {
    let open = Bench::new().get("/admin/v1/whoami").await;
    let everybody = json!({"replica": 1, "name": null, "role": "admin", "by": null});
    assert_eq!(open, everybody);
}

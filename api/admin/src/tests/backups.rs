//! Backups and restores over HTTP.

use bytes::Bytes;
use futures_util::stream;
use state::command::{Charge, Item, RESTORE_PART_BYTES};
use state::ids::RestoreId;
use state::prefix::user_key;

use super::*;
use api::files::backup::{BackupHead, FileReader};

const BACKUP: &str = "/admin/v1/cluster/backup";
const RESTORE: &str = "/admin/v1/cluster/restore";

/// Creates an admin API whose cluster has `users` users, a backend and blocks on it.
fn busy(users: u32) -> Bench {
    let bench = Bench::new();
    bench.apply(Command::PutBackend(spec("gpu-1")));
    let state = bench.cluster.state.lock().unwrap();
    let backend = state.backend("gpu-1").unwrap().handle;
    drop(state);
    let acquire = Item::Acquire {
        attempt: 1,
        backend,
        tip: None,
        new: (1..=50).map(BlockHash).collect(),
    };
    let charges = (0..users).flat_map(|number| {
        let name = format!("user-{number}");
        let key = user_key(1, &name);
        let charge = Charge {
            user: key,
            output: 10,
            started: 1,
            ended: 1,
            ..Charge::default()
        };
        [Item::DefineUser { key, name }, Item::Charge(charge)]
    });
    let command = Command::Batch {
        base_attempt: AttemptId(0),
        items: [acquire].into_iter().chain(charges).collect(),
    };
    bench.cluster.apply(Lane::Outbox, command);
    bench
}

impl Bench {
    async fn backup(&self) -> Bytes {
        let request = Request::get(BACKUP).body(Body::empty()).unwrap();
        let response = self.api.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(
            response.headers()["content-type"],
            "application/octet-stream"
        );
        let length = response.headers()["content-length"].clone();
        let file = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(length, file.len().to_string());
        file
    }

    /// Uploads a backup in pieces whose boundaries differ from those of its chunks.
    async fn restore(&self, query: &str, file: Bytes) -> Answer {
        let pieces: Vec<_> = file.chunks(10_007).map(Bytes::copy_from_slice).collect();
        let pieces = pieces.into_iter().map(Ok::<_, std::io::Error>);
        let request = Request::post(format!("{RESTORE}{query}"));
        let request = request.header("content-type", "application/octet-stream");
        let body = Body::from_stream(stream::iter(pieces));
        self.send(request.body(body).unwrap()).await
    }

    fn counts(&self) -> (usize, usize, u64) {
        let state = self.cluster.state.lock().unwrap();
        let backends = state.backends().count();
        (backends, state.users_len(), state.owned_blocks_all())
    }
}

fn head_of(file: &[u8]) -> BackupHead {
    FileReader::open(file).unwrap().1
}

#[tokio::test]
async fn a_backup_can_be_restored_into_a_new_cluster() {
    let busy = busy(12_000);
    let file = busy.backup().await;
    assert!(file.len() > RESTORE_PART_BYTES, "{}", file.len());
    let head = head_of(&file);
    assert_eq!((head.backends, head.users, head.blocks), (1, 12_000, 50));
    assert_eq!(
        head.cluster.as_deref(),
        Some("0123456789abcdef0123456789abcdef")
    );
    let digest = busy.get("/admin/v1/digest").await;
    assert_eq!(
        (head.index, json!(head.digest)),
        (3, digest["digest"].clone())
    );
    assert_eq!(*busy.cluster.barriers.lock().unwrap(), 1);

    let fresh = Bench::new();
    let answer = fresh.restore("", file).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let answer = answer.json();
    assert_eq!(answer["outcome"], "committed");
    assert_eq!(answer["backup"]["digest"], head.digest);
    assert_eq!(answer["index"], answer["applied_index"]);
    let digest = fresh.get("/admin/v1/digest").await;
    assert_eq!(answer["digest"], digest["digest"]);
    let counts = json!([answer["backends"], answer["users"], answer["blocks"]]);
    assert_eq!(counts, json!([1, 12_000, 50]));
    assert_eq!(fresh.counts(), (1, 12_000, 50));
    let user = fresh.get("/admin/v1/users/user-7").await;
    assert_eq!(
        user["counter_milli_tokens"],
        busy.get("/admin/v1/users/user-7").await["counter_milli_tokens"]
    );
    let audit = fresh.get("/admin/v1/audit?limit=1").await;
    assert_eq!(audit["writes"][0]["action"], "restore");
}

#[tokio::test]
async fn restore_into_a_non_empty_cluster_requires_force() {
    let file = busy(1).backup().await;
    let other = busy(3);
    let answer = other.restore("", file.clone()).await;
    assert_eq!(answer.status, StatusCode::CONFLICT);
    let problem = answer.json();
    assert_eq!(problem["type"], "/problems/not-empty");
    assert_eq!(
        problem["detail"],
        "3 users and 50 blocks would be gone; with force the backup replaces them"
    );
    assert_eq!(other.counts(), (1, 3, 50));
    let answer = other.restore("?force=true", file).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(other.counts(), (1, 1, 50));
}

#[tokio::test]
async fn a_damaged_backup_changes_nothing_and_names_the_position() {
    let file = busy(12_000).backup().await;
    let flipped = |place: usize| {
        let mut file = file.to_vec();
        file[place] ^= 1;
        Bytes::from(file)
    };
    let last_chunk = file.len() - 100;
    let damaged = [
        (flipped(0), "not a Quorate backup"),
        (flipped(8), "format 0, this build reads 1"),
        (
            flipped(RESTORE_PART_BYTES),
            "the chunk's checksum does not match",
        ),
        (flipped(last_chunk), "the chunk's checksum does not match"),
        (file.slice(..file.len() - 1), "the file ends early"),
        (
            Bytes::from([&file[..], b"x"].concat()),
            "1 bytes follow the end",
        ),
        (Bytes::new(), "the file ends early"),
    ];
    for (file, expected) in damaged {
        let fresh = Bench::new();
        let answer = fresh.restore("", file).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{expected}");
        let detail = answer.json()["detail"].to_string();
        assert!(detail.contains(expected), "{detail}");
        assert!(detail.contains("backup damaged at byte"), "{detail}");
        assert_eq!(fresh.counts(), (0, 0, 0));
        let state = fresh.cluster.state.lock().unwrap();
        assert_eq!(state.restoring(), None, "{expected}");
    }
}

#[tokio::test]
async fn an_intact_backup_of_a_broken_state_changes_nothing() {
    let head = BackupHead {
        bytes: 9,
        ..head_of(&busy(1).backup().await)
    };
    let mut writer = api::files::backup::BackupWriter::new(Vec::new(), &head).unwrap();
    std::io::Write::write_all(&mut writer, b"no state!").unwrap();
    let fresh = Bench::new();
    let answer = fresh
        .restore("", Bytes::from(writer.finish().unwrap()))
        .await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    let problem = answer.json();
    let detail = problem["detail"].as_str().unwrap();
    let expected = "backup: a whole one: corrupt snapshot at byte";
    assert!(detail.starts_with(expected), "{detail}");
    assert_eq!(problem["outcome"], "rejected");
    assert_eq!(fresh.cluster.state.lock().unwrap().restoring(), None);
}

#[tokio::test]
async fn a_restore_excludes_backups_and_other_restores() {
    let bench = busy(1);
    let file = bench.backup().await;
    bench.apply(Command::BeginRestore {
        restore: RestoreId(9),
        force: true,
    });
    bench
        .problem(("GET", BACKUP, ""), 409, "restore-under-way")
        .await;
    let answer = bench.restore("?force=true", file).await;
    assert_eq!(answer.status, StatusCode::CONFLICT);
    assert_eq!(answer.json()["type"], "/problems/restore-under-way");
    let state = bench.cluster.state.lock().unwrap();
    assert_eq!(state.restoring().unwrap().restore, RestoreId(9));
}

#[tokio::test]
async fn a_backup_without_a_quorum_contains_the_local_state() {
    let bench = busy(1);
    let file = bench.backup().await;
    for (fate, status) in [(Fate::Unavailable, 503), (Fate::Unknown, 504)] {
        bench.set_fate(fate);
        let answer = bench.restore("?force=true", file.clone()).await;
        assert_eq!(answer.status, status);
        assert_eq!(bench.counts(), (1, 1, 50));
    }
    bench.problem(("GET", BACKUP, ""), 503, "no-quorum").await;
    let answer = Request::get(format!("{BACKUP}?read=local"));
    let answer = answer.body(Body::empty()).unwrap();
    let answer = bench.api.clone().oneshot(answer).await.unwrap();
    let local = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(head_of(&local).digest, head_of(&file).digest);
}

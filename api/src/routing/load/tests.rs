//! Tests of the load table.

use std::task::{Context, Waker};

use super::*;
use proptest::prelude::*;

fn backend(slot: u16, incarnation: u32) -> BackendRef {
    BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    }
}

fn load(running: u32, waiting: u32, pending_prefill_tokens: u64) -> Load {
    Load {
        running,
        waiting,
        pending_prefill_tokens,
    }
}

#[test]
fn load_counts_a_request_until_its_end() {
    let table = LoadTable::default();
    let mut first = table.begin(backend(3, 1), 700);
    let second = table.begin(backend(3, 1), 50);
    assert_eq!(table.here(backend(3, 1)), load(2, 2, 750));
    first.first_token();
    first.first_token();
    assert_eq!(table.here(backend(3, 1)), load(2, 1, 50));
    drop(second);
    drop(first);
    assert_eq!(table.here(backend(3, 1)), Load::default());
    assert_eq!(table.local_report(), [REPORT_VERSION]);
}

#[test]
fn an_unused_place_is_announced_to_waiting_peers() {
    let table = LoadTable::default();
    let engine = backend(0, 1);
    table.set_places(engine, 6, 2, true);
    let is_told = |table: &LoadTable| {
        let told = std::pin::pin!(table.report_due().notified());
        let mut context = Context::from_waker(Waker::noop());
        told.poll(&mut context).is_ready()
    };
    // A scan reserves a place for a request that the gate holds back, and gives it back.
    drop(table.reserve(engine, Some(6)).unwrap());
    assert_eq!(table.places(engine, 6), Some((2, 2)));
    assert!(!is_told(&table));
    let request = table.reserve(engine, Some(6)).unwrap().into_guard(0);
    drop(request);
    assert_eq!(table.places(engine, 6), Some((1, 1)));
    assert!(is_told(&table));
}

#[test]
fn a_new_incarnation_starts_at_zero_load() {
    let table = LoadTable::default();
    let old = table.begin(backend(0, 1), 10);
    let new = table.begin(backend(0, 2), 20);
    assert_eq!(table.here(backend(0, 1)), Load::default());
    let late = table.begin(backend(0, 1), 30);
    assert_eq!(table.here(backend(0, 2)), load(1, 1, 20));
    drop((old, late));
    assert_eq!(table.here(backend(0, 2)), load(1, 1, 20));
    drop(new);
    assert_eq!(table.here(backend(0, 2)), Load::default());
}

#[test]
fn a_peer_counts_until_its_report_expires() {
    let (here, peer) = (LoadTable::default(), LoadTable::default());
    let now = Instant::now();
    let _underway = (
        peer.begin(backend(7, 2), 5),
        peer.begin(backend(1000, 1), 6),
    );
    here.merge_report(ReplicaId(2), &peer.local_report(), now)
        .unwrap();
    let _own = here.begin(backend(7, 2), 1);
    assert_eq!(here.cluster(backend(7, 2), now), load(2, 2, 6));
    assert_eq!(here.cluster(backend(1000, 1), now + EXPIRY), load(1, 1, 6));
    assert_eq!(
        here.cluster(backend(7, 1), now),
        Load::default(),
        "an earlier life"
    );
    let later = now + EXPIRY + Duration::from_millis(1);
    assert_eq!(here.cluster(backend(7, 2), later), load(1, 1, 1));
    here.merge_report(ReplicaId(2), &[REPORT_VERSION], now)
        .unwrap();
    assert_eq!(here.cluster(backend(1000, 1), now), Load::default());
}

#[test]
fn one_pass_merges_load_of_many_backends() {
    let (here, peer) = (LoadTable::default(), LoadTable::default());
    let now = Instant::now();
    let _underway: Vec<_> = [1, 4, 5, 9]
        .map(|slot| peer.begin(backend(slot, 1), 1))
        .into();
    here.merge_report(ReplicaId(2), &peer.local_report(), now)
        .unwrap();
    let wanted = [0, 4, 6, 9].map(|slot| backend(slot, 1));
    let mut seen = [0; 4];
    here.add_each(now, 4, |i| wanted[i], |i, load| seen[i] += load.running);
    assert_eq!(seen, [0, 1, 0, 1]);
}

#[test]
fn load_reports_are_sent_on_change_and_as_heartbeat() {
    let table = LoadTable::default();
    let mut reporter = LoadReporter::default();
    let now = Instant::now();
    assert!(reporter.due(&table, now).is_some());
    assert!(
        reporter
            .due(&table, now + Duration::from_millis(20))
            .is_none()
    );
    let underway = table.begin(backend(0, 1), 1);
    assert!(
        reporter
            .due(&table, now + Duration::from_millis(40))
            .is_some()
    );
    assert!(
        reporter
            .due(&table, now + Duration::from_millis(60))
            .is_none()
    );
    assert!(
        reporter
            .due(&table, now + Duration::from_millis(140))
            .is_some()
    );
    drop(underway);
    assert!(
        reporter
            .due(&table, now + Duration::from_millis(141))
            .is_some()
    );
}

#[test]
fn malformed_load_reports_are_refused() {
    let malformed = Err(LoadReportError::Malformed);
    let table = LoadTable::default();
    let merge = |bytes: &[u8]| table.merge_report(ReplicaId(1), bytes, Instant::now());
    assert_eq!(merge(&[]), malformed);
    assert_eq!(merge(&[9]), Err(LoadReportError::Version(9)));
    assert_eq!(merge(&[1, 0]), malformed);
    assert_eq!(
        merge(&[1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1]),
        malformed,
        "slots must ascend"
    );
    assert_eq!(merge(&[1, 0x80, 0x08, 1, 1, 1, 1]), malformed, "slot 1024");
    assert_eq!(
        merge(&[&[1, 0, 1, 1, 1][..], &[0xff; 10]].concat()),
        malformed
    );
    assert_eq!(merge(&[1, 0, 1, 1, 1, 1]), Ok(()));
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_a_report_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let mut report = vec![REPORT_VERSION];
        report.extend(&bytes);
        let _ = LoadTable::default().merge_report(ReplicaId(1), &report, Instant::now());
        let _ = read_report(&bytes);
    }

    #[test]
    fn reports_round_trip(
        requests in proptest::collection::vec((0_u16..1024, 0_u64..1 << 40), 0..50)
    ) {
        let (here, peer) = (LoadTable::default(), LoadTable::default());
        let now = Instant::now();
        let _underway: Vec<_> =
            requests.iter().map(|&(slot, tokens)| peer.begin(backend(slot, 7), tokens)).collect();
        here.merge_report(ReplicaId(9), &peer.local_report(), now).unwrap();
        for (slot, _) in requests {
            let at = backend(slot, 7);
            prop_assert_eq!(here.cluster(at, now), peer.here(at));
        }
    }
}

//! Recording, comparing, awaiting and judging digests.

use proptest::prelude::*;

use super::*;

const PEER: ReplicaId = ReplicaId(2);

fn message(index: u64, digest: u128) -> Vec<u8> {
    let other = Digests::default();
    other.record(index, digest);
    other.message().unwrap().to_vec()
}

#[test]
fn only_digests_at_steps_are_computed() {
    let digests = Digests::default();
    for index in 1..=600 {
        digests.applied(index, || {
            assert_eq!(index % STEP_ENTRIES, 0);
            u128::from(index)
        });
    }
    assert_eq!(digests.get(512), Some(512));
    assert_eq!(digests.get(511), None);
    assert_eq!(digests.nearest(600), Some(592));
    assert_eq!(digests.nearest(15), None);
}

#[test]
fn a_slower_log_shortens_the_digest_step() {
    let digests = Digests::default();
    for index in 1..=300 {
        digests.applied(index, || u128::from(index));
    }
    let told = |digests: &Digests| digests.message().unwrap().to_vec();
    digests.grew(300);
    assert_eq!(told(&digests), message(256, 256));
    digests.grew(SLOW_ENTRIES);
    assert_eq!(told(&digests), message(256, 256));
    digests.grew(SLOW_ENTRIES - 1);
    let slow = told(&digests);
    let other = Digests::default();
    other.applied(288, || 7);
    other.receive(PEER, &slow).unwrap();
    assert_eq!(other.mismatches(), 1);
    digests.rest(300, 300);
    let at_rest = Digests::default();
    at_rest.record(300, 7);
    at_rest.receive(PEER, &told(&digests)).unwrap();
    assert_eq!(at_rest.mismatches(), 1);
}

#[test]
fn only_different_digest_claims_are_counted() {
    let digests = Digests::default();
    digests.applied(256, || 7);
    digests.receive(PEER, &message(256, 7)).unwrap();
    assert_eq!(digests.mismatches(), 0);
    digests.receive(PEER, &message(256, 8)).unwrap();
    assert_eq!(digests.mismatches(), 1);
    // A peer repeats its newest claim many times per second.
    digests.receive(PEER, &message(256, 8)).unwrap();
    assert_eq!(digests.mismatches(), 1);
}

#[test]
fn a_replica_differing_from_most_is_the_minority_until_repaired() {
    let members = [1, 2, 3, 4, 5].map(ReplicaId);
    let claim = |digests: &Digests, peer, index, digest| {
        digests
            .receive(ReplicaId(peer), &message(index, digest))
            .unwrap();
    };
    let digests = Digests::default();
    digests.applied(256, || 7);
    claim(&digests, 2, 256, 8);
    claim(&digests, 3, 256, 8);
    claim(&digests, 4, 256, 7);
    // Two of five disagree, which may be their fault. A claim from a non-voter does not count.
    claim(&digests, 9, 256, 8);
    assert_eq!(digests.judge(&members), None);
    claim(&digests, 5, 256, 8);
    let minority = Minority {
        index: 256,
        ours: 7,
        theirs: 8,
        holders: [2, 3, 5].map(ReplicaId).to_vec(),
    };
    assert_eq!(digests.judge(&members), Some(minority.clone()));
    assert_eq!(digests.judge(&members), None, "told once");
    digests.applied(512, || 1);
    claim(&digests, 2, 512, 1);
    assert_eq!(digests.minority(), Some(minority));

    digests.forget();
    assert_eq!(digests.minority(), None);
    // Later claims of the peers about earlier indexes do not count.
    claim(&digests, 3, 256, 8);
    claim(&digests, 4, 512, 8);
    digests.applied(768, || 9);
    claim(&digests, 3, 768, 9);
    assert_eq!(digests.judge(&members), None);
}

#[test]
fn without_a_majority_no_replica_is_the_minority() {
    let mut ring = DigestRing::default();
    ring.record(256, 7);
    ring.claim(ReplicaId(2), 256, 8);
    assert_eq!(ring.minority(&[1, 2].map(ReplicaId)), None);
    ring.claim(ReplicaId(3), 256, 9);
    assert_eq!(ring.minority(&[1, 2, 3].map(ReplicaId)), None);
    // A replica with the majority's digest is not in the minority.
    let mut ring = DigestRing::default();
    ring.record(256, 8);
    ring.claim(ReplicaId(2), 256, 8);
    ring.claim(ReplicaId(3), 256, 7);
    assert_eq!(ring.minority(&[1, 2, 3].map(ReplicaId)), None);
}

#[test]
fn a_future_claim_is_compared_once_its_index_is_applied() {
    let digests = Digests::default();
    let events = EventBus::default();
    let mut stream = events.subscribe();
    digests.announce(events);
    digests.receive(PEER, &message(512, 8)).unwrap();
    digests.applied(256, || 1);
    assert_eq!(digests.mismatches(), 0);
    digests.applied(512, || 9);
    assert_eq!(digests.mismatches(), 1);
    assert_eq!(
        stream.try_recv().unwrap().event,
        ClusterEvent::DigestMismatch {
            peer: PEER,
            index: 512,
            ours: hex(9),
            theirs: hex(8),
        }
    );
    // The claim is compared only once.
    digests.applied(768, || 9);
    assert_eq!(digests.mismatches(), 1);
}

#[test]
fn malformed_digest_messages_are_refused() {
    let digests = Digests::default();
    for bad in [&[][..], &[1], &[2; MESSAGE_BYTES], &[1; MESSAGE_BYTES + 1]] {
        assert_eq!(digests.receive(PEER, bad), Err(ClaimError));
    }
}

#[test]
fn digest_memory_is_bounded() {
    let mut ring = DigestRing::default();
    for index in 1..=2 * DIGESTS_KEPT_MAX as u64 {
        ring.claim(PEER, 10_000 + index, 0);
        ring.record(index, 0);
        ring.claim(PEER, index, 0);
    }
    assert_eq!(ring.compared.len(), COMPARED_MAX);
    assert_eq!(ring.indexes().count(), DIGESTS_KEPT_MAX);
    assert_eq!(ring.claims[&PEER].len(), CLAIMS_PER_PEER_MAX);
    let digests = Digests::default();
    for index in 0..WANTED_MAX as u64 {
        digests.want(index + 1).unwrap();
    }
    assert_eq!(digests.want(9999), Err(TooManyWaitsRejection));
    assert_eq!(digests.want(1), Ok(()));
    // Indexes that will not be reached soon do not displace those that will.
    let digests = Digests::default();
    for index in 0..WANTED_MAX as u64 {
        digests.want(u64::MAX - index).unwrap();
    }
    assert_eq!(digests.want(1), Ok(()));
}

#[test]
fn applying_past_a_wanted_index_does_not_block() {
    let digests = std::sync::Arc::new(Digests::default());
    let waiting = std::sync::Arc::clone(&digests);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let waiter = std::thread::spawn(move || {
        runtime.block_on(async {
            for index in (1..60_001).step_by(3) {
                waiting.wait(index, Duration::ZERO).await;
            }
        });
    });
    // A snapshot skips the requested index, so it is never applied.
    for index in (1..60_001).step_by(3) {
        digests.want(index).unwrap();
        digests.applied(index + 1, || 0);
    }
    waiter.join().unwrap();
}

#[tokio::test]
async fn a_wanted_digest_is_recorded_when_applied() {
    let digests = Digests::default();
    digests.want(5).unwrap();
    let waiting = digests.wait(5, Duration::from_secs(60));
    let applying = async {
        digests.applied(4, || unreachable!("4 is not wanted"));
        digests.applied(5, || 55);
        digests.applied(6, || unreachable!("6 is not wanted"));
    };
    let (digest, ()) = tokio::join!(waiting, applying);
    assert_eq!(digest, Some(55));
}

#[tokio::test]
async fn a_wanted_index_that_is_skipped_is_answered() {
    let digests = Digests::default();
    digests.want(5).unwrap();
    let waiting = digests.wait(5, Duration::from_secs(60));
    // A snapshot moved the state from 3 to 9.
    let applying = async { digests.applied(9, || unreachable!("9 is not wanted")) };
    let (digest, ()) = tokio::join!(waiting, applying);
    assert_eq!(digest, None);
}

proptest! {
    #[test]
    fn arbitrary_digest_messages_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        let digests = Digests::default();
        prop_assert_eq!(
            digests.receive(PEER, &bytes).is_ok(),
            bytes.len() == MESSAGE_BYTES && bytes[0] == MESSAGE_VERSION
        );
    }

    #[test]
    fn a_mismatch_is_found_in_any_message_order(
        order in proptest::collection::vec((any::<bool>(), 1u64..20), 1..40)
    ) {
        // Claims and records agree at even indexes and disagree at odd ones. A claim that arrives
        // while it is ahead or recorded is compared; one that is behind is dropped.
        let mut ring = DigestRing::default();
        let mut found = 0;
        let mut expected = 0;
        let mut kept: Vec<u64> = Vec::new();
        // A peer's claim about an index counts once, however often it is repeated.
        let mut told = BTreeSet::new();
        let mut last = 0;
        for (is_claim, index) in order {
            if is_claim {
                found += usize::from(ring.claim(PEER, index, u128::from(index % 2)).is_some());
                if ring.get(index).is_some() {
                    expected += usize::from(index % 2 == 1 && told.insert(index));
                } else if index > last {
                    kept.push(index);
                    if kept.len() > CLAIMS_PER_PEER_MAX {
                        kept.remove(0);
                    }
                }
            } else if index > last {
                last = index;
                found += ring.record(index, 0).len();
                let is_told = kept.contains(&index) && index % 2 == 1 && told.insert(index);
                expected += usize::from(is_told);
                kept.retain(|k| *k > index);
            }
        }
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn a_state_lost_while_the_log_is_idle_is_detected() {
    let members = [1, 2, 3].map(ReplicaId);
    let told_at_rest = |index, digest| {
        let peer = Digests::default();
        peer.rest(index, digest);
        peer.message().unwrap()
    };
    let digests = Digests::default();
    digests.applied(256, || 1);
    digests.rest(300, 7);
    assert_eq!(digests.message(), Some(told_at_rest(300, 7)));
    for peer in [2, 3] {
        let claim = told_at_rest(300, 7);
        digests.receive(ReplicaId(peer), &claim).unwrap();
    }
    digests.rest(300, 7);
    assert_eq!((digests.mismatches(), digests.judge(&members)), (0, None));
    digests.rest(300, 8);
    assert_eq!(digests.mismatches(), 2);
    let found = digests.judge(&members).unwrap();
    assert_eq!((found.index, found.ours, found.theirs), (300, 8, 7));
    // After the repair, the same index is compared again.
    digests.forget();
    digests.rest(300, 7);
    digests.receive(PEER, &told_at_rest(300, 7)).unwrap();
    assert_eq!(digests.mismatches(), 2);
    // Peers then receive a later boundary instead.
    digests.applied(512, || 9);
    assert_eq!(digests.message().unwrap().to_vec(), message(512, 9));
}

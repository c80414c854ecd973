//! Tests of `cost`: the weight of a request's work while others wait, and the copies of a prefix.

use super::*;

const REQUESTS: u64 = 32_000;

fn policy() -> PolicyConfig {
    PolicyConfig::Cost(CostSettings::default())
}

/// Returns a backend that holds `matched` of [`REQUEST`]'s blocks.
fn backend(slot: u16, matched: u32, pending_prefill_tokens: u64) -> Candidate {
    Candidate {
        slot: Slot(slot),
        matched,
        pending_prefill_tokens,
        free_blocks: 1000,
        ..Candidate::default()
    }
}

/// Returns how many of [`REQUESTS`] each of two backends gets.
fn shares(candidates: &[Candidate; 2]) -> [u64; 2] {
    let mut shares = [0; 2];
    for number in 0..REQUESTS {
        let jitter = rank::mix(number);
        let request = PolicyRequest { jitter, ..REQUEST };
        let choice = choose(&policy(), &request, candidates).unwrap();
        shares[usize::from(choice.slot.0)] += 1;
    }
    shares
}

#[test]
fn cost_weighs_work_by_the_mean_queue() {
    // Either 1,500 tokens ahead and 160 to compute, or 1,600 to compute at once.
    let at = |pending| {
        let waits = |candidate| Candidate {
            pending,
            ..candidate
        };
        [waits(backend(0, 0, 0)), waits(backend(1, 90, 1500))]
    };
    let costs = |pending| {
        let scores = scores(&policy(), &REQUEST, &at(pending));
        [scores[0].score, scores[1].score]
    };
    assert_eq!(costs(0), [160_000_000, 166_000_000]);
    assert_eq!(costs(1), [320_000_000, 182_000_000]);
    assert_eq!(costs(2), [480_000_000, 198_000_000]);
    let [cold, warm] = shares(&at(0));
    assert_eq!((cold, warm), (REQUESTS, 0), "an idle fleet answers sooner");
    let [cold, warm] = shares(&at(1));
    assert!(warm > 19 * cold, "a busy one saves work: {cold}, {warm}");
}

#[test]
fn cost_weighs_loading_against_computing_and_waiting() {
    let policy = policy();
    let chosen = |candidates: &[Candidate]| choose(&policy, &REQUEST, candidates).unwrap();
    let loads = |slot, matched, loaded, pending| Candidate {
        loaded: LowerTierBlocks::from(loaded),
        ..backend(slot, matched, pending)
    };
    // 1,440 tokens from memory take 7 ms, computing them 144 ms; 160 are computed in any case.
    let (cold, warm) = (backend(0, 0, 0), loads(1, 90, [90, 0, 0], 0));
    let all = scores(&policy, &REQUEST, &[cold, warm]);
    assert_eq!([all[0].score, all[1].score], [160_000_000, 23_200_000]);
    let choice = chosen(&[cold, warm]);
    assert_eq!((choice.slot, choice.loaded.cpu), (Slot(1), 90));
    // What is on the GPU is better still, unless it has to wait longer than the others load.
    let on_gpu = |pending| backend(0, 90, pending);
    assert_eq!(chosen(&[on_gpu(0), warm]).slot, Slot(0));
    assert_eq!(chosen(&[on_gpu(100), warm]).slot, Slot(1));
    // A store that is slower than the engine computes is worth nothing.
    let slow = Prices {
        prefill_ns_per_token: 40_000,
        decode_ns_per_request: 0,
        prefill_range_ns: None,
        decode_range_ns: None,
        load: LoadPrices::ASSUMED,
    };
    let priced = |candidate| Candidate {
        prices: Some(slow),
        ..candidate
    };
    let stored = priced(loads(1, 90, [0, 0, 90], 0));
    assert_eq!(chosen(&[priced(cold), stored]).slot, Slot(0));
    // Loaded blocks take places on the GPU.
    let full = Candidate {
        free_blocks: 10,
        ..warm
    };
    let score = scores(&policy, &REQUEST, &[full])[0].score;
    assert_eq!(score, 23_200_000 + 90 * 16 * 100_000);
    let offloads = Candidate {
        evicts_to: Some(LowerTier::Cpu),
        ..full
    };
    let score = scores(&policy, &REQUEST, &[offloads])[0].score;
    assert_eq!(
        score,
        23_200_000 + 90 * 16 * 5_000,
        "evicted blocks are loaded again"
    );
}

#[test]
fn cost_copies_a_prefix_in_proportion_to_the_wait_avoided() {
    // A copy costs 1,440 tokens of work; a request that follows the prefix waits for those ahead.
    for ahead in [90, 360, 720, 1296] {
        let [copies, followers] = shares(&[backend(0, 0, 0), backend(1, 90, ahead)]);
        let expected = REQUESTS * ahead / (1440 * 16);
        assert!(
            copies.abs_diff(expected) < expected / 10 + 20,
            "{ahead} tokens ahead: {copies} copies, {followers} followers, expected {expected}"
        );
    }
}

#[test]
fn cost_copies_no_prefix_without_waiting_or_missing_blocks() {
    let cold = backend(0, 0, 0);
    assert_eq!(shares(&[cold, backend(1, 90, 0)]), [0, REQUESTS]);
    let busier = backend(0, 0, 200);
    assert_eq!(shares(&[busier, backend(1, 90, 100)]), [0, REQUESTS]);
    // Both hold it: the one with less load takes all.
    let both = [backend(0, 90, 0), backend(1, 90, 400)];
    assert_eq!(shares(&both), [REQUESTS, 0]);
}

#[test]
fn cost_copies_no_prefix_of_a_session_that_goes_on() {
    let candidates = [backend(0, 0, 0), backend(1, 90, 1296)];
    // The home holds 1,440 tokens.
    let copies = |home, continued_tokens| {
        (0..REQUESTS).any(|number| {
            let request = PolicyRequest {
                jitter: rank::mix(number),
                home: Some(Slot(home)),
                continued_tokens,
                ..REQUEST
            };
            choose(&policy(), &request, &candidates).unwrap().slot == Slot(0)
        })
    };
    assert!(!copies(1, 1500));
    assert!(
        copies(1, 0),
        "the first turn may find a prefix that others have"
    );
    assert!(
        copies(1, 20_000),
        "it is another prompt under the same name"
    );
    assert!(copies(0, 1500), "the prefix is not at home");
}

//! Tests of choosing two backends for one request.

use super::*;

fn backend(slot: u16, matched: u32) -> Candidate {
    Candidate {
        slot: Slot(slot),
        matched,
        free_blocks: u32::MAX,
        ..Candidate::default()
    }
}

fn cost() -> PolicyConfig {
    PolicyConfig::Cost(CostSettings::default())
}

/// A backend with far more to compute than any prefill backend.
const BUSY: Candidate = Candidate {
    slot: Slot(99),
    matched: 0,
    loaded: LowerTierBlocks {
        cpu: 0,
        disk: 0,
        store: 0,
    },
    evicts_to: None,
    running: 0,
    pending: 0,
    waiting: 0,
    pending_prefill_tokens: 1_000_000,
    kv_usage_permille: 0,
    free_blocks: u32::MAX,
    is_model_listed: false,
    prices: None,
};

fn sides<'a>(
    handover: Handover,
    prefill: &'a [Candidate],
    decode: &'a [Candidate],
) -> PairSides<'a> {
    PairSides {
        handover,
        prefill,
        decode,
    }
}

fn paired(prefill: &[Candidate], decode: &[Candidate]) -> Result<BackendPair, WholeReason> {
    let terms = (&PairSettings::default(), Some(&BUSY));
    choose_pair(
        &cost(),
        &REQUEST,
        terms,
        &[sides(Handover::Answer, prefill, decode)],
    )
}

fn chosen(prefill: &[Candidate], decode: &[Candidate]) -> [u16; 2] {
    let pair = paired(prefill, decode).unwrap();
    [pair.prefill.slot.0, pair.decode.slot.0]
}

#[test]
fn uncached_prompt_length_decides_on_disaggregation() {
    let whole = |matched| Choice {
        slot: Slot(0),
        matched,
        loaded: LowerTierBlocks::default(),
        reason: Reason::LeastCost,
    };
    let decided = |disaggregate, matched| {
        let settings = PairSettings {
            disaggregate,
            above_tokens: 800,
        };
        is_worth_two(&settings, &REQUEST, whole(matched))
    };
    assert_eq!(decided(Disaggregate::Auto, 49), Ok(()));
    assert_eq!(decided(Disaggregate::Auto, 50), Err(WholeReason::Short));
    assert_eq!(decided(Disaggregate::Always, 100), Ok(()));
    assert_eq!(decided(Disaggregate::Off, 0), Err(WholeReason::Off));
}

#[test]
fn choose_pair_names_the_side_without_candidates() {
    let some = [backend(0, 0)];
    assert_eq!(paired(&[], &some), Err(WholeReason::NoPrefill));
    assert_eq!(paired(&some, &[]), Err(WholeReason::NoDecode));
    assert!(paired(&some, &some).is_ok());
}

#[test]
fn decode_backends_prefill_while_prefill_backends_are_behind() {
    let pending = |slot, tokens| Candidate {
        pending_prefill_tokens: tokens,
        ..backend(slot, 0)
    };
    let decided = |disaggregate, prefill_tokens, whole_tokens| {
        let settings = PairSettings {
            disaggregate,
            above_tokens: 0,
        };
        let whole = pending(1, whole_tokens);
        let prefill = [pending(0, prefill_tokens)];
        let decode = [whole];
        let sides = [sides(Handover::Answer, &prefill, &decode)];
        choose_pair(&cost(), &REQUEST, (&settings, Some(&whole)), &sides)
    };
    // The prompt's own 1,600 tokens are added on both sides.
    assert!(decided(Disaggregate::Auto, 1_600, 0).is_ok());
    let busy = Err(WholeReason::PrefillBusy);
    assert_eq!(decided(Disaggregate::Auto, 1_601, 0), busy);
    assert!(decided(Disaggregate::Auto, 3_600, 1_000).is_ok());
    assert!(decided(Disaggregate::Always, 1_000_000, 0).is_ok());
}

#[test]
fn prefill_choice_weighs_prefix_and_pending_tokens() {
    let decode = [backend(9, 0)];
    assert_eq!(chosen(&[backend(0, 0), backend(1, 60)], &decode), [1, 9]);
    let busy = Candidate {
        pending_prefill_tokens: 2_000,
        ..backend(1, 60)
    };
    assert_eq!(chosen(&[backend(0, 0), busy], &decode), [0, 9]);
}

#[test]
fn decode_choice_weighs_load_memory_and_transfer() {
    let prefill = [backend(9, 0)];
    let running = |running, candidate| Candidate {
        running,
        ..candidate
    };
    // Fetching all 1600 tokens costs 10 ms, a running request costs 1 ms.
    let decided = |load| chosen(&prefill, &[backend(0, 0), running(load, backend(1, 100))]);
    assert_eq!(decided(5), [9, 1]);
    assert_eq!(decided(20), [9, 0]);
    // If the prompt must be computed, the prefix is worth far more.
    let whole = choose(
        &cost(),
        &REQUEST,
        &[backend(0, 0), running(20, backend(1, 100))],
    );
    assert_eq!(whole.unwrap().slot, Slot(1));
    let full = Candidate {
        kv_usage_permille: 990,
        ..backend(0, 0)
    };
    assert_eq!(chosen(&prefill, &[full, running(5, backend(1, 0))]), [9, 1]);
}

#[test]
fn both_backends_of_a_pair_use_one_handover() {
    let (by_answer, by_room) = (
        [backend(0, 0), backend(1, 0)],
        [backend(2, 90), backend(3, 0)],
    );
    let terms = (&PairSettings::default(), Some(&BUSY));
    let pair = |first: &[Candidate], second: &[Candidate]| {
        let sides = [
            sides(Handover::Answer, &by_answer[..1], first),
            sides(Handover::Room, &by_room[..1], second),
        ];
        let pair = choose_pair(&cost(), &REQUEST, terms, &sides)?;
        Ok((pair.handover, pair.prefill.slot.0, pair.decode.slot.0))
    };
    let (answering, meeting) = (&by_answer[1..], &by_room[1..]);
    // The best prefill backend determines the kind of handover.
    assert_eq!(pair(answering, meeting), Ok((Handover::Room, 2, 3)));
    // A prefill backend needs a decode backend of its own kind.
    assert_eq!(pair(answering, &[]), Ok((Handover::Answer, 0, 1)));
    assert_eq!(pair(&[], meeting), Ok((Handover::Room, 2, 3)));
    assert_eq!(pair(&[], &[]), Err(WholeReason::NoDecode));
}

#[test]
fn a_busy_prefill_backend_is_used_if_no_backend_serves_whole() {
    let busy = [Candidate {
        pending_prefill_tokens: 10_000_000,
        ..backend(0, 0)
    }];
    let decode = [backend(1, 0)];
    let sides = [sides(Handover::Room, &busy, &decode)];
    let decided = |whole| choose_pair(&cost(), &REQUEST, (&PairSettings::default(), whole), &sides);
    assert!(decided(None).is_ok());
    assert_eq!(decided(Some(&backend(2, 0))), Err(WholeReason::PrefillBusy));
}

proptest! {
    #[test]
    fn each_side_of_a_pair_is_one_of_its_candidates(
        policy in policies(),
        loads in prop::collection::vec((0_u32..100, 0_u32..100), 2..12),
        split in 1_usize..11,
    ) {
        let candidates: Vec<Candidate> = loads
            .iter()
            .zip(0_u16..)
            .map(|((matched, running), slot)| Candidate {
                running: *running,
                ..backend(slot, *matched)
            })
            .collect();
        let (prefill, decode) = candidates.split_at(split.min(candidates.len() - 1));
        let terms = (&PairSettings::default(), Some(&BUSY));
        let sides = [sides(Handover::Answer, prefill, decode)];
        let pair = choose_pair(&policy, &REQUEST, terms, &sides).unwrap();
        prop_assert!(prefill.iter().any(|it| it.slot == pair.prefill.slot));
        prop_assert!(decode.iter().any(|it| it.slot == pair.decode.slot));
    }
}

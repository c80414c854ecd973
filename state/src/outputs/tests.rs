//! Tests of outputs: the original examples, the literal algorithms next to this implementation,
//! predictions, and bounds.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::batch::fits;
use super::literal;
use super::*;

const USER: UserKey = UserKey(1);
const MODEL: ModelKey = ModelKey(2);

fn histogram_of(lengths: &[u32]) -> Histogram {
    let mut histogram = Histogram::default();
    lengths.iter().for_each(|tokens| histogram.add(*tokens));
    histogram
}

fn observed(lengths: &[u32], bins: u16) -> Outputs {
    let mut outputs = Outputs::default();
    for lengths in lengths.chunks(OUTPUTS_PER_ITEM_MAX) {
        assert!(outputs.observe(USER, MODEL, lengths, bins));
    }
    outputs
}

// Algorithm 6.

/// Lengths with the quartiles of the original example.
fn example() -> Vec<u32> {
    let stretches = [1..42, 42..80, 80..167, 167..600_u32];
    let spread = |it: &std::ops::Range<u32>| {
        let (start, width) = (it.start, it.end - it.start);
        (0..250).map(move |at| start + at * width / 250)
    };
    stretches.iter().flat_map(spread).chain([600]).collect()
}

#[test]
fn four_bins_match_the_published_example() {
    let literal = literal::equal_mass(&example(), 4);
    assert_eq!(literal, [(1, 42), (42, 80), (80, 167), (167, 10_000)]);
    // 168 is the end of the bucket from 164 to 167.
    let ours = Boundaries::equal_mass(&histogram_of(&example()[..1000]), 4);
    assert_eq!(ours.edges(), [42, 80, 168]);
}

#[test]
fn a_prediction_below_all_lengths_is_in_the_first_bin() {
    let lengths: Vec<u32> = (50..1050).collect();
    let literal = literal::equal_mass(&lengths, 4);
    assert_eq!(literal::bin_of(&literal, 10), 3, "among the longest");
    let ours = Boundaries::equal_mass(&histogram_of(&lengths), 4);
    assert_eq!(ours.bin_of(10), 0);
    assert_eq!(ours.bin_of(u32::MAX), 3);
}

#[test]
fn equal_quantiles_give_no_empty_bins() {
    // Six of ten outputs have 20 tokens.
    let lengths: Vec<u32> = (0..1000)
        .map(|at| if at % 10 < 6 { 20 } else { at })
        .collect();
    let literal = literal::equal_mass(&lengths, 8);
    let empty = literal.iter().filter(|(least, beyond)| least >= beyond);
    assert_eq!(empty.count(), 3, "{literal:?}");
    let ours = Boundaries::equal_mass(&histogram_of(&lengths), 8);
    assert_eq!(ours.bins(), 5, "{ours:?}");

    let same = Boundaries::equal_mass(&histogram_of(&[300; 100]), 8);
    assert_eq!((same.bins(), same.bin_of(0), same.bin_of(300)), (1, 0, 0));
    assert_eq!(Boundaries::equal_mass(&Histogram::default(), 8).bins(), 1);
}

#[test]
fn unsorted_edges_are_refused() {
    assert!(Boundaries::from_edges(vec![1, 5, 9]).is_ok());
    for wrong in [vec![0, 5], vec![5, 5], vec![9, 5]] {
        assert!(Boundaries::from_edges(wrong).is_err());
    }
}

proptest! {
    #[test]
    fn bins_have_about_equal_mass(
        lengths in prop::collection::vec(prop_oneof![Just(20_u32), 0_u32..64, any::<u32>()], 1..500),
        bins in 2_u16..=64,
    ) {
        let histogram = histogram_of(&lengths);
        let boundaries = Boundaries::equal_mass(&histogram, bins);
        prop_assert!(boundaries.is_sound() && boundaries.bins() <= bins);
        let mut masses = vec![0_usize; boundaries.bins().into()];
        for tokens in &lengths {
            masses[usize::from(boundaries.bin_of(*tokens))] += 1;
        }
        // A bin holds its share plus the bucket at its end.
        let fullest = histogram.buckets().map(|it| it.weight as usize).max().unwrap_or(0) / 16;
        let share = lengths.len().div_ceil(bins.into());
        prop_assert!(masses.iter().all(|mass| (1..=share + fullest).contains(mass)), "{masses:?}");
    }

    #[test]
    fn bin_search_equals_a_linear_scan(
        mut edges in prop::collection::btree_set(1_u32..1000, 0..20),
        tokens in 0_u32..1100,
    ) {
        let edges: Vec<u32> = std::mem::take(&mut edges).into_iter().collect();
        let ends = edges.iter().copied().chain([u32::MAX]);
        let pairs = [0].into_iter().chain(edges.iter().copied()).zip(ends).collect();
        let boundaries = Boundaries::from_edges(edges).expect("a set ascends");
        prop_assert_eq!(usize::from(boundaries.bin_of(tokens)), literal::bin_of(&pairs, tokens));
    }
}

// Bins over time.

#[test]
fn bin_boundaries_follow_observed_lengths() {
    let mut outputs = observed(&[100; 63], 2);
    assert_eq!(outputs.view().bins(MODEL).bins(), 1, "too few to tell");
    outputs = observed(&(0..64).collect::<Vec<_>>(), 2);
    assert_eq!(outputs.view().bins(MODEL).edges(), [32]);
    // From here on all outputs are long: the bins become one-sided, which is noticed before they
    // are due.
    let before = outputs.view();
    let drifted = (1..256).find(|_| {
        outputs.observe(USER, MODEL, &[1000], 2);
        outputs.view().bins(MODEL) != before.bins(MODEL)
    });
    assert_eq!(drifted, Some(64));
    assert_eq!(
        before.bins(MODEL).edges(),
        [32],
        "who holds a view keeps it"
    );

    outputs.rebin(1);
    assert_eq!(outputs.view().bins(MODEL).bins(), 1);
    outputs.rebin(4);
    assert!(outputs.view().bins(MODEL).bins() > 1);
    assert_eq!(outputs.check(), Ok(()));
}

// Predictions.

#[test]
fn predictions_use_the_most_specific_histogram() {
    let nothing = Outputs::default().view();
    let by = |basis, tokens| Prediction { tokens, basis };
    assert_eq!(nothing.predict(USER, MODEL, None), by(Basis::Unknown, 256));
    assert_eq!(nothing.predict(USER, MODEL, Some(40)), by(Basis::Bound, 40));

    // The prediction is the mean of the last five; the first is forgotten.
    let view = observed(&[60, 10, 20, 30, 40, 51], 1).view();
    assert_eq!(view.predict(USER, MODEL, None), by(Basis::User, 31));
    assert_eq!(view.predict(USER, MODEL, Some(12)), by(Basis::User, 12));
    assert_eq!(view.predict(USER, MODEL, Some(0)), by(Basis::User, 1));
    let other = UserKey(9);
    assert_eq!(view.predict(other, MODEL, None), by(Basis::Model, 30));
    assert_eq!(
        view.predict(USER, ModelKey(9), None),
        by(Basis::Unknown, 256)
    );
}

#[test]
fn predictions_are_raised_by_tokens_produced() {
    let view = observed(&[10, 20, 60, 60], 1).view();
    let table = [0, 9, 10, 19, 20, 59, 60, 100].map(|it| view.correct(MODEL, 15, it, None));
    assert_eq!(table, [15, 15, 15, 47, 60, 60, 61, 101]);
    assert_eq!(view.correct(MODEL, 15, 20, Some(30)), 30);
    assert_eq!(view.correct(ModelKey(9), 15, 20, None), 21);
}

// Bounds.

#[test]
fn items_out_of_bounds_are_dropped() {
    let mut outputs = Outputs::default();
    assert!(!outputs.observe(USER, MODEL, &[], 4));
    assert!(!outputs.observe(USER, MODEL, &[1; OUTPUTS_PER_ITEM_MAX + 1], 4));
    let digest = |outputs: &Outputs| {
        let mut bytes = Vec::new();
        outputs.append_digest(&mut bytes);
        bytes
    };
    assert_eq!(digest(&outputs), digest(&Outputs::default()));
    assert!(outputs.observe(USER, MODEL, &[u32::MAX; OUTPUTS_PER_ITEM_MAX], 4));
    assert_eq!(outputs.check(), Ok(()));
    let longest = outputs.view().predict(USER, MODEL, None).tokens;
    assert_eq!(longest, OUTPUT_TOKENS_MAX);
}

#[test]
fn least_recently_observed_pairs_and_models_are_forgotten() {
    let mut outputs = Outputs::default();
    let pairs = PAIRS_MAX as u64;
    for user in 0..pairs {
        outputs.observe(UserKey(user), MODEL, &[7], 1);
    }
    outputs.observe(UserKey(0), MODEL, &[7], 1);
    outputs.observe(UserKey(pairs), MODEL, &[7], 1);
    let view = outputs.view();
    assert_eq!(view.pairs(), PAIRS_MAX);
    let basis = |user| view.predict(UserKey(user), MODEL, None).basis;
    assert_eq!(
        [0, 1, 2, pairs].map(basis),
        [Basis::User, Basis::Model, Basis::User, Basis::User]
    );

    for model in 0..=MODELS_MAX as u64 {
        outputs.observe(USER, ModelKey(100 + model), &[7], 1);
    }
    assert!(outputs.view().model(MODEL).is_none());
    assert!(outputs.view().model(ModelKey(100)).is_none());
    assert_eq!(outputs.view().models().count(), MODELS_MAX);
    assert_eq!(outputs.check(), Ok(()));
}

fn encoded(outputs: &Outputs) -> Vec<u8> {
    encoding::to_bytes(outputs)
}

fn decoded(bytes: &[u8]) -> Result<Outputs, String> {
    encoding::from_bytes::<Outputs, { encoding::SECTION_BYTES_MAX }>(bytes)
}

#[test]
fn an_inconsistent_snapshot_is_refused() {
    let mut outputs = observed(&[5, 6, 7], 1);
    outputs.clock = 0;
    assert!(
        decoded(&encoded(&outputs)).is_err(),
        "heard of in the future"
    );
    let mut outputs = observed(&[5, 6, 7], 1);
    let model = Arc::make_mut(outputs.models.get_mut(&MODEL).expect("it was observed"));
    *model = ModelOutputs::default();
    assert!(decoded(&encoded(&outputs)).is_ok(), "sound, if not ours");
    assert!(decoded(&encoded(&outputs)[..3]).is_err());
}

proptest! {
    #[test]
    fn a_decoded_state_continues_like_the_original(
        items in prop::collection::vec(
            (0_u64..20, 0_u64..4, prop::collection::vec(0_u32..3000, 1..80), 1_u16..6),
            1..60,
        ),
        at in 0_usize..60,
    ) {
        let digest = |outputs: &Outputs| {
            let mut bytes = Vec::new();
            outputs.append_digest(&mut bytes);
            bytes
        };
        let mut outputs = Outputs::default();
        let mut restored = Outputs::default();
        for (turn, (user, model, tokens, bins)) in items.iter().enumerate() {
            if turn == at {
                restored = decoded(&encoded(&outputs)).expect("what was encoded is sound");
            }
            outputs.observe(UserKey(*user), ModelKey(*model), tokens, *bins);
            if turn >= at {
                restored.observe(UserKey(*user), ModelKey(*model), tokens, *bins);
                prop_assert_eq!(digest(&restored), digest(&outputs));
                prop_assert_eq!(encoded(&restored), encoded(&outputs));
            }
            prop_assert_eq!(outputs.check(), Ok(()));
        }
    }
}

// Algorithms 3 and 5, as written. `admission/tests/queue.rs` tests this implementation.

#[test]
fn the_literal_longest_queue_starves_a_short_one() {
    let mut literal = [VecDeque::from([10]), VecDeque::from([10; 50])];
    for _ in 0..1000 {
        let batch = literal::form(&mut literal, 2, 100);
        literal[1].extend(batch);
    }
    assert_eq!(literal[0].len(), 1, "it never went");
}

#[test]
fn the_literal_form_stops_forever_at_an_oversize_request() {
    let mut literal = [VecDeque::from([101, 10, 10])];
    assert!((0..100).all(|_| literal::form(&mut literal, 2, 100).is_empty()));
    assert_eq!(literal[0], [101, 10, 10]);
    // This implementation rejects the request on arrival.
    assert!(!fits(101, Some(100)));
    assert!(fits(100, Some(100)) && fits(u64::MAX, None));
}

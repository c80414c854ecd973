//! Prices learned from engines with known true prices, and from engines with wrong reports.

use proptest::prelude::*;

use super::*;
use crate::ids::Incarnation;
use crate::policy::LoadPrices;

const BACKEND: BackendRef = BackendRef {
    slot: Slot(0),
    incarnation: Incarnation(1),
};

/// An engine whose first tokens and gaps cost exactly what the model says, apart from noise.
#[derive(Debug, Clone, Copy)]
struct Engine {
    base_us: u64,
    prefill_ns: u64,
    decode_ns: u64,
    gap_base_us: u64,
    gap_ns: u64,
    /// Nanoseconds per token loaded from each tier below the GPU; nothing is loaded if 0.
    load_ns: [u64; LOWER_TIERS],
}

impl Engine {
    /// Returns one replica's report over some seconds with `events` first tokens under a varying
    /// load.
    fn sample(&self, draw: &mut u64, events: u32) -> ServiceSample {
        let mut next = |below: u64| {
            *draw = draw
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            (*draw >> 33) % below
        };
        let mut sample = ServiceSample::empty(BACKEND);
        // Load of the interval, around which its requests vary.
        let (busy, deep) = (next(24), next(4000));
        for _ in 0..events {
            let running = busy + next(4);
            let prefill = deep + next(1000) + 16;
            let mut ns = prefill * self.prefill_ns + running * self.decode_ns;
            for (tier, load_ns) in self.load_ns.into_iter().enumerate() {
                // Half of the requests find nothing on the tier.
                if load_ns > 0 && next(2) == 0 {
                    let tokens = next(32_000);
                    sample.loaded_tokens[tier] += tokens;
                    ns += tokens * load_ns;
                }
            }
            let us = self.base_us + ns / 1000;
            // Up to a tenth above or below.
            let noisy = us * (900 + next(201)) / 1000;
            sample.first_tokens += 1;
            let loading = &mut sample.loading;
            loading.requests += 1;
            loading.first_token_us += noisy;
            loading.prefill_tokens += prefill;
            loading.running += running;
            loading.loaded_tokens = sample.loaded_tokens;
            sample.first_token_us += noisy;
            sample.prefill_tokens += prefill;
            sample.first_running += running;
            let gaps = 50 + next(100);
            let gap_us = self.gap_base_us + running * self.gap_ns / 1000;
            sample.gaps += gaps;
            sample.gap_us += gaps * gap_us * (950 + next(101)) / 1000;
            sample.gap_running += gaps * running;
        }
        sample
    }

    fn taught(&self, samples: usize) -> PriceLearner {
        let (mut learning, mut draw) = (PriceLearner::default(), 1);
        for _ in 0..samples {
            learning.observe(&self.sample(&mut draw, 8));
        }
        learning
    }
}

/// Whether `found` is within `percent` percent of `wanted`.
fn is_near(found: u32, wanted: u64, percent: u64) -> bool {
    u64::from(found).abs_diff(wanted) * 100 <= wanted * percent
}

const ENGINES: [Engine; 3] = [
    Engine {
        base_us: 15_000,
        prefill_ns: 60_000,
        decode_ns: 800_000,
        gap_base_us: 12_000,
        gap_ns: 300_000,
        load_ns: [0; LOWER_TIERS],
    },
    Engine {
        base_us: 5_000,
        prefill_ns: 25_000,
        decode_ns: 400_000,
        gap_base_us: 7_000,
        gap_ns: 150_000,
        load_ns: [0; LOWER_TIERS],
    },
    Engine {
        base_us: 40_000,
        prefill_ns: 400_000,
        decode_ns: 5_000_000,
        gap_base_us: 40_000,
        gap_ns: 2_000_000,
        load_ns: [0; LOWER_TIERS],
    },
];

#[test]
fn learned_prices_converge_to_the_engines() {
    for engine in ENGINES {
        let learnt = engine.taught(300).learnt().unwrap();
        let shown = format!("{engine:?}: {learnt:?}");
        assert!(
            is_near(learnt.prices.prefill_ns_per_token, engine.prefill_ns, 10),
            "{shown}"
        );
        assert!(
            is_near(learnt.prices.decode_ns_per_request, engine.decode_ns, 50),
            "{shown}"
        );
        assert!(
            is_near(learnt.gap_base_us, engine.gap_base_us, 10),
            "{shown}"
        );
        assert!(
            is_near(learnt.gap_ns_per_request, engine.gap_ns, 15),
            "{shown}"
        );
        let includes = |range: Option<(u32, u32)>, price: u64| {
            range.is_some_and(|(least, most)| (least.into()..=most.into()).contains(&price))
        };
        assert!(
            includes(learnt.prices.prefill_range_ns, engine.prefill_ns),
            "{shown}"
        );
        assert!(
            includes(learnt.prices.decode_range_ns, engine.decode_ns),
            "{shown}"
        );
        assert!(learnt.trusted().is_some());
    }
}

#[test]
fn load_prices_are_within_a_tenth_after_500_requests() {
    for load_ns in [[5_000, 30_000, 0], [20_000, 0, 45_000]] {
        let engine = Engine {
            load_ns,
            ..ENGINES[0]
        };
        // Each sample is of 8 requests.
        let prices = engine.taught(500 / 8).learnt().unwrap().prices;
        assert!(is_near(prices.prefill_ns_per_token, engine.prefill_ns, 10));
        let assumed = LoadPrices::ASSUMED.all();
        for (tier, learnt) in prices.load.all().into_iter().enumerate() {
            match load_ns[tier] {
                0 => assert_eq!(learnt, assumed[tier], "nothing was loaded"),
                true_ns => assert!(is_near(learnt, true_ns, 10), "{load_ns:?}: {prices:?}"),
            }
        }
    }
}

#[test]
fn ranges_are_unknown_until_samples_scatter_and_then_narrow() {
    let range = |samples| {
        let learnt = ENGINES[0].taught(samples).learnt().unwrap();
        learnt.prices.prefill_range_ns
    };
    assert_eq!(range(15), None);
    let width = |samples| range(samples).map(|(least, most)| most - least).unwrap();
    assert!(width(128) < width(16), "{} {}", width(16), width(128));
}

#[test]
fn a_few_samples_distinguish_fast_and_slow_engines() {
    let [_, fast, slow] = ENGINES.map(|engine| engine.taught(4).learnt().unwrap());
    let (fast, slow) = (fast.trusted().unwrap(), slow.trusted().unwrap());
    assert!(fast.prefill_ns_per_token * 5 < slow.prefill_ns_per_token);
}

#[test]
fn prices_are_unused_before_enough_first_tokens() {
    let (mut learning, mut draw) = (PriceLearner::default(), 1);
    assert_eq!(learning.learnt(), None);
    learning.observe(&ENGINES[0].sample(&mut draw, LEARNT_FIRST_TOKENS_MIN - 1));
    assert_eq!(learning.learnt().unwrap().trusted(), None);
    learning.observe(&ENGINES[0].sample(&mut draw, 1));
    assert!(learning.learnt().unwrap().trusted().is_some());
}

#[test]
fn constant_load_is_attributed_in_proportion() {
    let mut learning = PriceLearner::default();
    let mut sample = ServiceSample::empty(BACKEND);
    (sample.first_tokens, sample.first_token_us) = (8, 8 * 300_000);
    (sample.prefill_tokens, sample.first_running) = (8 * 1000, 8 * 2);
    for _ in 0..50 {
        learning.observe(&sample);
    }
    // 300 ms for 1000 tokens: most of it belongs to the tokens, however it is divided.
    let learnt = learning.learnt().unwrap();
    assert!(
        (150_000..=300_000).contains(&learnt.prices.prefill_ns_per_token),
        "{learnt:?}"
    );
}

/// Returns the prices learned from an engine and its host in bursts of mostly cached requests. Each
/// waits for those before it, with or without tokens, for which the model has no price.
fn taught_by_bursts(base_us: u64, per_request_us: u64, prefill_ns: u64) -> LearntPrices {
    let (mut learning, mut draw) = (PriceLearner::default(), 1_u64);
    let mut next = |below: u64| {
        draw = draw
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (draw >> 33) % below
    };
    for _ in 0..400 {
        let mut sample = ServiceSample::empty(BACKEND);
        let (busy, deep) = (next(40), 1 + next(12));
        while sample.first_tokens < 16 {
            let (running, mut pending) = (busy + next(4), 0);
            for before in 0..=next(deep) {
                // A cached prompt leaves only its end to compute.
                pending += 16 + next(85);
                let us = base_us + before * per_request_us + pending * prefill_ns / 1000;
                sample.first_tokens += 1;
                sample.first_token_us += us * (900 + next(201)) / 1000;
                sample.prefill_tokens += pending;
                sample.first_running += running + before;
            }
        }
        learning.observe(&sample);
    }
    learning.learnt().unwrap()
}

#[test]
fn cached_prompts_do_not_raise_token_prices() {
    for base_us in [5_000, 20_000, 50_000] {
        for per_request_us in [0, 5_000, 10_000] {
            let learnt = taught_by_bursts(base_us, per_request_us, 25_000);
            let shown = format!("{base_us} {per_request_us}: {learnt:?}");
            // Roughly between the true price and the prior.
            let credible = 25_000..=140_000;
            assert!(
                credible.contains(&learnt.prices.prefill_ns_per_token),
                "{shown}"
            );
        }
    }
}

#[test]
fn an_overlong_queue_does_not_raise_token_prices() {
    let mut learning = ENGINES[1].taught(100);
    let before = learning.learnt().unwrap();
    let mut sample = ServiceSample::empty(BACKEND);
    (sample.first_tokens, sample.first_running) = (8, 8 * 200);
    // Four million tokens at 25 microseconds.
    (sample.prefill_tokens, sample.first_token_us) = (8 * 4_000_000, 8 * 100_000_000);
    assert!(sample.is_plausible());
    for _ in 0..300 {
        learning.observe(&sample);
    }
    assert_eq!(learning.learnt().unwrap(), before);
}

#[test]
fn prices_resist_outliers_and_follow_lasting_changes() {
    let mut learning = ENGINES[0].taught(300);
    let before = learning.learnt().unwrap();
    let mut wild = ENGINES[0].sample(&mut 7, 1);
    wild.first_token_us = FIRST_TOKEN_US_MAX;
    assert!(wild.is_plausible());
    learning.observe(&wild);
    let after = learning.learnt().unwrap();
    assert!(
        is_near(
            after.prices.prefill_ns_per_token,
            before.prices.prefill_ns_per_token.into(),
            20
        ),
        "{after:?}"
    );
    let mut draw = 3;
    for _ in 0..300 {
        learning.observe(&ENGINES[2].sample(&mut draw, 8));
    }
    let changed = learning.learnt().unwrap();
    assert!(
        is_near(
            changed.prices.prefill_ns_per_token,
            ENGINES[2].prefill_ns,
            15
        ),
        "{changed:?}"
    );
}

#[test]
fn absurd_sums_are_ignored() {
    let good = ENGINES[0].sample(&mut 1, 8);
    assert!(good.is_plausible());
    let spoilt: [fn(&mut ServiceSample); 8] = [
        |it| it.first_token_us = u64::MAX,
        |it| it.prefill_tokens = u64::MAX,
        |it| it.first_running = u64::MAX,
        |it| it.gap_us = it.gaps * GAP_US_MAX + 1,
        |it| it.gaps_at_limit = it.gaps + 1,
        |it| it.ended = u32::MAX,
        |it| it.cached_tokens = it.predicted_prompt_tokens + 1,
        |it| (it.first_tokens, it.first_token_us, it.first_running) = (0, 0, 0),
    ];
    for spoil in spoilt {
        let mut sample = good;
        spoil(&mut sample);
        assert!(!sample.is_plausible(), "{sample:?}");
    }
}

fn mixed(from: &[u64; 16]) -> ServiceSample {
    let count = |at: usize| from[at] as u32;
    ServiceSample {
        ended: count(0),
        first_tokens: count(1),
        first_token_us: from[2],
        prefill_tokens: from[3],
        first_running: from[4],
        gaps: from[5],
        gap_us: from[6],
        gap_running: from[7],
        gaps_at_limit: from[8],
        predicted: count(9),
        predicted_prompt_tokens: from[10],
        predicted_cached_tokens: from[11],
        cached_tokens: from[12],
        prompt_tokens: from[13],
        output_tokens: from[14],
        added_tokens: from[15],
        ..ServiceSample::empty(BACKEND)
    }
}

proptest! {
    /// For every plausible sample, prices stay within their bounds and nothing overflows.
    #[test]
    fn prices_stay_within_bounds(
        samples in prop::collection::vec(
            (prop::array::uniform16(prop_oneof![0_u64..1000, any::<u64>()]), any::<[u8; 16]>()),
            1..30,
        ),
    ) {
        let (mut learning, mut accuracy) = (PriceLearner::default(), Accuracy::default());
        for (numbers, shifts) in samples {
            let mut at = 0;
            let numbers = numbers.map(|number| {
                at += 1;
                number >> (shifts[at - 1] % 64)
            });
            let sample = mixed(&numbers);
            if !sample.is_plausible() {
                continue;
            }
            learning.observe(&sample);
            accuracy.observe(&sample, 200, CapacityObservation { owned: 100, capacity: Some(100) });
            if let Some(learnt) = learning.learnt() {
                prop_assert!(learnt.prices.prefill_ns_per_token <= 10_000_000);
                prop_assert!(learnt.prices.decode_ns_per_request <= 1_000_000_000);
                prop_assert!(learnt.first_tokens <= 1024 && learnt.gaps <= 1024);
            }
            let corrected = accuracy.corrected(1000, 1000);
            prop_assert!((500..=2000).contains(&corrected), "{}", corrected);
        }
    }
}

proptest! {
    /// For every report, a step is 1/32, the bounds hold, and only evidence moves the capacity:
    /// more failures in one direction than in the other.
    #[test]
    fn capacity_correction_moves_in_bounded_steps(
        samples in prop::collection::vec(
            (0_u32..60, 0_u32..12, 0_u32..12, 0_u64..2000, 0_u64..1100, any::<bool>()),
            1..200,
        ),
    ) {
        let mut beliefs = CapacityCorrections::default();
        for (held, lost, found, computed_blocks, owned, is_absurd) in samples {
            let before = beliefs.permille(Slot(0));
            let absurd = |count: u32| if is_absurd { count << 20 } else { count };
            let sample = BeliefSample {
                backend: BACKEND,
                held: absurd(held),
                lost: absurd(lost),
                found: absurd(found),
                computed_blocks,
            };
            if !sample.is_plausible() {
                continue;
            }
            beliefs.observe(&sample, CapacityObservation { owned, capacity: Some(1000) });
            let after = beliefs.permille(Slot(0));
            prop_assert!((700..=1400).contains(&after));
            prop_assert!(before.abs_diff(after) <= before / 32);
            prop_assert!(after >= before || lost > found || held > 0);
            prop_assert!(owned >= 938 || before == after, "what is not full is left alone");
        }
    }
}

fn predicted(prompt: u64, predicted: u64, cached: u64) -> ServiceSample {
    ServiceSample {
        predicted: 1,
        predicted_prompt_tokens: prompt,
        predicted_cached_tokens: predicted,
        cached_tokens: cached,
        ..ServiceSample::empty(BACKEND)
    }
}

#[test]
fn inaccuracy_is_flagged_and_cleared_by_evidence() {
    let unbounded = CapacityObservation {
        owned: 10,
        capacity: None,
    };
    let mut accuracy = Accuracy::default();
    let mut see = |predicted_permille: u64, times: usize| {
        for _ in 0..times {
            let sample = predicted(8192, 8192 * predicted_permille / 1000, 4096);
            accuracy.observe(&sample, 200, unbounded);
        }
        accuracy.view(1000).is_off
    };
    assert!(!see(900, 3), "too few tokens to say");
    assert!(see(900, 1));
    assert!(
        see(650, 60),
        "off by 150: within the bound, not within half of it"
    );
    assert!(!see(590, 60));
    assert!(!see(650, 60), "and not off again within the bound");
    assert_eq!(
        accuracy.view(1000).correction_permille,
        1000,
        "nothing to correct"
    );
}

#[test]
fn capacity_is_corrected_by_two_at_most_where_it_binds() {
    let full = CapacityObservation {
        owned: 950,
        capacity: Some(1000),
    };
    let half_full = CapacityObservation { owned: 500, ..full };
    let run = |holding, predicted_permille: u64, cached_permille: u64| {
        let mut accuracy = Accuracy::default();
        for _ in 0..2000 {
            let (believed, there) = (65_536 * predicted_permille, 65_536 * cached_permille);
            accuracy.observe(
                &predicted(65_536, believed / 1000, there / 1000),
                200,
                holding,
            );
        }
        accuracy.corrected(1000, 1000)
    };
    assert_eq!(run(full, 900, 100), 500);
    assert_eq!(run(full, 100, 900), 2000);
    assert_eq!(
        run(half_full, 900, 100),
        1000,
        "blocks go for other reasons there"
    );
    assert_eq!(run(full, 500, 450), 1000, "that is within the bound");
}

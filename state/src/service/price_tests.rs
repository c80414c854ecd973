//! Which engines `cost` prefers by their learned prices: engines whose times to first token are
//! simulated serve what the policy sends them, and learn their prices from it.

use proptest::prelude::*;

use super::*;
use crate::ids::Incarnation;
use crate::policy::{Candidate, CostSettings, PolicyConfig, PolicyRequest, choose};

/// Number of requests over which shares are counted.
const COUNTED: u64 = 400;

/// A linear congruential generator, of which the high bits are used.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % bound.max(1)
    }
}

/// What determines the times to first token of a fleet.
#[derive(Debug, Clone)]
struct Fleet {
    /// True price of an uncached token at each engine.
    prefill_ns: Vec<u64>,
    base_us: u64,
    /// Mean of what a first token takes for reasons that have nothing to do with its prompt.
    noise_us: u64,
    /// Number of uncached tokens by which prompts differ.
    spread: u64,
    /// Number of requests between two reports.
    reported: u64,
    seed: u64,
}

/// A fleet at work. Requests come one at a time, so that all engines are idle at each.
struct Run {
    fleet: Fleet,
    draws: Draws,
    learning: Vec<PriceLearner>,
    samples: Vec<ServiceSample>,
    number: u64,
}

impl Run {
    fn new(fleet: &Fleet) -> Self {
        let count = fleet.prefill_ns.len();
        let backend = BackendRef {
            slot: Slot(0),
            incarnation: Incarnation(1),
        };
        Self {
            draws: Draws(fleet.seed),
            learning: vec![PriceLearner::default(); count],
            samples: vec![ServiceSample::empty(backend); count],
            number: 0,
            fleet: fleet.clone(),
        }
    }

    /// Serves a request with `tokens` uncached tokens at an engine, and reports if it is time.
    fn serve(&mut self, at: usize, tokens: u64) {
        let Fleet {
            base_us,
            noise_us,
            reported,
            ..
        } = self.fleet;
        // The host is busy with other things for a while, and then is not.
        let noisy = 1 + (self.number / 97) % 4;
        let noise_us = self.draws.below(noise_us * noisy);
        let sample = &mut self.samples[at];
        sample.first_tokens += 1;
        sample.first_token_us += base_us + noise_us + tokens * self.fleet.prefill_ns[at] / 1000;
        sample.prefill_tokens += tokens;
        self.number += 1;
        if self.number.is_multiple_of(reported) {
            for (learning, sample) in self.learning.iter_mut().zip(&mut self.samples) {
                assert!(sample.is_plausible());
                learning.observe(sample);
                *sample = ServiceSample::empty(sample.backend);
            }
        }
    }

    fn tokens(&mut self) -> u64 {
        16 + self.draws.below(self.fleet.spread)
    }

    /// Sends requests to the engines that `cost` chooses, and returns how many each got.
    fn send(&mut self, requests: u64) -> Vec<u64> {
        let policy = PolicyConfig::Cost(CostSettings::default());
        let mut shares = vec![0; self.learning.len()];
        for _ in 0..requests {
            let tokens = self.tokens();
            let request = PolicyRequest {
                jitter: self.draws.below(u64::MAX) << 32 | self.draws.below(u64::MAX),
                blocks: tokens as u32 / 16,
                tokens: tokens as u32,
                tokens_per_block: 16,
                ..PolicyRequest::default()
            };
            let candidate = |(slot, learning): (usize, &PriceLearner)| Candidate {
                slot: Slot(slot as u16),
                free_blocks: u32::MAX,
                prices: learning.learnt().and_then(|learnt| learnt.trusted()),
                ..Candidate::default()
            };
            let candidates: Vec<_> = self.learning.iter().enumerate().map(candidate).collect();
            let choice = choose(&policy, &request, &candidates).expect("there are candidates");
            let at = usize::from(choice.slot.0);
            shares[at] += 1;
            self.serve(at, tokens);
        }
        shares
    }
}

fn equal_engines() -> impl Strategy<Value = Fleet> {
    let spread = prop_oneof![Just(1_u64), 2_u64..64, 64_u64..512, 512_u64..4096];
    (
        (3_usize..8, 5_000_u64..1_000_000),
        1_000_u64..200_000,
        prop_oneof![0_u64..10_000, 0_u64..2_000_000],
        spread,
        1_u64..24,
        any::<u64>(),
    )
        .prop_map(
            |((count, ns), base_us, noise_us, spread, reported, seed)| Fleet {
                prefill_ns: vec![ns; count],
                base_us,
                noise_us,
                spread,
                reported,
                seed,
            },
        )
}

proptest! {
    /// Whatever noise engines learned from, and however much more one of them did, none of equal
    /// ones gets more than twice its share of the requests to an idle fleet.
    #[test]
    fn equal_engines_share_an_idle_fleet(fleet in equal_engines(), alone in 0_u64..2_000) {
        let mut run = Run::new(&fleet);
        for _ in 0..alone {
            let tokens = run.tokens();
            run.serve(0, tokens);
        }
        run.send(1_600);
        let shares = run.send(COUNTED);
        // Five standard deviations of a fair draw.
        let most = 2 * COUNTED / fleet.prefill_ns.len() as u64 + 50;
        prop_assert!(shares.iter().all(|share| *share <= most), "{:?}", shares);
    }
}

#[test]
fn a_price_at_its_floor_attracts_no_more_than_others() {
    // A busy host, and prompts that are mostly cached: the noise hides the price.
    let fleet = Fleet {
        prefill_ns: vec![250_000; 3],
        base_us: 50_000,
        noise_us: 1_000_000,
        spread: 256,
        reported: 3,
        seed: 0,
    };
    let mut found = 0;
    for seed in 0..64 {
        let mut run = Run::new(&Fleet {
            seed,
            ..fleet.clone()
        });
        for number in 0..842 {
            let tokens = run.tokens();
            // 642 first tokens for one engine, 100 for each of the others.
            let at = if number < 642 { 0 } else { 1 + number % 2 };
            run.serve(at, tokens);
        }
        let learnt = run.learning[0].learnt().and_then(|it| it.trusted());
        if learnt.expect("it served enough").prefill_ns_per_token > 1_000 {
            continue;
        }
        found += 1;
        let shares = run.send(COUNTED);
        assert!(
            shares.iter().all(|it| *it < COUNTED / 2),
            "{seed}: {shares:?}"
        );
    }
    assert!(found > 4, "{found} prices at the floor");
}

#[test]
fn a_faster_engine_is_preferred() {
    for (times, noise_us, spread) in [(8, 20_000, 2048), (8, 2_000, 512), (2, 5_000, 2048)] {
        for slow_ns in [50_000, 400_000] {
            for seed in 0..8 {
                let fleet = Fleet {
                    prefill_ns: vec![slow_ns, slow_ns / times, slow_ns],
                    base_us: 20_000,
                    noise_us,
                    spread,
                    reported: 8,
                    seed,
                };
                let mut run = Run::new(&fleet);
                run.send(8_000);
                let shares = run.send(COUNTED);
                assert!(shares[1] > COUNTED * 3 / 4, "{fleet:?}: {shares:?}");
            }
        }
    }
}

/// Returns a sample of `count` first tokens after equal prompts.
fn sample(count: u32, first_token_us: u64, tokens: u64, running: u64) -> ServiceSample {
    let backend = BackendRef {
        slot: Slot(0),
        incarnation: Incarnation(1),
    };
    ServiceSample {
        first_tokens: count,
        first_token_us: u64::from(count) * first_token_us,
        prefill_tokens: u64::from(count) * tokens,
        first_running: u64::from(count) * running,
        ..ServiceSample::empty(backend)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Amounts that hardly vary, or only together, reveal no price, for however long. A range of
    /// three standard errors misses once in some hundred times, but never says that a part costs
    /// more than the whole.
    #[test]
    fn amounts_that_hardly_vary_leave_prices_open(
        count in 1_u32..80,
        tokens in 1_u64..60_000,
        more_tokens in 0_u64..3,
        running in 0_u64..200,
        every in 1_u64..60,
        seed: u64,
    ) {
        // The first token may cost all of it, or nothing.
        let all_ns = 1_000_000_000 / (tokens + more_tokens);
        let mut missed = 0;
        for seed in (0..4).map(|more| seed.wrapping_add(more)) {
            let (mut learner, mut draws) = (PriceLearner::default(), Draws(seed));
            for number in 0..3_000_u64 {
                let us = 1_000_000 + draws.below(200_000);
                let running = if number.is_multiple_of(every) { running } else { 0 };
                let tokens = tokens + draws.below(more_tokens + 1);
                learner.observe(&sample(count, us, tokens, running));
            }
            let learnt = learner.learnt().unwrap();
            if let Some((least, most)) = learnt.prices.prefill_range_ns {
                let (least, most) = (u64::from(least), u64::from(most));
                prop_assert!(least <= 1_000 + all_ns * 5 / 4, "{least} to {most} of {all_ns}");
                prop_assert!(most >= all_ns.min(9_000_000) / 2, "{least} to {most} of {all_ns}");
                missed += u64::from(least > 1_000 + all_ns / 20);
            }
        }
        prop_assert!(missed <= 1, "{missed} of 4 ranges leave out that tokens cost nothing");
    }
}

#[test]
fn equal_engines_with_other_prompts_have_ranges_in_common() {
    let learn = |least: u64, spread: u64| {
        let (mut learner, mut draws) = (PriceLearner::default(), Draws(7));
        for _ in 0..3_000 {
            let tokens = least + draws.below(spread);
            let us = 200_000 + 20 * tokens + draws.below(20_000);
            learner.observe(&sample(1, us, tokens, 0));
        }
        learner.learnt().unwrap().prices.prefill_range_ns.unwrap()
    };
    let (alike, various) = (learn(990, 20), learn(16, 4_000));
    assert!(
        alike.0 <= various.1 && various.0 <= alike.1,
        "{alike:?}, {various:?}"
    );
    assert!((19_000..21_000).contains(&various.0), "{various:?}");
}

#[test]
fn an_engine_slower_than_the_bound_is_not_preferred() {
    let fleet = Fleet {
        prefill_ns: vec![20_000_000, 53_000],
        base_us: 20_000,
        noise_us: 5_000,
        spread: 2048,
        reported: 8,
        seed: 1,
    };
    let mut run = Run::new(&fleet);
    run.send(4_000);
    let shares = run.send(COUNTED);
    assert!(shares[0] < COUNTED / 20, "{shares:?}");
}

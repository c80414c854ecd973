//! Algorithms 1, 2 and 7: tables, comparisons with the literal algorithms, and modelled engines.

use proptest::prelude::*;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

use super::literal;
use super::*;
use crate::ids::{BackendRef, Incarnation, Slot};

/// A uniform pseudo-random sequence.
struct Random(SplitMix64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// Returns a number within (0, 1).
    fn unit(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }
}

/// Returns an empty sample.
fn nothing() -> ServiceSample {
    ServiceSample::empty(BackendRef {
        slot: Slot(0),
        incarnation: Incarnation(0),
    })
}

/// Returns a sample of requests that added these numbers of tokens.
fn ended(tokens: &[u64]) -> ServiceSample {
    ServiceSample {
        ended: tokens.len() as u32,
        added_tokens: tokens.iter().sum(),
        added_squared: tokens.iter().map(|it| it * it).sum(),
        block_tokens: 16,
        ..nothing()
    }
}

/// Returns a sample of one second of tokens at `inter_token_us` with `running` requests.
fn tokens(inter_token_us: u32, running: u32, is_at_limit: bool) -> ServiceSample {
    let gaps = u64::from(1_000_000 / inter_token_us * running);
    ServiceSample {
        gaps,
        gap_us: gaps * u64::from(inter_token_us),
        gap_running: gaps * u64::from(running),
        gaps_at_limit: if is_at_limit { gaps } else { 0 },
        ..nothing()
    }
}

fn footprint_of(sizes: &[u64]) -> Footprint {
    let mut footprint = Footprint::default();
    for sizes in sizes.chunks(64) {
        footprint.observe(&ended(sizes));
    }
    footprint
}

/// Returns a footprint of requests that closely follow a distribution, given by its quantiles.
fn footprint_by(quantile: impl Fn(f64) -> f64) -> Footprint {
    let sizes = (0..512).map(|at| quantile((f64::from(at) + 0.5) / 512.0).round() as u64);
    footprint_of(&sizes.collect::<Vec<u64>>())
}

fn sla(inter_token_us: u32) -> SlaSettings {
    inter_token_us.into()
}

fn adaptive(inter_token_us: u32) -> LimitSettings {
    LimitSettings {
        concurrency: Concurrency::Adaptive,
        sla: sla(inter_token_us),
    }
}

// Algorithm 1.

/// Returns the share of draws in which `b` requests with sizes from `draw` exceed `capacity`.
fn overflow(b: u32, capacity: f64, mut draw: impl FnMut() -> f64) -> f64 {
    const DRAWS: u32 = 20_000;
    let exceed = (0..DRAWS).filter(|_| (0..b).map(|_| draw()).sum::<f64>() > capacity);
    exceed.count() as f64 / f64::from(DRAWS)
}

#[test]
fn the_root_rule_holds_where_a_fixed_buffer_overflows() {
    // Sizes uniform over 0..1000: mean 500, deviation 289.
    let mut random = Random::new(1);
    let footprint = footprint_by(|share| share * 1000.0);
    let mut lines = String::new();
    for capacity in [5_000_u32, 20_000, 100_000, 1_000_000] {
        let literal = literal::b_mem(f64::from(capacity), 300.0, 200.0, (1, 65_536));
        let ours = footprint.b_mem(capacity.into(), 1645, 65_536);
        let ours = ours.expect("enough requests were seen");
        let mut share = |b| {
            // The sum of many is normal, and the share of overflows is too small to sample.
            if capacity > 20_000 {
                return 0.0;
            }
            overflow(b, capacity.into(), || random.unit() * 1000.0) * 100.0
        };
        lines += &format!(
            "{capacity}: literal {literal} ({:.1} %), ours {ours} ({:.1} %)\n",
            share(literal),
            share(ours)
        );
    }
    expect_test::expect![[r#"
        5000: literal 9 (29.0 %), ours 7 (2.5 %)
        20000: literal 36 (12.6 %), ours 34 (3.9 %)
        100000: literal 180 (0.0 %), ours 187 (0.0 %)
        1000000: literal 1800 (0.0 %), ours 1957 (0.0 %)
    "#]]
    .assert_eq(&lines);
}

#[test]
fn long_tails_overflow_hardly_more_than_requested() {
    // Exponential: the deviation is the mean.
    let size = |share: f64| -share.ln() * 500.0;
    let mut random = Random::new(2);
    let mut draw = || size(random.unit());
    let footprint = footprint_by(size);
    for capacity in [3_000_u32, 10_000, 30_000] {
        let b = footprint.b_mem(capacity.into(), 1645, 65_536);
        let share = overflow(b.expect("there is a bound"), capacity.into(), &mut draw);
        assert!(share <= 0.065, "{capacity}: {share}");
        let literal = literal::b_mem(capacity.into(), 300.0, 200.0, (1, 65_536));
        assert!(overflow(literal, capacity.into(), &mut draw) > share);
    }
}

#[test]
fn averages_begin_with_the_first_sample() {
    let mut literal = literal::Statistics::default();
    literal.update(3000.0, 1000.0);
    let believed = literal::b_mem(
        100_000.0,
        literal.prompt_mean,
        literal.output_mean,
        (1, 999),
    );
    assert_eq!(believed, 112, "five times what fits");

    let footprint = footprint_of(&[4000; 16]);
    assert_eq!(footprint.mean(), 4000);
    assert_eq!(footprint.b_mem(100_000, 1645, 999), Some(25));
}

#[test]
fn no_memory_bound_before_enough_samples() {
    assert_eq!(Footprint::default().b_mem(1000, 1645, 999), None);
    assert_eq!(footprint_of(&[100_000; 15]).b_mem(1000, 1645, 999), None);
    // One request always runs: one that does not fit at all is rejected separately.
    assert_eq!(footprint_of(&[100_000; 16]).b_mem(1000, 1645, 999), Some(1));
    assert_eq!(footprint_of(&[0; 16]).b_mem(1000, 1645, 999), Some(999));
}

#[test]
fn averages_forget_old_requests() {
    let mut sizes = vec![10_000; 1024];
    sizes.extend([100; 4096]);
    let footprint = footprint_of(&sizes);
    assert!(footprint.requests() <= 1024);
    assert!((100..1000).contains(&footprint.mean()), "{footprint:?}");
}

#[test]
fn implausible_sums_are_refused() {
    let good = ended(&[10, 20]);
    let wrong = [
        ServiceSample { ended: 0, ..good },
        ServiceSample {
            ended: u32::MAX,
            ..good
        },
        ServiceSample {
            added_tokens: u64::MAX,
            added_squared: u64::MAX,
            ..good
        },
        ServiceSample {
            added_squared: 449,
            ..good
        },
        ServiceSample {
            added_squared: u64::MAX,
            ..good
        },
    ];
    for sample in wrong {
        let mut footprint = Footprint::default();
        footprint.observe(&sample);
        assert_eq!(footprint, Footprint::default(), "{sample:?}");
    }
}

proptest! {
    #[test]
    fn memory_bound_is_the_largest_that_fits(
        sizes in prop::collection::vec(0_u64..20_000, 16..200),
        capacity in 1_u64..10_000_000,
        z_milli in 0_u32..=10_000,
    ) {
        let footprint = footprint_of(&sizes);
        let n = sizes.len() as f64;
        let mean = sizes.iter().sum::<u64>() as f64 / n;
        let squares = sizes.iter().map(|it| (it * it) as f64).sum::<f64>() / n;
        let deviation = (squares - mean * mean).max(0.0).sqrt();
        let needed = |b: u32| {
            f64::from(b) * mean + f64::from(z_milli) / 1000.0 * deviation * f64::from(b).sqrt()
        };
        let b = footprint.b_mem(capacity, z_milli, 65_536).expect("enough were seen");
        let slack = 1e-6 * capacity as f64 + 1e-3;
        prop_assert!(b == 1 || needed(b) <= capacity as f64 + slack);
        prop_assert!(b == 65_536 || needed(b + 1) >= capacity as f64 - slack);
    }
}

// Algorithms 2 and 7.

/// An engine whose time between tokens depends on the number of running requests.
struct Modelled<F> {
    inter_token_us: F,
    pace: SlaController,
    sla: SlaSettings,
    b_mem: Option<u32>,
}

impl<F: FnMut(u32) -> u32> Modelled<F> {
    /// Simulates a second in which `demand` requests want to run.
    fn second(&mut self, demand: u32) -> u32 {
        let limit = self.limit();
        let running = demand.min(limit);
        let inter_token_us = (self.inter_token_us)(running);
        let sample = tokens(inter_token_us, running, running >= limit);
        self.pace.observe(&sample, &self.sla, self.b_mem);
        inter_token_us
    }

    fn limit(&self) -> u32 {
        let b_sla = self.pace.b_sla(&self.sla);
        self.b_mem.map_or(b_sla, |b_mem| b_mem.min(b_sla))
    }

    fn seconds(&mut self, seconds: u32, demand: u32) -> u32 {
        (0..seconds).for_each(|_| {
            self.second(demand);
        });
        self.limit()
    }
}

fn modelled<F: FnMut(u32) -> u32>(inter_token_us: F, sla: SlaSettings) -> Modelled<F> {
    Modelled {
        inter_token_us,
        pace: SlaController::default(),
        sla,
        b_mem: None,
    }
}

/// Returns a usual time between tokens: 10 ms plus 0.3 ms per running request, 50 ms at 133.
fn usual(running: u32) -> u32 {
    10_000 + 300 * running
}

#[test]
fn controller_finds_and_keeps_the_bound() {
    let mut engine = modelled(usual, sla(50_000));
    let bounds: Vec<u32> = [3, 6, 9, 12, 30, 60, 200]
        .into_iter()
        .scan(0, |done, at| {
            let bound = engine.seconds(at - *done, 2000);
            *done = at;
            Some(bound)
        })
        .collect();
    expect_test::expect!["[256, 128, 129, 130, 134, 134, 134]"].assert_eq(&format!("{bounds:?}"));
    for _ in 0..100 {
        let inter_token_us = engine.second(2000);
        assert!((45_000..=55_000).contains(&inter_token_us));
    }
}

#[test]
fn controller_resists_noise() {
    let mut random = Random::new(3);
    let noisy = move |running| {
        let factor = 0.85 + 0.3 * random.unit();
        (f64::from(usual(running)) * factor) as u32
    };
    let mut engine = modelled(noisy, sla(50_000));
    engine.seconds(120, 2000);
    for _ in 0..300 {
        let bound = engine.seconds(1, 2000);
        assert!((100..170).contains(&bound), "{bound}");
    }
}

#[test]
fn slow_tokens_below_the_bound_lower_it() {
    // 80 requests at 90 ms: the limit starts at 512, which is never reached.
    let mut engine = modelled(|running| 10_000 + 1_000 * running, sla(50_000));
    let bound = engine.seconds(60, 80);
    assert!((35..=45).contains(&bound), "{bound}");
}

#[test]
fn the_literal_controller_sticks_at_two_after_idling() {
    // Decoding is bound by memory bandwidth: hardly slower with more requests, and within the band.
    let flat = |running: u32| 48_000 + 10 * running;
    let mut literal = literal::Controller::new(50_000.0, 5_000.0, (1, 128));
    let mut step = |demand: i64| {
        let b = literal.b_sla();
        let batch = demand.min(b);
        literal.update(f64::from(flat(batch as u32)), batch, 0);
        b
    };
    (0..50).for_each(|_| {
        step(2);
    });
    let after: Vec<i64> = (0..1000).map(|_| step(100)).collect();
    assert!(after.iter().all(|b| *b == 2), "{after:?}");

    let sla = SlaSettings {
        batch_max: 128,
        ..sla(50_000)
    };
    let mut ours = modelled(flat, sla);
    let before = ours.seconds(60, 100);
    let lull = ours.seconds(300, 1);
    assert!(
        lull.abs_diff(before) <= 1,
        "a lull changes nothing: {before} {lull}"
    );
    // It recovers from anywhere, even when set to 2.
    ours.pace = low_pace(2);
    let after = ours.seconds(600, 200);
    assert!(after > 100, "{after}");
}

/// Returns a controller whose limit has come down to `bound`.
fn low_pace(bound: u32) -> SlaController {
    let sla = SlaSettings {
        batch_max: bound,
        ..sla(50_000)
    };
    let mut pace = SlaController::default();
    (0..60).for_each(|_| pace.observe(&tokens(49_000, bound, true), &sla, None));
    assert_eq!(pace.b_sla(&sla), bound);
    pace
}

#[test]
fn the_literal_controller_winds_up_while_idle() {
    let mut literal = literal::Controller::new(50_000.0, 5_000.0, (1, 1024));
    let mut step = |demand: i64| {
        let b = literal.b_sla();
        let batch = demand.min(b);
        literal.update(f64::from(usual(batch as u32)), batch, 0);
        b
    };
    (0..400).for_each(|_| {
        step(2000);
    });
    let settled = step(2000);
    (0..2000).for_each(|_| {
        step(1);
    });
    let wound_up = step(1);
    assert!(
        settled < 160 && wound_up > 3 * settled,
        "{settled} {wound_up}"
    );

    let mut ours = modelled(usual, sla(50_000));
    let settled = ours.seconds(400, 2000);
    let after = ours.seconds(2000, 1);
    assert!(after.abs_diff(settled) <= 1, "{settled} {after}");
}

#[test]
fn a_binding_memory_bound_does_not_raise_the_sla_bound() {
    let mut engine = modelled(usual, sla(50_000));
    engine.seconds(200, 2000);
    let before = engine.pace.b_sla(&engine.sla);
    engine.b_mem = Some(20);
    engine.seconds(500, 2000);
    assert_eq!(engine.pace.b_sla(&engine.sla), before);
}

#[test]
fn requests_from_before_a_fall_lower_the_bound_no_further() {
    let sla = sla(50_000);
    let mut pace = low_pace(40);
    let settings = SlaSettings {
        batch_max: 1024,
        ..sla
    };
    // 200 requests from before the limit fell to 40 still run: slow, but not because of the limit.
    (0..30).for_each(|_| pace.observe(&tokens(90_000, 200, true), &settings, None));
    assert_eq!(pace.b_sla(&settings), 40);
    (0..3).for_each(|_| pace.observe(&tokens(90_000, 41, true), &settings, None));
    assert!(pace.b_sla(&settings) < 40);
}

#[test]
fn a_floor_of_decoding_requests_would_keep_the_bound_high() {
    // The original algorithm, meant for a scheduler within an engine. A router refills the floor.
    let mut literal = literal::Controller::new(50_000.0, 5_000.0, (1, 128));
    for _ in 0..500 {
        let batch = literal.b_sla();
        literal.update(90_000.0, batch, batch);
    }
    assert!(literal.b_sla() >= 64);
    let mut ours = modelled(|_| 90_000, sla(50_000));
    assert_eq!(ours.seconds(500, 2000), 1);
}

#[test]
fn controller_reaches_both_ends_of_its_range() {
    let mut slow = modelled(|_| 90_000, sla(50_000));
    assert_eq!(slow.seconds(200, 2000), 1, "no batch is fast enough");
    let mut fast = modelled(|_| 1_000, sla(50_000));
    assert_eq!(fast.seconds(200, 2000), 1024);

    let mut literal = literal::Controller::new(50_000.0, 5_000.0, (1, 1024));
    for _ in 0..2000 {
        let b = literal.b_sla();
        literal.update(90_000.0, b, 0);
    }
    assert_eq!(
        literal.b_sla(),
        3,
        "one or two requests at once are never tried"
    );
}

#[test]
fn controller_waits_for_enough_gaps() {
    let sla = sla(50_000);
    let mut pace = SlaController::default();
    let few = ServiceSample {
        gaps: 1,
        gap_us: 900_000,
        gap_running: 1,
        ..nothing()
    };
    (0..63).for_each(|_| pace.observe(&few, &sla, None));
    assert_eq!((pace.b_sla(&sla), pace.inter_token_us()), (512, None));
    pace.observe(&few, &sla, None);
    assert_eq!(pace.inter_token_us(), Some(900_000));
    assert!(pace.b_sla(&sla) < 512);
}

// The limit.

#[test]
fn the_limit_is_the_smaller_bound_clamped_to_settings() {
    let mut limit = AdaptiveLimit::default();
    let mut settings = adaptive(0);
    let limit_of = |limit: &AdaptiveLimit, settings: &LimitSettings, blocks| {
        limit.figures(settings, blocks).limit
    };
    assert_eq!(
        limit_of(&limit, &settings, Some(1000)),
        None,
        "nothing seen"
    );

    // 16,000 tokens of capacity, 400 each.
    limit.observe(&ended(&[400; 64]), &settings, Some(1000));
    assert_eq!(limit_of(&limit, &settings, Some(1000)), Some(40));
    assert_eq!(limit_of(&limit, &settings, None), None, "capacity unknown");
    assert_eq!(limit_of(&limit, &settings, Some(1_000_000)), Some(1024));
    settings.sla.batch_min = 50;
    assert_eq!(limit_of(&limit, &settings, Some(1000)), Some(50));
    settings.sla.batch_min = 1;

    settings.sla.inter_token_us = 50_000;
    assert_eq!(limit_of(&limit, &settings, None), Some(512), "the middle");
    let figures = limit.figures(&settings, Some(1000));
    assert_eq!((figures.b_mem, figures.b_sla), (Some(40), Some(512)));
    assert_eq!(figures.limit, Some(40));

    settings.concurrency = Concurrency::Fixed(7);
    assert_eq!(limit_of(&limit, &settings, Some(1000)), Some(7));
    settings.concurrency = Concurrency::Unlimited;
    assert_eq!(limit_of(&limit, &settings, Some(1000)), None);
}

#[test]
fn controller_resets_without_a_service_level() {
    let mut limit = AdaptiveLimit::default();
    limit.observe(&tokens(90_000, 10, true), &adaptive(50_000), None);
    assert_ne!(limit, AdaptiveLimit::default());
    limit.observe(&tokens(90_000, 10, true), &adaptive(0), None);
    assert_eq!(limit, AdaptiveLimit::default());
}

fn any_sample() -> impl Strategy<Value = ServiceSample> {
    let count = prop_oneof![0_u64..300, any::<u64>()];
    prop::array::uniform8(count).prop_map(|it| ServiceSample {
        ended: it[0] as u32,
        added_tokens: it[1],
        added_squared: it[2],
        block_tokens: it[3] as u32,
        gaps: it[4],
        gap_us: it[5],
        gap_running: it[6],
        gaps_at_limit: it[7],
        ..nothing()
    })
}

fn any_settings() -> impl Strategy<Value = LimitSettings> {
    let number = || prop_oneof![1_u32..200, 1..=crate::admission::BATCH_MAX];
    (
        number(),
        number(),
        any::<u16>(),
        any::<u32>(),
        0_u32..=10_000,
    )
        .prop_map(
            |(a, b, inter_token_us, tolerance_us, memory_z_milli)| LimitSettings {
                sla: SlaSettings {
                    inter_token_us: inter_token_us.into(),
                    tolerance_us,
                    batch_min: a.min(b),
                    batch_max: a.max(b),
                    memory_z_milli,
                },
                ..adaptive(0)
            },
        )
}

proptest! {
    #[test]
    fn the_limit_stays_within_settings_for_any_sample(
        steps in prop::collection::vec((any_settings(), any_sample(), any::<Option<u32>>()), 1..60),
    ) {
        let mut limit = AdaptiveLimit::default();
        for (settings, sample, capacity) in steps {
            limit.observe(&sample, &settings, capacity);
            let figures = limit.figures(&settings, capacity);
            let allowed = settings.sla.batch_min..=settings.sla.batch_max;
            prop_assert!(figures.limit.is_none_or(|it| allowed.contains(&it)));
            if let Some((low, high)) = figures.interval {
                prop_assert!(low <= high && allowed.contains(&low) && allowed.contains(&high));
            }
        }
    }
}

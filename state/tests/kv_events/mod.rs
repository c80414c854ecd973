//! The router's knowledge from KV events matches the engine's cache, whatever happens in between.

mod evictions;
mod fixture;
mod pool;
mod scenes;
mod tiers;
mod under_way;

use fixture::EventFixture;
use proptest::prelude::*;

/// One step of a random history.
#[derive(Debug, Clone)]
enum Step {
    Arrive {
        tokens: Vec<u8>,
        salt: u8,
        output: u8,
        is_routed: bool,
    },
    Engine(usize),
    Release(bool),
    Deliver {
        rank: usize,
        back: usize,
        cut: usize,
    },
    CatchUp(usize, bool),
    Doubt(usize),
    OldNews(usize),
    Forget(usize, usize),
    Reset(usize),
    Restart(usize, bool),
    Rebuild,
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rank = || 0_usize..2;
    let arrive = (
        prop::collection::vec(0_u8..2, 1..14),
        prop::bool::weighted(0.1),
        0_u8..5,
        prop::bool::weighted(0.8),
    )
        .prop_map(|(tokens, is_salted, output, is_routed)| Step::Arrive {
            tokens,
            salt: u8::from(is_salted),
            output,
            is_routed,
        });
    let step = prop_oneof![
        12 => arrive,
        20 => rank().prop_map(Step::Engine),
        6 => prop::bool::weighted(0.1).prop_map(Step::Release),
        6 => (rank(), 0_usize..4, 0_usize..3)
            .prop_map(|(rank, back, cut)| Step::Deliver { rank, back, cut }),
        8 => (rank(), any::<bool>()).prop_map(|(rank, twice)| Step::CatchUp(rank, twice)),
        1 => rank().prop_map(Step::Doubt),
        1 => rank().prop_map(Step::OldNews),
        1 => (rank(), 0_usize..6).prop_map(|(rank, kept)| Step::Forget(rank, kept)),
        2 => rank().prop_map(Step::Reset),
        1 => (rank(), any::<bool>()).prop_map(|(rank, is_seen)| Step::Restart(rank, is_seen)),
        2 => Just(Step::Rebuild),
        3 => (0_u64..9_000).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..120)
}

fn run(fixture: &mut EventFixture, step: Step) {
    match step {
        Step::Arrive {
            tokens,
            salt,
            output,
            is_routed,
        } => fixture.arrive(&tokens, salt, output, is_routed),
        Step::Engine(rank) => fixture.step(rank),
        Step::Release(is_abort) => fixture.release(is_abort),
        Step::Deliver { rank, back, cut } => fixture.deliver(rank, back, cut),
        Step::CatchUp(rank, is_twice) => fixture.catch_up(rank, is_twice),
        Step::Doubt(rank) => fixture.doubt(rank),
        Step::OldNews(rank) => fixture.old_news(rank),
        Step::Forget(rank, kept) => fixture.forget(rank, kept),
        Step::Reset(rank) => fixture.reset(rank),
        Step::Restart(rank, is_seen) => fixture.restart(rank, is_seen),
        Step::Rebuild => fixture.rebuild(),
        Step::Pass(milliseconds) => fixture.pass(milliseconds),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Under any loss, duplication, reordering and restart, exact is never claimed wrongly. Once
    /// all is quiet and heard, the router finds for every prompt what the engine would. A stream
    /// with messages lost for good is recognised, and recovers after a reset.
    #[test]
    fn the_view_equals_the_engines_cache(steps in steps(), capacity in prop::option::of(1_u32..20)) {
        let mut fixture = EventFixture::new(capacity);
        for step in steps {
            run(&mut fixture, step);
            fixture.check();
        }
        fixture.settle();
        if !fixture.is_exact() {
            for rank in 0..2 {
                fixture.reset(rank);
                fixture.arrive(&[0, 1, 0, 1, 0], 0, 2, true);
            }
            fixture.settle();
        }
        prop_assert!(fixture.is_exact());
        fixture.compare();
    }
}

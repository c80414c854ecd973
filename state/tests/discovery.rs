//! Backends that sources register: who controls them, when they drain and are removed. No answer of
//! a source removes a whole fleet.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::{Driver, restored, snapshot, spec};
use proptest::prelude::*;
use state::command::{Command, Rejection, Reply, UserSettings};
use state::discovery::{
    Discovery, DiscoveryChange, EngineCondition, ListedEngine, SourcePlan, SourceRules,
};
use state::ids::BackendRef;

const REMOVE_AFTER_MS: u64 = 30_000;

fn rules() -> SourceRules {
    SourceRules {
        source: "pods".to_owned(),
        remove_after_ms: REMOVE_AFTER_MS,
        lost_permille_max: 500,
    }
}

fn told(id: &str, condition: EngineCondition) -> ListedEngine {
    let port = 1000 + u16::from(id.as_bytes()[id.len() - 1]);
    ListedEngine {
        spec: spec(&format!("pods-{id}"), port, None),
        condition,
    }
}

fn ready(ids: &[&str]) -> Vec<ListedEngine> {
    let ids = ids.iter();
    ids.map(|id| told(id, EngineCondition::Ready)).collect()
}

fn discover(driver: &mut Driver, source: &str, change: DiscoveryChange) -> Reply {
    let source = source.to_owned();
    driver.apply(1, Command::Discover(Box::new(Discovery { source, change })))
}

fn sound(driver: &Driver) {
    assert_eq!(driver.state.check(), Ok(()));
    let bytes = snapshot(&driver.state);
    let copy = restored(&bytes);
    assert_eq!(copy.check(), Ok(()));
    assert_eq!(copy.digest(), driver.state.digest());
}

fn plan(driver: &Driver, told: &[ListedEngine]) -> SourcePlan {
    let registry = driver.state.view().registry();
    SourcePlan::of(&rules(), told, &registry.fleet(), driver.state.now_ms())
}

/// Applies a source's answer until nothing changes. Returns all changes in short form.
fn follow(driver: &mut Driver, told: &[ListedEngine]) -> Vec<String> {
    let mut done = Vec::new();
    loop {
        let plan = plan(driver, told);
        if plan.changes.is_empty() {
            return done;
        }
        for change in plan.changes {
            let name = change.backend().to_owned();
            let what = match change {
                DiscoveryChange::Found(_) => "found",
                DiscoveryChange::Lost { .. } => "lost",
                DiscoveryChange::Forgotten { .. } => "forgotten",
            };
            done.push(format!("{what} {name}"));
            assert_eq!(discover(driver, "pods", change), Reply::Applied);
        }
        sound(driver);
        assert!(done.len() < 1000, "no end: {done:?}");
    }
}

/// Lets replicated time pass, a second per command.
fn pass(driver: &mut Driver, seconds: u64) {
    for _ in 0..seconds {
        driver.apply(
            1,
            Command::configure_user("ada", UserSettings::of_weight(1000)),
        );
    }
}

fn handle(driver: &Driver, id: &str) -> Option<(BackendRef, bool)> {
    let backend = driver.state.backend(id)?;
    Some((backend.handle, backend.draining))
}

#[test]
fn a_vanished_engine_drains_is_removed_and_returns_as_new() {
    let mut driver = Driver::new();
    let both = ready(&["a", "b"]);
    assert_eq!(follow(&mut driver, &both), ["found pods-a", "found pods-b"]);
    let (first, _) = handle(&driver, "pods-b").unwrap();
    let one = ready(&["a"]);
    assert_eq!(follow(&mut driver, &one), ["lost pods-b"]);
    assert_eq!(handle(&driver, "pods-b"), Some((first, true)));
    // It returns in time: the same incarnation, so what it owns is kept.
    pass(&mut driver, 20);
    assert_eq!(follow(&mut driver, &both), ["found pods-b"]);
    assert_eq!(handle(&driver, "pods-b"), Some((first, false)));
    assert_eq!(follow(&mut driver, &one), ["lost pods-b"]);
    pass(&mut driver, 20);
    assert!(follow(&mut driver, &one).is_empty());
    pass(&mut driver, 20);
    assert_eq!(follow(&mut driver, &one), ["forgotten pods-b"]);
    assert_eq!(handle(&driver, "pods-b"), None);
    assert_eq!(follow(&mut driver, &both), ["found pods-b"]);
    assert_ne!(handle(&driver, "pods-b").unwrap().0, first);
}

#[test]
fn an_empty_source_answer_changes_nothing() {
    let mut driver = Driver::new();
    follow(&mut driver, &ready(&["a", "b", "c", "d"]));
    assert!(follow(&mut driver, &[]).is_empty());
    // Half of them at once, then half of the rest.
    let other = ready(&["z"]);
    assert_eq!(
        follow(&mut driver, &other),
        ["found pods-z", "lost pods-a", "lost pods-b"]
    );
    assert_eq!(plan(&driver, &other).withheld, 2);
    for _ in 0..4 {
        pass(&mut driver, 40);
        follow(&mut driver, &other);
    }
    let left: Vec<_> = driver
        .state
        .backends()
        .map(|it| it.spec.id.clone())
        .collect();
    assert_eq!(left, ["pods-z"]);
    pass(&mut driver, 40);
    assert!(follow(&mut driver, &ready(&[])).is_empty());
}

#[test]
fn the_only_engine_is_replaced_but_never_just_removed() {
    let mut driver = Driver::new();
    follow(&mut driver, &ready(&["a"]));
    assert_eq!(
        follow(&mut driver, &ready(&["b"])),
        ["found pods-b", "lost pods-a"]
    );
}

#[test]
fn a_leaving_engine_drains_at_once_and_is_not_registered() {
    let mut driver = Driver::new();
    follow(&mut driver, &ready(&["a"]));
    let leaving = [
        told("a", EngineCondition::Leaving),
        told("b", EngineCondition::Leaving),
    ];
    assert_eq!(follow(&mut driver, &leaving), ["lost pods-a"]);
    // As long as the source lists it, it is not removed.
    pass(&mut driver, 60);
    assert!(follow(&mut driver, &leaving).is_empty());
    // Another engine may already have its address.
    let mut next = told("c", EngineCondition::Ready);
    next.spec.url = leaving[0].spec.url.clone();
    let both = [leaving[0].clone(), next];
    assert_eq!(follow(&mut driver, &both), ["found pods-c"]);
    assert_eq!(follow(&mut driver, &both[1..]), ["forgotten pods-a"]);
}

#[test]
fn an_unready_engine_drains_unless_too_many_are_unready() {
    let mut driver = Driver::new();
    follow(&mut driver, &ready(&["a", "b"]));
    let not = |ids: &[&str]| -> Vec<ListedEngine> {
        let ids = ids.iter();
        ids.map(|id| told(id, EngineCondition::NotReady)).collect()
    };
    assert_eq!(follow(&mut driver, &not(&["a", "b", "c"])), ["lost pods-a"]);
    pass(&mut driver, 60);
    assert!(follow(&mut driver, &not(&["a", "b", "c"])).is_empty());
    assert_eq!(follow(&mut driver, &ready(&["a", "b"])), ["found pods-a"]);
}

#[test]
fn discovery_leaves_operators_backends_and_drains_alone() {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("pods-a", 1097, Some(7))));
    driver.apply(1, Command::PutBackend(spec("mine", 1098, None)));
    let all = ready(&["a", "b", "c"]);
    assert_eq!(follow(&mut driver, &all), ["found pods-c"]);
    let told_why: Vec<_> = plan(&driver, &all)
        .refused
        .into_iter()
        .map(|it| it.reason)
        .collect();
    assert_eq!(
        told_why,
        [
            "an operator registered the backend pods-a",
            "its url is that of the backend mine"
        ]
    );
    for change in [
        DiscoveryChange::Found(spec("mine", 9, None)),
        DiscoveryChange::Lost {
            name: "mine".to_owned(),
        },
        DiscoveryChange::Forgotten {
            name: "mine".to_owned(),
        },
    ] {
        let reply = discover(&mut driver, "pods", change);
        let name = "mine".to_owned();
        assert_eq!(reply, Reply::Rejected(Rejection::NotOfSource { name }));
    }
    // A backend drained by an operator is also drained when it returns.
    let name = "pods-c".to_owned();
    let drain = |draining| Command::SetDraining {
        name: name.clone(),
        draining,
        moves_streams: false,
    };
    follow(&mut driver, &ready(&["c", "d"]));
    driver.apply(1, drain(true));
    assert!(follow(&mut driver, &ready(&["c", "d"])).is_empty());
    follow(&mut driver, &ready(&["d"]));
    follow(&mut driver, &ready(&["c", "d"]));
    assert!(handle(&driver, "pods-c").unwrap().1);
    // A backend put again by an operator belongs to the operator.
    driver.apply(1, Command::PutBackend(spec("pods-c", 1099, Some(3))));
    assert!(follow(&mut driver, &ready(&["d"])).is_empty());
}

#[test]
fn a_refused_engine_is_reported_and_keeps_its_former_spec() {
    let mut driver = Driver::new();
    follow(&mut driver, &ready(&["a", "b"]));
    let mut wrong = told("a", EngineCondition::Ready);
    wrong.spec.url = "ftp://a".to_owned();
    let mut twice = told("c", EngineCondition::Ready);
    twice.spec.url = told("b", EngineCondition::Ready).spec.url;
    let answer = [
        wrong,
        told("b", EngineCondition::Ready),
        twice,
        told("b", EngineCondition::Ready),
    ];
    assert!(follow(&mut driver, &answer).is_empty());
    let refused = plan(&driver, &answer).refused;
    let reasons: Vec<_> = refused.iter().map(|it| &*it.reason).collect();
    assert_eq!(
        reasons,
        [
            "url: http://host:port or https://host:port, with a path prefix if wanted",
            "pods-b is listed twice",
            "its url is that of pods-b"
        ]
    );
}

#[test]
fn an_oversize_source_fills_the_registry_and_no_more() {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("mine", 1, None)));
    let engine = |number: u32| {
        let mut engine = told("a", EngineCondition::Ready);
        engine.spec.id = format!("pods-{number:05}");
        engine.spec.url = format!("http://10.0.{}.{}:1", number / 256, number % 256);
        engine
    };
    let answer: Vec<_> = (0..10_000).map(engine).collect();
    let plan = plan(&driver, &answer);
    assert_eq!(plan.changes.len(), 1023);
    assert_eq!(plan.refused.len(), 10_000 - 1023);
    assert_eq!(
        plan.refused[0].reason,
        "pods lists more engines than the 1024 that a cluster can have"
    );
}

/// One answer of a source, or none.
#[derive(Debug, Clone)]
enum DiscoveryEvent {
    /// Which of eight engines the source lists, and which of these are not ready.
    Answer(u8, u8),
    Nothing,
    Pass(u64),
    Drain(u8, bool),
    PutByHand(u8),
    NextLeader,
}

fn discovery_event() -> impl Strategy<Value = DiscoveryEvent> {
    let not_ready = prop_oneof![4 => Just(0_u8), 1 => any::<u8>()];
    prop_oneof![
        8 => (any::<u8>(), not_ready).prop_map(|(told, not)| DiscoveryEvent::Answer(told, not)),
        2 => Just(DiscoveryEvent::Nothing),
        4 => (1_u64..40).prop_map(DiscoveryEvent::Pass),
        1 => (0_u8..8, any::<bool>()).prop_map(|(engine, draining)| DiscoveryEvent::Drain(engine, draining)),
        1 => (0_u8..8).prop_map(DiscoveryEvent::PutByHand),
        2 => Just(DiscoveryEvent::NextLeader),
    ]
}

fn id(engine: u8) -> String {
    format!("pods-{engine}")
}

fn answer(told_of: u8, not_ready: u8) -> Vec<ListedEngine> {
    let engines = (0..8_u8).filter(|engine| told_of & (1 << engine) != 0);
    let condition = |engine: u8| match not_ready & (1 << engine) {
        0 => EngineCondition::Ready,
        _ => EngineCondition::NotReady,
    };
    engines
        .map(|engine| told(&engine.to_string(), condition(engine)))
        .collect()
}

/// Checks what a history of answers must not do.
#[derive(Default)]
struct ApplyObserver {
    /// Backends of operators, as they were registered.
    by_hand: BTreeMap<String, (BackendRef, state::Backend)>,
}

impl ApplyObserver {
    fn look(&self, driver: &Driver) {
        for (name, (handle, backend)) in &self.by_hand {
            let now = driver
                .state
                .backend(name)
                .unwrap_or_else(|| panic!("{name} is gone"));
            assert_eq!((now.handle, now.draining), (*handle, backend.draining));
        }
    }

    /// Applies an answer, checking each change.
    fn follow(&self, driver: &mut Driver, told: &[ListedEngine]) {
        let ids: BTreeSet<_> = told.iter().map(|it| it.spec.id.clone()).collect();
        for _ in 0..100 {
            let plan = plan(driver, told);
            assert!(!told.is_empty() || plan == SourcePlan::default());
            if plan.changes.is_empty() {
                return;
            }
            for change in plan.changes {
                if let DiscoveryChange::Forgotten { name } = &change {
                    let registry = driver.state.view().registry();
                    let slot = driver
                        .state
                        .backend(name)
                        .expect("it is registered")
                        .handle
                        .slot;
                    let since_ms = registry.discovered[&slot]
                        .lost
                        .expect("it is lost")
                        .since_ms;
                    assert!(driver.state.now_ms() - since_ms >= REMOVE_AFTER_MS);
                    assert!(!ids.contains(name));
                }
                let is_lost = matches!(change, DiscoveryChange::Lost { .. });
                assert_eq!(discover(driver, "pods", change), Reply::Applied);
                let known = &driver.state.view().registry().discovered;
                let lost = known.values().filter(|it| it.lost.is_some()).count();
                assert!(!is_lost || 2 * lost <= known.len(), "{lost} are lost");
                self.look(driver);
            }
        }
        panic!("no end");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any answers of a source: operators' backends stay, not all backends are lost, none is
    /// removed early, and each answer settles. A leader that restored a snapshot decides the same.
    #[test]
    fn no_sequence_of_answers_removes_the_whole_fleet(history in prop::collection::vec(discovery_event(), 1..40)) {
        let mut driver = Driver::new();
        let mut witness = ApplyObserver::default();
        let mut last = Vec::new();
        for step in history {
            match step {
                DiscoveryEvent::Answer(told_of, not_ready) => {
                    last = answer(told_of, not_ready);
                    witness.follow(&mut driver, &last);
                }
                DiscoveryEvent::Nothing => witness.follow(&mut driver, &[]),
                DiscoveryEvent::Pass(seconds) => pass(&mut driver, seconds),
                DiscoveryEvent::Drain(engine, draining) => {
                    let name = id(engine);
                    if !witness.by_hand.contains_key(&name) {
                        driver.apply(1, Command::SetDraining { name, draining, moves_streams: false,});
                    }
                }
                DiscoveryEvent::PutByHand(engine) => {
                    let put = told(&engine.to_string(), EngineCondition::Ready).spec;
                    driver.apply(1, Command::PutBackend(put));
                    let backend = driver.state.backend(&id(engine)).unwrap().clone();
                    witness.by_hand.insert(id(engine), (backend.handle, backend));
                }
                DiscoveryEvent::NextLeader => {
                    let before = plan(&driver, &last);
                    let state = restored(&snapshot(&driver.state));
                    driver = Driver::over(state, &driver);
                    prop_assert_eq!(plan(&driver, &last), before);
                }
            }
            witness.look(&driver);
        }
        sound(&driver);
    }

    /// If a source lists ever fewer engines, at most the fraction is removed per `remove_after`.
    #[test]
    fn at_most_the_configured_fraction_is_removed_per_period(count in 2_u8..9, told_of in 1_u8..=255, seconds in 1_u64..29) {
        let mut driver = Driver::new();
        let mask = (1_u16 << count) - 1;
        let mask = u8::try_from(mask).unwrap_or(u8::MAX);
        let witness = ApplyObserver::default();
        witness.follow(&mut driver, &answer(mask, 0));
        let wanted = answer(told_of & mask | 1, 0);
        witness.follow(&mut driver, &wanted);
        // Replicated time is slightly ahead of the time that passes here: commands take time too.
        let look = |driver: &Driver| (driver.state.now_ms(), driver.state.backends().count());
        let mut looks = vec![look(&driver)];
        for _ in 0..8 * (REMOVE_AFTER_MS / 1000 / seconds + 1) {
            pass(&mut driver, seconds);
            witness.follow(&mut driver, &wanted);
            looks.push(look(&driver));
        }
        for (nth, (since_ms, first)) in looks.iter().enumerate() {
            let near = looks[nth..].iter().take_while(|(at_ms, _)| at_ms - since_ms < REMOVE_AFTER_MS);
            for (_, later) in near {
                prop_assert!(first - later <= first / 2, "{:?}", looks);
            }
        }
        prop_assert_eq!(looks.last().unwrap().1, wanted.len());
        sound(&driver);
    }
}

#[test]
fn discovered_backends_survive_in_a_snapshot() {
    let mut driver = Driver::new();
    let digest = driver.state.digest();
    follow(&mut driver, &ready(&["a", "b"]));
    follow(&mut driver, &ready(&["a"]));
    assert_ne!(driver.state.digest(), digest);
    let copy = restored(&snapshot(&driver.state));
    let (kept, known) = (copy.view().registry(), driver.state.view().registry());
    assert_eq!(kept.discovered, known.discovered);
}

#[test]
fn ranks_follow_their_engines_discovery() {
    let mut driver = Driver::new();
    let both = ready(&["a", "b"]);
    follow(&mut driver, &both);
    let (backend, _) = handle(&driver, "pods-a").unwrap();
    let ranks = Command::SetRanks { backend, ranks: 2 };
    assert_eq!(driver.apply(1, ranks), Reply::Applied);
    assert_eq!(plan(&driver, &both), SourcePlan::default());
    assert_eq!(follow(&mut driver, &ready(&["b"])), ["lost pods-a"]);
    let drains = driver.state.backends().filter(|it| it.draining).count();
    assert_eq!(drains, 2);
    pass(&mut driver, 40);
    assert_eq!(follow(&mut driver, &ready(&["b"])), ["forgotten pods-a"]);
    assert_eq!(driver.state.backends().count(), 1);
}

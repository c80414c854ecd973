//! Wanted engines through the log: from what the state knows of demand and engines, the same at every
//! replica, and with the replicas' sessions.

use crate::common::{Driver, batch, demand, restored, service, snapshot, spec};
use state::admission::{AdmissionSettings, Concurrency};
use state::capacity::{DEMAND_REQUESTS_MAX, ModelCapacityView, PLACES_UNKNOWN};
use state::command::{BackendRole, BackendSpec, BatchReply, Command, Item, Reply};
use state::ids::{BackendRef, Incarnation, ReplicaId, SessionId, Slot};

const MODEL: &str = "m";

fn engine(id: &str, port: u16, capacity_blocks: Option<u32>) -> Command {
    Command::PutBackend(BackendSpec {
        models: vec![MODEL.to_owned()],
        ..spec(id, port, capacity_blocks)
    })
}

fn limited(requests: u32) -> Command {
    Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(requests),
        ..AdmissionSettings::default()
    })
}

/// Applies the same report of `replica` for as long as the number of wanted engines takes to follow.
fn settle(driver: &mut Driver, replica: u8, (waiting, running): (u32, u32)) -> ModelCapacityView {
    // The harness proposes a command a second.
    for _ in 0..120 {
        driver.apply(replica, batch(vec![demand(MODEL, waiting, running)]));
        assert_eq!(driver.state.check(), Ok(()));
    }
    seen(driver)
}

fn seen(driver: &Driver) -> ModelCapacityView {
    driver.state.view().capacity().model(MODEL)
}

#[test]
fn wanted_engines_follow_from_limits_and_the_demand_of_all_replicas() {
    let mut driver = Driver::new();
    driver.apply(1, limited(10));
    driver.apply(1, engine("a", 1, None));
    settle(&mut driver, 1, (4, 30));
    let both = settle(&mut driver, 2, (6, 40));
    // 80 requests need almost 9 spare places, and each engine has 10.
    assert_eq!((both.wanted, both.demand.requests()), (9, 80));
    assert_eq!(both.saturation_permille, 8_000);
    driver.apply(1, engine("b", 2, None));
    driver.apply(1, engine("c", 3, None));
    driver.apply(
        1,
        Command::SetDraining {
            name: "c".to_owned(),
            draining: true,
            moves_streams: false,
        },
    );
    driver.apply(
        1,
        Command::PutBackend(BackendSpec {
            role: BackendRole::Prefill,
            models: vec![MODEL.to_owned()],
            ..spec("d", 4, None)
        }),
    );
    let more = settle(&mut driver, 2, (6, 40));
    assert_eq!(
        (more.wanted, more.saturation_permille),
        (9, 4_000),
        "of a and b"
    );
}

#[test]
fn places_follow_from_the_kv_cache_without_a_limit() {
    let mut driver = Driver::new();
    driver.apply(
        1,
        Command::PutAdmission(AdmissionSettings {
            concurrency: Concurrency::Unlimited,
            ..AdmissionSettings::default()
        }),
    );
    driver.apply(1, engine("a", 1, Some(1000)));
    assert_eq!(settle(&mut driver, 1, (0, 1)).room.places, PLACES_UNKNOWN);
    let handle = BackendRef {
        slot: Slot(0),
        incarnation: Incarnation(1),
    };
    let sample = service(handle, 90, 40_000);
    driver.apply(1, batch(vec![Item::ObserveService(Box::new(sample))]));
    // 1000 blocks of 16 tokens hold 40 requests of 400 tokens each.
    let known = settle(&mut driver, 1, (0, 64));
    let served = driver.state.view().service().get(Slot(0)).unwrap().limits;
    assert_eq!(served.limit, None);
    assert_eq!(Some(known.room.places), served.b_mem);
    assert!(known.room.places <= 40, "{known:?}");
    assert_eq!(known.wanted, (64 + 8_u32).div_ceil(known.room.places));
}

#[test]
fn capacity_of_engines_is_remembered_while_there_is_none() {
    let mut driver = Driver::new();
    driver.apply(1, limited(100));
    driver.apply(1, engine("a", 1, None));
    assert_eq!(settle(&mut driver, 1, (0, 1)).room.places, 100);
    driver.apply(
        1,
        Command::DeleteBackend {
            name: "a".to_owned(),
        },
    );
    let none = settle(&mut driver, 1, (160, 0));
    assert_eq!((none.wanted, none.saturation_permille), (2, 1_600));
}

#[test]
fn demand_ends_with_the_session_of_its_replica() {
    let mut driver = Driver::new();
    driver.apply(1, batch(vec![demand(MODEL, 1, 2)]));
    driver.apply(2, batch(vec![demand(MODEL, 4, 0)]));
    driver.apply(
        1,
        Command::ExpireSession {
            replica: ReplicaId(2),
            session: SessionId(1),
        },
    );
    assert_eq!(seen(&driver).demand.requests(), 3);
    // A later run of replica 1 starts with nothing.
    driver.apply_in(1, 2, Command::PutAdmission(AdmissionSettings::default()));
    assert_eq!(seen(&driver).demand.requests(), 0);
    assert_eq!(seen(&driver).wanted, 1, "for a while");
    assert_eq!(driver.state.check(), Ok(()));
}

#[test]
fn a_replica_from_a_snapshot_wants_the_same_engines_from_then_on() {
    let mut driver = Driver::new();
    driver.apply(1, engine("a", 1, None));
    settle(&mut driver, 1, (3, 50));
    let state = restored(&snapshot(&driver.state));
    assert_eq!(state.check(), Ok(()));
    let mut other = Driver::over(state, &driver);
    assert_eq!(seen(&other), seen(&driver));
    for replica in [&mut driver, &mut other] {
        settle(replica, 2, (0, 9));
    }
    assert_eq!(seen(&other), seen(&driver));
    assert_eq!(other.state.digest(), driver.state.digest());
}

#[test]
fn an_invalid_report_is_dropped() {
    let mut driver = Driver::new();
    let items = vec![demand("", 1, 0), demand(MODEL, DEMAND_REQUESTS_MAX + 1, 0)];
    let reply = driver.apply(1, batch(items));
    let dropped = BatchReply {
        dropped: 2,
        ..BatchReply::default()
    };
    assert_eq!(reply, Reply::Batch(dropped));
    assert!(driver.state.view().capacity().iter().next().is_none());
}

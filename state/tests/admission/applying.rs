//! Admission in the state: commands and snapshots. A state without it does not change.

use state::admission::{AdmissionSettings, ChargeInput};
use state::caches::CacheScope;
use state::command::{
    Charge, Command, Founding, Item, Lane, Rejection, Reply, UserChanges, UserDefaults, UserSpec,
};
use state::ids::LogIndex;
use state::policy::{PolicyConfig, RoutingSettings};
use state::prefix::user_key;
use state::quotas::UserLimits;
use state::{AuditAction, RouterState};

use crate::common::{self, Driver, restored, snapshot};

fn limits(requests: u32) -> UserLimits {
    UserLimits {
        requests: Some(requests),
        ..UserLimits::default()
    }
}

fn put(name: &str, limits: UserLimits) -> Command {
    Command::PutUserLimits {
        name: name.to_owned(),
        limits,
    }
}

#[test]
fn user_limits_are_set_validated_and_removed() {
    let mut driver = Driver::new();
    assert_eq!(driver.apply(1, put("bob", limits(5))), Reply::Applied);
    let user = |driver: &Driver| driver.state.user_named("bob");
    assert_eq!(user(&driver).unwrap().limits, Some(limits(5)));
    assert_eq!(user(&driver).unwrap().left.requests, Some(5));
    let refused = driver.apply(1, put("bob", limits(0)));
    assert!(matches!(
        refused,
        Reply::Rejected(Rejection::Invalid { .. })
    ));
    let refused = driver.apply(1, put("", limits(1)));
    assert!(matches!(
        refused,
        Reply::Rejected(Rejection::Invalid { .. })
    ));
    driver.apply(1, put("bob", UserLimits::default()));
    assert_eq!(user(&driver).unwrap().limits, None);
    let settings = AdmissionSettings {
        user_limits: limits(0),
        ..AdmissionSettings::default()
    };
    let refused = driver.apply(1, Command::PutAdmission(settings));
    assert!(matches!(
        refused,
        Reply::Rejected(Rejection::Invalid { .. })
    ));
    assert_eq!(driver.state.check(), Ok(()));
}

#[test]
fn founding_sets_all_settings_or_none() {
    let founding = |requests, bins| {
        let admission = AdmissionSettings {
            bins,
            ..AdmissionSettings::default()
        };
        let routing = RoutingSettings {
            learn: false,
            ..RoutingSettings::default()
        };
        Command::from(Founding {
            routing,
            admission,
            user_defaults: UserDefaults {
                limits: limits(requests),
                ..UserDefaults::default()
            },
            ..Founding::of_seed(common::HASH_SEED, PolicyConfig::LeastRequest)
        })
    };
    let mut state = RouterState::new();
    let mut apply = |seq, command| {
        let index = LogIndex(state.applied().0 + 1);
        let envelope = common::envelope(1, 1, Lane::Admin, seq, command);
        state.apply(index, envelope)
    };
    let refused = apply(1, founding(0, 4));
    assert!(matches!(
        refused,
        Reply::Rejected(Rejection::Invalid { .. })
    ));
    assert_eq!(apply(2, founding(5, 4)), Reply::Applied);
    let again = Reply::Rejected(Rejection::AlreadyInitialised);
    assert_eq!(apply(3, founding(7, 1)), again);
    let registry = state.view().registry();
    assert_eq!(registry.policy, PolicyConfig::LeastRequest);
    assert_eq!(registry.hash_secret, Some(common::secret()));
    assert!(registry.routing.as_ref().is_some_and(|it| !it.learn));
    let admission = registry.admission.as_ref().unwrap();
    assert_eq!((admission.bins, admission.user_limits), (4, limits(5)));
    assert_eq!(state.check(), Ok(()));
    let copy = restored(&snapshot(&state));
    assert_eq!(copy.digest(), state.digest());
    let actions: Vec<_> = state.audit().map(|entry| entry.action).collect();
    assert_eq!(actions, [AuditAction::FoundCluster]);
}

#[test]
fn weight_and_limits_are_set_atomically() {
    let set = |weight_milli, limits| Command::SetUser {
        user: UserSpec {
            name: "bob".to_owned(),
            weight_milli,
        },
        limits,
    };
    let mut driver = Driver::new();
    for wrong in [set(0, limits(5)), set(2000, limits(0))] {
        let refused = driver.apply(1, wrong);
        assert!(matches!(
            refused,
            Reply::Rejected(Rejection::Invalid { .. })
        ));
        assert_eq!(driver.state.user_named("bob"), None);
    }
    assert_eq!(driver.apply(1, set(2000, limits(5))), Reply::Applied);
    let user = driver.state.user_named("bob").unwrap();
    assert_eq!((user.weight_milli, user.limits), (2000, Some(limits(5))));
    let none = UserLimits::default();
    assert_eq!(driver.apply(1, set(500, none)), Reply::Applied);
    let user = driver.state.user_named("bob").unwrap();
    assert_eq!((user.weight_milli, user.limits), (500, None));
    assert_eq!(driver.state.check(), Ok(()));
}

#[test]
fn scope_and_weight_are_set_atomically() {
    let set = |weight_milli, scope| {
        Command::ConfigureUser(Box::new(UserChanges {
            name: "bob".to_owned(),
            weight_milli: Some(weight_milli),
            cache: Some(scope),
            ..UserChanges::default()
        }))
    };
    let own = |driver: &Driver| {
        let bob = user_key(common::HASH_SEED, "bob");
        driver.state.view().caches().own(bob).cloned()
    };
    let nameless = CacheScope::Group(String::new());
    let mut driver = Driver::new();
    for wrong in [set(0, Some(CacheScope::Own)), set(500, Some(nameless))] {
        let refused = driver.apply(1, wrong);
        assert!(matches!(
            refused,
            Reply::Rejected(Rejection::Invalid { .. })
        ));
        assert_eq!(driver.state.user_named("bob"), None);
        assert_eq!(own(&driver), None);
    }
    let both = set(2000, Some(CacheScope::Own));
    assert_eq!(driver.apply(1, both), Reply::Applied);
    assert_eq!(own(&driver), Some(CacheScope::Own));
    assert_eq!(driver.state.user_named("bob").unwrap().weight_milli, 2000);
    assert_eq!(driver.apply(1, set(500, None)), Reply::Applied);
    assert_eq!(own(&driver), None);
    assert_eq!(driver.state.check(), Ok(()));
}

#[test]
fn charge_input_decides_which_prompt_tokens_are_charged() {
    let table = [
        (ChargeInput::Uncached, 100),
        (ChargeInput::Full, 150),
        (ChargeInput::Discounted, 105),
    ];
    for (charge, counter) in table {
        let mut driver = Driver::new();
        driver.apply(
            1,
            Command::PutAdmission(AdmissionSettings {
                charge,
                ..AdmissionSettings::default()
            }),
        );
        let user = user_key(common::HASH_SEED, "bob");
        let prompt = Charge {
            user,
            input_uncached: 100,
            input_cached: 50,
            ..Charge::default()
        };
        driver.apply(1, common::batch(vec![Item::Charge(prompt)]));
        let view = driver.state.user(user).unwrap();
        assert_eq!(view.counter_milli_tokens, counter * 1000, "{charge:?}");
    }
}

#[test]
fn a_snapshot_keeps_waiting_requests_and_limits() {
    let mut driver = Driver::new();
    driver.apply(1, put("bob", limits(5)));
    let user = user_key(common::HASH_SEED, "bob");
    let charge = Charge {
        user,
        started: 3,
        queued: 4,
        dequeued: 3,
        ..Charge::default()
    };
    driver.apply(2, common::batch(vec![Item::Charge(charge)]));
    let copy = restored(&snapshot(&driver.state));
    assert_eq!(copy.digest(), driver.state.digest());
    assert_eq!(copy.check(), Ok(()));
    let view = copy.user(user).unwrap();
    assert_eq!((view.waiting, view.left.requests), (1, Some(1)));
}

#[test]
fn users_are_published_only_once_wanted() {
    let mut driver = Driver::new();
    let view = driver.state.view();
    driver.apply(1, put("bob", limits(5)));
    let bob = user_key(common::HASH_SEED, "bob");
    assert!(view.users().is_none());
    assert_eq!(view.quota(bob).limits, UserLimits::default());
    view.want_users();
    driver.apply(1, common::batch(Vec::new()));
    assert_eq!(view.quota(bob).limits, limits(5));
    let users = view.users().expect("they are published");
    driver.apply(1, common::batch(Vec::new()));
    let same = view.users().expect("they are published");
    assert!(std::sync::Arc::ptr_eq(&users, &same), "nothing changed");
    // The default limits change what readers see, although no user changed.
    let settings = AdmissionSettings {
        user_limits: limits(7),
        ..AdmissionSettings::default()
    };
    driver.apply(1, Command::PutAdmission(settings));
    assert_eq!(view.quota(state::ids::UserKey(1)).limits, limits(7));
    assert_eq!(view.quota(bob).limits, limits(5));
}

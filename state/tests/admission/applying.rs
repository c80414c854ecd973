//! Admission in the state: commands and snapshots.

use state::admission::{AdmissionSettings, ChargeInput};
use state::budgets::Budget;
use state::caches::CacheScope;
use state::command::{
    Charge, Command, Founding, Item, Lane, Rejection, Reply, UserDefaults, UserSettings,
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

#[test]
fn user_limits_are_set_validated_and_removed() {
    let mut driver = Driver::new();
    assert_eq!(
        driver.apply(1, common::limit("bob", limits(5))),
        Reply::Applied
    );
    let user = |driver: &Driver| driver.state.user_named("bob");
    assert_eq!(user(&driver).unwrap().own.limits, Some(limits(5)));
    assert_eq!(user(&driver).unwrap().left.requests, Some(5));
    let refused = driver.apply(1, common::limit("bob", limits(0)));
    assert!(matches!(
        refused,
        Reply::Rejected(Rejection::Invalid { .. })
    ));
    let refused = driver.apply(1, common::limit("", limits(1)));
    assert!(matches!(
        refused,
        Reply::Rejected(Rejection::Invalid { .. })
    ));
    driver.apply(1, common::limit("bob", UserLimits::default()));
    assert_eq!(user(&driver).unwrap().own.limits, None);
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
    assert_eq!(registry.hash_secret, common::secret());
    assert!(!registry.routing.learn);
    let admission = &registry.admission;
    assert_eq!(
        (admission.bins, registry.user_defaults.limits),
        (4, limits(5))
    );
    assert_eq!(state.check(), Ok(()));
    let copy = restored(&snapshot(&state));
    assert_eq!(copy.digest(), state.digest());
    let actions: Vec<_> = state.audit().map(|entry| entry.action).collect();
    assert_eq!(actions, [AuditAction::FoundCluster]);
}

#[test]
fn a_user_is_replaced_as_a_whole_or_not_at_all() {
    let settings = |weight_milli, requests| UserSettings {
        weight_milli: Some(weight_milli),
        limits: Some(limits(requests)),
        budget: Some(Budget {
            day: Some(9),
            month: None,
        }),
        models: vec!["m*".to_owned()],
        cache: Some(CacheScope::Own),
    };
    let wrong = [
        settings(0, 5),
        settings(2000, 0),
        UserSettings {
            budget: Some(Budget {
                day: Some(0),
                month: None,
            }),
            ..settings(2000, 5)
        },
        UserSettings {
            models: vec![String::new()],
            ..settings(2000, 5)
        },
        UserSettings {
            cache: Some(CacheScope::Group(String::new())),
            ..settings(2000, 5)
        },
    ];
    let mut driver = Driver::new();
    let user = |driver: &Driver| driver.state.user_named("bob").map(|user| user.own);
    for before in [None, Some(settings(500, 7))] {
        if let Some(before) = &before {
            driver.apply(1, Command::configure_user("bob", before.clone()));
        }
        for wrong in wrong.clone() {
            let refused = driver.apply(1, Command::configure_user("bob", wrong));
            let is_invalid = matches!(refused, Reply::Rejected(Rejection::Invalid { .. }));
            assert!(is_invalid, "{refused:?}");
            assert_eq!(user(&driver), before);
        }
    }
    driver.apply(1, Command::configure_user("bob", settings(2000, 5)));
    assert_eq!(user(&driver), Some(settings(2000, 5)));
    // What a command leaves out is removed.
    driver.apply(
        1,
        Command::configure_user("bob", UserSettings::of_weight(500)),
    );
    assert_eq!(user(&driver), Some(UserSettings::of_weight(500)));
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
    driver.apply(1, common::limit("bob", limits(5)));
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
fn users_are_published_if_they_changed() {
    let mut driver = Driver::new();
    let view = driver.state.view();
    driver.apply(1, common::limit("bob", limits(5)));
    let bob = user_key(common::HASH_SEED, "bob");
    assert_eq!(view.quota(bob).limits, limits(5));
    let users = view.users();
    driver.apply(1, common::batch(Vec::new()));
    let same = view.users();
    assert!(std::sync::Arc::ptr_eq(&users, &same), "nothing changed");
    // The default limits change what readers see, although no user changed.
    let defaults = UserDefaults {
        limits: limits(7),
        ..UserDefaults::default()
    };
    driver.apply(1, Command::PutUserDefaults(Box::new(defaults)));
    assert_eq!(view.quota(state::ids::UserKey(1)).limits, limits(7));
    assert_eq!(view.quota(bob).limits, limits(5));
}

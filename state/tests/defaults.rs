//! Defaults of users without their own settings: they apply at once, only to such users, and a
//! user's own settings take precedence.

use crate::common::{self, Driver, restored, snapshot};
use state::budgets::{Budget, BudgetPeriod};
use state::caches::CacheScope;
use state::command::{
    Charge, Command, Founding, Item, Rejection, Reply, UserDefaults, UserSettings,
};
use state::policy::PolicyConfig;
use state::prefix::user_key;
use state::quotas::{PendingUse, UserLimits};
use state::users::UserView;
use state::{AuditAction, RouterState};

const NONE: Budget = Budget {
    day: None,
    month: None,
};

fn defaults(weight_milli: u32, day: Option<u64>) -> UserDefaults {
    UserDefaults {
        weight_milli,
        budget: Budget { day, month: None },
        ..UserDefaults::default()
    }
}

fn put(driver: &mut Driver, defaults: UserDefaults) {
    let put = Command::PutUserDefaults(Box::new(defaults));
    assert_eq!(driver.apply(1, put), Reply::Applied);
    sound(driver);
}

/// Charges a user `tokens` uncached input tokens, at a price of one each.
fn charge(driver: &mut Driver, name: &str, tokens: u64) {
    let charge = Charge {
        user: user_key(common::HASH_SEED, name),
        input_uncached: tokens,
        ..Charge::default()
    };
    driver.apply(1, common::batch(vec![Item::Charge(charge)]));
    sound(driver);
}

fn configure(driver: &mut Driver, name: &str, settings: UserSettings) {
    let reply = driver.apply(1, Command::configure_user(name, settings));
    assert_eq!(reply, Reply::Applied);
    sound(driver);
}

fn weigh(driver: &mut Driver, name: &str, weight_milli: u32) {
    configure(driver, name, UserSettings::of_weight(weight_milli));
}

/// Checks that the state keeps its invariants and survives a snapshot unchanged.
fn sound(driver: &Driver) {
    assert_eq!(driver.state.check(), Ok(()));
    let bytes = snapshot(&driver.state);
    let copy = restored(&bytes);
    assert_eq!(copy.check(), Ok(()));
    assert_eq!(copy.digest(), driver.state.digest());
    assert_eq!(snapshot(&copy), bytes);
}

fn user(driver: &Driver, name: &str) -> UserView {
    driver.state.user_named(name).expect("the user is known")
}

/// Returns the effective weight, and whether it is the user's own.
fn weight(driver: &Driver, name: &str) -> (u32, bool) {
    let user = user(driver, name);
    let shown = driver.state.view().user_figures(user.key).weight_milli;
    assert_eq!(shown, user.weight_milli);
    (user.weight_milli, user.own.weight_milli.is_some())
}

/// Returns how much of today's budget is used, and the budget.
fn used(driver: &Driver, name: &str) -> Option<(u64, u64)> {
    let left = user(driver, name).budget.left(BudgetPeriod::Day, 1, 0)?;
    Some((left.used, left.limit))
}

#[test]
fn a_default_weight_applies_at_once_and_keeps_counters() {
    let mut driver = Driver::new();
    let counter = |driver: &Driver, name: &str| user(driver, name).counter_milli_tokens;
    for name in ["ada", "bob", "eve"] {
        driver.apply(
            1,
            common::batch(vec![Item::DefineUser {
                key: user_key(common::HASH_SEED, name),
                name: name.to_owned(),
            }]),
        );
    }
    weigh(&mut driver, "eve", 1000);
    for name in ["ada", "bob", "eve"] {
        charge(&mut driver, name, 100);
        assert_eq!(counter(&driver, name), 100_000);
    }
    put(&mut driver, defaults(2000, None));
    assert_eq!(weight(&driver, "ada"), (2000, false));
    assert_eq!(weight(&driver, "eve"), (1000, true));
    assert_eq!(counter(&driver, "ada"), 100_000);
    for name in ["ada", "eve"] {
        charge(&mut driver, name, 100);
    }
    assert_eq!(counter(&driver, "ada"), 150_000);
    assert_eq!(counter(&driver, "eve"), 200_000);
    // Bob was not charged in the meantime, so the defaults in between do not affect him.
    put(&mut driver, defaults(500, None));
    charge(&mut driver, "bob", 100);
    assert_eq!(counter(&driver, "bob"), 300_000);
    // A user's own weight does not follow the default, even if it is equal.
    weigh(&mut driver, "bob", 500);
    put(&mut driver, UserDefaults::default());
    assert_eq!(weight(&driver, "bob"), (500, true));
    assert_eq!(weight(&driver, "ada"), (1000, false));
    let unknown = user_key(common::HASH_SEED, "nobody");
    put(&mut driver, defaults(3000, None));
    assert_eq!(driver.state.view().user_figures(unknown).weight_milli, 3000);
    // A user who loses its own weight follows the default.
    configure(&mut driver, "bob", UserSettings::default());
    assert_eq!(weight(&driver, "bob"), (3000, false));
    assert_eq!(counter(&driver, "bob"), 300_000);
    charge(&mut driver, "bob", 300);
    assert_eq!(counter(&driver, "bob"), 400_000);
}

#[test]
fn a_default_budget_applies_to_each_user_without_one() {
    let mut driver = Driver::new();
    charge(&mut driver, "ada", 50);
    assert_eq!(driver.state.users(None, 9)[0].budget.budget, NONE);
    put(&mut driver, defaults(1000, Some(100)));
    let names = ["ada", "bob", "eve"];
    for name in names {
        configure(&mut driver, name, UserSettings::default());
        charge(&mut driver, name, 60);
    }
    // Counting starts with the budget.
    let key = |name| user_key(common::HASH_SEED, name);
    let quota = |driver: &Driver, name| driver.state.view().quota(key(name));
    let is_over = |driver: &Driver, name| {
        quota(driver, name)
            .check_budget(1, &PendingUse::default())
            .is_err()
    };
    assert!(names.iter().all(|name| !is_over(&driver, name)));
    charge(&mut driver, "ada", 40);
    assert!(is_over(&driver, "ada") && !is_over(&driver, "bob"));
    assert!(!is_over(&driver, "nobody"));
    assert_eq!(quota(&driver, "nobody").budget.budget.day, Some(100));
    // A user's own budget replaces the default as a whole, and its usage stays.
    let month = Budget {
        month: Some(1000),
        day: None,
    };
    let own = |budget| UserSettings {
        budget: Some(budget),
        ..UserSettings::default()
    };
    configure(&mut driver, "ada", own(month));
    assert_eq!(used(&driver, "ada"), None);
    assert_eq!(user(&driver, "ada").own.budget, Some(month));
    let left = user(&driver, "ada").budget;
    let left = left.left(BudgetPeriod::Month, 1, 0).unwrap();
    assert_eq!((left.used, left.limit), (100, 1000));
    // Without it, the default budget applies again.
    configure(&mut driver, "ada", own(NONE));
    assert_eq!(used(&driver, "ada"), Some((100, 100)));
    assert_eq!(user(&driver, "ada").own.budget, None);
    put(&mut driver, defaults(1000, Some(101)));
    assert!(!is_over(&driver, "ada"));
    // Without a budget, nothing is counted.
    put(&mut driver, defaults(1000, None));
    charge(&mut driver, "ada", 1000);
    assert_eq!(used(&driver, "ada"), None);
    assert!(!is_over(&driver, "ada"));
    let ada = || "ada".to_owned();
    driver.apply(1, Command::ForgiveUser { name: ada() });
    put(&mut driver, defaults(1000, Some(100)));
    assert_eq!(used(&driver, "ada"), Some((0, 100)));
    driver.apply(1, Command::DeleteUser { name: ada() });
    assert_eq!(driver.state.users_len(), 2);
    sound(&driver);
}

#[test]
fn defaults_are_replaced_as_a_whole_or_not_at_all() {
    let mut driver = Driver::new();
    let limits = |requests| UserLimits {
        requests: Some(requests),
        ..UserLimits::default()
    };
    let set = UserDefaults {
        limits: limits(5),
        cache: CacheScope::Group("team".to_owned()),
        ..defaults(500, Some(9))
    };
    put(&mut driver, set.clone());
    for wrong in [
        defaults(0, None),
        defaults(1, Some(0)),
        UserDefaults {
            limits: limits(0),
            ..UserDefaults::default()
        },
        UserDefaults {
            cache: CacheScope::Group(String::new()),
            ..UserDefaults::default()
        },
    ] {
        let put = Command::PutUserDefaults(Box::new(wrong));
        let reply = driver.apply(1, put);
        let is_invalid = matches!(reply, Reply::Rejected(Rejection::Invalid { .. }));
        assert!(is_invalid, "{reply:?}");
    }
    let view = driver.state.view();
    assert_eq!(view.registry().user_defaults, set);
    let unknown = user_key(common::HASH_SEED, "nobody");
    assert_eq!(view.quota(unknown).limits, set.limits);
    assert_eq!(view.users().scope(unknown), &set.cache);
}

#[test]
fn founding_sets_defaults_or_fails() {
    let founding = |user_defaults| {
        Command::from(Founding {
            user_defaults,
            ..Founding::of_seed(common::HASH_SEED, PolicyConfig::LeastRequest)
        })
    };
    let mut state = RouterState::new();
    let mut apply = |seq, command| {
        let index = state::ids::LogIndex(state.applied().0 + 1);
        let lane = state::command::Lane::Admin;
        state.apply(index, common::envelope(1, 1, lane, seq, command))
    };
    let wrong = apply(1, founding(defaults(0, None)));
    assert!(matches!(wrong, Reply::Rejected(Rejection::Invalid { .. })));
    let right = UserDefaults {
        cache: CacheScope::Own,
        ..defaults(500, Some(9))
    };
    assert_eq!(apply(2, founding(right.clone())), Reply::Applied);
    let again = Reply::Rejected(Rejection::AlreadyInitialised);
    assert_eq!(apply(3, founding(defaults(1, None))), again);
    let registry = state.view().registry();
    assert!(registry.initialised);
    assert_eq!(registry.user_defaults, right);
    let actions: Vec<_> = state.audit().map(|entry| entry.action).collect();
    assert_eq!(actions, [AuditAction::FoundCluster]);
    assert_eq!(state.check(), Ok(()));
}

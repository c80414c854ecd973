//! The table of usage under charges, deletions, age and lack of room.

use proptest::prelude::*;

use super::*;
use crate::users::UserUsage;

const SEED: u64 = 5;
const DAY_MS: u64 = 24 * 60 * 60 * 1000;

fn tokens(output: u64) -> UserUsage {
    UserUsage {
        output,
        ..UserUsage::default()
    }
}

fn source(key: Option<u64>, model: &str) -> (SourceKey, UsageSource) {
    let source = UsageSource {
        key: key.map(ApiKeyId),
        model: model.to_owned(),
    };
    (source_key(SEED, source.key, model), source)
}

/// Returns the rows as days, users, models and output tokens, in order.
fn rows(table: &UsageTable) -> Vec<(u32, Option<u64>, Option<String>, u64)> {
    let view = table.published();
    let row = |row: UsageRow<'_>| {
        let model = row.source.map(|source| source.model.clone());
        (row.day, row.user.map(|it| it.0), model, row.usage.output)
    };
    let mut rows: Vec<_> = view.rows().map(row).collect();
    rows.sort();
    rows
}

#[test]
fn usage_counts_for_the_day_of_its_stamp() {
    let mut table = UsageTable::default();
    let (llama, named) = source(None, "llama");
    table.define(SEED, named);
    let mut charge = |at_ms, output| table.charge(UserKey(1), llama, &tokens(output), at_ms);
    charge(20 * DAY_MS, 1);
    charge(20 * DAY_MS - 1, 2);
    charge(20 * DAY_MS - 60 * 60 * 1000 - 1, 4);
    charge(21 * DAY_MS, 8);
    let row = |day, output| (day, Some(1), Some("llama".to_owned()), output);
    assert_eq!(rows(&table), [row(19, 4), row(20, 3), row(21, 8)]);
}

#[test]
fn usage_goes_when_its_days_are_over_and_stays_in_the_total() {
    let mut table = UsageTable::default();
    for day in 10..14 {
        table.charge(UserKey(1), SourceKey(2), &tokens(1 << day), day * DAY_MS);
    }
    table.forget_some(13 * DAY_MS, 2);
    let row = |day, output| (day, Some(1), None, output);
    assert_eq!(rows(&table), [row(12, 1 << 12), row(13, 1 << 13)]);
    assert_eq!(table.published().charged().output, 0b1111 << 10);
    assert_eq!(table.check(), Ok(()));
}

#[test]
fn usage_of_a_deleted_user_keeps_day_and_model_and_not_the_key() {
    let mut table = UsageTable::default();
    for (user, key) in [(1, Some(7)), (1, None), (2, Some(8))] {
        let (charged, named) = source(key, "llama");
        table.define(SEED, named);
        table.charge(UserKey(user), charged, &tokens(10), DAY_MS);
    }
    table.forget_user(SEED, UserKey(1));
    let row = |user, output| (1, user, Some("llama".to_owned()), output);
    assert_eq!(rows(&table), [row(None, 20), row(Some(2), 10)]);
    let view = table.published();
    let nobody = view.rows().find(|row| row.user.is_none()).unwrap();
    assert_eq!(nobody.source.unwrap().key, None);
    assert_eq!(table.check(), Ok(()));
}

#[test]
fn a_full_table_folds_the_oldest_day_by_user_first() {
    let mut table = UsageTable::with_bounds(4, 4);
    for (day, user, source) in [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)] {
        table.charge(UserKey(user), SourceKey(source), &tokens(1), day * DAY_MS);
    }
    table.charge(UserKey(1), SourceKey(1), &tokens(1), 3 * DAY_MS);
    let days = |rows: &[(u32, Option<u64>, Option<String>, u64)]| -> Vec<_> {
        rows.iter()
            .map(|(day, user, _, n)| (*day, *user, *n))
            .collect()
    };
    let first = [
        (1, Some(1), 2),
        (1, Some(2), 1),
        (2, Some(1), 1),
        (3, Some(1), 1),
    ];
    assert_eq!(days(&rows(&table)), first);
    table.charge(UserKey(1), SourceKey(1), &tokens(1), 4 * DAY_MS);
    let (oldest, rest) = (rows(&table)[0].clone(), rows(&table).len());
    assert_eq!((oldest.0, oldest.1, oldest.3, rest), (1, None, 3, 4));
    let view = table.published();
    assert_eq!((view.folded(), view.whole_from()), (4, Some(2)));
    table.forget_some(5 * DAY_MS, 4);
    assert_eq!(table.published().whole_from(), None);
}

#[test]
fn each_row_beyond_the_bound_costs_one_row_its_detail() {
    let mut table = UsageTable::with_bounds(100, 100);
    for user in 1..=150 {
        let (charged, named) = source(Some(user), "llama");
        table.define(SEED, named);
        table.charge(UserKey(user), charged, &tokens(1), DAY_MS);
    }
    let rows = rows(&table);
    let whole = rows
        .iter()
        .filter(|(_, user, model, _)| user.is_some() && model.is_some());
    assert_eq!((whole.count(), rows[0].clone()), (99, (1, None, None, 51)));
}

#[test]
fn every_source_with_a_row_keeps_its_name_however_many_there_are() {
    let mut table = UsageTable::default();
    let keys = 0..20_000;
    for key in keys.clone() {
        let (charged, named) = source(Some(key), "llama");
        table.define(SEED, named);
        table.charge(UserKey(1), charged, &tokens(1), DAY_MS);
    }
    let view = table.published();
    let named: std::collections::BTreeSet<u64> = view
        .rows()
        .map(|row| row.source.unwrap().key.unwrap().0)
        .collect();
    assert!(named.into_iter().eq(keys));
    assert_eq!(table.check_sources(), Ok(()));
}

#[derive(Debug, Clone)]
enum Step {
    Define(u64),
    Charge {
        user: u64,
        source: u64,
        day: u64,
        output: u64,
    },
    DeleteUser(u64),
    Age {
        day: u64,
        days: u16,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let charge = (1_u64..6, 0_u64..9, 0_u64..9, 0_u64..100);
    prop_oneof![
        4 => (0_u64..9).prop_map(Step::Define),
        12 => charge.prop_map(|(user, source, day, output)| Step::Charge { user, source, day, output }),
        1 => (1_u64..6).prop_map(Step::DeleteUser),
        1 => (0_u64..12, 1_u16..9).prop_map(|(day, days)| Step::Age { day, days }),
    ]
}

proptest! {
    /// I172.
    #[test]
    fn nothing_that_was_charged_is_lost(
        steps in prop::collection::vec(step(), 0..120),
        rows_max in 12_usize..40,
    ) {
        let mut table = UsageTable::with_bounds(rows_max, 3);
        let mut by_user = std::collections::BTreeMap::<u64, u64>::new();
        // Sources that had a name and a row at once, and have had a row ever since.
        let mut kept = std::collections::BTreeSet::<SourceKey>::new();
        let of = |number: u64| source(Some(number), "llama");
        for step in steps {
            match step {
                Step::Define(number) => {
                    let (key, named) = of(number);
                    table.define(SEED, named);
                    prop_assert!(table.published().knows(key));
                }
                Step::Charge { user, source, day, output } => {
                    *by_user.entry(user).or_default() += output;
                    table.charge(UserKey(user), of(source).0, &tokens(output), day * DAY_MS);
                }
                Step::DeleteUser(user) => table.forget_user(SEED, UserKey(user)),
                Step::Age { day, days } => table.forget_some(day * DAY_MS, days),
            }
            prop_assert_eq!(table.check(), Ok(()));
            prop_assert_eq!(table.check_sources(), Ok(()));
            let view = table.published();
            prop_assert!(view.rows().count() <= rows_max);
            let in_use = view.rows().map(|row| row.source_key);
            let in_use: std::collections::BTreeSet<SourceKey> = in_use.collect();
            kept.retain(|key| in_use.contains(key));
            prop_assert!(kept.iter().all(|key| view.knows(*key)));
            kept.extend(in_use.into_iter().filter(|key| view.knows(*key)));
        }
        let charged: u64 = by_user.values().sum();
        prop_assert_eq!(table.published().charged().output, charged);
        // No user shows more than was charged to it.
        for row in table.published().rows() {
            if let Some(user) = row.user {
                prop_assert!(row.usage.output <= by_user[&user.0]);
            }
        }
    }
}

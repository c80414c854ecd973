//! Tests of the resolution of names.

use proptest::prelude::*;

use super::*;

fn names(text: &[(&str, &str)]) -> BTreeMap<String, String> {
    let owned = |(name, model): &(&str, &str)| ((*name).to_owned(), (*model).to_owned());
    text.iter().map(owned).collect()
}

fn keys(user: u64) -> SplitKeys<'static> {
    SplitKeys {
        user: Some(user),
        session: None,
        request_id: "r",
    }
}

fn resolved(names: &ModelNames, name: &str, down: &[&str], denied: &[&str]) -> String {
    let health = |model: &str| match (down.contains(&model), model.starts_with('?')) {
        (true, _) => ModelHealth::Down,
        (_, true) => ModelHealth::Doubtful,
        _ => ModelHealth::Healthy,
    };
    let may_use = |model: &str| !denied.contains(&model);
    let found = names.resolve(name, || keys(1), health, may_use);
    found.map_or_else(|| name.to_owned(), |found| found.model)
}

#[test]
fn aliases_and_fallbacks_lead_to_a_model_that_can_be_served() {
    let names = ModelNames {
        aliases: names(&[("small", "a")]),
        fallbacks: names(&[("a", "b"), ("b", "c"), ("?a", "?b"), ("?b", "c")]),
        ..ModelNames::default()
    };
    for (name, down, denied, expected) in [
        ("a", &[][..], &[][..], "a"),
        ("x", &["x"], &[], "x"),
        ("small", &[], &[], "a"),
        ("small", &["a"], &[], "b"),
        ("a", &["a", "b"], &[], "c"),
        ("a", &["a"], &["b"], "c"),
        // Permissions never lead away from a model that can be served.
        ("a", &[], &["a"], "a"),
        // Without any that can serve, the request is one for the model itself.
        ("small", &["a", "b", "c"], &[], "a"),
        ("small", &["a"], &["b", "c"], "a"),
        // Failed probes are doubted only if no other model is healthy.
        ("?a", &[], &[], "c"),
        ("?a", &["c"], &[], "?a"),
        ("?a", &["?a", "c"], &[], "?b"),
        ("?a", &[], &["c"], "?a"),
    ] {
        let found = resolved(&names, name, down, denied);
        assert_eq!(found, expected, "{name} without {down:?} and {denied:?}");
    }
}

#[test]
fn a_cycle_of_fallbacks_ends() {
    let names = ModelNames {
        fallbacks: names(&[("a", "b"), ("b", "a")]),
        ..ModelNames::default()
    };
    assert_eq!(resolved(&names, "a", &["a", "b"], &[]), "a");
}

#[test]
fn splits_go_by_the_session_else_the_user_else_the_request() {
    let (user, session) = (Some(1), Some(2));
    let request = xxh3_64(b"r");
    for (by, user, session, expected) in [
        (SplitBy::Session, user, session, (SplitBy::Session, 2)),
        (SplitBy::Session, user, None, (SplitBy::User, 1)),
        (SplitBy::Session, None, None, (SplitBy::Request, request)),
        (SplitBy::User, user, session, (SplitBy::User, 1)),
        (SplitBy::User, None, session, (SplitBy::Request, request)),
        (SplitBy::Request, user, session, (SplitBy::Request, request)),
    ] {
        let keys = SplitKeys {
            user,
            session,
            request_id: "r",
        };
        assert_eq!(keys.of(by), expected);
    }
}

#[test]
fn shares_of_a_split_follow_its_weights() {
    let weights = [
        ("a".to_owned(), 90),
        ("b".to_owned(), 9),
        ("c".to_owned(), 1),
    ];
    let split = ModelSplit::new("s", SplitBy::User, &weights);
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for key in 0..100_000 {
        *counts.entry(split.choose(key).unwrap()).or_default() += 1;
    }
    // The expectation with five standard deviations of a binomial count on either side.
    for (model, expected, margin) in [("a", 90_000, 475), ("b", 9_000, 453), ("c", 1_000, 158)] {
        let count = counts[model];
        assert!(count.abs_diff(expected) <= margin, "{model}: {count}");
    }
}

/// Weights of up to five models.
fn weights() -> impl Strategy<Value = Vec<(String, u32)>> {
    let model = |nth: usize, weight| (format!("m{nth}"), weight);
    let weights = proptest::collection::vec(1..50_u32, 1..6);
    weights.prop_map(move |them| {
        let them = them.into_iter().enumerate();
        them.map(|(nth, weight)| model(nth, weight)).collect()
    })
}

proptest! {
    #[test]
    fn the_order_of_targets_does_not_change_the_choice(
        weights in weights(),
        keys in proptest::collection::vec(any::<u64>(), 50),
    ) {
        let mut reversed = weights.clone();
        reversed.reverse();
        let split = ModelSplit::new("s", SplitBy::User, &weights);
        let reversed = ModelSplit::new("s", SplitBy::User, &reversed);
        for key in keys {
            prop_assert_eq!(split.choose(key), reversed.choose(key));
        }
    }

    #[test]
    fn a_higher_weight_only_draws_requests_toward_its_model(
        weights in weights(),
        nth in any::<proptest::sample::Index>(),
        more in 1..50_u32,
        keys in proptest::collection::vec(any::<u64>(), 200),
    ) {
        let nth = nth.index(weights.len());
        let mut raised = weights.clone();
        raised[nth].1 += more;
        let before = ModelSplit::new("s", SplitBy::User, &weights);
        let after = ModelSplit::new("s", SplitBy::User, &raised);
        for key in keys {
            let (before, after) = (before.choose(key), after.choose(key));
            prop_assert!(before == after || after == Some(&*weights[nth].0));
        }
    }

    #[test]
    fn a_removed_target_moves_only_its_own_requests(
        weights in weights().prop_filter("two targets", |it| it.len() > 1),
        nth in any::<proptest::sample::Index>(),
        keys in proptest::collection::vec(any::<u64>(), 200),
    ) {
        let nth = nth.index(weights.len());
        let mut fewer = weights.clone();
        let (removed, _) = fewer.remove(nth);
        let before = ModelSplit::new("s", SplitBy::User, &weights);
        let after = ModelSplit::new("s", SplitBy::User, &fewer);
        for key in keys {
            let (before, after) = (before.choose(key), after.choose(key));
            prop_assert!(before == after || before == Some(&*removed));
        }
    }
}

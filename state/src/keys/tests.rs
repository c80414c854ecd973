//! Tests of the table of API keys against a naive list.

use proptest::prelude::*;

use super::*;

const NOW_MS: u64 = 1_000_000;

fn secret(number: u8) -> SecretHash {
    let mut bytes = [0; 32];
    // Several secrets fall into one shard.
    bytes[0] = number & 1;
    bytes[31] = number;
    SecretHash(bytes)
}

fn spec(id: u64, number: u8, expires_at_ms: Option<u64>) -> ApiKeySpec {
    ApiKeySpec {
        id: ApiKeyId(id << 60 | id),
        secret: secret(number),
        name: "ci".to_owned(),
        user: "ada".to_owned(),
        expires_at_ms,
        models: Vec::new(),
        scopes: Vec::new(),
    }
}

#[test]
fn model_patterns_are_exact_or_end_in_a_star() {
    let mut key = ApiKey {
        spec: spec(1, 1, None),
        created_at_ms: 0,
        rotated_at_ms: None,
        former: None,
    };
    assert!(key.allows_model("anything") && key.allows_path("/v1/models"));
    key.spec.models = vec!["llama-*".to_owned(), "qwen".to_owned()];
    key.spec.scopes = vec!["/v1/chat/*".to_owned(), "/v1/models".to_owned()];
    for (model, is_allowed) in [
        ("llama-3", true),
        ("qwen", true),
        ("qwen2", false),
        ("llama", false),
    ] {
        assert_eq!(key.allows_model(model), is_allowed, "{model}");
    }
    assert!(key.allows_path("/v1/chat/completions"));
    assert!(!key.allows_path("/v1/embeddings") && !key.allows_path("/v1/models/x"));
}

#[test]
fn key_fields_out_of_bounds_are_refused() {
    let field = |change: &dyn Fn(&mut ApiKeySpec)| {
        let mut spec = spec(1, 1, None);
        change(&mut spec);
        match spec.validate() {
            Err(Rejection::Invalid { field, .. }) => field,
            other => format!("{other:?}"),
        }
    };
    assert_eq!(field(&|_| ()), "Ok(())");
    assert_eq!(field(&|it| it.name.clear()), "name");
    assert_eq!(field(&|it| it.user = "x".repeat(257)), "user");
    assert_eq!(field(&|it| it.expires_at_ms = Some(u64::MAX)), "expires_at");
    assert_eq!(field(&|it| it.models.push(String::new())), "models");
    assert_eq!(field(&|it| it.scopes.push("v1".to_owned())), "scopes");
    let long = || vec!["/x".repeat(100); 6];
    assert_eq!(field(&|it| it.scopes = long()), "models and scopes");
}

#[test]
fn a_full_key_table_drops_expired_keys_then_refuses() {
    let mut keys = Keys::with_max(2);
    keys.create(spec(1, 1, Some(NOW_MS + 20)), NOW_MS).unwrap();
    keys.create(spec(2, 2, Some(NOW_MS + 10)), NOW_MS).unwrap();
    let third = || spec(3, 3, None);
    assert_eq!(keys.create(third(), NOW_MS), Err(Rejection::TooManyKeys));
    assert_eq!(keys.create(third(), NOW_MS + 30), Ok(()));
    let view = keys.view();
    let ids: Vec<u64> = view.after(None).map(|key| key.spec.id.0 & 0xf).collect();
    assert_eq!(ids, [1, 3]);
    let late = spec(4, 4, Some(NOW_MS));
    assert!(matches!(
        keys.create(late, NOW_MS),
        Err(Rejection::Invalid { .. })
    ));
}

#[test]
fn a_rotated_key_accepts_both_secrets_during_the_grace_period() {
    let mut keys = Keys::default();
    keys.create(spec(1, 1, None), NOW_MS).unwrap();
    let id = spec(1, 1, None).id;
    keys.rotate(id, secret(2), 100, NOW_MS).unwrap();
    let is_live = |keys: &Keys, number, at| {
        matches!(keys.view().find(&secret(number), at), FoundKey::Live(_))
    };
    assert!(is_live(&keys, 1, NOW_MS + 99) && is_live(&keys, 2, NOW_MS + 99));
    assert_eq!(
        keys.view().find(&secret(1), NOW_MS + 100),
        FoundKey::Expired
    );
    // A key has at most two secrets: the first one ends with the next rotation.
    keys.rotate(id, secret(3), 100, NOW_MS + 1).unwrap();
    let taken = [1, 2, 3].map(|number| is_live(&keys, number, NOW_MS + 2));
    assert_eq!(taken, [false, true, true]);
    keys.rotate(id, secret(4), 0, NOW_MS + 2).unwrap();
    let taken = [2, 3, 4].map(|number| is_live(&keys, number, NOW_MS + 2));
    assert_eq!(taken, [false, false, true]);
    assert_eq!(
        keys.rotate(id, secret(4), 0, NOW_MS),
        Err(Rejection::KeyTaken { id })
    );
    let too_long = keys.rotate(id, secret(5), GRACE_MS_MAX + 1, NOW_MS);
    assert!(matches!(too_long, Err(Rejection::Invalid { .. })));
    keys.check().unwrap();
}

#[test]
fn restore_revives_no_revoked_key_or_secret() {
    let mut keys = Keys::default();
    for id in 1..=4 {
        keys.create(spec(id, id as u8, None), NOW_MS).unwrap();
    }
    let id = |id| spec(id, 0, None).id;
    keys.revoke(id(4), NOW_MS).unwrap();
    let copy = |keys: &Keys| {
        let mut copy = Keys::default();
        for piece in keys.freeze().pieces() {
            copy.restore_piece(&piece).unwrap();
        }
        for piece in keys.revoked().pieces() {
            copy.restore_revoked(&piece).unwrap();
        }
        let digest_of = |keys: &Keys| {
            let mut bytes = Vec::new();
            keys.append_digest(&mut bytes);
            bytes
        };
        assert_eq!(digest_of(&copy), digest_of(keys));
        copy
    };
    let mut backup = copy(&keys);
    keys.revoke(id(1), NOW_MS + 1).unwrap();
    keys.rotate(id(2), secret(12), 0, NOW_MS + 2).unwrap();
    keys.create(spec(5, 5, None), NOW_MS + 3).unwrap();
    backup.keep_revocations(&keys);
    backup.check().unwrap();
    let found = |number| backup.view().find(&secret(number), NOW_MS + 4);
    for ended in [1, 2, 4, 5] {
        assert_eq!(found(ended), FoundKey::Unknown, "{ended}");
    }
    for live in [3, 12] {
        assert!(matches!(found(live), FoundKey::Live(_)), "{live}");
    }
    // Revocations are remembered from one restore to the next.
    assert_eq!(backup.revoked().len(), 2);
    let again = backup.create(spec(1, 21, None), NOW_MS);
    assert_eq!(again, Err(Rejection::KeyTaken { id: id(1) }));
}

#[test]
fn the_earliest_revoked_key_is_forgotten_first() {
    let mut keys = Keys::with_max(2);
    for (id, at_ms) in [(1, NOW_MS + 2), (2, NOW_MS + 1), (3, NOW_MS + 3)] {
        keys.create(spec(id, id as u8, None), NOW_MS).unwrap();
        keys.revoke(spec(id, 0, None).id, at_ms).unwrap();
    }
    keys.check().unwrap();
    let again = |keys: &mut Keys, id| keys.create(spec(id, 9, None), NOW_MS);
    assert_eq!(again(&mut keys, 2), Ok(()));
    assert!(again(&mut keys, 1).is_err() && again(&mut keys, 3).is_err());
}

proptest! {
    #[test]
    fn key_index_is_complete_and_survives_a_snapshot(
        steps in prop::collection::vec((0_u8..4, 0_u64..6, 0_u8..10, 0_u64..40), 0..60),
    ) {
        let mut keys = Keys::with_max(4);
        for (what, id, number, grace_ms) in steps {
            let spec = spec(id, number, (grace_ms > 20).then_some(NOW_MS + grace_ms));
            let before = keys.digest();
            let done = match what {
                0 | 1 => keys.create(spec, NOW_MS),
                2 => keys.revoke(spec.id, NOW_MS),
                _ => keys.rotate(spec.id, spec.secret, grace_ms, NOW_MS),
            };
            prop_assert_eq!(done.is_err(), keys.digest() == before);
            keys.check().map_err(TestCaseError::fail)?;
            let mut copy = Keys::with_max(4);
            for piece in keys.freeze().pieces() {
                copy.restore_piece(&piece).map_err(TestCaseError::fail)?;
            }
            prop_assert_eq!(copy.digest(), keys.digest());
            prop_assert!(copy.are(&keys.view()));
        }
    }
}

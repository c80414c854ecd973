//! Tests of cache scopes: which scope applies to a user, and snapshots.

use super::*;
use crate::ids::UserKey;

const ADA: UserKey = UserKey(1 << 60);
const BOB: UserKey = UserKey(2 << 60);

fn group(name: &str) -> CacheScope {
    CacheScope::Group(name.to_owned())
}

#[test]
fn a_users_own_scope_overrides_the_default() {
    let mut scopes = CacheScopes::default();
    assert!(scopes.is_empty() && scopes.view().is_empty());
    scopes.set(ADA, Some(group("team")));
    assert_eq!(scopes.view().of(ADA), &group("team"));
    assert_eq!(scopes.view().of(BOB), &CacheScope::Shared);
    scopes.set_default(CacheScope::Own);
    assert_eq!(scopes.view().of(BOB), &CacheScope::Own);
    scopes.set(ADA, Some(CacheScope::Shared));
    assert_eq!(scopes.view().of(ADA), &CacheScope::Shared);
    scopes.set(ADA, None);
    let view = scopes.publish().unwrap();
    assert_eq!((view.of(ADA), view.own(ADA)), (&CacheScope::Own, None));
    assert_eq!(scopes.check(&view), Ok(()));
    assert!(scopes.publish().is_none());
    scopes.set_default(CacheScope::Shared);
    assert!(scopes.check(&view).is_err() && scopes.is_empty());
}

#[test]
fn a_restored_copy_has_the_same_scopes_and_digest() {
    let mut scopes = CacheScopes::default();
    assert_eq!(scopes.freeze().pieces().count(), 0);
    for (default, own) in [
        (CacheScope::Own, None),
        (CacheScope::Shared, Some(group("team"))),
        (group("all"), Some(CacheScope::Own)),
    ] {
        scopes.set_default(default);
        scopes.set(ADA, own);
        let mut copy = CacheScopes::default();
        for piece in scopes.freeze().pieces() {
            copy.restore_piece(&piece).unwrap();
        }
        assert_eq!(copy.check(&scopes.view()), Ok(()));
        let digest = |scopes: &CacheScopes| {
            let mut bytes = Vec::new();
            scopes.append_digest(&mut bytes);
            bytes
        };
        assert_eq!(digest(&copy), digest(&scopes));
    }
    let piece = scopes.freeze().pieces().next().unwrap();
    let mut copy = CacheScopes::default();
    copy.restore_piece(&piece).unwrap();
    assert!(copy.restore_piece(&piece).unwrap_err().contains("twice"));
}

#[test]
fn group_names_have_length_bounds() {
    assert!(group("").validate().is_err());
    assert!(group(&"x".repeat(257)).validate().is_err());
    assert_eq!(group("team").validate(), Ok(()));
}

//! Isolation of users' cached blocks by a salt, under which a user's prompts are hashed and which
//! engines receive (ADR 0017).
//!
//! A salt depends on the user's cache scope, the cluster's hash secret and the client's own
//! `cache_salt`, if any, and on nothing else. Every replica therefore computes the same one, and no
//! client can compute that of another scope. The client's salt subdivides its scope and opens no
//! other.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use state::caches::CacheScope;
use state::prefix::BlockHasher;

/// Prefix of the hashed bytes, for domain separation from other hashes.
const SALT_LABEL: &[u8] = b"quorate cache salt 1";
/// Backend label that declares whether the engine supports `cache_salt`: `true` or `false`. Without
/// it, the engine's kind decides.
pub const CACHE_SALT_LABEL: &str = "cache-salt";

/// Kind of work that engines isolate by a salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaltedWork {
    /// Generated answers.
    Generation,
    /// Embeddings, scores and classes. SGLang takes no salt for them.
    Pooling,
}

/// Behaviour of engines that support salts, on one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SaltedPath {
    /// Engines use the salt.
    Taken(SaltedWork),
    /// Engines need no salt: they cache nothing of the prompt, or compute nothing.
    NeedsNone,
    /// Engines ignore the salt, as far as is known.
    Ignored,
}

impl SaltedPath {
    pub(crate) fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" | "/v1/completions" | "/v1/responses" => {
                Self::Taken(SaltedWork::Generation)
            }
            "/v1/embeddings" | "/v1/rerank" | "/v1/reranking" | "/v1/score" | "/v1/classify"
            | "/v1/pooling" | "/classify" | "/pooling" | "/rerank" | "/score" | "/v2/rerank" => {
                Self::Taken(SaltedWork::Pooling)
            }
            "/v1/chat/completions/render"
            | "/v1/completions/render"
            | "/v1/messages/count_tokens"
            | "/v1/tokenize"
            | "/v1/detokenize"
            | "/tokenize"
            | "/detokenize"
            | "/v1/audio/transcriptions"
            | "/v1/audio/translations" => Self::NeedsNone,
            _ => Self::Ignored,
        }
    }
}

/// Returns the salt for `user`, 256 bits in base64url; `None` if the user shares its cache.
pub(crate) fn salt(
    hashing: &BlockHasher,
    scope: &CacheScope,
    user: &str,
    of_client: Option<&str>,
) -> Option<String> {
    let (kind, name) = match scope {
        CacheScope::Shared => return None,
        CacheScope::Own => (b"user", user),
        CacheScope::Group(group) => (b"pool", group.as_str()),
    };
    let mut hash = Sha256::new()
        .chain_update(SALT_LABEL)
        .chain_update(hashing.seed.to_le_bytes())
        .chain_update(hashing.secret.key_bytes());
    hash.update(kind);
    // Each text follows its length, so that no two pairs produce the same input.
    for text in [name, of_client.unwrap_or_default()] {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    Some(BASE64_URL_SAFE_NO_PAD.encode(hash.finalize()))
}
#[cfg(test)]
mod tests {
    use state::prefix::HashSecret;

    use super::*;

    fn hashing(seed: u64, secret: u64) -> BlockHasher {
        let secret = HashSecret::of_number(secret);
        BlockHasher { seed, secret }
    }

    fn group(name: &str) -> CacheScope {
        CacheScope::Group(name.to_owned())
    }

    #[test]
    fn a_cache_salt_depends_on_scope_cluster_and_client_salt() {
        let salt = |hashing: &BlockHasher, scope: &CacheScope, user, of_client| {
            let salt = salt(hashing, scope, user, of_client).unwrap();
            assert!(salt.len() == 43 && salt.bytes().all(|it| it.is_ascii_graphic() && it != b'"'));
            salt
        };
        let (here, own) = (hashing(1, 1), CacheScope::Own);
        let salts = [
            salt(&here, &own, "ada", None),
            salt(&here, &own, "bob", None),
            salt(&here, &group("ada"), "ada", None),
            salt(&here, &own, "ada", Some("x")),
            salt(&here, &own, "adax", None),
            salt(&here, &own, "ad", Some("a")),
            salt(&hashing(2, 1), &own, "ada", None),
            salt(&hashing(1, 2), &own, "ada", None),
        ];
        for (nth, one) in salts.iter().enumerate() {
            assert!(salts[..nth].iter().all(|other| other != one), "{nth}");
        }
        let team = salt(&here, &group("team"), "ada", None);
        assert_eq!(team, salt(&here, &group("team"), "bob", None));
        assert_eq!(super::salt(&here, &CacheScope::Shared, "ada", None), None);
    }

    #[test]
    fn cache_salts_have_golden_values() {
        let salt = salt(&hashing(42, 7), &group("team"), "ada", None);
        expect_test::expect!["HmcAZvARsozzfnmDrbi-y1IQIfLLbWhmN_vJpSbVBa0"]
            .assert_eq(&salt.unwrap());
    }
}

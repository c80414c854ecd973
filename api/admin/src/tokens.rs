//! Tokens of operators: SHA-256 hashes, each with a name and a role.
//!
//! A token from [`NewToken::draw`] has 256 random bits, so a single fast hash protects it: guessing
//! is infeasible. All hashes are compared in constant time and to the last one, so that the
//! response time reveals nothing about them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::roles::{AdminRole, CallerProof, Operator};

/// Prefix of a drawn token, by which secret scanners can detect leaks.
const PREFIX: &str = "qat-";
/// Maximum length of a token's name, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// Maximum number of tokens in a file.
const TOKENS_MAX: usize = 1000;

type TokenHash = [u8; 32];

/// A token's name, role and hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenEntry {
    name: Arc<str>,
    role: AdminRole,
    hash: TokenHash,
}

/// The accepted tokens. Clones share one set, which can be replaced while in use.
#[derive(Clone, Default)]
pub struct AdminTokens(Arc<ArcSwap<Vec<TokenEntry>>>);

impl AdminTokens {
    /// Replaces all accepted tokens.
    pub fn replace(&self, entries: Vec<TokenEntry>) {
        self.0.store(Arc::new(entries));
    }

    /// Returns the holder of the token `secret`, if it is accepted.
    pub(super) fn holder(&self, secret: &[u8]) -> Option<Operator> {
        let entries = self.0.load();
        let hash: TokenHash = Sha256::digest(secret).into();
        let mut found = u32::MAX;
        for (entry, nth) in entries.iter().zip(0_u32..) {
            let is_it: Choice = entry.hash.ct_eq(&hash);
            found = u32::conditional_select(&found, &nth, is_it);
        }
        let entry = entries.get(usize::try_from(found).ok()?)?;
        Some(Operator {
            name: Arc::clone(&entry.name),
            role: entry.role,
            by: CallerProof::Token,
        })
    }
}

/// Compares by identity: equal if both share one set.
impl PartialEq for AdminTokens {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for AdminTokens {}

impl fmt::Debug for AdminTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdminTokens({} tokens)", self.0.load().len())
    }
}

/// Parses a tokens file: `name:role:sha256-hex` per line. Ignores empty lines and lines that begin
/// with `#`. Errors name the line but never quote its hash, which may be a secret put there by
/// mistake.
///
/// # Errors
/// Describes the first fault. A file without tokens is a fault, since it would lock everyone out.
pub fn read_tokens(text: &str) -> Result<Vec<TokenEntry>, String> {
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let (mut names, mut hashes) = (BTreeSet::new(), BTreeSet::new());
    let mut entries = Vec::new();
    for (number, line) in lines {
        let entry = token_of(line).map_err(|why| format!("line {number}: {why}"))?;
        if !names.insert(Arc::clone(&entry.name)) {
            return Err(format!("line {number}: the name {:?} again", entry.name));
        }
        if !hashes.insert(entry.hash) {
            return Err(format!("line {number}: the token of an earlier line again"));
        }
        entries.push(entry);
    }
    match entries.len() {
        0 => Err("no token".to_owned()),
        1..=TOKENS_MAX => Ok(entries),
        more => Err(format!("{more} tokens, expected at most {TOKENS_MAX}")),
    }
}

fn token_of(line: &str) -> Result<TokenEntry, String> {
    let mut parts = line.split(':');
    let (Some(name), Some(role), Some(hash), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err("expected name:role:sha256-hex".to_owned());
    };
    check_token_name(name)?;
    // A token in the wrong place must not reach the log.
    let role: AdminRole = role.parse().map_err(|why| format!("the role: {why}"))?;
    let hash = unhex(hash).ok_or("the hash: expected 64 hex digits, the SHA-256 of the token")?;
    Ok(TokenEntry {
        name: name.into(),
        role,
        hash,
    })
}

/// Rejects names that would not fit into a line of the file or the log.
///
/// # Errors
/// States what was expected.
pub fn check_token_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
    if name.starts_with(PREFIX) {
        return Err(format!("the name begins with {PREFIX:?}, as tokens do"));
    }
    match (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(is_plain) {
        true => Ok(()),
        false => Err(format!(
            "the name: expected 1 to {NAME_BYTES_MAX} of letters, digits, '.', '_', '-' and '@'"
        )),
    }
}

fn unhex(text: &str) -> Option<TokenHash> {
    let digits = text.as_bytes();
    let mut hash = TokenHash::default();
    if digits.len() != 2 * hash.len() {
        return None;
    }
    let digit = |digit: u8| char::from(digit).to_digit(16);
    for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
        let value = digit(pair[0])? << 4 | digit(pair[1])?;
        *byte = u8::try_from(value).ok()?;
    }
    Some(hash)
}

/// A newly drawn token.
pub struct NewToken {
    /// The secret that the token's holder sends. It cannot be recovered later.
    pub secret: String,
    /// The token's line in the tokens file.
    pub line: String,
}

impl NewToken {
    /// Draws a random token with this name and role.
    ///
    /// # Errors
    /// States what was expected if the name is invalid.
    pub fn draw(name: &str, role: AdminRole) -> Result<Self, String> {
        check_token_name(name)?;
        let bits: [u8; 32] = rand::random();
        let secret = format!("{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bits));
        let hash = Sha256::digest(&secret);
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = format!("{name}:{role}:{hash}");
        Ok(Self { secret, line })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `a`.
    const OF_A: &str = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb";

    #[test]
    fn a_token_file_names_the_holder_of_each_token() {
        let drawn = NewToken::draw("bot", AdminRole::Operator).unwrap();
        let text = format!("# staff\nada:admin:{OF_A}\n\n {}\n", drawn.line);
        let tokens = AdminTokens::default();
        assert_eq!(tokens.holder(b"a"), None);
        tokens.replace(read_tokens(&text).unwrap());
        let role = |secret: &str| {
            let holder = tokens.holder(secret.as_bytes());
            holder.map(|it| (it.name.to_string(), it.role))
        };
        assert_eq!(role("a"), Some(("ada".to_owned(), AdminRole::Admin)));
        let bot = Some(("bot".to_owned(), AdminRole::Operator));
        assert_eq!(role(&drawn.secret), bot);
        assert_eq!([role("b"), role(""), role(OF_A)], [None, None, None]);
        assert!(!format!("{tokens:?}").contains("ca97"));
    }

    #[test]
    fn token_file_errors_name_the_line_and_no_secret() {
        let other = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d";
        for (text, fault) in [
            (String::new(), "no token"),
            ("# none\n".to_owned(), "no token"),
            ("ada:admin".to_owned(), "line 1: expected name:role"),
            (
                format!("ada:root:{OF_A}"),
                "line 1: the role: expected viewer",
            ),
            (
                format!("ada:s3cret:{OF_A}"),
                "line 1: the role: expected viewer",
            ),
            (
                "\nada:admin:s3cret".to_owned(),
                "line 2: the hash: expected 64",
            ),
            (format!("a b:admin:{OF_A}"), "line 1: the name: expected"),
            (format!(":admin:{OF_A}"), "line 1: the name: expected"),
            (
                format!("qat-s3cret:admin:{OF_A}"),
                "line 1: the name begins with",
            ),
            (format!("a:admin:{OF_A}:x"), "line 1: expected name:role"),
            (
                format!("a:admin:{OF_A}\na:viewer:{other}"),
                "line 2: the name \"a\" again",
            ),
            (
                format!("a:admin:{OF_A}\nb:viewer:{OF_A}"),
                "line 2: the token of an earlier",
            ),
        ] {
            let told = read_tokens(&text).unwrap_err();
            assert!(told.starts_with(fault), "{told}");
            assert!(!told.contains("s3cret") && !told.contains(OF_A), "{told}");
        }
    }
}

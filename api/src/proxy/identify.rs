//! Who pays for a request: by its key, by what a trusted proxy says, or by what it says of itself.

use std::borrow::Cow;
use std::net::IpAddr;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};
use state::prefix::BlockHasher;

use super::headers::{API_KEY, AZURE_KEY};
use super::keys::{Holder, key_user_name};
use super::settings::{IdentifyBy, ProxySettings};
use crate::api_keys::is_of_cluster;
use crate::error::ProxyError;
use crate::prompt::ParsedBody;
use crate::routing::UserName;
use crate::user_name;

/// Who is charged when nobody can be told.
const ANONYMOUS: &str = "anonymous";

/// Where a request comes from.
#[derive(Debug, Clone, Copy)]
pub enum RequestOrigin<'a> {
    /// From this address.
    Address(&'a HeaderValue),
    /// From a proxy that is trusted to name users. Only for `explain`.
    TrustedProxy,
    /// From this user, whatever the request says. Only for `explain`.
    User(&'a str),
}

/// How a request's user was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UserSource {
    /// By this entry of `users.identify_by`.
    Identified(IdentifyBy),
    /// By its key, as keys are checked and no entry named a user.
    CheckedKey,
    /// By its key, which is the cluster's.
    ClusterKey,
    /// Not at all: it is anonymous.
    Nobody,
    /// `explain` was asked for this user.
    Given,
}

impl UserSource {
    /// As answers of the admin API spell it.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Identified(place) => place.to_string(),
            Self::CheckedKey => "checked-key".to_owned(),
            Self::ClusterKey => "cluster-key".to_owned(),
            Self::Nobody => "nobody".to_owned(),
            Self::Given => "given".to_owned(),
        }
    }
}

/// The client's key, from `authorization: Bearer`, `x-api-key` or `api-key`.
fn api_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers
        .get(AUTHORIZATION)
        .map(http::HeaderValue::as_bytes)
        .and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme
                .eq_ignore_ascii_case(b"bearer ")
                .then(|| key.trim_ascii())
        });
    let plain = |name: HeaderName| headers.get(name).map(|value| value.as_bytes().trim_ascii());
    let key = bearer
        .or_else(|| plain(API_KEY))
        .or_else(|| plain(AZURE_KEY));
    key.filter(|key| !key.is_empty())
}

/// Whom the client's key stands for. Refuses clients without a known key, where keys are checked.
///
/// A key that has the form of the cluster's keys is judged by the cluster alone, `of_cluster`; every
/// other one by this replica's file, if it has one.
pub(super) fn check_key(
    settings: &ProxySettings,
    headers: &HeaderMap,
    of_cluster: impl FnOnce(&[u8]) -> Result<Holder, ProxyError>,
) -> Result<Holder, ProxyError> {
    let key = api_key(headers);
    if let Some(key) = key.filter(|key| is_of_cluster(key)) {
        return of_cluster(key);
    }
    match &settings.api_keys {
        None if settings.keys.is_required => Err(ProxyError::BadKey),
        None => Ok(Holder::Unchecked),
        Some(keys) => key
            .and_then(|key| keys.holder(key))
            .ok_or(ProxyError::BadKey),
    }
}

/// Who sends a request, before its body is looked at.
#[derive(Clone, Copy)]
pub(super) struct Client<'a> {
    /// As [`check_key`] found.
    pub(super) holder: &'a Holder,
    pub(super) origin: RequestOrigin<'a>,
    pub(super) headers: &'a HeaderMap,
}

/// Whom a request's tokens are charged to, and how that is known.
#[derive(Debug)]
pub(super) struct IdentifiedUser {
    pub(super) name: UserName,
    pub(super) source: UserSource,
}

/// The user whom the request's tokens are charged to.
///
/// A key of the cluster says who it is, above all else.
///
/// A bare name is one that somebody vouched for: a key, or a proxy that is trusted. What
/// others say of themselves stands behind `header:` or `body:`, so that nobody takes another's
/// name, and counts only where no keys are checked.
pub(super) fn identify<'a>(
    settings: &ProxySettings,
    hashing: impl Fn() -> BlockHasher,
    client: &Client<'a>,
    parsed: &'a ParsedBody,
) -> Result<IdentifiedUser, ProxyError> {
    let Client {
        holder,
        origin,
        headers,
    } = *client;
    let user = |name, source| IdentifiedUser {
        name: UserName::bounded(name),
        source,
    };
    if let RequestOrigin::User(name) = origin {
        return Ok(user(Cow::Borrowed(name), UserSource::Given));
    }
    if let Holder::Cluster(key) = holder {
        return Ok(user(Cow::Borrowed(&*key.spec.user), UserSource::ClusterKey));
    }
    let are_checked = *holder != Holder::Unchecked;
    let by_key = || match holder {
        Holder::Named(name) => Some(Cow::Borrowed(&**name)),
        Holder::Unnamed | Holder::Unchecked | Holder::Cluster(_) => {
            api_key(headers).map(|key| key_user_name(&hashing(), key).into())
        }
    };
    for place in &settings.identify_by {
        let found = match place {
            IdentifyBy::ApiKey => by_key(),
            IdentifyBy::Header(field) => match header_text(headers, field) {
                None => None,
                Some(name) if is_trusted(settings, origin) => Some(vouched(name, field.as_str())?),
                Some(_) if are_checked => None,
                Some(name) => Some(claimed(SAID_IN_HEADER, name, field.as_str())?),
            },
            IdentifyBy::BodyUser => match parsed.user.as_deref() {
                None | Some("") => None,
                Some(_) if are_checked => None,
                Some(name) => Some(claimed(SAID_IN_BODY, name, "user")?),
            },
        };
        if let Some(name) = found {
            return Ok(user(name, UserSource::Identified(place.clone())));
        }
    }
    Ok(match are_checked.then(by_key).flatten() {
        Some(name) => user(name, UserSource::CheckedKey),
        None => user(Cow::Borrowed(ANONYMOUS), UserSource::Nobody),
    })
}

/// What stands before the names that clients give themselves.
const SAID_IN_HEADER: &str = "header:";
const SAID_IN_BODY: &str = "body:";

fn header_text<'a>(headers: &'a HeaderMap, field: &HeaderName) -> Option<&'a str> {
    let value = std::str::from_utf8(headers.get(field)?.as_bytes()).ok()?;
    Some(value.trim()).filter(|value| !value.is_empty())
}

/// Whether who is at the other end speaks for others.
fn is_trusted(settings: &ProxySettings, origin: RequestOrigin<'_>) -> bool {
    match origin {
        RequestOrigin::Address(peer) => {
            let address: Option<IpAddr> = peer.to_str().ok().and_then(|peer| peer.parse().ok());
            let mut trusted = settings.trusted_proxies.iter();
            address.is_some_and(|address| trusted.any(|prefix| prefix.contains(address)))
        }
        RequestOrigin::TrustedProxy | RequestOrigin::User(_) => true,
    }
}

/// A name that a trusted proxy gives: not one that is made here.
fn vouched<'a>(name: &'a str, place: &str) -> Result<Cow<'a, str>, ProxyError> {
    let said = [SAID_IN_HEADER, SAID_IN_BODY];
    let is_of_key = name.strip_prefix("key-").is_some_and(user_name::is_hash);
    let is_made_here = is_of_key
        || user_name::looks_shortened(name)
        || said.iter().any(|prefix| name.starts_with(prefix));
    if is_made_here {
        return Err(bad_name("begins like one that is made here", place));
    }
    check_name(name, place)?;
    Ok(Cow::Borrowed(name))
}

/// A name that a client gives itself.
fn claimed(prefix: &str, name: &str, place: &str) -> Result<Cow<'static, str>, ProxyError> {
    check_name(name, place)?;
    Ok(Cow::Owned(format!("{prefix}{name}")))
}

/// Names are shown on terminals and in tables: what changes how the rest is shown is refused.
fn check_name(name: &str, place: &str) -> Result<(), ProxyError> {
    let is_format = |it: char| {
        matches!(
            it,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}'
        )
    };
    if name.chars().any(|it| it.is_control() || is_format(it)) {
        return Err(bad_name("has a control character", place));
    }
    Ok(())
}

fn bad_name(what: &str, place: &str) -> ProxyError {
    ProxyError::BadRequest {
        message: format!("the user's name {what}"),
        param: Some(place.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use state::ids::ReplicaId;

    use super::super::keys::ApiKeys;
    use super::*;

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &str)| {
            (
                http::HeaderName::from_static(name),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            )
        };
        fields.iter().map(field).collect()
    }

    /// The keys of a cluster that has none.
    fn nobody(_: &[u8]) -> Result<Holder, ProxyError> {
        Err(ProxyError::BadKey)
    }

    /// Who asks from `peer`, with these fields and `"user":"body"`.
    fn named(settings: &ProxySettings, peer: &str, fields: &[(&'static str, &str)]) -> String {
        let parsed = ParsedBody {
            user: Some("body".into()),
            ..ParsedBody::default()
        };
        let peer = HeaderValue::from_str(peer).unwrap();
        let headers = headers(fields);
        let holder = check_key(settings, &headers, nobody).unwrap();
        let client = Client {
            holder: &holder,
            origin: RequestOrigin::Address(&peer),
            headers: &headers,
        };
        match identify(settings, || 7.into(), &client, &parsed) {
            Ok(user) => user.name.as_str().to_owned(),
            Err(failure) => format!("{failure:?}"),
        }
    }

    const PROXY: &str = "127.0.0.1";
    const STRANGER: &str = "192.0.2.9";

    #[test]
    fn a_bare_name_is_one_that_somebody_vouched_for() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let head = [("x-quorate-user", " head ")];
        let key = [("authorization", "bearer sk-1"), ("x-quorate-user", "head")];
        let of_key = key_user_name(&7.into(), b"sk-1");
        assert_eq!(named(&settings, PROXY, &key), of_key);
        for name in ["x-api-key", "api-key"] {
            assert_eq!(named(&settings, STRANGER, &[(name, "sk-1")]), of_key);
        }
        assert_eq!(named(&settings, PROXY, &head), "head");
        assert_eq!(named(&settings, STRANGER, &head), "header:head");
        assert_eq!(named(&settings, PROXY, &[]), "body:body");
        assert_eq!(
            named(&settings, PROXY, &[("authorization", "Basic x")]),
            "body:body"
        );
        settings.identify_by = Vec::new();
        assert_eq!(named(&settings, PROXY, &key), "anonymous");
    }

    #[test]
    fn where_keys_are_checked_only_they_and_trusted_proxies_name_users() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let mut keys = ApiKeys::default();
        keys.add("sk-1", Some("ada".to_owned()));
        settings.api_keys = Some(keys);
        settings.identify_by.rotate_left(1);
        let both = [("x-api-key", "sk-1"), ("x-quorate-user", "head")];
        assert_eq!(named(&settings, STRANGER, &both), "ada");
        assert_eq!(named(&settings, PROXY, &both), "head");
        settings.identify_by = vec![IdentifyBy::BodyUser];
        assert_eq!(named(&settings, STRANGER, &both), "ada");
    }

    #[test]
    fn where_keys_are_required_only_known_ones_pass() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let anyone = check_key(&settings, &HeaderMap::new(), nobody);
        assert_eq!(anyone, Ok(Holder::Unchecked));
        let mut keys = ApiKeys::default();
        keys.add("sk-1", None);
        settings.api_keys = Some(keys);
        let known = headers(&[("authorization", "Bearer sk-1")]);
        assert_eq!(check_key(&settings, &known, nobody), Ok(Holder::Unnamed));
        for key in ["Bearer sk-2", "Bearer sk-", "Bearer "] {
            let unknown = headers(&[("authorization", key)]);
            assert_eq!(
                check_key(&settings, &unknown, nobody),
                Err(ProxyError::BadKey)
            );
        }
        assert_eq!(
            check_key(&settings, &HeaderMap::new(), nobody),
            Err(ProxyError::BadKey)
        );
    }

    #[test]
    fn names_of_one_kind_are_not_taken_by_another() {
        let settings = ProxySettings::new(ReplicaId(1));
        for name in [
            "header:ada",
            "body:ada",
            "key-0123456789abcdef",
            "a\u{202e}b",
            "a\u{9b}b",
        ] {
            let failure = named(&settings, PROXY, &[("x-quorate-user", name)]);
            assert!(failure.starts_with("BadRequest"), "{name:?}: {failure}");
        }
        assert_eq!(
            named(&settings, PROXY, &[("x-quorate-user", "key-team")]),
            "key-team"
        );
    }

    #[test]
    fn an_over_long_name_means_whom_explain_means() {
        let settings = ProxySettings::new(ReplicaId(1));
        let long = "x".repeat(1000);
        let said = named(&settings, STRANGER, &[("x-quorate-user", &long)]);
        assert!(said.starts_with("header:xxx"), "{said}");
        assert_eq!(said, UserName::bounded(format!("header:{long}")).as_str());
        let vouched = named(&settings, PROXY, &[("x-quorate-user", &long)]);
        assert_eq!(vouched, UserName::bounded(&long).as_str());
        let again = named(&settings, PROXY, &[("x-quorate-user", &vouched)]);
        assert!(again.starts_with("BadRequest"), "{again}");
    }
}

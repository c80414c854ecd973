//! Identifies the user who pays for a request: by key, by a trusted proxy, or by its own claim.

use std::borrow::Cow;
use std::net::IpAddr;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};
use state::prefix::BlockHasher;

use super::headers::{API_KEY, AZURE_KEY, FORWARDED_FOR};
use crate::error::ProxyError;
use crate::prompt::ParsedBody;
use crate::proxy::settings::keys::{Holder, key_user_name};
use crate::proxy::settings::{IdentifyBy, ProxySettings};
use crate::routing::UserName;
use crate::users::api_keys::is_of_cluster;
use crate::users::user_name;

/// User who is charged if none can be identified.
const ANONYMOUS: &str = "anonymous";

/// Origin of a request.
#[derive(Debug, Clone, Copy)]
pub enum RequestOrigin<'a> {
    /// A client at this address.
    Address(&'a HeaderValue),
    /// A proxy that is trusted to name users. Only for `explain`.
    TrustedProxy,
    /// A given user, whatever the request claims. Only for `explain`.
    User(&'a str),
}

/// How the user of a request was identified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UserSource {
    /// An entry of `users.identify_by` named the user.
    Identified(IdentifyBy),
    /// The API key identified the user, because keys are checked and no entry named one.
    CheckedKey,
    /// The API key, one of the cluster's keys, determines the user.
    ClusterKey,
    /// The user was not identified and is anonymous.
    Nobody,
    /// The `explain` request names the user.
    Given,
    /// A stored record names the source.
    Stored(&'static str),
}

impl UserSource {
    /// Returns the name of this source in responses of the admin API.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Identified(place) => place.to_string(),
            Self::CheckedKey => "checked-key".to_owned(),
            Self::ClusterKey => "cluster-key".to_owned(),
            Self::Nobody => "nobody".to_owned(),
            Self::Given => "given".to_owned(),
            Self::Stored(source) => (*source).to_owned(),
        }
    }
}

/// Returns the client's keys from `authorization: Bearer`, `x-api-key` and `api-key`, in this order.
/// Some clients send a placeholder in one header and their key in another.
fn api_keys(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let plain = |name: HeaderName| headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let keys = bearer.chain(plain(API_KEY)).chain(plain(AZURE_KEY));
    keys.map(<[u8]>::trim_ascii).filter(|key| !key.is_empty())
}

/// Returns the holder of the first of the client's keys that is valid. Rejects clients without one if
/// keys are checked.
///
/// Only `of_cluster` validates keys that have the form of the cluster's keys. This replica's key
/// file, if it has one, validates all others.
pub(in crate::proxy) fn check_key(
    settings: &ProxySettings,
    headers: &HeaderMap,
    of_cluster: impl Fn(&[u8]) -> Result<Holder, ProxyError>,
) -> Result<Holder, ProxyError> {
    let mut why = None;
    for key in api_keys(headers) {
        let holder = match (is_of_cluster(key), &settings.api_keys) {
            (true, _) => of_cluster(key),
            (false, Some(keys)) => keys.holder(key).ok_or(ProxyError::BadKey),
            (false, None) => continue,
        };
        match holder {
            Ok(holder) => return Ok(holder),
            // An expired key tells more than an unknown one.
            Err(failure) if why.as_ref().is_none_or(|why| *why == ProxyError::BadKey) => {
                why = Some(failure);
            }
            Err(_) => {}
        }
    }
    match (why, &settings.api_keys) {
        (Some(why), _) => Err(why),
        (None, Some(_)) => Err(ProxyError::BadKey),
        (None, None) if settings.keys.is_required => Err(ProxyError::BadKey),
        (None, None) => Ok(Holder::Unchecked),
    }
}

/// Sender of a request, before the body is parsed.
#[derive(Clone, Copy)]
pub(in crate::proxy) struct Client<'a> {
    /// Holder of the client's key, as returned by [`check_key`].
    pub(in crate::proxy) holder: &'a Holder,
    pub(in crate::proxy) origin: RequestOrigin<'a>,
    pub(in crate::proxy) is_of_gateway: bool,
    pub(in crate::proxy) headers: &'a HeaderMap,
}

/// User to charge for a request's tokens, and how it was identified.
#[derive(Debug)]
pub(in crate::proxy) struct IdentifiedUser {
    pub(in crate::proxy) name: UserName,
    pub(in crate::proxy) source: UserSource,
}

/// Returns the user to charge for the request's tokens.
///
/// A user given for `explain` takes precedence, then the user of a key of the cluster.
///
/// From a trusted gateway that asks for endpoints, its fairness id stands in for a header in
/// `users.identify_by` that the request lacks.
///
/// A bare name is one that a key or a trusted proxy vouches for. A client's own claims get the
/// prefix `header:` or `body:`, so that no client can take another user's name. They count only if
/// no keys are checked.
pub(in crate::proxy) fn identify<'a>(
    settings: &ProxySettings,
    hashing: impl Fn() -> BlockHasher,
    client: &Client<'a>,
    parsed: &'a ParsedBody,
) -> Result<IdentifiedUser, ProxyError> {
    let Client {
        holder,
        origin,
        headers,
        ..
    } = *client;
    let user = |name, source| IdentifiedUser {
        name: UserName::bounded(name),
        source,
    };
    if let RequestOrigin::User(name) = origin {
        return Ok(user(Cow::Borrowed(name), UserSource::Given));
    }
    if let Holder::Cluster(key) = holder {
        return Ok(IdentifiedUser {
            name: UserName::bounded(&*key.spec.user).of_key(key.spec.id),
            source: UserSource::ClusterKey,
        });
    }
    let are_checked = *holder != Holder::Unchecked;
    let by_key = || match holder {
        Holder::Named(name) => Some(Cow::Borrowed(&**name)),
        Holder::Unnamed | Holder::Unchecked | Holder::Cluster(_) => {
            let is_valid = |key: &&[u8]| match &settings.api_keys {
                Some(keys) => keys.holder(key).is_some(),
                None => true,
            };
            let key = api_keys(headers).find(is_valid);
            key.map(|key| key_user_name(&hashing(), key).into())
        }
    };
    for place in &settings.identify_by {
        let found = match place {
            IdentifyBy::ApiKey => by_key(),
            IdentifyBy::Header(field) => match header_text(headers, field) {
                None => match fairness_id(settings, client)? {
                    Some(by_gateway) => return Ok(by_gateway),
                    None => None,
                },
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

/// Header with the user in the Gateway API Inference Extension.
const FAIRNESS_ID: HeaderName = HeaderName::from_static("x-gateway-inference-fairness-id");

/// Prefix of names that clients claim for themselves in a header.
const SAID_IN_HEADER: &str = "header:";
/// Prefix of names that clients claim for themselves in the body.
const SAID_IN_BODY: &str = "body:";

fn header_text<'a>(headers: &'a HeaderMap, field: &HeaderName) -> Option<&'a str> {
    let value = std::str::from_utf8(headers.get(field)?.as_bytes()).ok()?;
    Some(value.trim()).filter(|value| !value.is_empty())
}

/// Returns the user that a gateway of the Gateway API Inference Extension names; `None` if it names
/// none, or is not trusted.
fn fairness_id<'a>(
    settings: &ProxySettings,
    client: &Client<'a>,
) -> Result<Option<IdentifiedUser>, ProxyError> {
    let named = header_text(client.headers, &FAIRNESS_ID);
    let Some(name) = named.filter(|_| client.is_of_gateway && is_trusted(settings, client.origin))
    else {
        return Ok(None);
    };
    Ok(Some(IdentifiedUser {
        name: UserName::bounded(vouched(name, FAIRNESS_ID.as_str())?),
        source: UserSource::Identified(IdentifyBy::Header(FAIRNESS_ID)),
    }))
}

/// Whether the request's origin may name users.
pub(super) fn is_trusted(settings: &ProxySettings, origin: RequestOrigin<'_>) -> bool {
    match origin {
        RequestOrigin::Address(peer) => {
            let address: Option<IpAddr> = peer.to_str().ok().and_then(|peer| peer.parse().ok());
            let mut trusted = settings.trusted_proxies.iter();
            address.is_some_and(|address| trusted.any(|prefix| prefix.contains(address)))
        }
        RequestOrigin::TrustedProxy | RequestOrigin::User(_) => true,
    }
}

/// Returns the client's address, or `x-forwarded-for` if a trusted proxy sent the request; `None` if
/// the address is not known.
pub(in crate::proxy) fn client_address(
    settings: &ProxySettings,
    origin: RequestOrigin<'_>,
    headers: &HeaderMap,
) -> Option<HeaderValue> {
    let forwarded = headers.get_all(FORWARDED_FOR).iter().next_back();
    match (forwarded, origin) {
        (Some(list), _) if is_trusted(settings, origin) => Some(list.clone()),
        (_, RequestOrigin::Address(peer)) => Some(peer.clone()),
        (_, RequestOrigin::TrustedProxy | RequestOrigin::User(_)) => None,
    }
}

/// Accepts a name from a trusted proxy. Fails if it has a control character or the form of names
/// generated here.
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

/// Adds `prefix` to a name that a client claims for itself.
fn claimed(prefix: &str, name: &str, place: &str) -> Result<Cow<'static, str>, ProxyError> {
    check_name(name, place)?;
    Ok(Cow::Owned(format!("{prefix}{name}")))
}

/// Rejects control and format characters.
fn check_name(name: &str, place: &str) -> Result<(), ProxyError> {
    if user_name::has_hidden_character(name) {
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

    use super::*;
    use crate::proxy::settings::keys::ApiKeys;

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &str)| {
            (
                http::HeaderName::from_static(name),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            )
        };
        fields.iter().map(field).collect()
    }

    /// Key lookup of a cluster without keys.
    fn nobody(_: &[u8]) -> Result<Holder, ProxyError> {
        Err(ProxyError::BadKey)
    }

    /// Returns the user of a request from `peer` with these fields and `"user":"body"`.
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
            is_of_gateway: peer == GATEWAY,
            headers: &headers,
        };
        match identify(settings, || 7.into(), &client, &parsed) {
            Ok(user) => user.name.as_str().to_owned(),
            Err(failure) => format!("{failure:?}"),
        }
    }

    const PROXY: &str = "127.0.0.1";
    /// A trusted proxy that asks for endpoints.
    const GATEWAY: &str = "127.0.0.2";
    const STRANGER: &str = "192.0.2.9";

    #[test]
    fn only_vouched_names_are_unprefixed() {
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
        let fair = [("x-gateway-inference-fairness-id", "team")];
        assert_eq!(named(&settings, GATEWAY, &fair), "team");
        assert_eq!(named(&settings, GATEWAY, &[head[0], fair[0]]), "head");
        assert_eq!(named(&settings, PROXY, &fair), "body:body");
        assert_eq!(named(&settings, STRANGER, &fair), "body:body");
        assert_eq!(named(&settings, PROXY, &[]), "body:body");
        assert_eq!(
            named(&settings, PROXY, &[("authorization", "Basic x")]),
            "body:body"
        );
        settings.identify_by = Vec::new();
        assert_eq!(named(&settings, PROXY, &key), "anonymous");
    }

    #[test]
    fn with_keys_only_keys_and_trusted_proxies_name_users() {
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
    fn any_valid_key_of_several_counts() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let mut keys = ApiKeys::default();
        keys.add("sk-1", None);
        keys.add("sk-2", Some("ada".to_owned()));
        settings.api_keys = Some(keys);
        let (dummy, first) = (("authorization", "Bearer dummy"), ("x-api-key", "sk-1"));
        let named = |fields: &[_]| named(&settings, STRANGER, fields);
        let of_first = key_user_name(&7.into(), b"sk-1");
        assert_eq!(named(&[dummy, first]), of_first);
        assert_eq!(named(&[("api-key", "dummy"), first]), of_first);
        assert_eq!(named(&[dummy, ("api-key", "sk-2")]), "ada");
        assert_eq!(named(&[first, ("authorization", "Bearer sk-2")]), "ada");
        let none = headers(&[dummy, ("x-api-key", "sk-3")]);
        assert_eq!(check_key(&settings, &none, nobody), Err(ProxyError::BadKey));
        settings.api_keys = None;
        let secret = crate::users::api_keys::NewSecret::draw();
        let expired = headers(&[dummy, ("x-api-key", secret.text())]);
        let told = check_key(&settings, &expired, |_| Err(ProxyError::ExpiredKey));
        assert_eq!(told, Err(ProxyError::ExpiredKey));
    }

    #[test]
    fn required_keys_admit_only_known_ones() {
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
    fn user_names_of_one_kind_cannot_imitate_another() {
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
    fn overlong_names_are_shortened_as_in_explain() {
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

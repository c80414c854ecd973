//! API keys: create, list, rotate, revoke. This module draws each secret and returns it once. It is
//! stored nowhere: the log contains only its hash.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use schemars::JsonSchema;
use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::json;
use state::command::{Command, NAME_BYTES_MAX};
use state::ids::{ApiKeyId, LogIndex};
use state::keys::{ApiKey, ApiKeySpec, EXPIRY_MS_MAX};

use super::AdminState;
use super::answer::{
    Answer, Json, ListQuery, PathParam, QueryParams, ReadLevel, ReadQuery, Written, WrittenWith,
    at_level, commit, name_of, submit,
};
use super::problem::{invalid, not_found};
use api::error::Problem;
use api::users::api_keys::{NewSecret, draw_id};

/// An API key, without its secret.
#[derive(Serialize, JsonSchema)]
struct ApiKeyDetail {
    id: String,
    name: String,
    user: String,
    /// `live` or `expired`.
    state: &'static str,
    created_at: String,
    /// When the key expires; `null`: never.
    expires_at: Option<String>,
    rotated_at: Option<String>,
    /// Until when the previous secret remains valid.
    former_until: Option<String>,
    /// Models that the key may use; empty: all.
    models: Vec<String>,
    /// Paths that the key may use; empty: all.
    scopes: Vec<String>,
}

impl ApiKeyDetail {
    fn of(key: &ApiKey, now_ms: u64) -> Self {
        let is_expired = key.is_expired(now_ms);
        let former = key.former.filter(|it| it.until_ms > now_ms);
        Self {
            id: key.spec.id.to_string(),
            name: key.spec.name.clone(),
            user: key.spec.user.clone(),
            state: if is_expired { "expired" } else { "live" },
            created_at: date(key.created_at_ms),
            expires_at: key.spec.expires_at_ms.map(date),
            rotated_at: key.rotated_at_ms.map(date),
            former_until: former.map(|it| date(it.until_ms)),
            models: key.spec.models.clone(),
            scopes: key.spec.scopes.clone(),
        }
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct KeyList {
    index: LogIndex,
    keys: Vec<ApiKeyDetail>,
    /// Value of `cursor` for the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct KeyResponse {
    index: LogIndex,
    #[serde(flatten)]
    key: ApiKeyDetail,
}

/// A new secret, returned only once.
#[derive(Serialize, JsonSchema)]
pub(super) struct SecretResponse {
    index: LogIndex,
    outcome: &'static str,
    id: String,
    /// The secret. It is not stored and cannot be shown again.
    secret: String,
}

/// Query parameters of the list.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct KeysQuery {
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    #[serde(default)]
    read: ReadLevel,
    /// Maximum number of entries; 100 if absent.
    #[schemars(range(min = 1, max = super::PAGE_ENTRIES_MAX))]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only keys of this user.
    user: Option<String>,
}

pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<KeysQuery>,
) -> Result<Answer<KeyList>, Problem> {
    let after = query.cursor.as_deref();
    let after = after.map(|cursor| id_of("cursor", cursor)).transpose()?;
    let page = ListQuery {
        read: query.read,
        limit: query.limit,
        cursor: None,
    };
    let limit = page.limit()?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let now_ms = admin.clock.unix_ms();
    let all = admin.view.keys();
    let wanted = all.after(after).filter(|key| {
        let user = query.user.as_ref();
        user.is_none_or(|user| key.spec.user == *user)
    });
    // One more than requested shows whether there are more.
    let mut keys: Vec<_> = wanted
        .take(limit + 1)
        .map(|key| ApiKeyDetail::of(key, now_ms))
        .collect();
    let mut next_cursor = None;
    if keys.len() > limit {
        keys.truncate(limit);
        next_cursor = keys.last().map(|key| key.id.clone());
    }
    Ok(Answer(KeyList {
        index,
        keys,
        next_cursor,
    }))
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<String>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<KeyResponse>, Problem> {
    let id = id_of("id", &id)?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let keys = admin.view.keys();
    let key = keys
        .get(id)
        .ok_or_else(|| not_found(format!("no API key has the id {id}")))?;
    let key = ApiKeyDetail::of(key, admin.clock.unix_ms());
    Ok(Answer(KeyResponse { index, key }))
}

/// A key to create.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(example = json!({ "user": "ann", "expires_at": "2027-01-31T12:00:00Z" }))]
pub(super) struct CreateKeyBody {
    /// User that is charged for requests with this key.
    #[schemars(length(min = 1, max = NAME_BYTES_MAX))]
    user: String,
    /// Name of the key; the user's name if absent.
    #[schemars(length(min = 1, max = NAME_BYTES_MAX))]
    name: Option<String>,
    #[schemars(with = "Option<DateForm>")]
    expires_at: Option<Date>,
    /// Models that the key may use, each a name, or a prefix and `*`; empty: all.
    #[serde(default)]
    models: Vec<String>,
    /// Paths that the key may use, each a path, or a prefix and `*`; empty: all.
    #[serde(default)]
    scopes: Vec<String>,
}

/// A point in time, as RFC 3339 or in Unix seconds.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a date in the document")]
enum DateForm {
    Text(#[schemars(extend("format" = "date-time"))] String),
    Seconds(u64),
}

/// A point in time, as RFC 3339 or in Unix seconds.
enum Date {
    Text(String),
    Seconds(u64),
}

impl<'de> Deserialize<'de> for Date {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct DateVisitor;
        impl Visitor<'_> for DateVisitor {
            type Value = Date;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a date such as \"2027-01-31T12:00:00Z\", or Unix seconds")
            }

            fn visit_str<E>(self, text: &str) -> Result<Date, E> {
                Ok(Date::Text(text.to_owned()))
            }

            fn visit_u64<E>(self, seconds: u64) -> Result<Date, E> {
                Ok(Date::Seconds(seconds))
            }
        }
        input.deserialize_any(DateVisitor)
    }
}

impl Date {
    fn unix_ms(&self) -> Result<u64, Problem> {
        match self {
            Self::Seconds(seconds) => Ok(seconds.saturating_mul(1000)),
            Self::Text(text) => {
                let at = humantime::parse_rfc3339_weak(text).ok();
                let since = at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
                let ms = since.and_then(|it| u64::try_from(it.as_millis()).ok());
                ms.ok_or_else(|| {
                    let expected = "expected a date such as \"2027-01-31T12:00:00Z\"";
                    invalid("expires_at", format!("{text:?}, {expected}"))
                })
            }
        }
    }
}

pub(super) async fn create(
    State(admin): State<AdminState>,
    Json(body): Json<CreateKeyBody>,
) -> Result<WrittenWith<SecretResponse>, Problem> {
    name_of("user", &body.user)?;
    let name = body.name.unwrap_or_else(|| body.user.clone());
    name_of("name", &name)?;
    for model in &body.models {
        pattern_of("models", model)?;
    }
    for scope in &body.scopes {
        pattern_of("scopes", scope)?;
    }
    let expires_at_ms = body.expires_at.as_ref().map(Date::unix_ms).transpose()?;
    let (id, secret) = (draw_id(), NewSecret::draw());
    let spec = ApiKeySpec {
        id,
        secret: secret.hash(admin.view.registry().hash_seed),
        name,
        user: body.user,
        expires_at_ms,
        models: body.models,
        scopes: body.scopes,
    };
    let written = commit(&admin, Command::CreateKey(Box::new(spec))).await;
    told_once(written, id, &secret)
}

/// Query parameters of a rotation.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RotateQuery {
    /// How long the old secret stays valid; not at all if absent.
    grace: Option<String>,
}

pub(super) async fn rotate(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<String>,
    QueryParams(query): QueryParams<RotateQuery>,
) -> Result<WrittenWith<SecretResponse>, Problem> {
    let id = id_of("id", &id)?;
    let grace = match &query.grace {
        None => Duration::ZERO,
        Some(text) => humantime::parse_duration(text).map_err(|_| {
            let expected = "expected a duration such as \"1h\" or \"30m\"";
            invalid("grace", format!("{text:?}, {expected}"))
        })?,
    };
    let secret = NewSecret::draw();
    let rotate = Command::RotateKey {
        id,
        secret: secret.hash(admin.view.registry().hash_seed),
        grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
    };
    let written = commit(&admin, rotate).await;
    told_once(written, id, &secret)
}

pub(super) async fn revoke(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<String>,
) -> Result<Written, Problem> {
    let id = id_of("id", &id)?;
    submit(&admin, Command::RevokeKey { id }).await
}

/// Returns the response with the secret if the write is known to be committed. Otherwise the secret
/// is never revealed, and the problem contains the id by which the key, if it exists, can be
/// revoked.
fn told_once(
    written: Result<LogIndex, Problem>,
    id: ApiKeyId,
    secret: &NewSecret,
) -> Result<WrittenWith<SecretResponse>, Problem> {
    let id = id.to_string();
    match written {
        Ok(index) => {
            let body = SecretResponse {
                index,
                outcome: "committed",
                id,
                secret: secret.text().to_owned(),
            };
            Ok(WrittenWith { index, body })
        }
        Err(problem) => Err(problem.member("id", id)),
    }
}

/// Checks a name or pattern: `*` may occur only at its end.
pub(super) fn pattern_of(field: &str, pattern: &str) -> Result<(), Problem> {
    name_of(field, pattern)?;
    let beginning = pattern.strip_suffix('*').unwrap_or(pattern);
    match beginning.contains('*') {
        true => Err(invalid(
            field,
            format!("{pattern:?}, expected a `*` at the end or none"),
        )),
        false => Ok(()),
    }
}

fn id_of(field: &str, text: &str) -> Result<ApiKeyId, Problem> {
    let id = (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok());
    id.flatten().map(ApiKeyId).ok_or_else(|| {
        invalid(
            field,
            format!("{text:?}, expected the 16 hex digits of a key's id"),
        )
    })
}

/// Formats a time as RFC 3339.
pub(super) fn date(unix_ms: u64) -> String {
    let at: SystemTime = UNIX_EPOCH + Duration::from_millis(unix_ms.min(EXPIRY_MS_MAX));
    humantime::format_rfc3339_seconds(at).to_string()
}

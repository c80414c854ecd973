//! Sessions of agents and chats: what the cluster knows of each. Names of sessions are not stored; an
//! id is a hash.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::Registry;
use state::ids::{AgentSessionKey, BackendRef, LogIndex, ModelKey, UserKey};
use state::prefix::user_key;
use state::trees::{AgentSession, TreesView, TurnUsage};

use super::answer::{Answer, ListQuery, PathParam, QueryParams, ReadLevel, ReadQuery, at_level};
use super::bins::model_names;
use super::problem::{invalid, not_found, stopping};
use super::users::key_text;
use super::{Admin, AdminState, PAGE_ENTRIES_MAX};
use api::error::Problem;

/// A session.
#[derive(Serialize, JsonSchema)]
pub(super) struct SessionDetail {
    /// Hash of the user's key and the session's name, 16 hex digits.
    id: String,
    /// Session that started it; `null`: it is a root.
    parent: Option<String>,
    /// Root of its tree; a root's own id.
    root: String,
    /// Name of the user who pays; `null`: the user is no longer known.
    user: Option<String>,
    user_key: String,
    /// Model of the first turn; `null`: no backend names it any more.
    model: Option<String>,
    /// Backend of the last turn; `null`: it was removed or replaced.
    home: Option<String>,
    /// Time since the first turn began, in milliseconds.
    age_ms: u64,
    /// Time since a turn last began or ended, in milliseconds.
    idle_ms: u64,
    /// Number of turns that ended.
    turns: u32,
    /// Number of tokens of the last turn, prompt and output.
    tokens: u64,
    usage: TurnTokens,
}

/// Tokens of turns that ended.
#[derive(Serialize, JsonSchema)]
pub(super) struct TurnTokens {
    /// Prompt tokens that engines computed.
    input_uncached: u64,
    /// Prompt tokens that engines found in their caches.
    input_cached: u64,
    output: u64,
    /// Cached part of the prompt tokens; `null`: there were none.
    hit_percent: Option<f64>,
}

impl TurnTokens {
    pub(super) fn of(usage: &TurnUsage) -> Self {
        let input = usage.input();
        let share = || usage.input_cached as f64 / input as f64;
        Self {
            input_uncached: usage.input_uncached,
            input_cached: usage.input_cached,
            output: usage.output,
            hit_percent: (input > 0).then(|| (share() * 1000.0).round() / 10.0),
        }
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct SessionList {
    index: LogIndex,
    /// Number of all sessions, whatever the query asks for.
    sessions_total: usize,
    /// Number of all trees.
    trees_total: usize,
    /// The session used last comes first.
    sessions: Vec<SessionDetail>,
    /// Value of `cursor` for the next page; absent at the end. A session that is used meanwhile
    /// moves to the first page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

/// A session, as it is known by itself.
#[derive(Serialize, JsonSchema)]
pub(super) struct SessionResponse {
    index: LogIndex,
    #[serde(flatten)]
    session: SessionDetail,
}

/// Query parameters of the list.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SessionQuery {
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    read: ReadLevel,
    /// Only sessions of this user, by name.
    user: Option<String>,
    /// Only sessions whose last turn was at this backend.
    backend: Option<String>,
    /// Maximum number of entries; 100 if absent.
    #[schemars(range(min = 1, max = PAGE_ENTRIES_MAX))]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// Order of a list, as its cursors name it: what was used last comes first.
pub(super) const USED: &str = "used";

/// Position of a session or tree in a list: what it is ordered by, and its key. Higher ones come
/// first.
pub(super) type Position = (u64, AgentSessionKey);

/// What makes names of the hashes in sessions.
pub(super) struct SessionNaming {
    users: BTreeMap<UserKey, String>,
    models: BTreeMap<ModelKey, String>,
    registry: Arc<Registry>,
    now_ms: u64,
}

impl SessionNaming {
    pub(super) fn of(admin: &Admin, keys: &BTreeSet<UserKey>) -> Self {
        let registry = admin.view.registry();
        let mut users = BTreeMap::new();
        admin.cluster.with_state(&mut |state| {
            let named = |key: &UserKey| Some((*key, state.user(*key)?.name.to_string()));
            users = keys.iter().filter_map(named).collect();
        });
        Self {
            users,
            models: model_names(&registry),
            registry,
            now_ms: admin.view.now_ms(),
        }
    }

    pub(super) fn user(&self, key: UserKey) -> Option<String> {
        self.users.get(&key).cloned()
    }

    pub(super) fn backend(&self, home: BackendRef) -> Option<String> {
        let mut backends = self.registry.backends.iter();
        let named = backends.find(|it| it.handle == home);
        named.map(|it| it.spec.id.clone())
    }

    /// Returns the time since `at_ms`, both in replicated milliseconds.
    pub(super) fn since_ms(&self, at_ms: u64) -> u64 {
        self.now_ms.saturating_sub(at_ms)
    }

    pub(super) fn detail(&self, key: AgentSessionKey, session: &AgentSession) -> SessionDetail {
        SessionDetail {
            id: key.to_string(),
            parent: session.parent.map(|parent| parent.to_string()),
            root: session.root.to_string(),
            user: self.user(session.user),
            user_key: key_text(session.user),
            model: self.models.get(&session.model).cloned(),
            home: self.backend(session.home),
            age_ms: self.since_ms(session.begun_ms),
            idle_ms: self.since_ms(session.used_ms),
            turns: session.turns,
            tokens: session.tokens,
            usage: TurnTokens::of(&session.usage),
        }
    }
}

pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<SessionQuery>,
) -> Result<Answer<SessionList>, Problem> {
    let page = ListQuery {
        limit: query.limit,
        ..ListQuery::default()
    };
    let limit = page.limit()?;
    let after = position_of(query.cursor.as_deref(), USED)?;
    at_level(&admin, query.read).await?;
    let (index, registry) = (admin.view.applied(), admin.view.registry());
    let user = query.user.map(|name| user_key(registry.hash_seed, &name));
    let mut backends = registry.backends.iter();
    let home = query.backend.map(|id| {
        let named = backends.find(|it| it.spec.id == id);
        named.map(|it| it.handle)
    });
    let searching = move |trees: &TreesView| {
        let found = trees
            .sessions()
            .filter(|(_, it)| user.is_none_or(|user| it.user == user))
            .filter(|(_, it)| home.is_none_or(|home| home == Some(it.home)))
            .map(|(key, it)| ((it.used_ms, key), *it));
        (page_of(found, (after, USED), limit), trees.counts())
    };
    let (page, (sessions_total, trees_total)) = search(&admin, searching).await?;
    let (found, next_cursor) = page;
    let users = found.iter().map(|(_, it)| it.user).collect();
    let names = SessionNaming::of(&admin, &users);
    Ok(Answer(SessionList {
        index,
        sessions_total,
        trees_total,
        next_cursor,
        sessions: found
            .iter()
            .map(|((_, key), it)| names.detail(*key, it))
            .collect(),
    }))
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<String>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<SessionResponse>, Problem> {
    let id = id_of("id", &id)?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let session = admin.view.trees().session(id).copied();
    let session = session.ok_or_else(|| not_found(format!("no session has the id {id}")))?;
    let names = SessionNaming::of(&admin, &BTreeSet::from([session.user]));
    Ok(Answer(SessionResponse {
        index,
        session: names.detail(id, &session),
    }))
}

/// Searches sessions and trees on another thread, because it may read all of them.
pub(super) async fn search<T: Send + 'static>(
    admin: &Admin,
    search: impl FnOnce(&TreesView) -> T + Send + 'static,
) -> Result<T, Problem> {
    let trees = Arc::clone(&admin.view.trees());
    let searched = tokio::task::spawn_blocking(move || search(&trees)).await;
    searched.map_err(|_| stopping())
}

/// Reads the id of a session from the parameter `field`.
pub(super) fn id_of(field: &str, text: &str) -> Result<AgentSessionKey, Problem> {
    hex(text).map(AgentSessionKey).ok_or_else(|| {
        let found = format!("{text:?}, expected 16 hex digits");
        invalid(field, found)
    })
}

/// Reads 16 hex digits.
fn hex(text: &str) -> Option<u64> {
    let is_hex = text.len() == 16 && text.bytes().all(|it| it.is_ascii_hexdigit());
    u64::from_str_radix(text, 16).ok().filter(|_| is_hex)
}

/// Returns the `limit` entries with the highest positions below `after`, the highest first, and the
/// cursor of the next page in this `order`.
pub(super) fn page_of<T>(
    entries: impl Iterator<Item = (Position, T)>,
    (after, order): (Option<Position>, &str),
    limit: usize,
) -> (Vec<(Position, T)>, Option<String>) {
    let below = entries.filter(|(position, _)| after.is_none_or(|after| *position < after));
    let mut page: Vec<_> = below.collect();
    let has_more = page.len() > limit;
    if has_more {
        page.select_nth_unstable_by_key(limit, |(position, _)| Reverse(*position));
        page.truncate(limit);
    }
    page.sort_unstable_by_key(|(position, _)| Reverse(*position));
    let last = page.last().filter(|_| has_more);
    let next = last.map(|((amount, key), _)| format!("{order}-{amount:016x}-{key}"));
    (page, next)
}

/// Reads the cursor that [`page_of`] returned in this `order`, if there is one.
pub(super) fn position_of(cursor: Option<&str>, order: &str) -> Result<Option<Position>, Problem> {
    let Some(cursor) = cursor else {
        return Ok(None);
    };
    let read = || {
        let place = cursor.strip_prefix(order)?.strip_prefix('-')?;
        let (amount, key) = place.split_once('-')?;
        Some((hex(amount)?, AgentSessionKey(hex(key)?)))
    };
    let unfit = || {
        let found = format!("{cursor:?}, expected a next_cursor of the same order");
        invalid("cursor", found)
    };
    read().map(Some).ok_or_else(unfit)
}

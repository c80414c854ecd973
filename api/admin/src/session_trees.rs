//! The list of trees of sessions, each with the backends that its sessions are at.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::ids::{AgentSessionKey, BackendRef, LogIndex};
use state::prefix::user_key;
use state::trees::{SessionTree, TreesView};

use super::answer::{Answer, ListQuery, QueryParams, ReadLevel, at_level};
use super::sessions::{Position, SessionNaming, TurnTokens, page_of, position_of};
use super::users::key_text;
use super::{AdminState, PAGE_ENTRIES_MAX};
use api::error::Problem;

/// Maximum number of homes that are listed for a tree.
const HOMES_MAX: usize = 8;

/// A tree of sessions. Its turns and usage include sessions that have ended.
#[derive(Serialize, JsonSchema)]
struct TreeSummary {
    /// Id of its root.
    root: String,
    /// Name of the user who pays; `null`: the user is no longer known.
    user: Option<String>,
    user_key: String,
    /// Time since its first turn began, in milliseconds.
    age_ms: u64,
    /// Time since a turn of any of its sessions last began or ended, in milliseconds.
    idle_ms: u64,
    /// Number of sessions that have not ended.
    sessions: u32,
    /// Number of turns that ended.
    turns: u64,
    usage: TurnTokens,
    /// Number of backends that are the home of a session.
    homes_total: usize,
    /// Those with the most sessions, at most 8.
    homes: Vec<TreeHome>,
}

/// A backend that is the home of sessions of a tree.
#[derive(Serialize, JsonSchema)]
struct TreeHome {
    /// `null`: it was removed or replaced.
    backend: Option<String>,
    /// Number of the tree's sessions whose last turn was there.
    sessions: u32,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct TreeList {
    index: LogIndex,
    /// Number of all sessions, whatever the query asks for.
    sessions_total: usize,
    /// Number of all trees.
    trees_total: usize,
    /// Number of trees that the query asks for, listed or not.
    trees_found: usize,
    trees: Vec<TreeSummary>,
    /// Value of `cursor` for the next page; absent at the end. A tree that is used meanwhile moves
    /// to the first page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

/// Order of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum TreeOrder {
    /// The tree used last.
    #[default]
    Used,
    /// The tree with the most tokens.
    Tokens,
}

/// Query parameters of the list.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TreeQuery {
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    read: ReadLevel,
    /// Only trees of this user, by name.
    user: Option<String>,
    /// What comes first.
    order: TreeOrder,
    /// Maximum number of entries; 100 if absent.
    #[schemars(range(min = 1, max = PAGE_ENTRIES_MAX))]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// A tree with the last use of its sessions, in replicated milliseconds.
type UsedTree<'a> = (&'a SessionTree, u64);

pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<TreeQuery>,
) -> Result<Answer<TreeList>, Problem> {
    let page = ListQuery {
        limit: query.limit,
        ..ListQuery::default()
    };
    let limit = page.limit()?;
    let after = query.cursor.as_deref().map(position_of).transpose()?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let hash_seed = admin.view.registry().hash_seed;
    let user = query.user.map(|name| user_key(hash_seed, &name));
    let trees = admin.view.trees();
    let found: Vec<(Position, UsedTree<'_>)> = with_last_use(&trees)
        .filter(|(_, (it, _))| user.is_none_or(|user| it.user == user))
        .map(|(root, (it, used_ms))| match query.order {
            TreeOrder::Used => ((used_ms, root), (it, used_ms)),
            TreeOrder::Tokens => ((it.usage.tokens(), root), (it, used_ms)),
        })
        .collect();
    let trees_found = found.len();
    let (found, next_cursor) = page_of(found.into_iter(), after, limit);
    let users = found.iter().map(|(_, (it, _))| it.user).collect();
    let names = SessionNaming::of(&admin, &users);
    let mut homes = homes(&trees, &found.iter().map(|((_, root), _)| *root).collect());
    let (sessions_total, trees_total) = trees.counts();
    let summary = |((_, root), it): (Position, UsedTree<'_>)| {
        summary(&names, (root, it), homes.remove(&root).unwrap_or_default())
    };
    Ok(Answer(TreeList {
        index,
        sessions_total,
        trees_total,
        trees_found,
        trees: found.into_iter().map(summary).collect(),
        next_cursor,
    }))
}

fn with_last_use(trees: &TreesView) -> impl Iterator<Item = (AgentSessionKey, UsedTree<'_>)> {
    let mut used = HashMap::<AgentSessionKey, u64>::new();
    for (_, session) in trees.sessions() {
        let used_ms = used.entry(session.root).or_default();
        *used_ms = session.used_ms.max(*used_ms);
    }
    let tree = move |(root, used_ms)| Some((root, (trees.tree(root)?, used_ms)));
    used.into_iter().filter_map(tree)
}

/// Number of sessions at each home of a tree.
type HomeCounts = BTreeMap<BackendRef, u32>;

/// Counts the sessions of these trees at each home.
fn homes(
    trees: &TreesView,
    listed: &BTreeSet<AgentSessionKey>,
) -> BTreeMap<AgentSessionKey, HomeCounts> {
    let mut homes = BTreeMap::<_, HomeCounts>::new();
    for (_, session) in trees.sessions() {
        if listed.contains(&session.root) {
            let counts = homes.entry(session.root).or_default();
            *counts.entry(session.home).or_default() += 1;
        }
    }
    homes
}

fn summary(
    names: &SessionNaming,
    (root, (tree, used_ms)): (AgentSessionKey, UsedTree<'_>),
    homes: HomeCounts,
) -> TreeSummary {
    let homes_total = homes.len();
    let mut homes: Vec<_> = homes.into_iter().collect();
    homes.sort_by_key(|(_, sessions)| Reverse(*sessions));
    homes.truncate(HOMES_MAX);
    let home = |(home, sessions)| TreeHome {
        backend: names.backend(home),
        sessions,
    };
    TreeSummary {
        root: root.to_string(),
        user: names.user(tree.user),
        user_key: key_text(tree.user),
        age_ms: names.since_ms(tree.begun_ms),
        idle_ms: names.since_ms(used_ms),
        sessions: tree.sessions,
        turns: tree.turns,
        usage: TurnTokens::of(&tree.usage),
        homes_total,
        homes: homes.into_iter().map(home).collect(),
    }
}

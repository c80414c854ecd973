//! Trees of sessions: their list, with the backends that their sessions are at, and each by its root.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::command::Command;
use state::ids::{AgentSessionKey, BackendRef, LogIndex};
use state::prefix::user_key;
use state::trees::{AgentSession, SessionTree, TreesView};

use super::answer::{
    Answer, ListQuery, PathParam, QueryParams, ReadLevel, ReadQuery, Written, at_level, submit,
};
use super::problem::not_found;
use super::sessions::{
    Position, SessionDetail, SessionNaming, TurnTokens, USED, id_of, page_of, position_of, search,
};
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

impl TreeOrder {
    /// Returns its name in cursors.
    fn label(self) -> &'static str {
        match self {
            Self::Used => USED,
            Self::Tokens => "tokens",
        }
    }
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

/// A tree of sessions. Its figures include sessions that have ended.
#[derive(Serialize, JsonSchema)]
pub(super) struct TreeResponse {
    index: LogIndex,
    /// Id of its root.
    root: String,
    /// Name of the user who pays; `null`: the user is no longer known.
    user: Option<String>,
    user_key: String,
    /// Time since its first turn began, in milliseconds.
    age_ms: u64,
    /// Number of turns that ended.
    turns: u64,
    usage: TurnTokens,
    /// Number of sessions that have not ended.
    sessions_total: u32,
    /// These sessions, a parent before its children and the oldest first; at most 1000.
    sessions: Vec<SessionDetail>,
}

/// A tree with the last use of its sessions, in replicated milliseconds.
type UsedTree = (SessionTree, u64);

pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<TreeQuery>,
) -> Result<Answer<TreeList>, Problem> {
    let page = ListQuery {
        limit: query.limit,
        ..ListQuery::default()
    };
    let limit = page.limit()?;
    let order = query.order;
    let after = position_of(query.cursor.as_deref(), order.label())?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let hash_seed = admin.view.registry().hash_seed;
    let user = query.user.map(|name| user_key(hash_seed, &name));
    let searching = move |trees: &TreesView| {
        let found: Vec<(Position, UsedTree)> = with_last_use(trees)
            .filter(|(_, (it, _))| user.is_none_or(|user| it.user == user))
            .map(|(root, (it, used_ms))| match order {
                TreeOrder::Used => ((used_ms, root), (it, used_ms)),
                TreeOrder::Tokens => ((it.usage.tokens(), root), (it, used_ms)),
            })
            .collect();
        let trees_found = found.len();
        let page = page_of(found.into_iter(), (after, order.label()), limit);
        let homes = homes(trees, &page.0.iter().map(|((_, root), _)| *root).collect());
        (page, homes, (trees_found, trees.counts()))
    };
    let (page, mut homes, (trees_found, counts)) = search(&admin, searching).await?;
    let ((found, next_cursor), (sessions_total, trees_total)) = (page, counts);
    let users = found.iter().map(|(_, (it, _))| it.user).collect();
    let names = SessionNaming::of(&admin, &users);
    let summary = |((_, root), it): (Position, UsedTree)| {
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

pub(super) async fn show(
    State(admin): State<AdminState>,
    PathParam(root): PathParam<String>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<TreeResponse>, Problem> {
    let root = id_of("root", &root)?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let searching = move |trees: &TreesView| {
        let tree = *trees.tree(root)?;
        Some((tree, in_order(trees, root, &tree)))
    };
    let found = search(&admin, searching).await?;
    let (tree, shown) = found.ok_or_else(|| not_found(format!("no tree has the root {root}")))?;
    let names = SessionNaming::of(&admin, &BTreeSet::from([tree.user]));
    Ok(Answer(TreeResponse {
        index,
        root: root.to_string(),
        user: names.user(tree.user),
        user_key: key_text(tree.user),
        age_ms: names.since_ms(tree.begun_ms),
        turns: tree.turns,
        usage: TurnTokens::of(&tree.usage),
        sessions_total: tree.sessions,
        sessions: shown
            .iter()
            .map(|(key, it)| names.detail(*key, it))
            .collect(),
    }))
}

/// Ends all sessions of the tree with this root.
pub(super) async fn end(
    State(admin): State<AdminState>,
    PathParam(root): PathParam<String>,
) -> Result<Written, Problem> {
    let root = id_of("root", &root)?;
    submit(&admin, Command::EndTree { root }).await
}

/// Returns the sessions of a tree, a parent before its children and the oldest first, up to
/// [`PAGE_ENTRIES_MAX`]. A session without a known parent comes at the level of the root.
fn in_order(
    trees: &TreesView,
    root: AgentSessionKey,
    tree: &SessionTree,
) -> Vec<(AgentSessionKey, AgentSession)> {
    let of_tree = trees.sessions().filter(|(_, it)| it.root == root);
    let mut members: Vec<_> = of_tree.take(tree.sessions as usize).collect();
    // The youngest first, as they are taken from the end.
    members.sort_unstable_by_key(|(key, it)| Reverse((it.begun_ms, *key)));
    let known: BTreeSet<_> = members.iter().map(|(key, _)| *key).collect();
    let mut children = BTreeMap::<_, Vec<_>>::new();
    for (key, session) in members {
        let parent = session
            .parent
            .filter(|it| key != root && known.contains(it));
        children.entry(parent).or_default().push((key, session));
    }
    let (mut ordered, mut next) = (Vec::new(), Vec::<(AgentSessionKey, &AgentSession)>::new());
    while ordered.len() < PAGE_ENTRIES_MAX {
        if let Some((key, session)) = next.pop() {
            ordered.push((key, *session));
            next.extend(children.remove(&Some(key)).unwrap_or_default());
        } else if let Some((_, others)) = children.pop_first() {
            // First those without a parent, then any that clients made each other's parents.
            next = others;
        } else {
            break;
        }
    }
    ordered
}

fn with_last_use(trees: &TreesView) -> impl Iterator<Item = (AgentSessionKey, UsedTree)> {
    let mut used = HashMap::<AgentSessionKey, u64>::new();
    for (_, session) in trees.sessions() {
        let used_ms = used.entry(session.root).or_default();
        *used_ms = session.used_ms.max(*used_ms);
    }
    let tree = move |(root, used_ms)| Some((root, (*trees.tree(root)?, used_ms)));
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
    (root, (tree, used_ms)): (AgentSessionKey, UsedTree),
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

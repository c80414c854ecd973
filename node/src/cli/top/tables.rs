//! Formats a summary as lines and tables, for a screen and for a pipe.

use api::base::printable::escaped;
use lab::terminal::{FittedTable, column};

use super::summary::{BackendRow, ReplicaRow, Summary, TotalRow, TreeRow, UserRow};

/// Order in which backends are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum BackendOrder {
    /// Unhealthy backends first, then the busiest.
    #[default]
    Attention,
    Id,
    PromptTokens,
    KvUsage,
}

/// Order in which users are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum UserOrder {
    /// Users with the most waiting requests first, then the busiest.
    #[default]
    Waiting,
    Name,
    Tokens,
    Counter,
}

impl BackendOrder {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Attention => Self::Id,
            Self::Id => Self::PromptTokens,
            Self::PromptTokens => Self::KvUsage,
            Self::KvUsage => Self::Attention,
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Attention => "those that need attention first",
            Self::Id => "by id",
            Self::PromptTokens => "by prompt tokens",
            Self::KvUsage => "by KV use",
        }
    }

    pub(super) fn sort(self, rows: &mut [BackendRow]) {
        match self {
            Self::Attention => {}
            Self::Id => rows.sort_by(|a, b| a.id.cmp(&b.id)),
            Self::PromptTokens => {
                rows.sort_by(|a, b| falling(a.prompt_tokens_per_s, b.prompt_tokens_per_s));
            }
            Self::KvUsage => rows.sort_by(|a, b| falling(a.kv_usage_percent, b.kv_usage_percent)),
        }
    }
}

impl UserOrder {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Waiting => Self::Name,
            Self::Name => Self::Tokens,
            Self::Tokens => Self::Counter,
            Self::Counter => Self::Waiting,
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Waiting => "those that wait first",
            Self::Name => "by name",
            Self::Tokens => "by tokens",
            Self::Counter => "by counter",
        }
    }

    pub(super) fn sort(self, rows: &mut [UserRow]) {
        match self {
            Self::Waiting => {}
            Self::Name => rows.sort_by(|a, b| a.user.cmp(&b.user)),
            Self::Tokens => rows.sort_by(|a, b| falling(a.tokens_per_s, b.tokens_per_s)),
            Self::Counter => rows.sort_by_key(|row| std::cmp::Reverse(row.counter_milli_tokens)),
        }
    }
}

fn falling(a: Option<f64>, b: Option<f64>) -> std::cmp::Ordering {
    b.unwrap_or(-1.0).total_cmp(&a.unwrap_or(-1.0))
}

/// Describes the state of the cluster.
pub(super) fn cluster(summary: &Summary) -> String {
    let states = match summary.is_agreed {
        Some(true) => "states are equal",
        Some(false) => "STATES DIFFER",
        None => "states not compared",
    };
    let quorum = match summary.has_quorum {
        true => "quorum",
        false => "NO QUORUM",
    };
    let (leader, term) = (number(summary.leader), number(summary.term));
    let asked = number(summary.asked);
    format!("leader {leader}  term {term}  {quorum}  {states}  (as reported by replica {asked})")
}

/// Describes the load of the cluster.
pub(super) fn total(total: &TotalRow) -> String {
    let mut line = format!(
        "{:.1} requests/s  {:.1} failed/s  cached {}  in flight {}  waiting {}",
        total.requests_per_s,
        total.failed_per_s,
        percent(total.cached_percent),
        total.in_flight,
        total.waiting,
    );
    if let Some(longest) = &total.longest {
        let (user, seconds) = (escaped(&longest.user), longest.waited_ms as f64 / 1000.0);
        line += &format!(", {user} for {seconds:.1} s");
    }
    line
}

/// Says how many sessions and trees there are.
pub(super) fn sessions(summary: &Summary) -> String {
    format!(
        "{} sessions in {} trees",
        summary.sessions_total, summary.trees_total
    )
}

pub(super) fn replicas(rows: &[ReplicaRow]) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("replica"),
        column("role"),
        column("state"),
        column("requests/s").number(),
        column("failed/s").number().rank(2),
        column("TTFT p50 ms").number().rank(1),
        column("p99 ms").number().rank(1),
        column("routing p99 ms").number().rank(4),
        column("cached").number().rank(2),
        column("in flight").number().rank(1),
        column("waiting").number().rank(3),
        column("applied").number().rank(4),
        column("lag").number(),
        column("disk free").number().rank(4),
    ]);
    for row in rows {
        table.add_row([
            row.id.to_string(),
            escaped(&row.role).into_owned(),
            row.state.clone(),
            decimal(row.requests_per_s),
            decimal(row.failed_per_s),
            decimal(row.ttft_p50_ms),
            decimal(row.ttft_p99_ms),
            row.routing_p99_ms
                .map_or_else(dash, |value| format!("{value:.2}")),
            percent(row.cached_percent),
            number(row.in_flight),
            number(row.waiting),
            number(row.applied),
            number(row.lag),
            percent(row.disk_free_percent),
        ]);
    }
    table
}

pub(super) fn backends(rows: &[BackendRow]) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("backend"),
        column("state"),
        column("in flight").number(),
        column("limit").number().rank(4),
        column("queued").number().rank(1),
        column("prompt tok/s").number().rank(2),
        column("hits").number().rank(1),
        column("KV use").number(),
        column("owned").number().rank(3),
        column("capacity").number().rank(4),
        column("off").number().rank(2),
        column("ownership").rank(4),
    ]);
    for row in rows {
        table.add_row([
            escaped(&row.id).into_owned(),
            escaped(&row.state).into_owned(),
            row.in_flight.to_string(),
            number(row.limit),
            number(row.queued),
            whole(row.prompt_tokens_per_s),
            percent(row.hit_percent),
            percent(row.kv_usage_percent),
            row.owned_blocks.to_string(),
            number(row.capacity_blocks),
            percent(row.error_percent),
            escaped(&row.ownership).into_owned(),
        ]);
    }
    table
}

pub(super) fn users(rows: &[UserRow]) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("user"),
        column("weight").number().rank(3),
        column("waiting").number(),
        column("in flight").number(),
        column("requests/s").number().rank(2),
        column("tokens/s").number().rank(1),
        column("share").number().rank(1),
        column("fair").number().rank(1),
        column("counter").number().rank(3),
    ]);
    for row in rows {
        table.add_row([
            escaped(&row.user).into_owned(),
            (row.weight_milli as f64 / 1000.0).to_string(),
            row.waiting.to_string(),
            row.in_flight.to_string(),
            decimal(row.requests_per_s),
            decimal(row.tokens_per_s),
            percent(row.share_percent),
            percent(row.fair_percent),
            (row.counter_milli_tokens / 1000).to_string(),
        ]);
    }
    table
}

pub(super) fn trees(rows: &[TreeRow]) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("tree"),
        column("user"),
        column("homes").rank(2),
        column("sessions").number(),
        column("turns").number(),
        column("tokens/s").number(),
        column("hits").number().rank(1),
        column("tokens").number().rank(3),
        column("idle s").number().rank(3),
    ]);
    for row in rows {
        table.add_row([
            escaped(&row.root).into_owned(),
            escaped(&row.user).into_owned(),
            escaped(&row.homes.join(", ")).into_owned(),
            row.sessions.to_string(),
            row.turns.to_string(),
            decimal(row.tokens_per_s),
            percent(row.hit_percent),
            row.tokens.to_string(),
            (row.idle_ms / 1000).to_string(),
        ]);
    }
    table
}

fn dash() -> String {
    "-".to_owned()
}

fn decimal(value: Option<f64>) -> String {
    value.map_or_else(dash, |value| format!("{value:.1}"))
}

fn whole(value: Option<f64>) -> String {
    value.map_or_else(dash, |value| format!("{value:.0}"))
}

fn number(value: Option<u64>) -> String {
    value.map_or_else(dash, |value| value.to_string())
}

fn percent(value: Option<f64>) -> String {
    value.map_or_else(dash, |percent| format!("{percent:.1} %"))
}

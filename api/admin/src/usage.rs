//! Usage by user, API key, tree, model and day, and what it costs at this replica's prices.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use api::error::Problem;
use api::prices::{Money, PriceTable};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::HeaderMap;
use http::header::{ACCEPT, CONTENT_TYPE, VARY};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::ids::{AgentSessionKey, ApiKeyId, LogIndex, UserKey};
use state::keys::KeysView;
use state::prefix::user_key;
use state::trees::TreesView;
use state::usage::{UsageRow, UsageView};
use state::users::{UserUsage, UsersView};

use super::AdminState;
use super::answer::{Answer, ReadLevel, at_level};
use super::problem::{invalid, stopping};
use super::users::key_text;

/// Length of a day, in seconds.
const DAY_S: u64 = 24 * 60 * 60;
/// Number of rows of a page, if the query does not say.
const ROWS_DEFAULT: usize = 1000;
/// Maximum number of rows of a page.
const ROWS_MAX: usize = 10_000;
const CSV: &str = "text/csv";

/// Query parameters of the usage.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct UsageQuery {
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    read: ReadLevel,
    /// What the rows tell apart: `user`, `key`, `model` and `day`, separated by commas, or `tree`
    /// alone. `user` if absent.
    by: Option<String>,
    /// First day, such as `2026-11-01`, in UTC; if absent, the first one that is kept.
    from: Option<String>,
    /// Last day, which counts too; if absent, today.
    to: Option<String>,
    /// Only usage of this user, by name.
    user: Option<String>,
    /// `json`, or `csv` with all rows; if absent, what `Accept` prefers.
    format: Option<UsageFormat>,
    /// Maximum number of rows; 1000 if absent. CSV has no pages.
    #[schemars(range(min = 1, max = ROWS_MAX))]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// Format of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum UsageFormat {
    Json,
    Csv,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct UsageList {
    index: LogIndex,
    /// In ascending order of day, hash of the user, key and model.
    usage: Vec<UsageEntry>,
    /// Sum of all rows of the query, also of those on other pages.
    total: UsageFigures,
    /// First day that lost no detail because the table was full; absent: none did.
    #[serde(skip_serializing_if = "Option::is_none")]
    whole_from: Option<String>,
    /// Value of `cursor` for the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

/// A row. It has the columns by which the query groups.
#[derive(Serialize, JsonSchema)]
struct UsageEntry {
    /// Day in UTC, such as `2026-11-01`.
    #[serde(skip_serializing_if = "Option::is_none")]
    day: Option<String>,
    /// Name of the user; `null`: the user is no longer known.
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<Option<String>>,
    /// Hash of the user's name; `null`: users who were deleted, or whose rows had no room.
    #[serde(skip_serializing_if = "Option::is_none")]
    user_key: Option<Option<String>>,
    /// Id of the cluster's API key; `null`: requests without one, or rows that had no room.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Option<String>>,
    /// Name of the API key; `null`: the key is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_name: Option<Option<String>>,
    /// Model; `null`: rows that had no room.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<Option<String>>,
    /// Root of the tree of sessions.
    #[serde(skip_serializing_if = "Option::is_none")]
    tree: Option<String>,
    #[serde(flatten)]
    figures: UsageFigures,
}

/// Tokens, requests and money.
#[derive(Debug, Clone, Default, Serialize, JsonSchema)]
struct UsageFigures {
    #[serde(flatten)]
    usage: UserUsage,
    /// What the usage costs at the prices of this replica, exactly; absent: it has no prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    money: Option<String>,
    /// Tokens of models that have no price, which `money` leaves out; absent: there are none.
    #[serde(skip_serializing_if = "is_zero")]
    unpriced_tokens: u64,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(tokens: &u64) -> bool {
    *tokens == 0
}

/// The usage, in one of two formats.
pub(super) enum UsageAnswer {
    Json(Answer<UsageList>),
    Csv(String),
}

impl IntoResponse for UsageAnswer {
    fn into_response(self) -> Response {
        match self {
            Self::Json(list) => ([(VARY, "accept")], list).into_response(),
            Self::Csv(text) => {
                let headers = [(CONTENT_TYPE, "text/csv; charset=utf-8"), (VARY, "accept")];
                (headers, text).into_response()
            }
        }
    }
}

/// Columns by which rows are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Columns {
    day: bool,
    user: bool,
    key: bool,
    model: bool,
    tree: bool,
}

impl Columns {
    /// Whether rows show their user. A tree belongs to one.
    fn has_user(self) -> bool {
        self.user || self.tree
    }

    fn read(by: &str) -> Result<Self, Problem> {
        let mut columns = Self::default();
        for name in by.split(',') {
            let column = match name {
                "day" => &mut columns.day,
                "user" => &mut columns.user,
                "key" => &mut columns.key,
                "model" => &mut columns.model,
                "tree" => &mut columns.tree,
                _ => {
                    let expected = "user, key, model and day, separated by commas, or tree";
                    return Err(invalid("by", format!("{name:?}, expected {expected}")));
                }
            };
            *column = true;
        }
        let alone = Self {
            tree: true,
            ..Self::default()
        };
        if columns.tree && columns != alone {
            return Err(invalid("by", format!("{by:?}, expected tree alone")));
        }
        Ok(columns)
    }
}

/// What a group of rows has in common; `None` for columns that do not count. Flat, because JSON does
/// not tell a nested `None` from an outer one, and cursors are JSON.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Group {
    day: Option<u32>,
    user: Option<UserKey>,
    key: Option<ApiKeyId>,
    model: Option<String>,
    tree: Option<AgentSessionKey>,
}

/// Usage and money of a group.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    usage: UserUsage,
    money: Money,
    unpriced: u64,
}

impl Sum {
    fn add(&mut self, other: &Self) {
        self.usage.add(&other.usage);
        self.money += other.money;
        self.unpriced = self.unpriced.saturating_add(other.unpriced);
    }

    /// Returns this usage of a model, with what it costs.
    fn of(usage: UserUsage, model: Option<&str>, prices: &PriceTable) -> Self {
        let prices = model.and_then(|model| prices.get(model));
        Self {
            usage,
            money: prices.map(|it| it.of(&usage)).unwrap_or_default(),
            unpriced: match prices {
                Some(_) => 0,
                None => usage.tokens(),
            },
        }
    }

    fn figures(&self, prices: &PriceTable) -> UsageFigures {
        let has_prices = !prices.is_empty();
        UsageFigures {
            usage: self.usage,
            money: has_prices.then(|| self.money.to_string()),
            unpriced_tokens: if has_prices { self.unpriced } else { 0 },
        }
    }
}

/// Which rows count, and how they are grouped.
struct UsageSelection {
    columns: Columns,
    days: (Option<u32>, Option<u32>),
    user: Option<UserKey>,
}

impl UsageSelection {
    fn of(query: &UsageQuery, hash_seed: u64) -> Result<Self, Problem> {
        let columns = Columns::read(query.by.as_deref().unwrap_or("user"))?;
        let day = |field, text: &Option<String>| {
            let text = text.as_deref();
            text.map(|text| day_of(field, text)).transpose()
        };
        let days = (day("from", &query.from)?, day("to", &query.to)?);
        if columns.tree && days != (None, None) {
            return Err(invalid("by", "tree knows no days, expected no from and to"));
        }
        if let (Some(from), Some(to)) = days
            && from > to
        {
            return Err(invalid("to", "before from, expected the same day or later"));
        }
        let user = query.user.as_deref();
        Ok(Self {
            columns,
            days,
            user: user.map(|name| user_key(hash_seed, name)),
        })
    }

    fn takes(&self, row: &UsageRow<'_>) -> bool {
        let (from, to) = self.days;
        from.is_none_or(|from| row.day >= from)
            && to.is_none_or(|to| row.day <= to)
            && self.user.is_none_or(|user| row.user == Some(user))
    }

    /// Adds up the rows of the usage by group.
    fn sums(&self, usage: &UsageView, prices: &PriceTable) -> BTreeMap<Group, Sum> {
        let mut sums: BTreeMap<Group, Sum> = BTreeMap::new();
        let columns = self.columns;
        for row in usage.rows().filter(|row| self.takes(row)) {
            let model = row.source.map(|source| &*source.model);
            let group = Group {
                day: columns.day.then_some(row.day),
                user: row.user.filter(|_| columns.user),
                key: row.source.and_then(|it| it.key).filter(|_| columns.key),
                model: model.filter(|_| columns.model).map(str::to_owned),
                tree: None,
            };
            let sum = Sum::of(row.usage, model, prices);
            sums.entry(group).or_default().add(&sum);
        }
        sums
    }

    /// Returns the usage of the trees that have a session. A tree may use several models, so it has
    /// no price.
    fn sums_of_trees(&self, trees: &TreesView) -> BTreeMap<Group, Sum> {
        let theirs = trees
            .trees()
            .filter(|(_, tree)| self.user.is_none_or(|user| tree.user == user));
        let sum = |(root, tree): (AgentSessionKey, &state::trees::SessionTree)| {
            let group = Group {
                day: None,
                user: Some(tree.user),
                key: None,
                model: None,
                tree: Some(root),
            };
            let usage = UserUsage {
                input_uncached: tree.usage.input_uncached,
                input_cached: tree.usage.input_cached,
                output: tree.usage.output,
                requests: tree.turns,
            };
            (group, Sum::of(usage, None, &PriceTable::new()))
        };
        theirs.map(sum).collect()
    }
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    headers: HeaderMap,
    super::answer::QueryParams(query): super::answer::QueryParams<UsageQuery>,
) -> Result<UsageAnswer, Problem> {
    let limit = query.limit.unwrap_or(ROWS_DEFAULT);
    if !(1..=ROWS_MAX).contains(&limit) {
        return Err(invalid(
            "limit",
            format!("{limit}, expected 1 to {ROWS_MAX}"),
        ));
    }
    let after = query.cursor.as_deref().map(group_of).transpose()?;
    let selection = UsageSelection::of(&query, admin.view.registry().hash_seed)?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let file = admin.file.now();
    let (usage, trees) = (
        Arc::clone(&admin.view.usage()),
        Arc::clone(&admin.view.trees()),
    );
    let prices = match selection.columns.tree {
        true => PriceTable::new(),
        false => file.prices.clone(),
    };
    let is_csv = match query.format {
        Some(format) => format == UsageFormat::Csv,
        None => prefers_csv(&headers),
    };
    let limit = if is_csv { usize::MAX } else { limit };
    let named = Names {
        users: Arc::clone(&admin.view.users()),
        keys: Arc::clone(&admin.view.keys()),
    };
    // One at a time, because it reads all rows and may write all of them, on another thread.
    let turn = Arc::clone(&admin.usages).acquire_owned().await;
    let adding = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let sums = match selection.columns.tree {
            true => selection.sums_of_trees(&trees),
            false => selection.sums(&usage, &prices),
        };
        let mut total = Sum::default();
        sums.values().for_each(|sum| total.add(sum));
        let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let mut rows = sums.range((from, Bound::Unbounded)).peekable();
        let columns = selection.columns;
        let entry = |row| entry(row, columns, &named, &prices);
        if is_csv {
            let text = csv(columns, !prices.is_empty(), rows.map(entry));
            return UsageAnswer::Csv(text);
        }
        let page: Vec<_> = rows.by_ref().take(limit).collect();
        let last = page.last().filter(|_| rows.peek().is_some());
        let next_cursor = last.map(|(group, _)| text_of(group));
        UsageAnswer::Json(Answer(UsageList {
            index,
            usage: page.into_iter().map(entry).collect(),
            total: total.figures(&prices),
            whole_from: usage.whole_from().map(date_of),
            next_cursor,
        }))
    });
    adding.await.map_err(|_| stopping())
}

/// Where the names of users and API keys stand.
struct Names {
    users: Arc<UsersView>,
    keys: Arc<KeysView>,
}

/// Returns a row with the names of user and key.
fn entry(
    (group, sum): (&Group, &Sum),
    columns: Columns,
    named: &Names,
    prices: &PriceTable,
) -> UsageEntry {
    let user_name = |user| named.users.name(user).map(str::to_owned);
    UsageEntry {
        day: group.day.map(date_of),
        user: columns.has_user().then(|| group.user.and_then(user_name)),
        user_key: columns.has_user().then(|| group.user.map(key_text)),
        key: columns.key.then(|| group.key.map(|key| key.to_string())),
        key_name: columns.key.then(|| name_of(&named.keys, group.key?)),
        model: columns.model.then(|| group.model.clone()),
        tree: group.tree.map(|tree| tree.to_string()),
        figures: sum.figures(prices),
    }
}

fn name_of(keys: &KeysView, key: ApiKeyId) -> Option<String> {
    keys.get(key).map(|key| key.spec.name.clone())
}

/// Whether the client prefers CSV to JSON: it names CSV, and JSON not before.
fn prefers_csv(headers: &HeaderMap) -> bool {
    let accept = headers.get_all(ACCEPT).iter();
    let mut types = accept
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|it| it.split(';').next().unwrap_or_default().trim());
    let known = types.find(|it| [CSV, super::answer::JSON].contains(it));
    known == Some(CSV)
}

/// Writes rows as CSV (RFC 4180) with the names of the JSON fields. Absent values are empty.
fn csv(columns: Columns, has_prices: bool, rows: impl Iterator<Item = UsageEntry>) -> String {
    let shown = [
        ("day", columns.day),
        ("user", columns.has_user()),
        ("user_key", columns.has_user()),
        ("key", columns.key),
        ("key_name", columns.key),
        ("model", columns.model),
        ("tree", columns.tree),
        ("requests", true),
        ("input_uncached", true),
        ("input_cached", true),
        ("output", true),
        ("money", has_prices),
        ("unpriced_tokens", has_prices),
    ];
    let line = |cells: [String; 13]| {
        let cells = cells.into_iter().zip(shown);
        let cells = cells.filter(|(_, (_, is_shown))| *is_shown);
        let cells: Vec<String> = cells.map(|(cell, _)| cell).collect();
        cells.join(",") + "\r\n"
    };
    let mut text = line(shown.map(|(name, _)| name.to_owned()));
    let told = |name: Option<Option<String>>| quoted(&name.flatten().unwrap_or_default());
    for row in rows {
        let figures = row.figures;
        text += &line([
            row.day.unwrap_or_default(),
            told(row.user),
            told(row.user_key),
            told(row.key),
            told(row.key_name),
            told(row.model),
            row.tree.unwrap_or_default(),
            figures.usage.requests.to_string(),
            figures.usage.input_uncached.to_string(),
            figures.usage.input_cached.to_string(),
            figures.usage.output.to_string(),
            figures.money.unwrap_or_default(),
            figures.unpriced_tokens.to_string(),
        ]);
    }
    text
}

/// Quotes a text that would not be one cell, and one that a spreadsheet would take for a formula.
fn quoted(text: &str) -> String {
    let is_formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = if is_formula {
        format!("'{text}")
    } else {
        text.to_owned()
    };
    match text.contains([',', '"', '\r', '\n']) || is_formula {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

/// Reads a day such as `2026-11-01` as days since 1970.
fn day_of(field: &str, text: &str) -> Result<u32, Problem> {
    let at = humantime::parse_rfc3339(&format!("{text}T00:00:00Z")).ok();
    let since = at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let day = since.and_then(|since| u32::try_from(since.as_secs() / DAY_S).ok());
    day.ok_or_else(|| {
        let found = format!("{text:?}, expected a day such as 2026-11-01");
        invalid(field, found)
    })
}

/// Formats days since 1970 as a day such as `2026-11-01`.
fn date_of(day: u32) -> String {
    // The last day that has a date of four digits for the year.
    const LAST: u32 = 2_932_896;
    let at = UNIX_EPOCH + Duration::from_secs(u64::from(day.min(LAST)) * DAY_S);
    let mut date = humantime::format_rfc3339_seconds(at).to_string();
    date.truncate("2026-11-01".len());
    date
}

/// Returns the group as a cursor: its JSON in hexadecimal digits.
fn text_of(group: &Group) -> String {
    let json = serde_json::to_vec(group).unwrap_or_default();
    json.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn group_of(cursor: &str) -> Result<Group, Problem> {
    let read = || {
        let digits = cursor.as_bytes().chunks_exact(2);
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let json: Vec<u8> = digits.map(byte).collect::<Option<_>>()?;
        serde_json::from_slice(&json).ok()
    };
    // Numbers have several forms; a cursor has one.
    let found = read().filter(|group| text_of(group) == cursor);
    found.ok_or_else(|| invalid("cursor", format!("{cursor:?}, expected a next_cursor")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_read_as_they_are_written() {
        for (day, text) in [
            (0, "1970-01-01"),
            (20_786, "2026-11-29"),
            (19_782, "2024-02-29"),
        ] {
            assert_eq!(day_of("from", text).unwrap(), day);
            assert_eq!(date_of(day), text);
        }
        for text in ["2026-13-01", "2026-11-1", "today", "2025-02-29", ""] {
            assert!(day_of("from", text).is_err(), "{text}");
        }
        assert_eq!(date_of(u32::MAX), "9999-12-31");
    }

    #[test]
    fn cells_neither_break_rows_nor_run_as_formulas() {
        let cases = [
            ("ada", "ada"),
            ("a,b", "\"a,b\""),
            ("a\"b", "\"a\"\"b\""),
            ("=1+1", "\"'=1+1\""),
        ];
        for (text, cell) in cases {
            assert_eq!(quoted(text), cell);
        }
    }
}

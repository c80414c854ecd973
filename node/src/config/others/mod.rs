//! The tables: settings of other routers, each with what takes its place here.
//!
//! One table per router (`*.txt`) serves `quorate config import`, warnings about variables of
//! others, and the guide. A row is `NAMES | FATE | NOTE`, where the names may go on over several
//! lines; `#` begins a comment. Before the rows come `source:`, what the table is made from;
//! `programs:`, the names of the router's programs; and a line `implied:` for each key that gets a
//! value where no setting has one, with the reason. A key of a list applies if the entry exists.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

pub(super) static AIBRIX: LazyLock<Table> =
    LazyLock::new(|| Table::of(&[include_str!("aibrix.txt")]));
pub(super) static SMG: LazyLock<Table> =
    LazyLock::new(|| Table::of(&[include_str!("smg.txt"), SGLANG]));
pub(super) static VLLM_ROUTER: LazyLock<Table> =
    LazyLock::new(|| Table::of(&[include_str!("vllm-router.txt"), SGLANG]));
pub(super) static EPP: LazyLock<Table> = LazyLock::new(|| Table::of(&[include_str!("epp.txt")]));
/// Flags of both routers, which began as SGLang's.
const SGLANG: &str = include_str!("sglang.txt");

/// The settings of another router.
pub(super) struct Table {
    pub(super) source: &'static str,
    pub(super) programs: Vec<&'static str>,
    pub(super) rows: Vec<Row>,
    /// Key of ours, value and reason.
    pub(super) implied: Vec<(&'static str, Value, &'static str)>,
}

/// One or more settings of another router.
pub(super) struct Row {
    /// Their names. `NAME,NAME=VALUE,VALUE` stands for these values alone, a trailing `*` for any ending.
    pub(super) names: Vec<&'static str>,
    pub(super) fate: Fate,
    pub(super) note: &'static str,
}

/// What takes the place of a setting.
#[derive(Debug, PartialEq)]
pub(super) enum Fate {
    /// `KEY : UNIT`: a key of ours takes its value.
    Key(&'static str, Unit),
    /// `KEY = VALUE; ...`: if it is on, or has this value, these keys take these values.
    Set(Vec<(&'static str, Value)>),
    /// `hand KEY`: a key of ours, which nothing in the value can fill.
    Hand(&'static str),
    /// `nothing`: nothing has to be set.
    Unneeded,
    /// `none`: nothing does.
    Missing,
}

/// How a value becomes one of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Unit {
    Text,
    Integer,
    /// A number of which `0` and `-1` mean no limit.
    Limit,
    Decimal,
    /// A number, in thousandths here.
    Thousandths,
    Seconds,
    /// A quantity of Kubernetes, such as `5k` or `1Gi`.
    Quantity,
    /// All values, as a list.
    Texts,
    /// Labels `key=value`, as one selector.
    Selector,
    /// The host or the port of an address.
    Host,
    Port,
    /// URLs, each a backend.
    Urls,
    /// A URL, perhaps followed by a port that is not needed.
    Url,
    /// A directory or file of a tokenizer, unless it is a name on a model hub.
    Tokenizer,
    /// `host:port` of an OTLP collector.
    Collector,
}

impl Table {
    /// Reads a table, which may consist of several parts.
    pub(super) fn of(parts: &[&'static str]) -> Self {
        let mut table = Self {
            source: "",
            programs: Vec::new(),
            rows: Vec::new(),
            implied: Vec::new(),
        };
        let mut names = Vec::new();
        let lines = parts.iter().flat_map(|part| part.lines());
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(source) = line.strip_prefix("source: ") {
                table.source = source;
            } else if let Some(programs) = line.strip_prefix("programs: ") {
                table.programs = programs.split(' ').collect();
            } else if let Some((value, why)) = implied(line) {
                let (path, value) = assignment(value);
                table.implied.push((path, value, why));
            } else {
                let mut cells = line.split(" | ");
                names.extend(cells.next().into_iter().flat_map(|it| it.split(' ')));
                if let Some(fate) = cells.next() {
                    table.rows.push(Row {
                        names: std::mem::take(&mut names),
                        fate: Fate::of(fate),
                        note: cells.next().unwrap_or_default(),
                    });
                }
            }
        }
        table
    }

    /// Returns the row of a setting with this value; otherwise that of the setting.
    pub(super) fn row(&self, name: &str, value: &str) -> Option<&Row> {
        let is_value =
            |it: &str| values_of(it, name).is_some_and(|mut it| it.any(|it| it == value));
        let begins = |it: &str| it.strip_suffix('*').is_some_and(|it| name.starts_with(it));
        let find = |is: &dyn Fn(&str) -> bool| {
            let mut rows = self.rows.iter();
            rows.find(|row| row.names.iter().any(|it| is(it)))
        };
        find(&is_value)
            .or_else(|| find(&|it| it == name))
            .or_else(|| find(&begins))
    }

    /// Returns the values that a setting may have, if it has rows for values only.
    pub(super) fn values(&self, name: &str) -> Vec<&'static str> {
        let names = self.rows.iter().flat_map(|row| &row.names);
        names
            .filter_map(|it| values_of(it, name))
            .flatten()
            .collect()
    }
}

/// Returns the values in `NAME,NAME=VALUE,VALUE`, if `name` is one of the names.
fn values_of<'a>(text: &'a str, name: &str) -> Option<impl Iterator<Item = &'a str>> {
    let (names, values) = text.split_once('=')?;
    let is_one = names.split(',').any(|it| it == name);
    is_one.then(|| values.split(','))
}

fn implied(line: &'static str) -> Option<(&'static str, &'static str)> {
    line.strip_prefix("implied: ")?.split_once(" | ")
}

/// Reads a key and a value. What tables have in TOML is written alike in JSON.
fn assignment(text: &'static str) -> (&'static str, Value) {
    let (path, value) = text.split_once(" = ").expect("a table has KEY = VALUE");
    (
        path,
        serde_json::from_str(value).expect("a table has valid values"),
    )
}

impl Fate {
    fn of(text: &'static str) -> Self {
        if let Some((path, unit)) = text.split_once(" : ") {
            let unit = serde_json::from_value(Value::from(unit));
            return Self::Key(path, unit.expect("a table has units that exist"));
        }
        match (text, text.strip_prefix("hand ")) {
            ("nothing", _) => Self::Unneeded,
            ("none", _) => Self::Missing,
            (_, Some(path)) => Self::Hand(path),
            (_, None) => Self::Set(text.split("; ").map(assignment).collect()),
        }
    }
}

impl Row {
    /// Tells what takes the place of the setting, as Markdown on one line.
    pub(super) fn told(&self) -> String {
        let what = match &self.fate {
            Fate::Key(path, _) => format!("`{}`", shown(path)),
            Fate::Set(values) => {
                let values = values.iter();
                let values = values.map(|(path, value)| format!("`{} = {value}`", shown(path)));
                values.collect::<Vec<_>>().join(", ")
            }
            Fate::Hand(path) => format!("`{}`, by hand", shown(path)),
            Fate::Unneeded => "nothing to set".to_owned(),
            Fate::Missing => "no counterpart".to_owned(),
        };
        match self.note {
            "" => what,
            note => format!("{what}: {note}"),
        }
    }
}

/// Returns a path as people write it: `[[models]] block_size` for `models[0].block_size`.
pub(super) fn shown(path: &str) -> String {
    match (path.split_once('['), path.split_once("].")) {
        (Some((list, _)), Some((_, key))) => format!("[[{list}]] {key}"),
        _ => path.to_owned(),
    }
}

/// Returns what takes the place of an environment variable of AIBrix; `None` if it is not one.
pub(super) fn variable(name: &str) -> Option<String> {
    name.strip_prefix("AIBRIX_")?;
    let row = AIBRIX.row(name, AIBRIX.values(name).first().unwrap_or(&""));
    Some(match row.map(|row| (&row.fate, row)) {
        // Another value would set the same key.
        Some((Fate::Set(values), _)) => shown(values[0].0),
        Some((_, row)) => plain(&row.told()),
        None => "no key here".to_owned(),
    })
}

/// Returns what takes the place of a routing algorithm of AIBrix, if there is one of that name.
pub(super) fn algorithm(name: &str) -> Option<String> {
    let row = AIBRIX.row("ROUTING_ALGORITHM", name);
    row.map(|row| plain(&row.told()))
}

fn plain(markdown: &str) -> String {
    markdown.replace('`', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_warnings_know_the_names_of_aibrix() {
        assert_eq!(variable("AIBRIX_ELSE").as_deref(), Some("no key here"));
        assert_eq!(variable("HOME"), None);
        let ours = variable("AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD");
        assert_eq!(ours.as_deref(), Some("routing.vtc-basic.max_pod_load"));
        let ours = algorithm("prefix-cache-preble");
        assert_eq!(ours.as_deref(), Some("routing.policy = \"preble-e2\""));
    }
}

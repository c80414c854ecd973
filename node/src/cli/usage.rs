//! `quorate usage`: tokens and money by user, API key, model, day or tree of sessions.

use std::process::ExitCode;

use lab::terminal::{self, FittedTable, column};
use serde_json::Value;

use super::client::encoded;
use super::read::{ReadArgs, json_text};
use super::table::cell;

/// Arguments of `quorate usage`.
#[derive(Debug, clap::Args)]
pub(super) struct UsageArgs {
    /// What the rows tell apart: `user`, `key`, `model` and `day`, separated by commas, or `tree`
    #[arg(long, value_name = "COLUMNS", default_value = "user")]
    by: String,
    /// First day, such as 2026-11-01, in UTC. Default: the first that is kept
    #[arg(long, value_name = "DAY")]
    from: Option<String>,
    /// Last day, which counts too. Default: today
    #[arg(long, value_name = "DAY")]
    to: Option<String>,
    /// Only usage of this user
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Print CSV
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    #[command(flatten)]
    read: ReadArgs,
}

impl UsageArgs {
    fn path(&self) -> String {
        let mut path = format!("/admin/v1/usage?by={}", encoded(&self.by));
        let others = [("from", &self.from), ("to", &self.to), ("user", &self.user)];
        for (name, value) in others {
            if let Some(value) = value {
                path += &format!("&{name}={}", encoded(value));
            }
        }
        path
    }
}

/// Runs `quorate usage`.
pub(super) async fn run(args: UsageArgs) -> anyhow::Result<ExitCode> {
    let (path, target) = (args.path(), &args.read.target);
    if args.csv {
        target.select_replica(false).await?;
        let table = target.download(&format!("{path}&format=csv")).await?;
        terminal::print(table.trim_end().to_owned())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut list = target.get(&format!("{path}&limit=10000")).await?;
    let mut next = list["next_cursor"].take();
    // What is charged meanwhile may be in the rows of later pages, and not in the total.
    while let Some(cursor) = next.as_str() {
        let mut page = target
            .get(&format!("{path}&limit=10000&cursor={cursor}"))
            .await?;
        if let (Value::Array(rows), Value::Array(more)) = (&mut list["usage"], page["usage"].take())
        {
            rows.extend(more);
        }
        next = page["next_cursor"].take();
    }
    if args.read.json {
        list.as_object_mut().map(|list| list.remove("next_cursor"));
        terminal::print(json_text(&list)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows = list["usage"].as_array().map_or(&[][..], Vec::as_slice);
    terminal::print(table(rows, &list["total"]))?;
    Ok(ExitCode::SUCCESS)
}

/// Formats the rows in the columns that they have, and their sum.
fn table(rows: &[Value], total: &Value) -> String {
    let names = ["day", "user", "key", "model", "tree"];
    let shown = names.into_iter();
    let shown: Vec<&'static str> = shown
        .filter(|name| rows.iter().any(|row| row.get(name).is_some()))
        .collect();
    let has_money = total.get("money").is_some();
    let mut columns: Vec<_> = shown.iter().map(|name| column(name)).collect();
    let figures = ["requests", "computed", "cached", "output"];
    columns.extend(figures.map(|name| column(name).number()));
    if has_money {
        columns.extend(["money", "unpriced"].map(|name| column(name).number()));
    }
    let mut table = FittedTable::new(&columns);
    for row in rows {
        let named = shown.iter().map(|name| label(row, name));
        table.add_row(named.chain(figures_of(row, has_money)));
    }
    let sum = figures_of(total, has_money);
    let mut text = format!(
        "{table}\n{} requests, {} prompt tokens computed, {} cached, {} output",
        sum[0], sum[1], sum[2], sum[3]
    );
    if has_money {
        text += &format!(", {} money", sum[4]);
    }
    if let Some(tokens) = total["unpriced_tokens"].as_u64() {
        text += &format!("\n{tokens} tokens are of models without a price");
    }
    text
}

/// Returns the name in a column, or what stands for it. Names of keys are not unique, so the id of a
/// key is always there.
fn label(row: &Value, column: &str) -> String {
    let (name, id) = match column {
        "user" => ("user", "user_key"),
        "key" => ("key_name", "key"),
        _ => (column, column),
    };
    match (row[name].as_str(), row[id].as_str()) {
        (Some(_), Some(_)) if column == "key" => {
            format!("{} ({})", cell(&row[name]), cell(&row[id]))
        }
        (Some(_), _) => cell(&row[name]),
        (None, Some(_)) => cell(&row[id]),
        (None, None) => "-".to_owned(),
    }
}

/// Returns the cells of requests, tokens and money, with the tokens that it leaves out.
fn figures_of(row: &Value, has_money: bool) -> Vec<String> {
    let names = ["requests", "input_uncached", "input_cached", "output"];
    let mut cells: Vec<String> = names.iter().map(|name| cell(&row[*name])).collect();
    if has_money {
        let unpriced = row["unpriced_tokens"].as_u64().unwrap_or(0);
        cells.extend([cell(&row["money"]), unpriced.to_string()]);
    }
    cells
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_table_has_the_columns_of_the_rows_and_money_if_there_are_prices() {
        let row = |user: Value, key: &str| {
            json!({
                "user": user, "user_key": key, "requests": 2, "input_uncached": 10,
                "input_cached": 5, "output": 3, "money": "0.0004821",
            })
        };
        let mut rows = [row(json!("ada"), "01"), row(Value::Null, "02")];
        let mut total = row(Value::Null, "");
        let text = table(&rows, &total);
        for part in ["money", "ada", "02", "0.0004821 money"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("model"));
        rows[0]["key"] = json!("0007");
        rows[0]["key_name"] = json!("ci");
        rows[1]["unpriced_tokens"] = json!(41);
        let text = table(&rows, &total);
        for part in ["ci (0007)", "unpriced", " 41"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        total.as_object_mut().unwrap().remove("money");
        assert!(!table(&rows, &total).contains("money"));
    }
}

//! `quorate explain`: where a request would go, and why. Changes nothing.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use http::Method;
use serde_json::{Value, json};

use super::client::Target;
use super::read::print_json;
use super::table::{cell, table};

/// `quorate explain`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// File with the request's body, `-` for stdin
    #[arg(value_name = "FILE", required_unless_present = "prompt")]
    body: Option<PathBuf>,
    /// Explain a request with this prompt in place of a body from a file
    #[arg(long, conflicts_with = "body", requires = "model")]
    prompt: Option<String>,
    /// Model of `--prompt`
    #[arg(long)]
    model: Option<String>,
    /// Path the request would be posted to
    #[arg(long, default_value = "/v1/chat/completions")]
    path: String,
    /// Ask only after everything committed before is applied
    #[arg(long)]
    linearizable: bool,
    #[command(flatten)]
    target: Target,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let body = match &args.prompt {
        Some(prompt) if args.path.ends_with("/completions") && !args.path.contains("chat") => {
            json!({ "model": args.model, "prompt": prompt }).to_string()
        }
        Some(prompt) => {
            let messages = json!([{ "role": "user", "content": prompt }]);
            json!({ "model": args.model, "messages": messages }).to_string()
        }
        None => read_body(args.body.as_deref())?,
    };
    // The body goes as a text, byte for byte: blocks depend on its bytes.
    let request = json!({ "path": args.path, "headers": {}, "body": body });
    let read = if args.linearizable {
        "linearizable"
    } else {
        "local"
    };
    let path = format!("/admin/v1/explain?read={read}");
    let answer = args
        .target
        .send(Method::POST, &path, Some(&request))
        .await?;
    if args.json {
        return print_json(&answer);
    }
    show(&answer);
    Ok(ExitCode::SUCCESS)
}

fn read_body(path: Option<&std::path::Path>) -> anyhow::Result<String> {
    let Some(path) = path.filter(|path| path.as_os_str() != "-") else {
        let mut body = String::new();
        std::io::stdin()
            .read_to_string(&mut body)
            .context("read stdin")?;
        return Ok(body);
    };
    std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

fn show(answer: &Value) {
    let Some(fields) = answer.as_object() else {
        println!("{answer}");
        return;
    };
    let is_rows = |value: &Value| {
        value
            .as_array()
            .is_some_and(|rows| rows.iter().all(Value::is_object))
    };
    for (name, value) in fields.iter().filter(|(_, value)| !is_rows(value)) {
        println!("{name:<12} {}", shortened(&cell(value)));
    }
    for (name, value) in fields.iter().filter(|(_, value)| is_rows(value)) {
        println!("\n{name}");
        rows(value.as_array().map_or(&[][..], Vec::as_slice));
    }
}

/// A list of objects as a table: one column for each field that any of them has.
fn rows(rows: &[Value]) {
    let mut heads: Vec<&str> = Vec::new();
    for name in rows
        .iter()
        .filter_map(Value::as_object)
        .flat_map(|row| row.keys())
    {
        if !heads.contains(&name.as_str()) {
            heads.push(name);
        }
    }
    let mut table = table(&heads);
    for row in rows {
        table.add_row(heads.iter().map(|head| cell(&row[*head])));
    }
    println!("{table}");
}

fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 160;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

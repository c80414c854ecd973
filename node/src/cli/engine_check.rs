//! `quorate engine-check URL`: what an engine can do, and how Quorate will treat it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use api::base::printable::escaped;
use api::engines::backends::EngineUrl;
use api::engines::kv_transport::endpoint::KvEndpoint;
use api::files::text::read_text;
use api::prompt::{Tokenizer, TokenizerSpec};
use http::HeaderValue;
use lab::terminal::{self, FittedTable, column};

use super::read::print_json;
use crate::engine_check::{EngineCheckOptions, EngineReport, check};

/// Arguments of `quorate engine-check`.
#[derive(Debug, clap::Args)]
pub(super) struct EngineCheckArgs {
    /// URL of the engine, such as `http://gpu-1:8000`
    #[arg(value_name = "URL", value_parser = engine_url)]
    url: String,
    /// Model to request [default: the first that the engine lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Compare the engine's tokens with those of this tokenizer, named as in a config:
    /// `huggingface:FILE`, `tiktoken:o200k_base`
    #[arg(long, value_name = "TOKENIZER")]
    tokenizer: Option<TokenizerSpec>,
    /// Chat template to use instead of the one next to the tokenizer
    #[arg(long, value_name = "FILE", requires = "tokenizer")]
    chat_template: Option<PathBuf>,
    /// Where the engine publishes KV events, as in `kv_events` of a backend [default: ask the
    /// engine]
    #[arg(long, value_name = "ENDPOINT")]
    kv_events: Option<KvEndpoint>,
    /// Where it replays KV events, as in `kv_replay` of a backend
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events")]
    kv_replay: Option<KvEndpoint>,
    /// File with the engine's API key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Longest wait for a response, and for the engine to notice a disconnect, such as `1m`
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn engine_url(text: &str) -> Result<String, String> {
    let text = text.trim_end_matches('/');
    let is_plain = text.starts_with("http://") && EngineUrl::parse(text).is_ok();
    let expected = || "expected http://HOST[:PORT][/PATH]".to_owned();
    is_plain.then(|| text.to_owned()).ok_or_else(expected)
}

/// Checks an engine and prints the results. Exits with 1 if the engine cannot serve.
pub(super) async fn run(args: EngineCheckArgs) -> anyhow::Result<ExitCode> {
    let tokenizer = match args.tokenizer {
        Some(spec) => Some(Tokenizer::load(spec, args.chat_template.as_deref())?),
        None => None,
    };
    let authorization = match &args.api_key_file {
        Some(file) => {
            let key = read_text(file);
            let key = key.with_context(|| format!("read {}", file.display()))?;
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
                .with_context(|| format!("{} is no key", file.display()))?;
            value.set_sensitive(true);
            Some(value)
        }
        None => None,
    };
    let options = EngineCheckOptions {
        url: args.url,
        model: args.model,
        authorization,
        tokenizer,
        kv_events: args.kv_events.map(|events| (events, args.kv_replay)),
        patience: args.timeout,
    };
    let report = check(&options).await?;
    if args.json {
        print_json(&serde_json::to_value(&report)?)?;
    } else {
        print(&report)?;
    }
    Ok(match report.is_usable() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn print(report: &EngineReport) -> anyhow::Result<()> {
    let known = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
    let head = format!(
        "{}: {}, version {}, model {}",
        report.url,
        known(report.kind.map(|kind| kind.to_string())),
        known(report.version.clone()),
        known(report.model.clone())
    );
    terminal::print(format!("{}\n", escaped(&head)))?;
    let mut table = FittedTable::new(&[
        column("CHECK"),
        column("ENGINE"),
        column("FOUND").prose(),
        column("QUORATE").prose(),
    ]);
    for check in &report.checks {
        table.add_row([
            check.name.to_owned(),
            check.outcome.label().to_owned(),
            escaped(&check.found).into_owned(),
            check.therefore.clone(),
        ]);
    }
    terminal::print(table)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_check_accepts_backend_urls() {
        assert_eq!(engine_url("http://a:1/x/").as_deref(), Ok("http://a:1/x"));
        for bad in ["a:1", "https://a:1", "http://", "ftp://a", "http://a:x"] {
            assert!(engine_url(bad).is_err(), "{bad}");
        }
    }
}

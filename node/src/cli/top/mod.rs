//! `quorate top`: a live view of the cluster, on one screen or as text.
//!
//! Every replica reports on the whole cluster. The command learns the admin URLs that members
//! announce, and uses another replica if the first one fails.

mod observer;
mod screen;
mod summary;
mod tables;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use lab::terminal;
use serde_json::to_value;

use self::observer::Observer;
use self::summary::Summary;
use super::client::AdminTarget;
use super::read::print_json;

/// Arguments of `quorate top`.
#[derive(Debug, clap::Args)]
pub(super) struct TopArgs {
    #[command(flatten)]
    target: AdminTarget,
    /// Time between two updates
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = super::watch::interval)]
    interval: Duration,
    /// Print one interval as text, and exit
    #[arg(long)]
    once: bool,
    /// Print one interval as JSON
    #[arg(long, requires = "once")]
    json: bool,
}

/// Runs `quorate top`.
pub(super) async fn run(args: TopArgs) -> anyhow::Result<ExitCode> {
    if !args.once && !std::io::stdout().is_terminal() {
        bail!("stdout is not a terminal: use `quorate top --once`");
    }
    let mut observer = Observer::new(args.target);
    // Report a wrong address before the screen is set up.
    let before = observer.sample().await?;
    if !args.once {
        return screen::run((observer, before), args.interval).await;
    }
    tokio::time::sleep(args.interval).await;
    let now = observer.sample().await?;
    let summary = Summary::of(Some(&before), &now);
    if args.json {
        return print_json(&to_value(&summary)?);
    }
    terminal::print(format_args!(
        "{}\n{}\n\n{}\n\n{}\n\n{}\n\n{}{}",
        tables::cluster(&summary),
        tables::total(&summary.total),
        tables::replicas(&summary.replicas),
        tables::backends(&summary.backends),
        tables::users(&summary.users),
        tables::sessions(&summary),
        match summary.trees.is_empty() {
            true => String::new(),
            false => format!("\n{}", tables::trees(&summary.trees)),
        },
    ))?;
    Ok(ExitCode::SUCCESS)
}

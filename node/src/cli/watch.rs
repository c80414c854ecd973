//! `--watch`: repeats a command that displays something.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use lab::terminal;
use tokio::time::sleep;

use super::read::ReadArgs;

/// Minimum interval between updates.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Arguments of commands that support `--watch`.
#[derive(Debug, clap::Args)]
pub(super) struct WatchArgs {
    #[command(flatten)]
    pub(super) read: ReadArgs,
    /// Repeat at this interval [default without a value: 2s]
    #[arg(
        long,
        value_name = "DURATION",
        num_args = 0..=1,
        default_missing_value = "2s",
        value_parser = interval
    )]
    watch: Option<Duration>,
}

/// Parses the interval between updates.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let parsed = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if parsed < INTERVAL_MIN {
        return Err("expected 100ms or longer".to_owned());
    }
    Ok(parsed)
}

/// Prints the output of `show`. With `--watch`, repeats that until a signal. After the first
/// success, prints errors and continues, so that restarts of replicas can be watched.
pub(super) async fn watch(
    args: WatchArgs,
    show: impl AsyncFn(&ReadArgs) -> anyhow::Result<(String, ExitCode)>,
) -> anyhow::Result<ExitCode> {
    let (mut text, code) = show(&args.read).await?;
    let Some(every) = args.watch else {
        terminal::print(text)?;
        return Ok(code);
    };
    loop {
        if std::io::stdout().is_terminal() {
            terminal::clear()?;
        }
        terminal::print(text)?;
        sleep(every).await;
        text = loop {
            match show(&args.read).await {
                Ok((text, _)) => break text,
                Err(error) => super::report(&error, args.read.json),
            }
            sleep(every).await;
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_intervals_have_a_minimum() {
        assert_eq!(interval("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(interval("100ms"), Ok(INTERVAL_MIN));
        assert!(interval("99ms").is_err());
        assert!(interval("often").is_err());
    }
}

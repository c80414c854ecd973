//! Logging to stderr, as text or JSON, with a `tracing` filter. The access log is part of it.

use std::sync::{Arc, Mutex, PoisonError};

use admin::LogLevelControl;
use anyhow::Context as _;
use api::proxy::{ACCESS_TARGET, LoggedRequests};
use lab::terminal::is_coloured;
use state::form::Form as _;
use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, fmt, reload};

use crate::config::{LogConfig, LogFilter, LogFormat};

/// Default filter for dependencies that log each step, each failed heartbeat to a peer known to be
/// down, each connection reset by a client, or each invalid server name. A filter that names them
/// takes precedence.
const QUIET: &str = "openraft=error,sled=off,h2=error,hyper=warn,rustls::msgs=error,tonic=warn";

/// Handle that changes the log filter at run time.
#[derive(Clone)]
pub struct LogLevel {
    access: LoggedRequests,
    filter: reload::Handle<EnvFilter, Registry>,
    /// Level or filter that was set last.
    level: Arc<Mutex<String>>,
}

impl LogLevel {
    /// Replaces the filter with `level`, a level or filter.
    ///
    /// # Errors
    /// Fails if `level` does not parse.
    pub fn set(&self, level: &str) -> anyhow::Result<()> {
        self.filter.reload(filter(level, self.access)?)?;
        level.clone_into(&mut self.level.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }

    /// Returns a control for operators, whose errors state what is expected.
    #[must_use]
    pub fn control(self) -> LogLevelControl {
        let level = Arc::clone(&self.level);
        let show = move || {
            let level = level.lock().unwrap_or_else(PoisonError::into_inner);
            level.clone()
        };
        LogLevelControl::new(show, move |level| {
            let read = LogFilter::read(level).ok_or(LogFilter::EXPECTED)?;
            self.set(&read).map_err(|error| error.to_string())
        })
    }
}

/// Sets up logging for the whole process. Call it once, from a program's `main`. A library or test
/// that embeds a replica sets up its own logging, or none.
///
/// # Errors
/// Fails if the filter does not parse, or logging is set up already.
pub fn init(log: &LogConfig) -> anyhow::Result<LogLevel> {
    let access = log.access;
    let (reloading, filter) = reload::Layer::new(filter(&log.level, access)?);
    let outcome = tracing_subscriber::registry()
        .with(reloading)
        .with(to_stderr(log.format))
        .try_init();
    outcome.map_err(|error| anyhow::anyhow!("set up logging: {error}"))?;
    let level = Arc::new(Mutex::new(log.level.clone()));
    Ok(LogLevel {
        access,
        filter,
        level,
    })
}

fn to_stderr<S>(format: LogFormat) -> Box<dyn tracing_subscriber::Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let lines = fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Json => {
            let lines = lines.json().flatten_event(true);
            lines.with_current_span(false).boxed()
        }
        LogFormat::Text => lines.with_ansi(is_coloured(&std::io::stderr())).boxed(),
    }
}

/// Returns the filter of a config. A level does not affect the access log, which has its own
/// setting; a filter that names its target does.
fn filter(level: &str, access: LoggedRequests) -> anyhow::Result<EnvFilter> {
    let access = match access {
        LoggedRequests::Off => "off",
        LoggedRequests::Errors | LoggedRequests::All => "info",
    };
    let filter = format!("{QUIET},{ACCESS_TARGET}={access},{level}");
    Ok(EnvFilter::builder().parse(filter)?)
}

/// Sets up logging for commands without a config: lines of text, filtered by
/// `QUORATE_LOG__LEVEL`, else by `default`.
///
/// # Errors
/// Fails if the filter does not parse, or logging is set up already.
pub fn init_for_command(default: &str) -> anyhow::Result<()> {
    let filter = match std::env::var("QUORATE_LOG__LEVEL") {
        Ok(told) => LogFilter::read(&told).with_context(|| {
            let expected = LogFilter::EXPECTED;
            format!("QUORATE_LOG__LEVEL is {told:?}, expected {expected}")
        })?,
        Err(_) => default.to_owned(),
    };
    let format = match std::env::var("QUORATE_LOG__FORMAT").as_deref() {
        Ok("json") => LogFormat::Json,
        _ => LogFormat::Text,
    };
    let log = LogConfig {
        format,
        level: filter,
        access: LoggedRequests::Off,
    };
    init(&log)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tracing::Level;
    use tracing::subscriber::with_default;

    use super::*;

    fn with_filter(level: &str, access: LoggedRequests, is_told: impl FnOnce() -> bool) -> bool {
        let filter = filter(level, access).unwrap();
        let lines = tracing_subscriber::fmt().with_env_filter(filter);
        with_default(lines.finish(), is_told)
    }

    #[test]
    fn the_access_log_level_is_independent() {
        let is_told = |level: &str, access| {
            let is_told = || tracing::enabled!(target: ACCESS_TARGET, Level::INFO);
            with_filter(level, access, is_told)
        };
        assert!(is_told("error", LoggedRequests::All));
        assert!(is_told("info", LoggedRequests::Errors));
        assert!(!is_told("info", LoggedRequests::Off));
        assert!(!is_told("info,quorate::access=warn", LoggedRequests::All));
    }

    #[test]
    fn h2_warnings_caused_by_clients_are_logged_only_on_request() {
        let is_told = |told: &str| {
            let is_told = || tracing::enabled!(target: "h2::proto::streams::streams", Level::WARN);
            with_filter(told, LoggedRequests::Off, is_told)
        };
        assert!(!is_told("info"));
        assert!(!is_told("debug"));
        assert!(is_told("info,h2=warn"));
    }
}

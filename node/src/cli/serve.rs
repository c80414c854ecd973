//! `quorate serve`: runs one replica until SIGTERM or SIGINT. A second of these signals ends it at
//! once. SIGHUP reloads its config; SIGUSR1 and SIGUSR2 are only logged.

use std::convert::Infallible;
use std::process::ExitCode;

use admin::ReloadRequests;
use lab::terminal;
use tokio::signal::unix::{SignalKind, signal};

use super::reload::{self, ConfigReload};
use super::source::ConfigSource;
use crate::app::{App, ShutdownHandle};
use crate::config::Config;
use crate::service_manager::ServiceManager;
use crate::telemetry::LogLevel;
use crate::{descriptors, file_permissions, memory, telemetry};

/// Arguments of `quorate serve`.
#[derive(Debug, clap::Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    config: ConfigSource,
    /// Also use the engine at this URL; may be repeated. Without a config file, the replica then
    /// has id 1
    #[arg(long, value_name = "URL")]
    backend: Vec<String>,
    /// Start even if others can reach an unprotected listener
    #[arg(long)]
    insecure: bool,
}

/// Runs `quorate serve`.
pub(super) fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let (mut source, backends) = (args.config, args.backend);
    if args.insecure {
        source.set.push("insecure=true".to_owned());
    }
    file_permissions::keep_new_files_private();
    let loaded = source.clone().load_with(backends.clone())?;
    let level = telemetry::init(&loaded.config.log)?;
    let mut config = loaded.config;
    descriptors::fit(&mut config.limits, None, descriptors::raise());
    memory::fit(&mut config.limits, memory::limit());
    for file in &config.secret_files {
        if file_permissions::is_open_to_others(file) {
            let file = file.display();
            tracing::warn!(%file, "key file is readable by others; chmod 600");
        }
    }
    super::block_on(serve((source, backends), config, level))
}

/// Serves until a signal asks the replica to stop.
async fn serve(
    (source, backends): (ConfigSource, Vec<String>),
    config: Config,
    log_level: LogLevel,
) -> anyhow::Result<ExitCode> {
    let shutdown = ShutdownHandle::new();
    let hangups = signal(SignalKind::hangup())?;
    for kind in [SignalKind::user_defined1(), SignalKind::user_defined2()] {
        tokio::spawn(reload::ignore(signal(kind)?, kind));
    }
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminations = signal(SignalKind::terminate())?;
    let reloaded = config.clone();
    let (requests, asked) = ReloadRequests::channel();
    let app = App::build(config)?.reloading_by(requests);
    let app = app.logging_by(log_level.clone().control());
    let handles = (app.file_settings(), app.reload_handle());
    let reload = ConfigReload::new((source, backends), &reloaded, log_level, handles)
        .with_certificates(app.certificates());
    tokio::spawn(reload.follow(hangups, asked));
    let running = tokio::spawn(run_told(app, shutdown.clone()));
    tokio::pin!(running);
    let mut signals = 0;
    loop {
        tokio::select! {
            outcome = &mut running => {
                outcome??;
                return Ok(ExitCode::SUCCESS);
            }
            _ = interrupts.recv() => signals += 1,
            _ = terminations.recv() => signals += 1,
        }
        if signals > 1 {
            tracing::warn!("second signal: exiting immediately");
            return Ok(ExitCode::from(terminal::INTERRUPTED));
        }
        shutdown.drain();
    }
}

/// Runs the replica, and reports its progress to the service manager.
async fn run_told(app: App, shutdown: ShutdownHandle) -> anyhow::Result<()> {
    let manager = ServiceManager::of_environment();
    let addresses = app.addresses();
    let replica = app.start().await?;
    manager.ready(addresses);
    let longest = replica.longest_drain();
    let leaving = async {
        shutdown.draining().await;
        manager.stopping(longest());
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        biased;
        never = leaving => match never {},
        never = manager.feed_watchdog() => match never {},
        () = replica.until(&shutdown) => Ok(()),
    }
}

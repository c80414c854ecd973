//! Reloads the config on SIGHUP or an operator's request, and applies what can change at run time.
//! Reports the other changes, so that operators do not assume that they are in effect.

use std::collections::BTreeMap;

use admin::{AdminTokens, ReloadError, ReloadReport, ReloadResult, ReloadedKey};
use api::engines::backends::EngineKeys;
use api::net::tls::CertificateWatch;
use api::proxy::{ApiKeys, ProxyLimits};
use api::settings::{FileSettings, LocalSetting, SettingKey, SharedFileSettings};
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::{mpsc, oneshot};

use super::source::ConfigSource;
use crate::app::{ReloadHandle, read_admin_tokens, read_api_keys};
use crate::config::{Config, ConfigErrors, Place};
use crate::telemetry::LogLevel;
use crate::{descriptors, memory};

/// Effect of a changed setting on a running replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// The new value is in effect from now on.
    Taken,
    /// The setting is replicated, and the cluster keeps its own value.
    ClusterKeeps,
    /// The setting is read only at start.
    NeedsRestart,
}

/// A config key whose value has changed, with both values.
#[derive(Debug, Clone, PartialEq)]
struct ChangedSetting {
    key: String,
    before: Value,
    after: Value,
    effect: Effect,
}

/// Reloads the config of a running replica and applies what can change.
pub(super) struct ConfigReload {
    source: ConfigSource,
    /// URLs of backends that were given on the command line.
    backends: Vec<String>,
    log_level: LogLevel,
    api_keys: Option<ApiKeys>,
    admin_tokens: Option<AdminTokens>,
    engine_keys: EngineKeys,
    replica: ReloadHandle,
    /// The config in effect, without changes that need a restart.
    running: Config,
    /// Settings that the admin API shows: those in effect here, and the config's values of
    /// replicated settings.
    file: SharedFileSettings,
    certificates: CertificateWatch,
}

impl ConfigReload {
    /// Creates a reloader of `source` for the replica that runs with `config`.
    pub(super) fn new(
        (source, backends): (ConfigSource, Vec<String>),
        config: &Config,
        log_level: LogLevel,
        (file, replica): (SharedFileSettings, ReloadHandle),
    ) -> Self {
        Self {
            source,
            backends,
            log_level,
            api_keys: config.api_keys.clone(),
            admin_tokens: config.admin_tokens.clone(),
            engine_keys: config.engine_keys.clone(),
            replica,
            running: config.clone(),
            file,
            certificates: CertificateWatch::default(),
        }
    }

    /// Reloads the given certificates whenever the config is reloaded.
    pub(super) fn with_certificates(self, certificates: CertificateWatch) -> Self {
        Self {
            certificates,
            ..self
        }
    }

    /// Reloads the config at every signal and request, until both channels are closed.
    pub(super) async fn follow(
        mut self,
        mut hangups: Signal,
        mut asked: mpsc::Receiver<oneshot::Sender<ReloadResult>>,
    ) {
        loop {
            tokio::select! {
                biased;
                Some(()) = hangups.recv() => drop(self.reload().await),
                // The caller may be gone.
                Some(asker) = asked.recv() => drop(asker.send(self.reload().await)),
                else => return,
            }
        }
    }

    async fn reload(&mut self) -> ReloadResult {
        let result = self.read().await;
        let is_clean = result.as_ref().is_ok_and(|it| it.faults.is_empty());
        self.replica.note(!is_clean);
        result
    }

    async fn read(&mut self) -> ReloadResult {
        let (source, backends) = (self.source.clone(), self.backends.clone());
        // Loading tokenizers may take long.
        match tokio::task::spawn_blocking(move || source.load_with(backends)).await {
            Ok(Ok(loaded)) => Ok(self.take(&loaded.config)),
            Ok(Err(error)) => {
                let faults = faults_of(&error);
                tell_faults(&faults);
                Err(faults)
            }
            Err(error) => {
                let faults = vec![unread(&error)];
                tell_faults(&faults);
                Err(faults)
            }
        }
    }

    fn take(&mut self, config: &Config) -> ReloadReport {
        // The reload logs each fault.
        let (_, mut faults) = self.certificates.reload();
        let running = self.file.now();
        let changes = changes(&running, &config.file);
        for change in &changes {
            tell(change);
        }
        let is_changed = |key: &str| changes.iter().any(|change| change.key == key);
        if is_changed("log.level")
            && let Err(error) = self.log_level.set(&config.log.level)
        {
            tracing::error!(%error, "could not change the log level");
            faults.push(format!("log.level: {error}"));
        }
        if self.engine_keys != config.engine_keys {
            self.engine_keys.replace(&config.engine_keys);
            tracing::info!(keys = ?self.engine_keys, "reloaded keys of engines");
        }
        if let (Some(keys), Some(file)) = (&self.api_keys, &config.users.api_keys_file)
            && !is_changed("users.api_keys_file")
        {
            read_api_keys(file, keys);
        }
        if let (Some(tokens), Some(file)) = (&self.admin_tokens, &config.admin.tokens_file)
            && !is_changed("admin.tokens_file")
        {
            read_admin_tokens(file, tokens);
        }
        self.take_settings(config);
        let count = |effect| changes.iter().filter(|it| it.effect == effect).count();
        let (taken, need_restart) = (count(Effect::Taken), count(Effect::NeedsRestart));
        self.file.replace(in_effect(&running, config, &changes));
        tracing::info!(taken, need_restart, "reloaded the config");
        report(changes, faults)
    }
}

fn report(changes: Vec<ChangedSetting>, faults: Vec<String>) -> ReloadReport {
    let mut report = ReloadReport {
        faults,
        ..ReloadReport::default()
    };
    for change in changes {
        let list = match change.effect {
            Effect::Taken => &mut report.taken,
            Effect::NeedsRestart => &mut report.need_restart,
            Effect::ClusterKeeps => &mut report.cluster_keeps,
        };
        list.push(ReloadedKey {
            key: change.key,
            before: change.before,
            after: change.after,
        });
    }
    report
}

impl ConfigReload {
    /// Applies the settings that can change at run time. Lowers limits that the process cannot
    /// support.
    fn take_settings(&mut self, config: &Config) {
        let in_force = self.running.limits;
        self.running.limits = ProxyLimits {
            connections_max: in_force.connections_max,
            ..config.limits
        };
        let limits = &mut self.running.limits;
        descriptors::fit(limits, Some(&in_force), descriptors::limit());
        memory::fit(&mut self.running.limits, memory::limit());
        self.running.probes = config.probes.clone();
        self.running.drain = config.drain.clone();
        self.running.engine_addresses = config.engine_addresses.clone();
        self.replica.take(&self.running);
    }
}

/// Logs and ignores signals that have no effect here.
pub(super) async fn ignore(mut signals: Signal, kind: SignalKind) {
    while signals.recv().await.is_some() {
        let signal = kind.as_raw_value();
        tracing::info!(signal, "ignored a signal: SIGHUP reloads, SIGTERM drains");
    }
}

fn tell(change: &ChangedSetting) {
    let ChangedSetting {
        key, before, after, ..
    } = change;
    let (before, after) = (before.to_string(), after.to_string());
    match change.effect {
        Effect::Taken => tracing::info!(key, before, after, "setting changed"),
        Effect::ClusterKeeps => tracing::warn!(
            key,
            before,
            after,
            "changed in the config, but the cluster keeps its own value: see `quorate config diff`"
        ),
        Effect::NeedsRestart => tracing::warn!(
            key,
            before,
            after,
            "changed in the config, takes effect at a restart"
        ),
    }
}

fn faults_of(error: &anyhow::Error) -> Vec<ReloadError> {
    let Some(faults) = error.downcast_ref::<ConfigErrors>() else {
        return vec![unread(error)];
    };
    let each = faults.errors.iter().map(|fault| ReloadError {
        message: fault.message.clone(),
        expected: fault.expected.clone(),
        place: match &fault.place {
            Place::File(span) => faults.line(span.start),
            Place::Variable(name) => name.clone(),
            Place::Flag(flag) => format!("--set {flag}"),
            Place::Backend(url) => format!("--backend {url}"),
            Place::Nowhere => faults.file.clone(),
        },
    });
    each.collect()
}

/// Returns the error for a config that could not be read.
fn unread(error: &dyn std::fmt::Display) -> ReloadError {
    ReloadError {
        message: error.to_string(),
        expected: "a config that can be read".to_owned(),
        place: "config".to_owned(),
    }
}

fn tell_faults(faults: &[ReloadError]) {
    for ReloadError {
        message,
        expected,
        place,
    } in faults
    {
        tracing::error!(
            fault = message,
            expected,
            place,
            "could not reload the config; keeping the old one"
        );
    }
}

/// Returns the settings in which a config differs from the running one.
fn changes(running: &FileSettings, new: &FileSettings) -> Vec<ChangedSetting> {
    let local = differing(values(&running.local), values(&new.local));
    let local = local.map(|(key, before, after)| {
        let effect = effect(&key);
        ChangedSetting {
            key,
            before,
            after,
            effect,
        }
    });
    let stated = differing(by_name(running), by_name(new));
    let stated = stated.map(|(key, before, after)| ChangedSetting {
        key,
        before,
        after,
        effect: Effect::ClusterKeeps,
    });
    local.chain(stated).collect()
}

fn values(local: &BTreeMap<String, LocalSetting>) -> BTreeMap<String, Value> {
    let values = local.iter();
    values
        .map(|(key, setting)| (key.clone(), setting.value.clone()))
        .collect()
}

fn by_name(settings: &FileSettings) -> BTreeMap<String, Value> {
    let stated = settings.stated.iter();
    let named = |(key, value): (&SettingKey, &Value)| (key.to_string(), value.clone());
    stated.map(named).collect()
}

/// Returns the keys whose values differ, with both values; null stands for an absent key.
fn differing(
    mut before: BTreeMap<String, Value>,
    after: BTreeMap<String, Value>,
) -> impl Iterator<Item = (String, Value, Value)> {
    let mut both: BTreeMap<String, (Value, Value)> = BTreeMap::new();
    for (key, after) in after {
        let before = before.remove(&key).unwrap_or_default();
        both.insert(key, (before, after));
    }
    for (key, before) in before {
        both.insert(key, (before, Value::Null));
    }
    both.into_iter()
        .filter(|(_, (before, after))| before != after)
        .map(|(key, (before, after))| (key, before, after))
}

/// Returns the effect of changing a setting of this replica.
fn effect(key: &str) -> Effect {
    let is_engine_key = key.starts_with("backends.")
        && (key.ends_with(".api_key_file") || key.ends_with(".headers_file"));
    match key {
        // Room for connections is allocated at start.
        "limits.max_connections" => Effect::NeedsRestart,
        "log.level" | "admin.backends_allow" => Effect::Taken,
        _ if key.starts_with("prices.")
            || key.starts_with("limits.")
            || key.starts_with("drain.") =>
        {
            Effect::Taken
        }
        _ if key.starts_with("probes.") || is_engine_key => Effect::Taken,
        _ => Effect::NeedsRestart,
    }
}

/// Returns the settings that the admin API shows: those of `config`, except for changes that need a
/// restart.
fn in_effect(running: &FileSettings, config: &Config, changes: &[ChangedSetting]) -> FileSettings {
    let mut local = running.local.clone();
    for change in changes.iter().filter(|it| it.effect == Effect::Taken) {
        match config.file.local.get(&change.key) {
            Some(setting) => local.insert(change.key.clone(), setting.clone()),
            None => local.remove(&change.key),
        };
    }
    FileSettings {
        stated: config.file.stated.clone(),
        local,
        prices: config.file.prices.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use api::prices::PriceTable;

    use super::*;

    fn settings(local: &[(&str, Value)], stated: &[(SettingKey, Value)]) -> FileSettings {
        let local = local.iter().map(|(key, value)| {
            let value = value.clone();
            let is_set = true;
            ((*key).to_owned(), LocalSetting { value, is_set })
        });
        FileSettings {
            stated: stated.iter().cloned().collect(),
            local: local.collect(),
            prices: PriceTable::new(),
        }
    }

    #[test]
    fn every_reloaded_change_is_reported_with_its_effect() {
        let running = settings(
            &[
                ("log.level", json!("info")),
                ("limits.max_body", json!("32MiB")),
                ("limits.max_connections", json!(100)),
                ("node.id", json!(1)),
                ("backends.gone.api_key_file", json!("a")),
                ("backends.gone.headers_file", json!("a")),
            ],
            &[(SettingKey::Policy, json!("cost"))],
        );
        let new = settings(
            &[
                ("log.level", json!("debug")),
                ("limits.max_body", json!("1MiB")),
                ("limits.max_connections", json!(200)),
                ("node.id", json!(1)),
                ("backends.new.api_key_file", json!("b")),
            ],
            &[(SettingKey::Policy, json!("random"))],
        );
        let changes = changes(&running, &new);
        let told: Vec<_> = changes
            .iter()
            .map(|it| (it.key.as_str(), it.effect))
            .collect();
        let expected = [
            ("backends.gone.api_key_file", Effect::Taken),
            ("backends.gone.headers_file", Effect::Taken),
            ("backends.new.api_key_file", Effect::Taken),
            ("limits.max_body", Effect::Taken),
            ("limits.max_connections", Effect::NeedsRestart),
            ("log.level", Effect::Taken),
            ("routing.policy", Effect::ClusterKeeps),
        ];
        assert_eq!(told, expected);
        assert_eq!(changes[5].before, "info");
        assert_eq!(changes[5].after, "debug");
        assert_eq!(super::changes(&new, &new), []);
    }
}

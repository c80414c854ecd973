//! `quorate config diff` and `config apply`: compare a config file with a running cluster, and
//! write its values to the cluster.
//!
//! Only replicated settings that the file sets are compared and applied. A write replaces a whole
//! group, so the group's other settings are read first and sent along. Except for backends, it
//! fails if they have changed since.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use api::settings::{self, Difference, SettingKey, SettingValues};
use http::{HeaderValue, Method};
use lab::terminal::{self, FittedTable, column};
use serde_json::{Map, Value, json};

use super::client::AdminTarget;
use super::read::print_json;
use super::source::ConfigSource;
use super::table::cell;

/// Arguments of `quorate config diff`.
#[derive(Debug, clap::Args)]
pub(super) struct DiffArgs {
    #[command(flatten)]
    source: ConfigSource,
    #[command(flatten)]
    target: AdminTarget,
    /// Print the differences as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `quorate config apply`.
#[derive(Debug, clap::Args)]
pub(super) struct ApplyArgs {
    #[command(flatten)]
    source: ConfigSource,
    #[command(flatten)]
    target: AdminTarget,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    /// Show what would be written, but write nothing
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Print what was written as JSON
    #[arg(long)]
    json: bool,
}

/// Settings of a config file and of a cluster, to be compared.
struct Comparison {
    /// Name of the file.
    file: String,
    /// Settings in the file.
    stated: SettingValues,
    /// Settings of the cluster, by key.
    cluster: Map<String, Value>,
    /// Log index at which the cluster's settings were read.
    index: Value,
    differences: Vec<Difference>,
}

impl Comparison {
    async fn of(source: ConfigSource, target: &AdminTarget, read: &str) -> anyhow::Result<Self> {
        let loaded = source.load()?;
        let mut answer = target.get(&format!("/admin/v1/config{read}")).await?;
        let Value::Object(mut cluster) = answer["keys"].take() else {
            bail!("GET /admin/v1/config: the response has no keys");
        };
        cluster.retain(|_, detail| detail["scope"] == "cluster");
        for detail in cluster.values_mut() {
            *detail = detail["in_effect"].take();
        }
        let stated = loaded.config.file.stated;
        let differences = settings::differences(&stated, |key| {
            cluster.get(&key.to_string()).cloned().unwrap_or_default()
        });
        Ok(Self {
            file: loaded.file,
            stated,
            cluster,
            index: answer["index"].take(),
            differences,
        })
    }

    /// Prints the differences as a table.
    fn print(&self) -> anyhow::Result<()> {
        if self.differences.is_empty() {
            return terminal::print(format_args!(
                "the cluster has every value that {} sets (log index {})",
                self.file, self.index
            ));
        }
        let columns = [
            column("key"),
            column("file").prose(),
            column("cluster").prose(),
        ];
        let mut rows = FittedTable::new(&columns);
        for it in &self.differences {
            rows.add_row([it.key.to_string(), cell(&it.file), cell(&it.cluster)]);
        }
        terminal::print(rows)
    }

    fn json(&self) -> Value {
        let differences = self
            .differences
            .iter()
            .map(|it| json!({ "key": it.key.to_string(), "file": it.file, "cluster": it.cluster }));
        json!({ "index": self.index, "differences": differences.collect::<Value>() })
    }
}

/// Runs `quorate config diff`. Exits like `diff`: 0 without differences, 1 with some, 2 on errors.
pub(super) async fn diff(args: DiffArgs) -> ExitCode {
    let told = async {
        let compared = Comparison::of(args.source, &args.target, "").await?;
        if args.json {
            print_json(&compared.json())?;
        } else {
            compared.print()?;
        }
        anyhow::Ok(compared.differences.is_empty())
    };
    match told.await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            super::report(&error, args.json);
            ExitCode::from(2)
        }
    }
}

/// Runs `quorate config apply`.
pub(super) async fn apply(args: ApplyArgs) -> anyhow::Result<ExitCode> {
    let target = &args.target;
    let compared = Comparison::of(args.source, target, "?read=linearizable").await?;
    if !args.json {
        compared.print()?;
    }
    let is_asked = !args.yes && !args.dry_run && !compared.differences.is_empty();
    if is_asked && !is_confirmed(compared.differences.len())? {
        return Ok(ExitCode::from(2));
    }
    let writes = SettingWrite::all(&compared, target).await?;
    let mut outcomes = Vec::new();
    let mut is_failed = false;
    for write in writes {
        let outcome = match (args.dry_run, is_failed) {
            (true, _) => json!({ "outcome": "dry-run" }),
            (false, true) => json!({ "outcome": "not-tried" }),
            (false, false) => write.send(target).await,
        };
        is_failed |= !args.dry_run && outcome["outcome"] != "committed";
        if !args.json {
            terminal::print(write.told(&outcome))?;
        }
        outcomes.push(write.json(outcome));
    }
    if args.json {
        print_json(&json!({ "differences": compared.json()["differences"], "writes": outcomes }))?;
    }
    Ok(ExitCode::from(u8::from(is_failed)))
}

/// Asks on the terminal whether to write `count` settings, and returns the answer.
fn is_confirmed(count: usize) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        eprintln!(
            "error: cannot ask for confirmation without a terminal: --yes applies the values, --dry-run shows them"
        );
        return Ok(false);
    }
    let noun = if count == 1 { "value" } else { "values" };
    eprint!("Write {count} {noun} of the file to the cluster? [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// One write through the admin API.
struct SettingWrite {
    path: String,
    body: Value,
    /// Version that the write replaces; `None` for any.
    version: Option<HeaderValue>,
    /// Keys of the settings that the write changes.
    keys: Vec<String>,
}

impl SettingWrite {
    /// Returns the writes that make the cluster agree with the file.
    async fn all(compared: &Comparison, target: &AdminTarget) -> anyhow::Result<Vec<Self>> {
        let mut groups: Vec<(String, Vec<&Difference>)> = Vec::new();
        for it in &compared.differences {
            let path = path_of(&it.key);
            match groups.iter_mut().find(|(of, _)| *of == path) {
                Some((_, group)) => group.push(it),
                None => groups.push((path, vec![it])),
            }
        }
        let mut writes = Vec::new();
        for (path, group) in groups {
            let (mut body, version) = match &group[0].key {
                SettingKey::Backend { id, .. } => (backend(compared, id), None),
                _ => present(target, &path).await?,
            };
            for it in &group {
                overlay(&mut body, it, &compared.stated);
            }
            let keys = group.iter().map(|it| it.key.to_string()).collect();
            writes.push(Self {
                path,
                body,
                version,
                keys,
            });
        }
        Ok(writes)
    }

    /// Sends the write and returns its outcome.
    async fn send(&self, target: &AdminTarget) -> Value {
        let (body, version) = (Some(&self.body), self.version.clone());
        let answered = target.ask_over(Method::PUT, &self.path, body, version);
        let answer = match answered.await {
            Ok(answer) => answer,
            // The request may have arrived.
            Err(error) => return json!({ "outcome": "unknown", "error": format!("{error:#}") }),
        };
        let told = answer.json().unwrap_or_default();
        let outcome = told["outcome"].as_str();
        match answer.success() {
            Ok(told) => json!({ "outcome": "committed", "index": told["index"] }),
            Err(error) => json!({
                "outcome": outcome.unwrap_or("not-committed"),
                "error": format!("{error:#}"),
            }),
        }
    }

    fn told(&self, outcome: &Value) -> String {
        let keys = self.keys.join(", ");
        let what = match (outcome["outcome"].as_str(), outcome["error"].as_str()) {
            (Some("committed"), _) => format!("committed at log index {}", outcome["index"]),
            (Some("dry-run"), _) => format!("would send {}", self.body),
            (Some("not-tried"), _) => "not tried".to_owned(),
            (Some("unknown"), Some(why)) => format!("outcome unknown: {why}"),
            (_, why) => format!("failed: {}", why.unwrap_or("no reason given")),
        };
        format!("PUT {} ({keys}): {what}", self.path)
    }

    fn json(&self, mut outcome: Value) -> Value {
        outcome["path"] = json!(self.path);
        outcome["keys"] = json!(self.keys);
        outcome
    }
}

/// Returns the path at which a setting is written.
fn path_of(key: &SettingKey) -> String {
    match key {
        SettingKey::Policy | SettingKey::PolicySetting { .. } => "/admin/v1/policy".to_owned(),
        SettingKey::Routing(_) | SettingKey::ModelPolicy(_) | SettingKey::ModelSetting { .. } => {
            "/admin/v1/routing".to_owned()
        }
        SettingKey::Admission(_) => "/admin/v1/admission".to_owned(),
        SettingKey::UserDefault(_) => "/admin/v1/users/defaults".to_owned(),
        SettingKey::Backend { id, .. } => format!("/admin/v1/backends/{id}"),
    }
}

/// Returns the current settings of a group, with their version.
async fn present(target: &AdminTarget, path: &str) -> anyhow::Result<(Value, Option<HeaderValue>)> {
    let (answer, version) = target.latest(path).await?;
    let answer = answer.success();
    let config = answer.with_context(|| format!("GET {path}"))?["config"].take();
    let is_table = config.is_object().then_some(config);
    let config = is_table.with_context(|| format!("GET {path}: the response has no config"))?;
    Ok((config, version))
}

/// Returns the backend `id` as the cluster has it, or else with the fields of the file.
fn backend(compared: &Comparison, id: &str) -> Value {
    if compared
        .cluster
        .get(&settings::url_of(id).to_string())
        .is_none_or(Value::is_null)
    {
        let own = compared.stated.iter().filter_map(|(key, value)| match key {
            SettingKey::Backend { id: of, name } if of == id => Some((name.clone(), value.clone())),
            _ => None,
        });
        return own.collect::<Map<_, _>>().into();
    }
    let prefix = format!("backends.{id}.");
    let fields = compared.cluster.iter().filter_map(|(key, value)| {
        // Another backend's id may begin with this one's and a dot.
        let name = key
            .strip_prefix(&prefix)
            .filter(|name| !name.contains('.'))?;
        Some((name.to_owned(), value.clone()))
    });
    fields.collect::<Map<_, _>>().into()
}

/// Sets the file's value of a setting in `body`, a group of settings. A different policy replaces
/// the whole group with the file's settings.
fn overlay(body: &mut Value, difference: &Difference, stated: &SettingValues) {
    let file = difference.file.clone();
    match &difference.key {
        SettingKey::Policy => {
            *body = with_settings(&file, stated, |key| match key {
                SettingKey::PolicySetting { policy, name } if file == *policy => Some(name),
                _ => None,
            });
        }
        SettingKey::PolicySetting { name, .. }
        | SettingKey::Routing(name)
        | SettingKey::Backend { name, .. } => body[name.as_str()] = file,
        SettingKey::ModelPolicy(model) => {
            body["models"][model.as_str()] = with_settings(&file, stated, |key| match key {
                SettingKey::ModelSetting {
                    model: of,
                    policy,
                    name,
                } if of == model && file == *policy => Some(name),
                _ => None,
            });
        }
        SettingKey::ModelSetting { model, name, .. } => {
            body["models"][model.as_str()][name.as_str()] = file;
        }
        SettingKey::Admission(path) | SettingKey::UserDefault(path) => set_at(body, path, file),
    }
}

fn set_at(body: &mut Value, path: &str, value: Value) {
    let parts = path.split('.');
    *parts.fold(body, |table, part| &mut table[part]) = value;
}

fn with_settings(
    policy: &Value,
    stated: &SettingValues,
    name_of: impl Fn(&SettingKey) -> Option<&String>,
) -> Value {
    let mut body = json!({ "policy": policy });
    for (key, value) in stated {
        if let Some(name) = name_of(key) {
            body[name.as_str()] = value.clone();
        }
    }
    body
}

//! The config that an import makes: values with their sources, and a report of the rest.

use std::collections::{BTreeMap, BTreeSet};

use api::base::printable::{escaped, is_obeyed};
use serde_json::{Value, json};

use super::super::error::{Place, line_and_column};
use super::super::others::{Fate, Row, Table, Unit, shown};
use super::super::print::toml_of;
use super::super::read::{Layers, backend_id};
use super::super::schema::{join, sections};
use super::super::{ConfigError, ConfigErrors, read};
use super::source::{Fault, Setting};
use super::{Imported, convert};

/// Column in which the sources begin, as in `config print`.
const SOURCE_COLUMN: usize = 56;

/// Lists of engines for each stage: the one of whole requests, and those of prefill and decode.
const STAGES: [&str; 3] = ["both", "prefill", "decode"];

/// A config in the making.
pub(super) struct Draft {
    table: &'static Table,
    /// Values by path, such as `backends[0].url`.
    values: BTreeMap<String, DraftValue>,
    backends: usize,
    left: BTreeMap<Reason, Vec<String>>,
}

/// Why a setting is not in the config, in the order of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reason {
    /// The table does not have it, or not with this value.
    Unknown,
    ByHand,
    Missing,
    Unneeded,
    /// It is of another program.
    Unread,
}

struct DraftValue {
    value: Value,
    /// Where it comes from.
    source: String,
    /// Number of settings that it carries over; 0 if it is implied.
    settings: usize,
    /// Why the config would be invalid with it.
    refused: Option<String>,
}

impl Draft {
    pub(super) fn new(table: &'static Table) -> Self {
        Self {
            table,
            values: BTreeMap::new(),
            backends: 0,
            left: BTreeMap::new(),
        }
    }

    /// Adds to the report what is not in the config.
    pub(super) fn leave(&mut self, reason: Reason, place: &str, why: &str) {
        let left = self.left.entry(reason).or_default();
        left.push(format!("{place}: {why}"));
    }

    /// Adds a setting to the report whose row has no value for a key.
    fn leave_row(&mut self, row: &Row, source: &str) {
        let reason = match &row.fate {
            Fate::Hand(_) => Reason::ByHand,
            Fate::Missing => Reason::Missing,
            _ => Reason::Unneeded,
        };
        self.leave(reason, source, &row.told());
    }

    /// Adds a setting from the file `file`.
    pub(super) fn add(&mut self, file: &str, setting: &Setting) -> Result<(), Fault> {
        let name = &setting.name;
        let mut source = format!("{file}:{} {name}", setting.line);
        let value = setting.values.join(" ");
        // `sglang.launch_server` has the router's flags behind this prefix.
        let bare = name.strip_prefix("--router-").map(|it| format!("--{it}"));
        let bare = bare.filter(|_| self.table.row(name, "").is_none());
        let known = bare.as_ref().unwrap_or(name);
        let (row, values) = (self.table.row(known, &value), self.table.values(known));
        let has_value_only = !values.is_empty() && self.table.row(known, "").is_none();
        if has_value_only || values.contains(&&*value) {
            source.push_str(&format!(" {value}"));
        }
        let Some(row) = row else {
            let (reason, why) = match setting.is_filled_in() {
                _ if values.is_empty() => (Reason::Unknown, "not known".to_owned()),
                _ if setting.is_empty() => (Reason::Unneeded, "empty, nothing to set".to_owned()),
                true => (Reason::ByHand, "filled in elsewhere".to_owned()),
                false => {
                    let why = format!("not known, expected one of {}", values.join(", "));
                    (Reason::Unknown, why)
                }
            };
            self.leave(reason, &source, &why);
            return Ok(());
        };
        if setting.is_empty() {
            self.leave(Reason::Unneeded, &source, "empty, nothing to set");
            return Ok(());
        }
        let read = match &row.fate {
            Fate::Key(_, Unit::Urls | Unit::Texts | Unit::Selector) => usize::MAX,
            Fate::Key(_, Unit::Url) => 2,
            _ => 1,
        };
        if setting.values.len() > read && !setting.is_filled_in() {
            self.leave(Reason::Unread, &source, "values after the first one");
        }
        match &row.fate {
            Fate::Key(..) | Fate::Set(_) if setting.is_filled_in() => {
                let why = format!("filled in elsewhere: {}", row.told());
                self.leave(Reason::ByHand, &source, &why);
            }
            Fate::Key(path, unit) => {
                let refuse = |expected| {
                    let message = match &*setting.values {
                        [] => format!("{name} has no value"),
                        [value, ..] => format!("{name} is {value:?}"),
                    };
                    Fault::new(setting.line, &message, expected)
                };
                self.key(path, *unit, setting, &source).map_err(refuse)?;
            }
            Fate::Set(set) if values.contains(&&*value) => self.set_all(set, &source),
            Fate::Set(set) => match setting.is_on() {
                Some(true) => self.turn(set, &source),
                Some(false) => self.leave(Reason::Unneeded, &source, "off, nothing to set"),
                None => {
                    let message = format!("{name} is {value:?}");
                    return Err(Fault::new(setting.line, &message, "true or false"));
                }
            },
            Fate::Hand(_) | Fate::Missing if setting.is_false() => {
                self.leave(Reason::Unneeded, &source, "off, nothing to set");
            }
            Fate::Hand(_) | Fate::Unneeded | Fate::Missing => self.leave_row(row, &source),
        }
        Ok(())
    }

    fn key(
        &mut self,
        path: &str,
        unit: Unit,
        setting: &Setting,
        source: &str,
    ) -> Result<(), convert::Expected> {
        if setting.values.is_empty() {
            return Err("a value");
        }
        if unit == Unit::Urls || unit == Unit::Url {
            let is_one = unit == Unit::Url;
            let urls = if is_one {
                &setting.values[..1]
            } else {
                &setting.values
            };
            let mut stages = STAGES.iter().skip(1);
            let stage = stages.find(|stage| is_one && setting.name.ends_with(**stage));
            for url in urls.iter().flat_map(|it| it.split([' ', ','])) {
                self.backend(url, stage.copied(), source);
            }
            return Ok(());
        }
        let rounded = format!("{source}, rounded");
        let source = match convert::is_rounded(unit, &setting.values) {
            true => &rounded,
            false => source,
        };
        match (convert::value(unit, &setting.values)?, unit) {
            (Some(value), Unit::Host | Unit::Port) => self.listen(path, &value, source),
            (Some(value), _) => self.set(path, value, source),
            (None, Unit::Tokenizer) => {
                let why = "a name on a model hub: set `[[models]] tokenizer` by hand, to `engine` or \
                           to `huggingface:FILE`";
                self.leave(Reason::ByHand, source, why);
            }
            (None, _) => self.leave(Reason::Unneeded, source, "no limit, nothing to set"),
        }
        Ok(())
    }

    /// Sets what a switch sets, also in place of another setting's value: a switch that turns
    /// something off counts whatever else is set for it.
    fn turn(&mut self, values: &[(&str, Value)], source: &str) {
        for (path, value) in values {
            if let Some(set) = self.values.get_mut(*path).filter(|set| set.value != *value) {
                let replaced = std::mem::replace(&mut set.source, source.to_owned());
                set.value = value.clone();
                self.leave(
                    Reason::Unneeded,
                    &replaced,
                    &format!("replaced by {source}"),
                );
            }
        }
        self.set_all(values, source);
    }

    fn set_all(&mut self, values: &[(&str, Value)], source: &str) {
        for (path, value) in values {
            self.set(path, value.clone(), source);
        }
    }

    fn set(&mut self, path: &str, value: Value, source: &str) {
        match self.values.get(path) {
            Some(set) if set.value != value => {
                let why = format!("`{}` is set already, from {}", shown(path), set.source);
                self.leave(Reason::ByHand, source, &why);
            }
            Some(_) => {}
            None => self.insert(path, value, source, 1),
        }
    }

    /// Sets a key that no setting sets, unless it is set.
    fn imply(&mut self, path: &str, value: Value, source: &str) {
        self.insert(path, value, source, 0);
    }

    fn insert(&mut self, path: &str, value: Value, source: &str, settings: usize) {
        let entry = self.values.entry(path.to_owned());
        entry.or_insert_with(|| DraftValue {
            value,
            source: source.to_owned(),
            settings,
            refused: None,
        });
    }

    /// Sets the host or the port of an address, which is made of two settings.
    fn listen(&mut self, path: &str, part: &Value, source: &str) {
        let implied = self.table.implied.iter().find(|(it, ..)| *it == path);
        let (set, mut sources, settings) = match self.values.remove(path) {
            Some(set) => (set.value, vec![set.source], set.settings),
            None => (
                implied.map_or(json!("127.0.0.1:8080"), |(_, it, _)| it.clone()),
                vec![],
                0,
            ),
        };
        let set = set.as_str().unwrap_or_default();
        let (host, port) = set.rsplit_once(':').unwrap_or((set, "8080"));
        let address = match part {
            Value::String(host) if host.contains(':') => format!("[{host}]:{port}"),
            Value::String(host) => format!("{host}:{port}"),
            port => format!("{host}:{port}"),
        };
        sources.push(source.to_owned());
        self.insert(path, json!(address), &sources.join(", "), settings + 1);
    }

    fn backend(&mut self, url: &str, stage: Option<&str>, source: &str) {
        let Some(url) = Some(url.trim()).filter(|url| !url.is_empty()) else {
            return;
        };
        let public = convert::public_url(url);
        if public != url {
            let why = "user, password and query of the URL are left out: set `[[backends]] \
                       api_key_file` instead";
            self.leave(Reason::ByHand, source, why);
        }
        let url = &*public;
        let entry = format!("backends[{}]", self.backends);
        self.backends += 1;
        self.set(&format!("{entry}.url"), json!(url), source);
        self.imply(&format!("{entry}.id"), json!(backend_id(url)), "the URL");
        if let Some(stage) = stage {
            self.imply(&format!("{entry}.role"), json!(stage), source);
        }
    }

    /// Adds what other values imply, and what the router does where nothing is set.
    fn complete(&mut self) {
        if self.has("models[0].") {
            self.imply("models[0].name", json!("*"), "all models");
        }
        let shared = ["kind", "port", "namespace"].map(|key| format!("discovery[0].{key}"));
        let shared = shared.map(|path| {
            let value = self.values.get(&path)?;
            Some((path, value.value.clone(), value.source.clone()))
        });
        for (nth, stage) in STAGES.iter().enumerate().skip(1) {
            if self.has(&format!("discovery[{nth}].")) {
                for (path, value, source) in shared.iter().flatten() {
                    self.imply(
                        &path.replace("[0]", &format!("[{nth}]")),
                        value.clone(),
                        source,
                    );
                }
                let entry = |key: &str| format!("discovery[{nth}].{key}");
                self.imply(&entry("id"), json!(stage), "the role");
                self.imply(&entry("role"), json!(stage), "the selector's name");
                if !self.has("discovery[0].selector") {
                    self.values
                        .retain(|path, _| !path.starts_with("discovery[0]."));
                }
            }
        }
        for nth in 0..STAGES.len() {
            if self.has(&format!("discovery[{nth}].")) {
                let kind = format!("discovery[{nth}].kind");
                self.imply(&kind, json!("kubernetes"), "the selector");
            }
        }
        self.imply("node.id", json!(1), "each replica has its own");
        for (path, value, why) in &self.table.implied {
            let entry = path.split_once("[0].").map(|(list, _)| list);
            let entries: Vec<_> = match entry {
                None => vec![(*path).to_owned()],
                Some(list) => (0..STAGES.len())
                    .filter(|nth| self.has(&format!("{list}[{nth}].")))
                    .map(|nth| path.replace("[0]", &format!("[{nth}]")))
                    .collect(),
            };
            for path in entries {
                self.imply(&path, value.clone(), why);
            }
        }
    }

    /// Whether a value counts whose path begins with `prefix`.
    fn has(&self, prefix: &str) -> bool {
        let mut values = self.values.iter();
        values.any(|(path, value)| value.refused.is_none() && path.starts_with(prefix))
    }

    /// Makes a config that passes `config check`, from files with these names.
    pub(super) fn finish(mut self, files: &str) -> Imported {
        self.complete();
        let missing = loop {
            let (text, lines) = self.render();
            let layers = Layers {
                file: &text,
                ..Layers::default()
            };
            match read("import.toml", &layers) {
                Ok(_) => break BTreeSet::new(),
                Err(errors) => {
                    let (missing, is_new) = self.refuse(&errors, &lines);
                    if !is_new {
                        break missing;
                    }
                }
            }
        };
        let mut incomplete: Vec<_> = missing.into_iter().collect();
        if !self.has("backends[") && !self.has("discovery[") {
            let why = "[[backends]] with `id` and `url`, or [[discovery]]: no engine is named";
            incomplete.push(why.to_owned());
        }
        let mut config = format!(
            "# From {}.\n# Table: {}.\n",
            escaped(files),
            self.table.source
        );
        report(&mut config, "To complete", &incomplete);
        let peers = "cluster.peers, listen.advertise and cluster.secret_file make several replicas \
                     a cluster; this is one of its own";
        report(&mut config, "For production", &[peers.to_owned()]);
        config.push('\n');
        let (text, lines) = self.render();
        config.push_str(&text);
        for (title, reason) in [
            ("Not known", Reason::Unknown),
            ("To be set by hand", Reason::ByHand),
            ("Without a counterpart", Reason::Missing),
            ("Nothing to set", Reason::Unneeded),
            ("Not read", Reason::Unread),
        ] {
            report(&mut config, title, self.left(reason));
        }
        let (refused, set): (Vec<_>, Vec<_>) = self
            .values
            .values()
            .filter(|value| value.settings > 0)
            .partition(|value| value.refused.is_some());
        let count = |values: &[&DraftValue]| values.iter().map(|it| it.settings).sum();
        let of_refused: usize = count(&refused);
        let why = |it: &&DraftValue| Some(format!("{}: {}", it.source, it.refused.as_ref()?));
        Imported {
            config,
            keys: lines.into_iter().map(|(_, path)| path).collect(),
            carried: count(&set),
            left: self.left.values().map(Vec::len).sum::<usize>() + of_refused,
            refused: refused.iter().filter_map(why).collect(),
            unknown: self.left(Reason::Unknown).to_vec(),
            incomplete,
        }
    }

    fn left(&self, reason: Reason) -> &[String] {
        self.left.get(&reason).map_or(&[], Vec::as_slice)
    }

    /// Marks the values that the errors are about. Returns errors about missing keys and about files,
    /// which are another machine's, and whether a value was marked.
    fn refuse(
        &mut self,
        errors: &ConfigErrors,
        lines: &[(usize, String)],
    ) -> (BTreeSet<String>, bool) {
        let (mut missing, mut is_new) = (BTreeSet::new(), false);
        for error in &errors.errors {
            let line = match &error.place {
                Place::File(span) => line_and_column(&errors.text, span.start).0,
                _ => 0,
            };
            let why = format!("{}; expected {}", error.message, error.expected);
            let path = lines
                .iter()
                .find(|(it, _)| *it == line)
                .map(|(_, path)| path);
            let Some(path) = path.filter(|path| !self.is_about_file(path, error)) else {
                missing.insert(why);
                continue;
            };
            // A backend without its URL or id is none.
            let entry = path
                .starts_with("backends[")
                .then(|| path.split_once('.'))
                .flatten();
            let prefix = entry.map_or(path.clone(), |(entry, _)| format!("{entry}."));
            for (_, value) in self
                .values
                .iter_mut()
                .filter(|(it, _)| it.starts_with(&prefix))
            {
                is_new |= value.refused.is_none();
                value.refused.get_or_insert_with(|| why.clone());
            }
        }
        (missing, is_new)
    }

    /// Whether the error is about what is in the file that a value names, not about the value.
    fn is_about_file(&self, path: &str, error: &ConfigError) -> bool {
        let named = self.values.get(path).and_then(|it| it.value.as_str());
        let file = named.map(|it| it.trim_start_matches("huggingface:"));
        let is_file = ["_file", ".tokenizer", ".chat_template"];
        let is_file = is_file.iter().any(|ending| path.ends_with(ending));
        is_file && file.is_some_and(|file| !file.is_empty() && error.message.contains(file))
    }

    /// Returns the values as TOML, and the lines with the paths of those that count.
    fn render(&self) -> (String, Vec<(usize, String)>) {
        let (mut out, mut paths) = (Vec::new(), Vec::new());
        for section in sections() {
            let entries = match section.is_list {
                false => vec![section.path.clone()],
                true => {
                    let entries = 0..self.backends.max(STAGES.len());
                    let entries = entries.map(|nth| format!("{}[{nth}]", section.path));
                    entries.collect()
                }
            };
            for entry in entries {
                let keys = section.keys.iter().map(|(key, _)| (key, join(&entry, key)));
                let set = keys.filter_map(|(key, path)| Some((key, self.values.get(&path)?, path)));
                let set: Vec<_> = set.collect();
                if set.is_empty() {
                    continue;
                }
                if !out.is_empty() {
                    out.push(String::new());
                }
                let is_void = set.iter().all(|(_, value, _)| value.refused.is_some());
                let mark = if is_void { "# " } else { "" };
                out.push(match section.is_list {
                    true => format!("{mark}[[{}]]", section.path),
                    false => format!("{mark}[{}]", section.path),
                });
                for (key, value, path) in set {
                    let assignment = format!("{key} = {}", on_one_line(&value.value));
                    let source = escaped(&value.source);
                    out.push(match &value.refused {
                        None => format!("{assignment:<SOURCE_COLUMN$} # {source}"),
                        Some(why) => format!("# {assignment} # {source}: {}", escaped(why)),
                    });
                    if value.refused.is_none() {
                        paths.push((out.len(), path));
                    }
                }
            }
        }
        (out.join("\n") + "\n", paths)
    }
}

/// Writes a list as comments, if there is anything in it.
fn report(out: &mut String, title: &str, entries: &[String]) {
    if !entries.is_empty() {
        let entries = entries.iter().map(|it| format!("# - {}\n", escaped(it)));
        out.push_str(&format!("\n# {title}:\n{}", entries.collect::<String>()));
    }
}

/// Returns a value as TOML without line breaks, in which each character is displayed: a comment in
/// front of it holds all of it.
fn on_one_line(value: &Value) -> String {
    match value {
        Value::String(text) if text.contains(is_obeyed) => {
            // JSON escapes as TOML does, but not all of these characters.
            let json = value.to_string();
            let escapes = json.chars().map(|c| match is_obeyed(c) {
                true => format!("\\U{:08X}", u32::from(c)),
                false => c.to_string(),
            });
            escapes.collect()
        }
        Value::Array(elements) => {
            let elements: Vec<_> = elements.iter().map(on_one_line).collect();
            format!("[{}]", elements.join(", "))
        }
        _ => toml_of(value),
    }
}

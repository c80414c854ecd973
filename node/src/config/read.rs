//! Merges the layers (flags over environment variables over the file over defaults) into one tree
//! of valid values, with the source of each value and all errors.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use api::engines::backends::EngineUrl;
use serde_json::{Map, Value, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Place, line_and_column};
use super::foreign_names;
use super::schema::{self, SCHEMA, expected, fit, join};

/// Lists of tables, which variables cannot set, each with the way to set it.
const LISTS: [(&str, &str); 6] = [
    (
        "BACKENDS",
        "[[backends]] in the config file, or serve --backend URL",
    ),
    ("DISCOVERY", "[[discovery]] in the config file"),
    ("MODELS", "[[models]] in the config file"),
    ("PRICES", "[[prices]] in the config file"),
    (
        "SESSIONS__HEADERS",
        "[[sessions.headers]] in the config file",
    ),
    ("SPLITS", "[[splits]] in the config file"),
];

/// The layers of a config, except the defaults.
#[derive(Debug, Clone, Default)]
pub(super) struct Layers<'a> {
    /// Text of the config file.
    pub(super) file: &'a str,
    /// Environment variables; those that do not begin with `QUORATE_` are ignored.
    pub(super) variables: &'a [(String, String)],
    /// Values of `--set`, each as `section.key=value`.
    pub(super) flags: &'a [String],
    /// Values of `--backend`: URLs of additional backends.
    pub(super) backends: &'a [String],
}

/// The merged layers, and the errors found in them.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// All values that are set and valid.
    pub(super) tree: Map<String, Value>,
    /// Sources of all values that are set, by path.
    pub(super) places: BTreeMap<String, Place>,
    /// Paths of keys that are invalid or missing.
    refused: BTreeSet<String>,
    /// All errors found so far.
    pub(super) errors: Vec<ConfigError>,
}

impl Settings {
    /// Merges all layers, then runs `check`, which adds errors that involve several keys.
    pub(super) fn read<T>(layers: &Layers<'_>, check: impl FnOnce(&mut Self) -> T) -> (Self, T) {
        let mut settings = Self::default();
        let (table, errors) = DeTable::parse_recoverable(layers.file);
        settings.tree = settings.table("", &SCHEMA, table.get_ref());
        for (name, text) in layers.variables {
            settings.variable(name, text);
        }
        for flag in layers.flags {
            settings.flag(flag);
        }
        for url in layers.backends {
            settings.backend(url);
        }
        if !layers.backends.is_empty() && layers.file.is_empty() {
            settings.name_only_replica();
        }
        for (path, schema) in schema::required_keys() {
            if !settings.places.contains_key(&path) {
                settings.missing(&path, schema, Place::Nowhere);
            }
        }
        let checked = check(&mut settings);
        settings.forget_consequences(layers.file, &errors);
        (settings, checked)
    }

    /// Whether nothing at, below or above this path is invalid or missing by itself, so that it can
    /// be checked together with other keys.
    pub(super) fn is_sound(&self, path: &str) -> bool {
        let is_below = |path: &str, of: &str| {
            let rest = path.strip_prefix(of);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let mut refused = self.refused.iter();
        !refused.any(|it| is_below(it, path) || is_below(path, it))
    }

    /// Adds an error at the place where `path` is set. Does not affect [`Self::is_sound`].
    pub(super) fn refuse(&mut self, path: &str, message: String, expected: &str) {
        let place = self.places.get(path).cloned().unwrap_or(Place::Nowhere);
        self.error(message, expected.to_owned(), place);
    }

    /// Adds an error that shows the value of `path`, which may be its default.
    pub(super) fn refuse_value(&mut self, path: &str, expected: &str) {
        let set = path.split('.').try_fold(None, |table, part| {
            let table = table.map_or(Some(&self.tree), Value::as_object)?;
            table.get(part).map(Some)
        });
        let keys = schema::keys();
        let default = || keys.iter().find(|(key, _)| key == path)?.1.get("default");
        let value = set.flatten().or_else(default);
        let value = value.map_or_else(String::new, Value::to_string);
        self.refuse(path, format!("{path} is {value}"), expected);
    }

    /// Adds an error for each entry of a list that repeats the `key` of an earlier one. `names` are
    /// the values of `key`.
    pub(super) fn unique<'a>(
        &mut self,
        list: &str,
        key: &str,
        names: impl Iterator<Item = &'a str>,
    ) {
        let mut first_of = BTreeMap::new();
        for (nth, name) in names.enumerate() {
            let path = format!("{list}[{nth}].{key}");
            if !self.is_sound(&path) {
                continue;
            }
            if let Some(first) = first_of.get(name) {
                let message = format!("{path} is {name:?}, as is {list}[{first}].{key}");
                self.refuse(&path, message, &format!("each {key} once"));
            }
            first_of.insert(name, nth);
        }
    }

    fn error(&mut self, message: String, expected: String, place: Place) {
        self.errors.push(ConfigError {
            message,
            expected,
            place,
        });
    }

    fn misfit(&mut self, path: &str, shown: &str, schema: &Value, place: Place) {
        let message = format!("{path} is {shown}");
        self.reject(path, message, expected(schema), place);
    }

    fn missing(&mut self, path: &str, schema: &Value, place: Place) {
        let message = format!("{path} is not set");
        self.reject(path, message, expected(schema), place);
    }

    fn reject(&mut self, path: &str, message: String, expected: String, place: Place) {
        self.refused.insert(path.to_owned());
        self.error(message, expected, place);
    }

    /// Adds syntax errors, and removes errors that they may have caused.
    fn forget_consequences(&mut self, text: &str, errors: &[toml::de::Error]) {
        let end = text.len();
        let span = |error: &toml::de::Error| error.span().unwrap_or(end..end);
        let Some(first) = errors.iter().map(|error| span(error).start).min() else {
            return;
        };
        let line = |at: usize| line_and_column(text, at).0;
        // A broken header or string changes the meaning of everything after it.
        self.errors.retain(|error| match &error.place {
            Place::File(span) => line(span.start) < line(first),
            Place::Variable(_) | Place::Flag(_) | Place::Backend(_) => true,
            Place::Nowhere => false,
        });
        for error in errors {
            let message = error.message();
            let (message, expected) = message
                .split_once(", expected ")
                .unwrap_or((message, "valid TOML"));
            let place = Place::File(span(error));
            self.error(message.to_owned(), expected.to_owned(), place);
        }
    }

    fn table(&mut self, path: &str, schema: &Value, table: &DeTable<'_>) -> Map<String, Value> {
        let mut read = Map::new();
        for (name, value) in table {
            let key = join(path, name.get_ref());
            let Some(schema) = schema["properties"].get(&**name.get_ref()) else {
                self.unknown(path, schema, name);
                if let (Some(path), DeValue::Table(below)) =
                    (foreign_names::table(&key), value.get_ref())
                    && let Some(schema) = schema["properties"].get(last(path))
                {
                    self.table(path, schema, below);
                }
                continue;
            };
            self.places.insert(key.clone(), Place::File(value.span()));
            if let Some(value) = self.value(&key, schema, value) {
                read.insert(name.get_ref().to_string(), value);
            }
        }
        read
    }

    fn unknown(&mut self, path: &str, schema: &Value, name: &Spanned<Cow<'_, str>>) {
        let (place, name) = (Place::File(name.span()), name.get_ref());
        let key = join(path, name);
        let mut siblings: Vec<_> = schema::properties(schema)
            .map(|(it, _)| it.clone())
            .collect();
        siblings.sort();
        let all = siblings.join(", ");
        let expected = match (foreign_names::key(&key), nearest(name, siblings)) {
            (Some(ours), _) => ours.to_owned(),
            (None, Some(near)) => format!("{near}, or another of {all}"),
            (None, None) => format!("one of {all}"),
        };
        self.error(format!("unknown key {key}"), expected, place);
    }

    fn value(&mut self, path: &str, schema: &Value, value: &Spanned<DeValue<'_>>) -> Option<Value> {
        let is_list = schema["type"] == "array";
        let expected = match (schema::table(schema), value.get_ref()) {
            (Some(entry), DeValue::Array(array)) if is_list => {
                let entries = array.iter().enumerate();
                let entries =
                    entries.map(|(nth, it)| self.entry(&format!("{path}[{nth}]"), entry, it));
                return Some(entries.collect());
            }
            (Some(_), _) if is_list => format!("a list of tables: [[{path}]]"),
            (Some(_), DeValue::Table(table)) => {
                return Some(self.table(path, schema, table).into());
            }
            (Some(_), _) => format!("a table: [{path}]"),
            (None, DeValue::Table(table)) if schema["type"] == "object" => {
                return self.labels(path, table);
            }
            (None, DeValue::Array(array)) if is_list => {
                return self.list(path, schema, array, value.span());
            }
            (None, _) if is_list => format!("a list, each {}", expected(schema)),
            (None, _) => return self.single(path, schema, value),
        };
        let message = format!("{path} is {}", shown(value.get_ref()));
        self.reject(path, message, expected, Place::File(value.span()));
        None
    }

    fn entry(&mut self, path: &str, schema: &Value, value: &Spanned<DeValue<'_>>) -> Value {
        let place = Place::File(value.span());
        self.places.insert(path.to_owned(), place.clone());
        let DeValue::Table(table) = value.get_ref() else {
            let list = path.split('[').next().unwrap_or(path);
            let message = format!("{path} is {}", shown(value.get_ref()));
            self.reject(path, message, format!("a table: [[{list}]]"), place);
            return json!({});
        };
        let read = self.table(path, schema, table);
        for name in schema::required(schema) {
            if !table.contains_key(name) {
                let path = join(path, name);
                self.missing(&path, &schema["properties"][name], place.clone());
            }
        }
        read.into()
    }

    fn list(
        &mut self,
        path: &str,
        schema: &Value,
        array: &[Spanned<DeValue<'_>>],
        span: Range<usize>,
    ) -> Option<Value> {
        if array.is_empty() && schema.get("minItems").is_some() {
            let expected = format!("at least one element, each {}", expected(schema));
            self.reject(
                path,
                format!("{path} is empty"),
                expected,
                Place::File(span),
            );
            return None;
        }
        let elements = array.iter().enumerate();
        let elements = elements
            .filter_map(|(nth, it)| self.single(&format!("{path}[{nth}]"), &schema["items"], it));
        Some(elements.collect())
    }

    fn single(
        &mut self,
        path: &str,
        schema: &Value,
        value: &Spanned<DeValue<'_>>,
    ) -> Option<Value> {
        let fitting = json_of(value.get_ref()).and_then(|value| fit(schema, &value));
        if fitting.is_none() {
            let (shown, place) = (shown(value.get_ref()), Place::File(value.span()));
            match foreign_policy(path, value.get_ref()) {
                Some(ours) => {
                    self.reject(path, format!("{path} is {shown}"), ours, place);
                }
                None => self.misfit(path, &shown, schema, place),
            }
        }
        fitting
    }

    fn labels(&mut self, path: &str, table: &DeTable<'_>) -> Option<Value> {
        let mut labels = Map::new();
        for (name, value) in table {
            let DeValue::String(text) = value.get_ref() else {
                let path = join(path, name.get_ref());
                let message = format!("{path} is {}", shown(value.get_ref()));
                let place = Place::File(value.span());
                self.reject(&path, message, "a text".to_owned(), place);
                return None;
            };
            labels.insert(name.get_ref().to_string(), json!(text));
        }
        Some(labels.into())
    }

    fn variable(&mut self, name: &str, text: &str) {
        let Some(rest) = name.strip_prefix("QUORATE_") else {
            return;
        };
        let keys = schema::keys();
        let mut names = keys.iter().map(|(path, _)| variable(path));
        let place = Place::Variable(name.to_owned());
        if let Some((path, schema)) = keys.iter().find(|(path, _)| variable(path) == name) {
            return self.overlay(path, schema, text, place);
        }
        let section = rest.split("__").next().unwrap_or(rest);
        let list = LISTS
            .iter()
            .find(|(list, _)| *list == section || *list == rest);
        let expected = match list {
            Some((_, expected)) => (*expected).to_owned(),
            None if rest.contains("__") => {
                nearest(name, names).unwrap_or_else(|| "QUORATE_SECTION__KEY".to_owned())
            }
            // A variable with single underscores belongs to the command line, such as
            // `QUORATE_ADMIN`, or to an orchestrator, such as `QUORATE_PORT`, unless only an
            // underscore is missing.
            None => match names.find(|key| key.replace("__", "_") == name) {
                Some(meant) => meant,
                None => return,
            },
        };
        self.error("names no key".to_owned(), expected, place);
    }

    fn flag(&mut self, flag: &str) {
        let place = Place::Flag(flag.to_owned());
        let form = || "section.key=value".to_owned();
        let Some((path, text)) = flag.split_once('=') else {
            return self.error("has no value".to_owned(), form(), place);
        };
        let keys = schema::keys();
        match keys.iter().find(|(key, _)| key == path.trim()) {
            Some((path, schema)) => self.overlay(path, schema, text.trim(), place),
            None => {
                let expected = nearest(path, keys.into_iter().map(|(path, _)| path));
                self.error(
                    "names no key".to_owned(),
                    expected.unwrap_or_else(form),
                    place,
                );
            }
        }
    }

    /// Adds a backend with an id derived from its URL, so that the next start finds it by its id.
    fn backend(&mut self, url: &str) {
        let backends = self.tree.entry("backends").or_insert_with(|| json!([]));
        let Some(backends) = backends.as_array_mut() else {
            // A value that is not a list was rejected before.
            return;
        };
        let (path, place) = (
            format!("backends[{}]", backends.len()),
            Place::Backend(url.to_owned()),
        );
        let key = join(&path, "url");
        let schema = &SCHEMA["properties"]["backends"];
        let schema =
            schema::table(schema).map_or(&Value::Null, |entry| &entry["properties"]["url"]);
        match fit(schema, &json!(url)) {
            Some(fitting) => {
                // Equal URLs result in one id, however they are written.
                let place = EngineUrl::parse(url);
                let id = backend_id(place.as_ref().map_or(url, EngineUrl::as_str));
                backends.push(json!({ "id": id, "url": fitting }));
            }
            None => {
                backends.push(json!({ "id": "refused" }));
                let message = format!("{key} is {}", quoted(url));
                self.reject(&key, message, expected(schema), place.clone());
            }
        }
        self.places.insert(join(&path, "id"), place.clone());
        self.places.insert(key, place);
    }

    /// Sets `node.id` to 1 if it is not set, for a replica without a config file that has only
    /// backends.
    fn name_only_replica(&mut self) {
        let node = self.tree.entry("node").or_insert_with(|| json!({}));
        if let Some(node) = node.as_object_mut()
            && !node.contains_key("id")
            && !self.places.contains_key("node.id")
        {
            node.insert("id".to_owned(), json!("1"));
            self.places.insert("node.id".to_owned(), Place::Nowhere);
        }
    }

    /// Sets a value from a variable or flag. Lists are separated by commas.
    fn overlay(&mut self, path: &str, schema: &Value, text: &str, place: Place) {
        self.places.insert(path.to_owned(), place.clone());
        let read = |text: &str, schema| fit(schema, &json!(text)).ok_or_else(|| quoted(text));
        let value = match schema.get("items") {
            None => read(text, schema),
            Some(items) => {
                let elements = text.split(',').map(str::trim).filter(|it| !it.is_empty());
                elements.map(|text| read(text, items)).collect()
            }
        };
        let value = match value {
            Ok(value) => value,
            Err(shown) => return self.misfit(path, &shown, schema, place),
        };
        let (section, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut table = &mut self.tree;
        for part in section.split('.').filter(|part| !part.is_empty()) {
            let below = table.entry(part).or_insert_with(|| json!({}));
            table = below.as_object_mut().expect("sections are tables");
        }
        table.insert(name.to_owned(), value);
    }
}

/// Returns the id of a backend at `url`: its host, port and prefix, with a `-` in place of every
/// other character.
pub(super) fn backend_id(url: &str) -> String {
    let place = url.split_once("://").map_or(url, |(_, place)| place);
    let id = place.replace(
        |c: char| !c.is_ascii_alphanumeric() && !"._".contains(c),
        "-",
    );
    id.trim_matches('-').to_owned()
}

/// Returns the environment variable of a key, such as `QUORATE_NODE__ID`.
fn variable(path: &str) -> String {
    let name = path.replace('.', "__").replace('-', "_");
    format!("QUORATE_{}", name.to_uppercase())
}

/// Returns what to set instead of a policy of another router; `None` if `path` is no policy.
fn foreign_policy(path: &str, value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(name) if last(path) == "policy" => foreign_names::policy(name),
        _ => None,
    }
}

/// Returns the last part of a path.
fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

fn json_of(value: &DeValue<'_>) -> Option<Value> {
    match value {
        DeValue::String(text) => Some(json!(text)),
        DeValue::Integer(integer) => {
            let integer = i64::from_str_radix(integer.as_str(), integer.radix());
            integer.ok().map(|integer| json!(integer))
        }
        DeValue::Boolean(is_set) => Some(json!(is_set)),
        DeValue::Float(float) => float.as_str().parse().ok().map(|number: f64| json!(number)),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

fn shown(value: &DeValue<'_>) -> String {
    let name = match value {
        DeValue::String(text) => return quoted(text),
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
        DeValue::Integer(_) | DeValue::Boolean(_) => {
            let value = json_of(value).map(|value| value.to_string());
            return value.unwrap_or_else(|| "an integer beyond 64 bits".to_owned());
        }
    };
    name.to_owned()
}

fn quoted(text: &str) -> String {
    if text.len() > 60 {
        return "a long text".to_owned();
    }
    format!("{text:?}")
}

/// Returns the most similar name, if its Levenshtein distance is at most two.
fn nearest(name: &str, names: impl IntoIterator<Item = String>) -> Option<String> {
    let names = names.into_iter();
    let distances = names.map(|near| (strsim::levenshtein(name, &near), near));
    let (distance, near) = distances.min()?;
    (distance <= 2).then_some(near)
}

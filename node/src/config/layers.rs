//! The layers a setting can come from (flag over environment over file over default), read into one
//! [`Settings`] that knows of every value where it came from, with all faults on the way.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::fault::{Fault, Place, line_and_column};
use super::key::{Absent, Key, Kind};
use super::keys::{BACKEND_KEYS, KEYS, MODEL_KEYS, is_later_policy};
use super::value::{Misfit, Raw, Value};

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Set nowhere.
    Default,
    /// The config file.
    File {
        /// From 1.
        line: usize,
        /// Bytes of the value.
        span: Range<usize>,
    },
    /// This environment variable.
    Variable(String),
    /// This `--set` flag, as given.
    Flag(String),
}

/// A value with its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Allowed by its key's kind.
    pub value: Value,
    /// Where it came from.
    pub source: Source,
}

/// Values by the path of their key. Keys that are set nowhere and have no default are absent.
pub(super) type Values = BTreeMap<&'static str, Setting>;

/// One entry of a list of tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// By the key's last part.
    pub values: Values,
    /// The entry's bytes in the file.
    pub span: Range<usize>,
}

/// All layers laid over each other.
#[derive(Debug, Default)]
pub struct Settings {
    /// By full path.
    pub values: Values,
    /// `[[models]]`, in order.
    pub models: Vec<Entry>,
    /// `[[backends]]`, in order.
    pub backends: Vec<Entry>,
    /// What was wrong on the way.
    pub faults: Vec<Fault>,
}

/// What settings are read from, beside the defaults.
#[derive(Debug, Clone, Default)]
pub struct Layers<'a> {
    /// Text of the config file.
    pub file: &'a str,
    /// Environment variables; those that do not begin with `QUORATE_` are passed over.
    pub variables: &'a [(String, String)],
    /// `section.key=value` each.
    pub flags: &'a [String],
}

impl Settings {
    /// Reads all layers.
    #[must_use]
    pub fn read(layers: &Layers<'_>) -> Self {
        let mut reader = Reader {
            text: layers.file,
            ..Reader::default()
        };
        let (table, errors) = DeTable::parse_recoverable(layers.file);
        reader.table("", table.get_ref());
        reader.forget_consequences(&errors);
        for (name, text) in layers.variables {
            reader.variable(name, text);
        }
        for flag in layers.flags {
            reader.flag(flag);
        }
        let seen = std::mem::take(&mut reader.seen);
        let mut settings = reader.settings;
        if errors.is_empty() {
            fill(KEYS, &mut settings.values, &seen, &mut settings.faults, "");
        }
        settings
    }
}

/// Puts defaults where nothing was set and faults where something must have been.
fn fill(
    keys: &[Key],
    values: &mut Values,
    seen: &BTreeSet<&'static str>,
    faults: &mut Vec<Fault>,
    of: &str,
) {
    for key in keys.iter().filter(|key| !seen.contains(key.path)) {
        match key.absent {
            Absent::Unset => {}
            Absent::Required => faults.push(Fault {
                message: format!("{of}{} is not set", key.path),
                expected: key.kind.expected(),
                place: Place::Nowhere,
            }),
            Absent::Default(text) => {
                let value = read_text(key.kind, text);
                let value = value.expect("the key table's defaults fit their kinds");
                values.insert(
                    key.path,
                    Setting {
                        value,
                        source: Source::Default,
                    },
                );
            }
        }
    }
}

/// Reads a variable's, flag's or default's text.
fn read_text(kind: Kind, text: &str) -> Result<Value, (Raw, Misfit)> {
    let read = |text: &str| {
        let raw = Raw::Text(text.to_owned());
        kind.read(&raw).map_err(|misfit| (raw, misfit))
    };
    if !kind.is_list() {
        return read(text);
    }
    let elements = text
        .split(',')
        .map(str::trim)
        .filter(|element| !element.is_empty());
    join(kind, elements.map(read).collect::<Result<Vec<_>, _>>()?)
        .ok_or_else(|| (Raw::Text(text.to_owned()), Misfit::Wrong))
}

/// Puts the elements of a list together; `None` when there are none and the kind needs some.
fn join(kind: Kind, elements: Vec<Value>) -> Option<Value> {
    let (mut texts, mut statuses) = (Vec::new(), Vec::new());
    for element in elements {
        match element {
            Value::Texts(more) => texts.extend(more),
            Value::Statuses(more) => statuses.extend(more),
            Value::Integer(_)
            | Value::Flag(_)
            | Value::Text(_)
            | Value::Duration(_)
            | Value::Range(_)
            | Value::Size(_)
            | Value::Address(_)
            | Value::Labels(_) => return None,
        }
    }
    match kind {
        Kind::Statuses => Some(Value::Statuses(statuses)),
        Kind::Texts if texts.is_empty() => None,
        _ => Some(Value::Texts(texts)),
    }
}

fn misfit_fault(path: &str, raw: &Raw, misfit: &Misfit, kind: Kind, place: Place) -> Fault {
    let message = match misfit {
        Misfit::NotAvailable => format!("{path} = {raw} is not available in this version"),
        Misfit::Wrong => format!("{path} is {raw}"),
    };
    Fault {
        message,
        expected: kind.expected(),
        place,
    }
}

#[derive(Default)]
struct Reader<'a> {
    text: &'a str,
    settings: Settings,
    /// Keys that were set, rightly or not.
    seen: BTreeSet<&'static str>,
}

impl Reader<'_> {
    /// Adds what the TOML parser itself found, and drops faults it may have caused.
    fn forget_consequences(&mut self, errors: &[toml::de::Error]) {
        let end = self.text.len();
        let spans: Vec<_> = errors
            .iter()
            .map(|error| error.span().unwrap_or(end..end))
            .collect();
        let Some(first) = spans.iter().map(|span| span.start).min() else {
            return;
        };
        let line = |at: usize| line_and_column(self.text, at).0;
        // A broken header or text changes the meaning of all that follows it.
        self.settings.faults.retain(|fault| match &fault.place {
            Place::File(span) => line(span.start) < line(first),
            Place::Variable(_) | Place::Flag(_) => true,
            Place::Nowhere => false,
        });
        for (error, span) in errors.iter().zip(spans) {
            let message = error.message();
            let (message, expected) = message
                .split_once(", expected ")
                .unwrap_or((message, "valid TOML"));
            self.settings.faults.push(Fault {
                message: message.to_owned(),
                expected: expected.to_owned(),
                place: Place::File(span),
            });
        }
    }

    fn table(&mut self, prefix: &str, table: &DeTable<'_>) {
        for (name, value) in table {
            let path = if prefix.is_empty() {
                name.get_ref().to_string()
            } else {
                format!("{prefix}.{}", name.get_ref())
            };
            let below = format!("{path}.");
            match path.as_str() {
                "models" => self.settings.models = self.entries(&path, MODEL_KEYS, value),
                "backends" => self.settings.backends = self.entries(&path, BACKEND_KEYS, value),
                // A quoted name with a dot in it would pass for a path.
                _ if name.get_ref().contains('.') => self.unknown(prefix, &path, name),
                _ => {
                    if let Some(key) = KEYS.iter().find(|key| key.path == path) {
                        self.seen.insert(key.path);
                        if let Some(setting) = self.value(&path, key.kind, value) {
                            self.settings.values.insert(key.path, setting);
                        }
                    } else if KEYS.iter().any(|key| key.path.starts_with(&below)) {
                        match value.get_ref() {
                            DeValue::Table(table) => self.table(&path, table),
                            other => self.fault(
                                format!("{path} is {}", raw(other)),
                                format!("a table: [{path}]"),
                                value.span(),
                            ),
                        }
                    } else {
                        self.unknown(prefix, &path, name);
                    }
                }
            }
        }
    }

    fn unknown(&mut self, prefix: &str, path: &str, name: &Spanned<std::borrow::Cow<'_, str>>) {
        if prefix == "routing" && is_later_policy(name.get_ref()) {
            let message = format!("[{path}] is not available in this version");
            self.fault(
                message,
                "the settings of an available policy".to_owned(),
                name.span(),
            );
            return;
        }
        let siblings = siblings(prefix);
        let expected = nearest(name.get_ref(), &siblings).map_or_else(
            || format!("one of {}", siblings.join(", ")),
            |near| format!("{near}, or another of {}", siblings.join(", ")),
        );
        self.fault(format!("unknown key {path}"), expected, name.span());
    }

    fn entries(&mut self, path: &str, keys: &[Key], value: &Spanned<DeValue<'_>>) -> Vec<Entry> {
        let DeValue::Array(array) = value.get_ref() else {
            let message = format!("{path} is {}", raw(value.get_ref()));
            self.fault(
                message,
                format!("a list of tables: [[{path}]]"),
                value.span(),
            );
            return Vec::new();
        };
        let mut entries = Vec::new();
        for (nth, element) in array.iter().enumerate() {
            match element.get_ref() {
                DeValue::Table(table) => {
                    entries.push(self.entry(
                        &format!("{path}[{nth}]"),
                        keys,
                        table,
                        element.span(),
                    ));
                }
                other => {
                    let message = format!("{path}[{nth}] is {}", raw(other));
                    self.fault(message, format!("a table: [[{path}]]"), element.span());
                }
            }
        }
        entries
    }

    fn entry(
        &mut self,
        path: &str,
        keys: &[Key],
        table: &DeTable<'_>,
        span: Range<usize>,
    ) -> Entry {
        let mut values = Values::new();
        let mut seen = BTreeSet::new();
        for (name, value) in table {
            let full = format!("{path}.{}", name.get_ref());
            let Some(key) = keys.iter().find(|key| key.path == name.get_ref()) else {
                let names: Vec<_> = keys.iter().map(|key| key.path.to_owned()).collect();
                let expected = format!("one of {}", names.join(", "));
                self.fault(format!("unknown key {full}"), expected, name.span());
                continue;
            };
            seen.insert(key.path);
            if let Some(setting) = self.value(&full, key.kind, value) {
                values.insert(key.path, setting);
            }
        }
        let mut faults = Vec::new();
        fill(keys, &mut values, &seen, &mut faults, &format!("{path}."));
        for mut fault in faults {
            fault.place = Place::File(span.clone());
            self.settings.faults.push(fault);
        }
        Entry { values, span }
    }

    fn value(&mut self, path: &str, kind: Kind, value: &Spanned<DeValue<'_>>) -> Option<Setting> {
        let read = match (kind, value.get_ref()) {
            (Kind::Labels, DeValue::Table(table)) => self.labels(path, table)?,
            (kind, DeValue::Array(array)) if kind.is_list() => {
                let mut elements = Vec::new();
                for (nth, element) in array.iter().enumerate() {
                    elements.push(self.one(&format!("{path}[{nth}]"), kind, element));
                }
                let elements: Option<Vec<_>> = elements.into_iter().collect();
                let Some(list) = join(kind, elements?) else {
                    let expected = format!("at least one element, each {}", kind.expected());
                    self.fault(format!("{path} is empty"), expected, value.span());
                    return None;
                };
                list
            }
            (kind, other) if kind.is_list() => {
                let message = format!("{path} is {}", raw(other));
                self.fault(
                    message,
                    format!("a list, each {}", kind.expected()),
                    value.span(),
                );
                return None;
            }
            _ => self.one(path, kind, value)?,
        };
        let line = line_and_column(self.text, value.span().start).0;
        Some(Setting {
            value: read,
            source: Source::File {
                line,
                span: value.span(),
            },
        })
    }

    fn one(&mut self, path: &str, kind: Kind, value: &Spanned<DeValue<'_>>) -> Option<Value> {
        let raw = raw(value.get_ref());
        match kind.read(&raw) {
            Ok(value) => Some(value),
            Err(misfit) => {
                let place = Place::File(value.span());
                self.settings
                    .faults
                    .push(misfit_fault(path, &raw, &misfit, kind, place));
                None
            }
        }
    }

    fn labels(&mut self, path: &str, table: &DeTable<'_>) -> Option<Value> {
        let mut labels = BTreeMap::new();
        for (name, value) in table {
            let DeValue::String(text) = value.get_ref() else {
                let message = format!("{path}.{} is {}", name.get_ref(), raw(value.get_ref()));
                self.fault(message, "a text".to_owned(), value.span());
                return None;
            };
            labels.insert(name.get_ref().to_string(), text.to_string());
        }
        Some(Value::Labels(labels))
    }

    fn variable(&mut self, name: &str, text: &str) {
        let Some(rest) = name.strip_prefix("QUORATE_") else {
            return;
        };
        let place = Place::Variable(name.to_owned());
        // One underscore names a variable of the command line, such as `QUORATE_ADMIN`, or one of
        // an orchestrator, such as `QUORATE_PORT`; but it may be a slip.
        if !rest.contains("__") {
            let meant = KEYS.iter().map(Key::variable);
            if let Some(meant) = meant.into_iter().find(|key| key.replace("__", "_") == name) {
                self.settings.faults.push(Fault {
                    message: "names no key".to_owned(),
                    expected: meant,
                    place,
                });
            }
            return;
        }
        let Some(key) = KEYS.iter().find(|key| key.variable() == name) else {
            let variables: Vec<_> = KEYS.iter().map(Key::variable).collect();
            let is_entry = rest.starts_with("MODELS__") || rest.starts_with("BACKENDS__");
            let expected = if is_entry {
                "lists of tables to stand in the file".to_owned()
            } else {
                nearest(name, &variables).unwrap_or_else(|| "QUORATE_SECTION__KEY".to_owned())
            };
            let message = "names no key".to_owned();
            self.settings.faults.push(Fault {
                message,
                expected,
                place,
            });
            return;
        };
        self.overlay(key, text, place, Source::Variable(name.to_owned()));
    }

    fn flag(&mut self, flag: &str) {
        let place = Place::Flag(flag.to_owned());
        let Some((path, text)) = flag.split_once('=') else {
            let (message, expected) = ("has no value".to_owned(), "section.key=value".to_owned());
            self.settings.faults.push(Fault {
                message,
                expected,
                place,
            });
            return;
        };
        let Some(key) = KEYS.iter().find(|key| key.path == path.trim()) else {
            let paths: Vec<_> = KEYS.iter().map(|key| key.path.to_owned()).collect();
            let expected = nearest(path, &paths).unwrap_or_else(|| "section.key=value".to_owned());
            let message = "names no key".to_owned();
            self.settings.faults.push(Fault {
                message,
                expected,
                place,
            });
            return;
        };
        self.overlay(key, text.trim(), place, Source::Flag(flag.to_owned()));
    }

    fn overlay(&mut self, key: &Key, text: &str, place: Place, source: Source) {
        self.seen.insert(key.path);
        match read_text(key.kind, text) {
            Ok(value) => {
                self.settings
                    .values
                    .insert(key.path, Setting { value, source });
            }
            Err((raw, misfit)) => {
                let fault = misfit_fault(key.path, &raw, &misfit, key.kind, place);
                self.settings.faults.push(fault);
            }
        }
    }

    fn fault(&mut self, message: String, expected: String, span: Range<usize>) {
        let place = Place::File(span);
        self.settings.faults.push(Fault {
            message,
            expected,
            place,
        });
    }
}

fn raw(value: &DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Integer(integer) => i64::from_str_radix(integer.as_str(), integer.radix())
            .map_or(Raw::Other("an integer beyond 64 bits"), Raw::Integer),
        DeValue::Float(_) => Raw::Other("a number with a fraction"),
        DeValue::Boolean(is_set) => Raw::Flag(*is_set),
        DeValue::Datetime(_) => Raw::Other("a date"),
        DeValue::Array(_) => Raw::Other("a list"),
        DeValue::Table(_) => Raw::Other("a table"),
    }
}

/// Names that may stand in a section, sections below it included.
fn siblings(section: &str) -> Vec<String> {
    let below = if section.is_empty() {
        String::new()
    } else {
        format!("{section}.")
    };
    let mut names: BTreeSet<_> = KEYS
        .iter()
        .filter_map(|key| key.path.strip_prefix(below.as_str()))
        .map(|rest| rest.split('.').next().unwrap_or(rest).to_owned())
        .collect();
    if section.is_empty() {
        names.extend(["models".to_owned(), "backends".to_owned()]);
    }
    names.into_iter().collect()
}

/// The name that was probably meant: the one fewest letters away, if these are few.
fn nearest(name: &str, names: &[String]) -> Option<String> {
    let (distance, near) = names
        .iter()
        .map(|near| (distance(name, near), near))
        .min()?;
    (distance <= 2).then(|| near.clone())
}

/// Levenshtein distance in bytes.
fn distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.bytes().enumerate() {
            let substituted = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

//! How checks read settings, and how they refuse one: with the place where it stands.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use super::fault::{Fault, Place};
use super::layers::{Entry, Setting, Source, Values};
use super::value::Value;

pub(super) fn integer(values: &Values, path: &str) -> Option<i64> {
    match values.get(path)?.value {
        Value::Integer(number) => Some(number),
        _ => None,
    }
}

pub(super) fn count(values: &Values, path: &str) -> Option<u32> {
    u32::try_from(integer(values, path)?).ok()
}

pub(super) fn flag(values: &Values, path: &str) -> Option<bool> {
    match values.get(path)?.value {
        Value::Flag(is_set) => Some(is_set),
        _ => None,
    }
}

pub(super) fn text(values: &Values, path: &str) -> Option<String> {
    match &values.get(path)?.value {
        Value::Text(text) => Some(text.clone()),
        _ => None,
    }
}

pub(super) fn texts(values: &Values, path: &str) -> Option<Vec<String>> {
    match &values.get(path)?.value {
        Value::Texts(texts) => Some(texts.clone()),
        _ => None,
    }
}

pub(super) fn duration(values: &Values, path: &str) -> Option<Duration> {
    match values.get(path)?.value {
        Value::Duration(span) => Some(span),
        _ => None,
    }
}

pub(super) fn range(values: &Values, path: &str) -> Option<Range<Duration>> {
    match &values.get(path)?.value {
        Value::Range(range) => Some(range.clone()),
        _ => None,
    }
}

pub(super) fn size(values: &Values, path: &str) -> Option<u64> {
    match values.get(path)?.value {
        Value::Size(bytes) => Some(bytes),
        _ => None,
    }
}

pub(super) fn address(values: &Values, path: &str) -> Option<SocketAddr> {
    match values.get(path)?.value {
        Value::Address(address) => Some(address),
        _ => None,
    }
}

/// Where a setting stands, so that a fault found later still points at it.
pub(super) fn place(setting: Option<&Setting>) -> Place {
    match setting.map(|setting| &setting.source) {
        Some(Source::File { span, .. }) => Place::File(span.clone()),
        Some(Source::Variable(name)) => Place::Variable(name.clone()),
        Some(Source::Flag(flag)) => Place::Flag(flag.clone()),
        Some(Source::Default) | None => Place::Nowhere,
    }
}

/// Adds a fault at the value of `path`.
pub(super) fn refuse(
    values: &Values,
    path: &str,
    message: String,
    expected: &str,
    faults: &mut Vec<Fault>,
) {
    let place = place(values.get(path));
    faults.push(Fault {
        message,
        expected: expected.to_owned(),
        place,
    });
}

/// Refuses an entry whose `key` an earlier one has too.
pub(super) fn unique(list: &str, key: &str, entries: &[Entry], faults: &mut Vec<Fault>) {
    let mut names = BTreeMap::new();
    for (nth, entry) in entries.iter().enumerate() {
        let Some(name) = text(&entry.values, key) else {
            continue;
        };
        if let Some(first) = names.insert(name.clone(), nth) {
            let message = format!("{list}[{nth}].{key} is {name:?}, as is {list}[{first}].{key}");
            let expected = format!("each {key} once");
            refuse(&entry.values, key, message, &expected, faults);
        }
    }
}

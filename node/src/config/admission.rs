//! Reads `[admission]` into the initial settings of a new cluster.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::json;
use state::admission::{AdmissionSettings, Concurrency, SlaSettings};
use state::command::Rejection;
use state::quotas::UserLimits;

use super::fault::Fault;
use super::layers::Values;
use super::read::refuse;
use super::value::Value;

/// The settings; `None` when one of them is missing or unfit, which is then among the faults.
pub(super) fn settings(values: &Values, faults: &mut Vec<Fault>) -> Option<AdmissionSettings> {
    let settings = read(values)?;
    match settings.validate() {
        Ok(()) => Some(settings),
        Err(Rejection::Invalid { field, expected }) => {
            let path = key_of(&field);
            let found = values.get(path.as_str()).map(|setting| &setting.value);
            let found = found.map_or_else(String::new, ToString::to_string);
            let message = format!("{path} is {found}");
            refuse(values, &path, message, &key_of(&expected), faults);
            None
        }
        Err(other) => unreachable!("settings are invalid or not, this is {other}"),
    }
}

fn read(values: &Values) -> Option<AdmissionSettings> {
    Some(AdmissionSettings {
        order: word(values, "admission.order")?,
        concurrency: match &values.get("admission.concurrency")?.value {
            Value::Integer(requests) => Concurrency::Fixed(u32::try_from(*requests).ok()?),
            _ => word(values, "admission.concurrency")?,
        },
        queue_max: number(values, "admission.max_queue")?,
        wait_ms_max: millis(values, "admission.max_wait")?,
        charge: word(values, "admission.charge")?,
        grants: word(values, "admission.grants")?,
        gate_tokens: number(values, "admission.gate_tokens")?,
        bins: u16::try_from(number(values, "admission.bins")?).ok()?,
        bin_selection: word(values, "admission.bin_selection")?,
        bin_age_ms_max: millis(values, "admission.bin_max_age")?,
        batching: word(values, "admission.batching")?,
        sla: SlaSettings {
            inter_token_us: micros(values, "admission.sla.inter_token")?,
            tolerance_us: micros(values, "admission.sla.tolerance")?,
            batch_min: number(values, "admission.sla.min_batch")?,
            batch_max: number(values, "admission.sla.max_batch")?,
            memory_z_milli: number(values, "admission.sla.memory_z_milli")?,
        },
        user_limits: UserLimits {
            requests: number(values, "admission.user_limits.requests"),
            tokens: number(values, "admission.user_limits.tokens").map(u64::from),
            concurrent: number(values, "admission.user_limits.concurrent"),
            window_ms: millis(values, "admission.user_limits.window"),
        },
    })
}

/// The key that sets a field of the settings; text that names one speaks of the key.
fn key_of(field: &str) -> String {
    let pairs = [
        ("queue_max", "max_queue"),
        ("wait_ms_max", "max_wait"),
        ("bin_age_ms_max", "bin_max_age"),
        ("batch_min", "min_batch"),
        ("batch_max", "max_batch"),
        ("inter_token_us", "inter_token"),
        ("tolerance_us", "tolerance"),
        ("window_ms", "window"),
    ];
    let mut key = field.to_owned();
    for (name, named) in pairs {
        key = key.replace(name, named);
    }
    let is_field = !key.contains(' ');
    if is_field {
        format!("admission.{key}")
    } else {
        key
    }
}

fn number(values: &Values, path: &str) -> Option<u32> {
    match values.get(path)?.value {
        Value::Integer(number) => u32::try_from(number).ok(),
        _ => None,
    }
}

fn span(values: &Values, path: &str) -> Option<Duration> {
    match values.get(path)?.value {
        Value::Duration(span) => Some(span),
        _ => None,
    }
}

fn millis(values: &Values, path: &str) -> Option<u32> {
    u32::try_from(span(values, path)?.as_millis()).ok()
}

/// More than an hour counts as an hour, which no engine takes for a token.
fn micros(values: &Values, path: &str) -> Option<u32> {
    u32::try_from(
        span(values, path)?
            .min(Duration::from_secs(3600))
            .as_micros(),
    )
    .ok()
}

/// A word that the settings spell alike.
fn word<T: DeserializeOwned>(values: &Values, path: &str) -> Option<T> {
    let Value::Text(text) = &values.get(path)?.value else {
        return None;
    };
    let word = serde_json::from_value(json!(text));
    Some(word.expect("the key table has the words of the settings"))
}

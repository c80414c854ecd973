//! Values of other routers as values of ours.

use serde_json::{Value, json};

use super::super::others::Unit;

/// What a value should have been.
pub(super) type Expected = &'static str;

/// Returns the value that a key takes; `None` if it needs none.
pub(super) fn value(unit: Unit, values: &[String]) -> Result<Option<Value>, Expected> {
    let text = values
        .first()
        .map(|it| it.trim())
        .filter(|it| !it.is_empty());
    let text = match unit {
        Unit::Texts => {
            let urls = values.iter().map(|it| public_url(it));
            return Ok(Some(json!(urls.collect::<Vec<_>>())));
        }
        Unit::Selector => return Ok(Some(json!(values.join(",")))),
        _ => text.ok_or("a value")?,
    };
    Ok(Some(match unit {
        Unit::Texts | Unit::Selector | Unit::Text | Unit::Host | Unit::Urls | Unit::Url => {
            json!(text)
        }
        Unit::Integer | Unit::Port => json!(integer(text)?),
        Unit::Limit => match integer(text)? {
            ..=0 => return Ok(None),
            limit => json!(limit),
        },
        Unit::Decimal => json!(number(text)?),
        Unit::Thousandths => json!(thousandths(text)?),
        Unit::Seconds => match thousandths(text)? {
            millis if millis % 1000 == 0 => json!(format!("{}s", millis / 1000)),
            millis => json!(format!("{millis}ms")),
        },
        Unit::Quantity => json!(quantity(text)?),
        Unit::Tokenizer => match text.starts_with(['/', '.']) {
            true if text.ends_with(".json") => json!(format!("huggingface:{text}")),
            true => json!(format!(
                "huggingface:{}/tokenizer.json",
                text.trim_end_matches('/')
            )),
            false => return Ok(None),
        },
        Unit::Collector => match text.contains("://") {
            true => json!(public_url(text)),
            false => json!(format!("http://{}", public_url(text))),
        },
    }))
}

/// Returns a URL without what may be secret: user and password, query and fragment.
pub(super) fn public_url(url: &str) -> String {
    let (scheme, place) = match url.split_once("://") {
        Some((scheme, place)) => (format!("{scheme}://"), place),
        None => (String::new(), url),
    };
    let place = place.split(['?', '#']).next().unwrap_or_default();
    // A password may have a `/`, a path hardly an `@`.
    let place = place.rsplit('@').next().unwrap_or_default();
    scheme + place
}

fn number(text: &str) -> Result<f64, Expected> {
    let number = text.parse().ok().filter(|it: &f64| it.abs() < 1e12);
    number.ok_or("a number")
}

/// Reads an integer, also one with a fraction of zero.
fn integer(text: &str) -> Result<i64, Expected> {
    let number = number(text)?;
    let is_whole = number.fract() == 0.0;
    is_whole.then_some(number as i64).ok_or("an integer")
}

fn thousandths(text: &str) -> Result<i64, Expected> {
    let number = number(text)?;
    let is_positive = number >= 0.0;
    is_positive
        .then_some((number * 1000.0).round() as i64)
        .ok_or("a number of at least 0")
}

/// Reads a quantity of Kubernetes.
fn quantity(text: &str) -> Result<i64, Expected> {
    let at = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (digits, suffix) = text.split_at(at);
    let powers = ["", "k", "M", "G", "T"];
    let power = |suffix: &str| powers.iter().position(|it| *it == suffix);
    let scale = match (power(suffix), suffix) {
        (Some(power), _) => 1000f64.powi(power as i32),
        (None, "Ki") => 1024.0,
        (None, _) => {
            let power = suffix.strip_suffix('i').and_then(power);
            1024f64.powi(power.ok_or("a quantity, such as 5k or 1Gi")? as i32)
        }
    };
    let number = number(digits)? * scale;
    let is_whole = (0.0..1e15).contains(&number);
    is_whole
        .then_some(number.round() as i64)
        .ok_or("a quantity, such as 5k or 1Gi")
}

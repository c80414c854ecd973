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
        Unit::Integer => json!(integer(text)?),
        Unit::Port => json!(port(text)?),
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

/// Whether a value gets rounded to an integer.
pub(super) fn is_rounded(unit: Unit, values: &[String]) -> bool {
    let number = values.first().and_then(|it| number(it.trim()).ok());
    matches!(unit, Unit::Integer | Unit::Limit) && number.is_some_and(|it| it.fract() != 0.0)
}

/// Reads an integer, also with a fraction, which is rounded.
fn integer(text: &str) -> Result<i64, Expected> {
    Ok(number(text)?.round() as i64)
}

fn port(text: &str) -> Result<u16, Expected> {
    text.parse().map_err(|_| "a port")
}

fn thousandths(text: &str) -> Result<i64, Expected> {
    let number = number(text)?;
    let is_positive = number >= 0.0;
    is_positive
        .then_some((number * 1000.0).round() as i64)
        .ok_or("a number of at least 0")
}

/// Reads a quantity of Kubernetes; rounds a fraction up, as it does.
fn quantity(text: &str) -> Result<i64, Expected> {
    const EXPECTED: Expected = "a quantity, such as 5k or 1Gi";
    // An exponent, as in 1e3, is a part of the number.
    let number = match number(text) {
        Ok(number) => number,
        Err(_) => {
            let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let scale = match &text[digits.len()..] {
                "n" => 1e-9,
                "u" => 1e-6,
                "m" => 1e-3,
                suffix => {
                    let (suffix, base) = match suffix.strip_suffix('i') {
                        Some("k") => return Err(EXPECTED),
                        Some("K") => ("k", 1024f64),
                        Some(suffix) => (suffix, 1024f64),
                        None => (suffix, 1000f64),
                    };
                    let mut powers = ["k", "M", "G", "T", "P", "E"].iter();
                    let power = powers.position(|it| *it == suffix).ok_or(EXPECTED)?;
                    base.powi(power as i32 + 1)
                }
            };
            number(digits)? * scale
        }
    };
    // The parts of a fraction are decimal, those of an f64 are not.
    let whole = (number - 1e-9).ceil().max(0.0);
    let is_valid = number >= 0.0 && whole < i64::MAX as f64;
    is_valid.then_some(whole as i64).ok_or(EXPECTED)
}

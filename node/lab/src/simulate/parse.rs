//! Parsers for the flags of `quorate simulate`.

use state::admission::{Concurrency, Order};
use state::policy::VisibleTiers;

use super::events::Micros;
use super::plan::micros;

/// Delay until other replicas learn of a change; `NewsLag(None)` if they never do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NewsLag(pub(super) Option<Micros>);

pub(super) fn order(text: &str) -> Result<Order, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "expected vtc, vtc-max-fair, vtc-pred, dlpm, lcf, rpm or fcfs".to_owned())
}

pub(super) fn tiers(text: &str) -> Result<VisibleTiers, String> {
    match text {
        "gpu" => Ok(VisibleTiers::Gpu),
        "all" => Ok(VisibleTiers::All),
        _ => Err("expected gpu or all".to_owned()),
    }
}

pub(super) fn lag(text: &str) -> Result<NewsLag, String> {
    if text == "never" {
        return Ok(NewsLag(None));
    }
    let time = humantime::parse_duration(text);
    time.map(|time| NewsLag(Some(micros(time))))
        .map_err(|error| format!("expected a time like 20ms, or never: {error}"))
}

pub(super) fn concurrency(text: &str) -> Result<Concurrency, String> {
    match text {
        "adaptive" => Ok(Concurrency::Adaptive),
        "unlimited" => Ok(Concurrency::Unlimited),
        number => match number.parse::<u32>() {
            Ok(requests) if requests > 0 => Ok(Concurrency::Fixed(requests)),
            _ => Err("expected a number from 1, adaptive or unlimited".to_owned()),
        },
    }
}

pub(super) fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e6 => Ok(number),
        _ => Err("expected a number above 0 and at most 1e6".to_owned()),
    }
}

pub(super) fn range(text: &str) -> Result<(u32, u32), String> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let tokens = |part: &str| {
        part.parse::<u32>()
            .ok()
            .filter(|n| (1..1 << 20).contains(n))
    };
    match (tokens(least), tokens(most)) {
        (Some(least), Some(most)) if least <= most => Ok((least, most)),
        _ => Err("expected tokens like 64..192".to_owned()),
    }
}

pub(super) fn patience(text: &str) -> Result<(Micros, Micros), String> {
    if text.contains("..") {
        return span(text);
    }
    let time = humantime::parse_duration(text).map_err(|_| "expected a time like 3s".to_owned())?;
    Ok((micros(time), micros(time)))
}

pub(super) fn span(text: &str) -> Result<(Micros, Micros), String> {
    let expected = || "expected times like 20s..40s".to_owned();
    let (from, until) = text.split_once("..").ok_or_else(expected)?;
    let time = |part| humantime::parse_duration(part).map_err(|_| expected());
    let (from, until) = (micros(time(from)?), micros(time(until)?));
    if from < until {
        Ok((from, until))
    } else {
        Err(expected())
    }
}

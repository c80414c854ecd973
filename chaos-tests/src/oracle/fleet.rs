//! The fleet of engines behind a simulated source, whose behaviour is known in advance.

use std::collections::BTreeSet;

use state::discovery::SourceRules;

/// Id of the source.
pub const SOURCE: &str = "fleet";
/// Number of engines that every response of the source lists.
pub const STEADY: u64 = 12;
/// Number of engines that responses omit now and then.
pub const FLAPPING: u64 = 8;
/// Number of engines that are replaced, one after another.
pub const ROLLING: u64 = 16;

/// Returns the rules for removing backends of the source.
#[must_use]
pub fn rules() -> SourceRules {
    SourceRules {
        source: SOURCE.to_owned(),
        remove_after_ms: 2000,
        lost_permille_max: 500,
    }
}

/// Returns the backend id of the engine with this kind and number.
#[must_use]
pub fn name(kind: &str, number: u64) -> String {
    format!("{SOURCE}-{kind}-{number}")
}

/// Returns whether the source always lists the engine with this backend id.
#[must_use]
pub fn is_steady(name: &str) -> bool {
    name.starts_with("fleet-steady-")
}

/// Returns the ids of the engines that the source lists at the end.
#[must_use]
pub fn last() -> BTreeSet<String> {
    let of = |kind: &'static str, count| (0..count).map(move |number| name(kind, number));
    let kinds = [
        ("steady", STEADY),
        ("flapping", FLAPPING),
        ("last", ROLLING),
    ];
    kinds
        .into_iter()
        .flat_map(|(kind, count)| of(kind, count))
        .collect()
}

//! The fleet of engines that a simulated source tells of: what is known of it beforehand.

use std::collections::BTreeSet;

use state::discovery::SourceRules;

/// Id of the source.
pub const SOURCE: &str = "fleet";
/// Engines of which every answer with engines in it tells.
pub const STEADY: u64 = 12;
/// Engines that answers leave out now and then.
pub const FLAPPING: u64 = 8;
/// Engines that are replaced, one after the other.
pub const ROLLING: u64 = 16;

/// How the source is followed.
#[must_use]
pub fn rules() -> SourceRules {
    SourceRules {
        source: SOURCE.to_owned(),
        remove_after_ms: 2000,
        lost_permille_max: 500,
    }
}

/// Id of the `number`th engine of a kind.
#[must_use]
pub fn name(kind: &str, number: u64) -> String {
    format!("{SOURCE}-{kind}-{number}")
}

/// Whether the source always tells of this engine.
#[must_use]
pub fn is_steady(name: &str) -> bool {
    name.starts_with("fleet-steady-")
}

/// What the source tells of in the end, for as long as it is asked.
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

//! Verdicts of the filters on each backend, and their counts.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

/// Result of the filters for one backend: it may take the request, or the first filter that
/// excluded it. The order is that of the filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Encode, Decode)]
#[serde(rename_all = "kebab-case")]
pub enum FilterVerdict {
    /// It may take the request.
    Candidate,
    /// It serves other models.
    OtherModel,
    /// The gateway does not offer its endpoint.
    NotOffered,
    /// It was already tried for this request.
    Tried,
    /// It is unhealthy, or not probed yet.
    Unhealthy,
    /// It is draining.
    Draining,
    /// Its circuit is open.
    CircuitOpen,
    /// Its role does not fit the way in which the request is served: by one backend, or by a
    /// prefill and a decode backend.
    OtherRole,
    /// Other candidates have loaded the model, and it has not.
    NotLoaded,
    /// It lacks a required label.
    OtherLabels,
    /// Its engine would not isolate the user's cached blocks.
    Unsalted,
    /// Its cache cannot hold the prompt.
    TooSmall,
    /// Other candidates have a short queue and the adapter in memory, or room for it.
    NotResident,
    /// It has reached its limit of concurrent requests. After a wait for a place that a peer holds:
    /// or this replica has no free place there.
    AtLimit,
}

impl FilterVerdict {
    /// All verdicts that exclude a backend, with the names of their filters.
    pub(super) const FILTERS: [(Self, &'static str); 13] = [
        (Self::OtherModel, "other-model"),
        (Self::NotOffered, "not-offered"),
        (Self::Tried, "tried"),
        (Self::Unhealthy, "unhealthy"),
        (Self::Draining, "draining"),
        (Self::CircuitOpen, "circuit-open"),
        (Self::OtherRole, "other-role"),
        (Self::NotLoaded, "not-loaded"),
        (Self::OtherLabels, "other-labels"),
        (Self::Unsalted, "unsalted"),
        (Self::TooSmall, "too-small"),
        (Self::NotResident, "not-resident"),
        (Self::AtLimit, "at-limit"),
    ];
}

/// Numbers of backends excluded by each filter, in the order of [`FilterVerdict::FILTERS`].
#[derive(Debug, Clone, Copy, Default, Encode, Decode)]
pub(super) struct FilterCounts([u32; FilterVerdict::FILTERS.len()]);

impl FilterCounts {
    pub(super) fn add(&mut self, verdict: FilterVerdict) {
        self.add_many(verdict, 1);
    }

    pub(super) fn add_many(&mut self, verdict: FilterVerdict, backends: u32) {
        if let Some(count) = (verdict as usize).checked_sub(1) {
            self.0[count] += backends;
        }
    }

    pub(super) fn count(&self, verdict: FilterVerdict) -> u32 {
        (verdict as usize)
            .checked_sub(1)
            .map_or(0, |count| self.0[count])
    }

    /// Returns the numbers in the order of [`FilterVerdict::FILTERS`].
    pub(super) fn counts(&self) -> &[u32] {
        &self.0
    }
}

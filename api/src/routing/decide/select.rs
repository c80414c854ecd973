//! Determines the labels that a request's backend must have: those in the settings of its model,
//! and those in its `x-quorate-select` header if the config allows it.

use http::{HeaderMap, HeaderName};
use state::Backend;

use crate::routing::RoutingRequest;

/// Header with the labels that the backend must have, as comma-separated `key=value` pairs.
pub const SELECT: HeaderName = HeaderName::from_static("x-quorate-select");

/// Maximum number of labels in the headers of a request.
const LABELS_MAX: usize = 16;

/// Error for an `x-quorate-select` header that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("x-quorate-select: expected at most {LABELS_MAX} key=value pairs, separated by commas")]
pub struct SelectRejection;

/// Settings that determine which labels backends must have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SelectSettings {
    /// Whether requests may require labels through the header [`SELECT`].
    pub allow: bool,
    /// Required labels by model. The first entry that names the model or `"*"` applies.
    pub models: Vec<(String, Labels)>,
}

/// Labels as pairs of a key and the value that it must have.
pub type Labels = Vec<(String, String)>;

/// Labels that the backend of one request must have.
#[derive(Debug, Clone, Copy)]
pub(super) struct WantedLabels<'a> {
    of_model: &'a [(String, String)],
    of_request: &'a [(String, String)],
}

impl WantedLabels<'_> {
    pub(in crate::routing) fn is_any(&self) -> bool {
        self.of_model.is_empty() && self.of_request.is_empty()
    }

    pub(in crate::routing) fn has(&self, backend: &Backend) -> bool {
        let labels = &backend.spec.labels;
        let has = |key: &str, value: &str| labels.get(key).is_some_and(|it| it == value);
        let mut wanted = self.of_model.iter().chain(self.of_request);
        wanted.all(|(key, value)| has(key, value))
    }
}

impl SelectSettings {
    /// Returns the labels that the backend of the request `ask` must have.
    pub(super) fn wanted<'a>(&'a self, ask: &RoutingRequest<'a>) -> WantedLabels<'a> {
        let mut models = self.models.iter();
        let of_model = models.find(|(name, _)| name == ask.model || name == "*");
        WantedLabels {
            of_model: of_model.map_or(&[], |(_, labels)| labels),
            of_request: ask.labels,
        }
    }

    /// Parses the labels in `headers`; returns none if requests may not require labels.
    pub(in crate::routing) fn asked(&self, headers: &HeaderMap) -> Result<Labels, SelectRejection> {
        let mut labels = Labels::new();
        if !self.allow {
            return Ok(labels);
        }
        for field in headers.get_all(SELECT) {
            let text = field.to_str().map_err(|_| SelectRejection)?;
            for pair in text.split(',') {
                let (key, value) = pair.split_once('=').ok_or(SelectRejection)?;
                let (key, value) = (key.trim(), value.trim());
                if key.is_empty() || labels.len() == LABELS_MAX {
                    return Err(SelectRejection);
                }
                labels.push((key.to_owned(), value.to_owned()));
            }
        }
        Ok(labels)
    }
}

//! Labels that a request's backend must have: of its model's settings, and of its
//! `x-quorate-select` header where the config lets requests say.

use http::{HeaderMap, HeaderName};
use state::Backend;

use super::Router;

/// Labels the backend must have, `key=value` each, separated by commas.
pub const SELECT: HeaderName = HeaderName::from_static("x-quorate-select");

/// Most labels one request may ask for.
const LABELS_MAX: usize = 16;

/// A request asks for labels in a form that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("x-quorate-select is no list of at most {LABELS_MAX} key=value, separated by commas")]
pub struct SelectRejection;

/// Which labels backends must have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SelectSettings {
    /// Whether requests may ask for labels themselves.
    pub allow: bool,
    /// Labels by model; the first entry that names a model, or `"*"`, counts.
    pub models: Vec<(String, Labels)>,
}

/// Labels, each with the value it must have.
pub type Labels = Vec<(String, String)>;

/// What one request wants.
#[derive(Debug, Default)]
pub(super) struct WantedLabels<'a> {
    of_model: &'a [(String, String)],
    of_request: Vec<(&'a str, &'a str)>,
}

impl WantedLabels<'_> {
    pub(super) fn is_any(&self) -> bool {
        self.of_model.is_empty() && self.of_request.is_empty()
    }

    pub(super) fn has(&self, backend: &Backend) -> bool {
        let labels = &backend.spec.labels;
        let has = |key: &str, value: &str| labels.get(key).is_some_and(|it| it == value);
        self.of_model.iter().all(|(key, value)| has(key, value))
            && self.of_request.iter().all(|(key, value)| has(key, value))
    }
}

impl Router {
    /// With these labels to keep to; without, any backend will do.
    #[must_use]
    pub fn selecting(mut self, select: SelectSettings) -> Self {
        self.select = select;
        self
    }

    /// Whether the labels that a request with these headers asks for can be read.
    ///
    /// # Errors
    /// [`SelectRejection`], where requests may ask at all.
    pub fn check_select(&self, headers: &HeaderMap) -> Result<(), SelectRejection> {
        self.asked_labels(headers).map(drop)
    }

    /// What a request for `model` with these headers wants. A header that cannot be read was
    /// refused before.
    pub(super) fn wanted<'a>(
        &'a self,
        model: &str,
        headers: Option<&'a HeaderMap>,
    ) -> WantedLabels<'a> {
        let mut models = self.select.models.iter();
        let of_model = models.find(|(name, _)| name == model || name == "*");
        let of_request = headers.map(|headers| self.asked_labels(headers));
        WantedLabels {
            of_model: of_model.map_or(&[], |(_, labels)| labels),
            of_request: of_request.and_then(Result::ok).unwrap_or_default(),
        }
    }

    fn asked_labels<'a>(
        &self,
        headers: &'a HeaderMap,
    ) -> Result<Vec<(&'a str, &'a str)>, SelectRejection> {
        if !self.select.allow {
            return Ok(Vec::new());
        }
        let mut labels = Vec::new();
        for field in headers.get_all(SELECT) {
            let text = field.to_str().map_err(|_| SelectRejection)?;
            for pair in text.split(',') {
                let (key, value) = pair.split_once('=').ok_or(SelectRejection)?;
                let (key, value) = (key.trim(), value.trim());
                if key.is_empty() || labels.len() == LABELS_MAX {
                    return Err(SelectRejection);
                }
                labels.push((key, value));
            }
        }
        Ok(labels)
    }
}

//! Statuses as label values. An engine may send any of 900 statuses. Only the meaningful ones get
//! their own value, which bounds the number of series.

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// Statuses with their own value, with 0 for none: those of the router, and known ones of engines
/// and their proxies.
const OWN: [u16; 24] = [
    0, 200, 201, 202, 204, 307, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 499, 500,
    501, 502, 503, 504, 529,
];

/// Status sent to a client, or the class of a rare one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StatusLabel(StatusName);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum StatusName {
    Own(u16),
    /// First digit of a status without its own value, if from 1 to 5; else 0.
    Class(u16),
}

impl From<u16> for StatusLabel {
    fn from(status: u16) -> Self {
        if OWN.contains(&status) {
            return Self(StatusName::Own(status));
        }
        let class = status / 100;
        Self(StatusName::Class(if (1..=5).contains(&class) {
            class
        } else {
            0
        }))
    }
}

impl EncodeLabelValue for StatusLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        match self.0 {
            StatusName::Own(status) => status.encode(encoder),
            StatusName::Class(0) => "other".encode(encoder),
            StatusName::Class(class) => format!("{class}xx").encode(encoder),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use prometheus_client::encoding::EncodeLabelSet;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::family::Family;
    use prometheus_client::registry::Registry;

    use super::*;

    #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Labels {
        code: StatusLabel,
    }

    #[test]
    fn status_labels_are_bounded() {
        let requests = Family::<Labels, Counter>::default();
        let mut registry = Registry::default();
        registry.register("requests", "Requests", requests.clone());
        for status in 0..=u16::MAX {
            let code = StatusLabel::from(status);
            requests.get_or_create(&Labels { code }).inc();
        }
        let mut page = String::new();
        encode(&mut page, &registry).unwrap();
        let series: HashSet<_> = page.lines().filter(|it| !it.starts_with('#')).collect();
        assert_eq!(series.len(), OWN.len() + 6, "{page}");
        for line in ["200\"} 1", "4xx\"} 88", "5xx\"} 94"] {
            assert!(page.contains(&format!("_total{{code=\"{line}\n")), "{page}");
        }
        assert!(page.contains("_total{code=\"other\"} 65035\n"), "{page}");
    }
}

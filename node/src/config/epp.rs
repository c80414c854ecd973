//! `[epp]`: how this replica talks to gateways that ask it for endpoints.

use api::proxy::picker::{BodyMode, PickerSettings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// `[epp]`.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EppConfig {
    /// Most endpoints that a gateway is told for one request, the best first: it may go to the next
    /// where it cannot reach the one before.
    #[schemars(range(min = 1, max = 16))]
    #[default(PickerSettings::default().endpoints_max)]
    pub endpoints: usize,
    /// How gateways send the bodies of requests that do not tell it: `full-duplex-streamed`,
    /// `streamed` or `buffered`.
    pub request_bodies: BodyModeName,
    /// The same of answers.
    pub answer_bodies: BodyModeName,
    /// Header, and key of metadata, with the endpoints that a request is to go to.
    #[default(PickerSettings::default().destination.to_string())]
    pub destination: String,
    /// Namespace of the metadata about endpoints.
    #[default(PickerSettings::default().namespace)]
    pub namespace: String,
    /// Key in `namespace` by which a gateway tells which endpoint has answered.
    #[default(PickerSettings::default().served)]
    pub served: String,
    /// Namespace of the metadata that restricts the choice.
    #[default(PickerSettings::default().subset_namespace)]
    pub subset_namespace: String,
    /// Key in `subset_namespace` with the endpoints that may be chosen.
    #[default(PickerSettings::default().subset)]
    pub subset: String,
}

/// How a gateway sends bodies, by the names of Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BodyModeName {
    /// In pieces, for which others come back whenever they do.
    #[default]
    FullDuplexStreamed,
    /// In pieces, each of which is answered.
    Streamed,
    /// Whole.
    Buffered,
}

impl BodyModeName {
    /// The mode as the picker has it.
    pub(super) fn mode(self) -> BodyMode {
        match self {
            Self::FullDuplexStreamed => BodyMode::Duplex,
            Self::Streamed => BodyMode::Streamed,
            Self::Buffered => BodyMode::Buffered,
        }
    }
}

//! `[picker]`: how this replica talks to gateways that ask it for endpoints.

use api::proxy::picker::{BodyMode, PickerSettings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Keys of `[picker]`: how many endpoints a gateway gets, how it sends bodies, and the names of its
/// metadata.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PickerConfig {
    /// Maximum number of endpoints returned to a gateway for one request, best first: if it cannot
    /// reach one, it may use the next.
    #[schemars(range(min = 1, max = 16))]
    #[default(PickerSettings::default().endpoints_max)]
    pub endpoints: usize,
    /// How gateways send request bodies if they do not say: `full-duplex-streamed`, `streamed` or
    /// `buffered`.
    pub request_bodies: BodyModeName,
    /// How gateways send response bodies if they do not say.
    pub answer_bodies: BodyModeName,
    /// Header, and metadata key, that names the endpoints for a request.
    #[default(PickerSettings::default().destination.to_string())]
    pub destination: String,
    /// Namespace of the metadata about endpoints.
    #[default(PickerSettings::default().namespace)]
    pub namespace: String,
    /// Key in `namespace` in which a gateway reports the endpoint that answered.
    #[default(PickerSettings::default().served)]
    pub served: String,
    /// Namespace of the metadata that restricts the choice.
    #[default(PickerSettings::default().subset_namespace)]
    pub subset_namespace: String,
    /// Key in `subset_namespace` with the endpoints that may be chosen.
    #[default(PickerSettings::default().subset)]
    pub subset: String,
}

/// How a gateway sends bodies, named as in Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BodyModeName {
    /// In pieces; replies may come at any time, and in other pieces.
    #[default]
    FullDuplexStreamed,
    /// In pieces, each of which is answered.
    Streamed,
    /// In one message.
    Buffered,
}

impl BodyModeName {
    /// Returns the picker's value for this mode.
    pub(super) fn mode(self) -> BodyMode {
        match self {
            Self::FullDuplexStreamed => BodyMode::Duplex,
            Self::Streamed => BodyMode::Streamed,
            Self::Buffered => BodyMode::Buffered,
        }
    }
}

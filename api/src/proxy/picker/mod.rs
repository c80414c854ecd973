//! The endpoint picker, which a gateway asks before it sends a request to an engine, by Envoy's
//! external processing and the endpoint picker protocol of the Gateway API Inference Extension.
//!
//! It is the second interface of the data plane. The same code receives, parses, admits, routes,
//! dispatches and accounts for a request. Here the request arrives in messages of a gRPC stream,
//! and the gateway sends it to the engine and forwards the response (ADR 0039). Connections,
//! retries and CORS remain the gateway's task.
//!
//! | module | what |
//! | --- | --- |
//! | `server` | connections, and how they are drained |
//! | `service` | the gRPC services: external processing and health |
//! | `frames` | gRPC's framing of messages, and bounds for incomplete ones |
//! | `wire` | protobuf: fields of messages, read in place and written at once |
//! | `stream` | one stream: from a request's head to the end of its response |
//! | `opening` | the beginning of a stream: the request's head and body |
//! | `accounting` | accounting of a request while its stream is open |
//! | `stream_meter` | counts the open streams |
//! | `gateway_message` | one message from a gateway |
//! | `inbound` | messages from a gateway: their order, and the body of a request |
//! | `heads` | heads of requests and responses in messages, and mutations of them |
//! | `offer` | the endpoints for a request in order, and what is sent there |
//! | `outbound` | messages to a gateway |
//! | `answers` | the picker's side of a stream: messages to a gateway, then the end |
//! | `answered` | the head of a response, who made it, and what that means for the attempt |
//! | `own_reply` | responses that the gateway made itself |
//! | `relayed_answer` | an engine's response as it is relayed |
//! | `metadata` | what gateways and pickers exchange in addition to headers |

mod accounting;
mod answered;
mod answers;
mod frames;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod gateway_message;
mod gateway_reply;
mod heads;
mod inbound;
mod metadata;
mod metrics;
mod offer;
mod opening;
mod outbound;
mod own_reply;
mod relayed_answer;
mod server;
mod service;
mod stream;
mod stream_meter;
mod upload_shape;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use tokio_util::task::TaskTracker;

pub use answers::PickerAnswers;
pub use metrics::{PickedOutcome, PickerMetrics, ServedBy};
pub use server::{PickerServer, PickerTls};
pub use wire::PickerMessage;

use super::Proxy;
use crate::base::log_rate_limit::AddressLogLimit;

/// Generated messages, client and server of Envoy's external processing.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod ext_proc {
    include!("../../../proto/ext_proc.rs");
}

/// Header and metadata key with the endpoints for a request. These names are those of the protocol.
pub const DESTINATION: HeaderName = HeaderName::from_static("x-gateway-destination-endpoint");
/// Namespace of the metadata with endpoints.
const NAMESPACE: &str = "envoy.lb";
/// Metadata key in [`NAMESPACE`] with the endpoint that responded.
const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Namespace of the metadata that restricts the choice.
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// Metadata key in [`SUBSET_NAMESPACE`] with the endpoints that the picker may choose.
const SUBSET: &str = "x-gateway-destination-endpoint-subset";

/// Attribute with the reason for a response: whether it is the engine's, or why the gateway made it.
const DETAILS: &str = "response.code_details";

/// Keys of `[picker]`: how this replica answers gateways that ask it for endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PickerSettings {
    /// Maximum number of endpoints returned to a gateway for one request, best first: if it cannot
    /// reach one, it may use the next.
    #[serde(rename = "endpoints")]
    #[schemars(range(min = 1, max = 16))]
    #[default(2)]
    pub endpoints_max: u32,
    /// How gateways send bodies if they do not say: `full-duplex-streamed`, `streamed` or
    /// `buffered`. `streamed` also says that gateways let the picker override the mode (Envoy's
    /// `allow_mode_override`); without it, bodies in mode `STREAMED` that wait for the reply to
    /// their head are refused.
    pub bodies: BodyMode,
}

impl PickerSettings {
    /// Whether gateways that stream requests let the picker ask for a whole body.
    fn allows_overrides(&self) -> bool {
        self.bodies == BodyMode::Streamed
    }
}

/// Modes in which a gateway sends bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyModes {
    /// Mode of request bodies.
    pub requests: BodyMode,
    /// Mode of response bodies.
    pub answers: BodyMode,
}

/// Mode in which a gateway sends one body, named as in Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BodyMode {
    /// The body comes in pieces. Those that the picker sends back may differ in size and time.
    #[default]
    #[serde(rename = "full-duplex-streamed")]
    Duplex,
    /// The body comes in pieces after the reply to the head. Each piece gets its own reply.
    Streamed,
    /// The body comes in pieces that do not wait for the reply to the head. Each gets its own
    /// reply.
    #[serde(skip)]
    StreamedEarly,
    /// The body comes as a whole after the reply to the head.
    Buffered,
}

/// Minimum interval between warnings about one gateway's connections.
const MISMATCH_PERIOD: Duration = Duration::from_secs(60);

/// State that all streams of a picker share.
pub struct Picker {
    proxy: Arc<Proxy>,
    settings: PickerSettings,
    metrics: PickerMetrics,
    /// Limiter of warnings about gateways whose connections do not fit this listener.
    mismatches: AddressLogLimit,
    /// Tasks of the streams, one per stream.
    tasks: TaskTracker,
}

impl Picker {
    /// Creates a picker on top of the data plane `proxy`.
    #[must_use]
    pub fn new(proxy: Arc<Proxy>, settings: PickerSettings, metrics: PickerMetrics) -> Self {
        Self {
            proxy,
            settings,
            metrics,
            mismatches: AddressLogLimit::new(MISMATCH_PERIOD),
            tasks: TaskTracker::new(),
        }
    }
}

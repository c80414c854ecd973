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
//! | `frames` | bounds for incomplete messages |
//! | `stream` | one stream: from a request's head to the end of its response |
//! | `inbound` | messages from a gateway: their order, and the body of a request |
//! | `heads` | heads of requests and responses in messages, and mutations of them |
//! | `offer` | the endpoints for a request in order, and what is sent there |
//! | `outbound` | messages to a gateway |
//! | `answers` | the picker's side of a stream: messages to a gateway, then the end |
//! | `relayed_answer` | an engine's response as it is relayed |
//! | `metadata` | what gateways and pickers exchange in addition to headers |

mod answers;
mod frames;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod heads;
mod inbound;
mod metadata;
mod metrics;
mod offer;
mod outbound;
mod relayed_answer;
mod server;
mod service;
mod stream;

use std::sync::Arc;

use http::HeaderName;
use tokio_util::task::TaskTracker;

pub use answers::PickerAnswers;
pub use metrics::{PickedOutcome, PickerMetrics, ServedBy};
pub use server::{PickerServer, PickerTls};

use super::Proxy;

/// Generated messages, client and server of Envoy's external processing.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod ext_proc {
    include!("../../../proto/ext_proc.rs");
}

/// Protocol settings between an endpoint picker and its gateways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PickerSettings {
    /// Maximum number of endpoints that a gateway receives for one request, the best first.
    pub endpoints_max: usize,
    /// Header and metadata key with the endpoints for a request.
    pub destination: HeaderName,
    /// Namespace of the metadata with endpoints.
    pub namespace: String,
    /// Metadata key in `namespace` with the endpoint that responded.
    pub served: String,
    /// Namespace of the metadata that restricts the choice.
    pub subset_namespace: String,
    /// Metadata key in `subset_namespace` with the endpoints that the picker may choose.
    pub subset: String,
    /// Body modes of a gateway that does not announce them.
    pub untold_bodies: BodyModes,
}

/// Modes in which a gateway sends bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyModes {
    /// Mode of request bodies.
    pub requests: BodyMode,
    /// Mode of response bodies.
    pub answers: BodyMode,
}

/// Mode in which a gateway sends one body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyMode {
    /// The body comes in pieces. Those that the picker sends back may differ in size and time.
    Duplex,
    /// The body comes in pieces after the reply to the head. Each piece gets its own reply.
    Streamed,
    /// The body comes in pieces that do not wait for the reply to the head. Each gets its own
    /// reply.
    StreamedEarly,
    /// The body comes as a whole after the reply to the head.
    Buffered,
}

impl Default for PickerSettings {
    fn default() -> Self {
        Self {
            endpoints_max: 2,
            destination: HeaderName::from_static("x-gateway-destination-endpoint"),
            namespace: "envoy.lb".to_owned(),
            served: "x-gateway-destination-endpoint-served".to_owned(),
            subset_namespace: "envoy.lb.subset_hint".to_owned(),
            subset: "x-gateway-destination-endpoint-subset".to_owned(),
            untold_bodies: BodyModes {
                requests: BodyMode::Duplex,
                answers: BodyMode::Duplex,
            },
        }
    }
}

/// State that all streams of a picker share.
pub struct Picker {
    proxy: Arc<Proxy>,
    settings: PickerSettings,
    metrics: PickerMetrics,
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
            tasks: TaskTracker::new(),
        }
    }
}

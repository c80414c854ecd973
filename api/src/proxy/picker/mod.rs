//! The endpoint picker: what a gateway asks before it sends a request to an engine, by Envoy's external
//! processing and the endpoint picker protocol of the Gateway API Inference Extension.
//!
//! It is the second face of the data plane. A request is taken in, understood, admitted, decided
//! about, dispatched and accounted for by the same code; here it comes in messages of a gRPC stream,
//! and the gateway sends it to the engine and hands over the answer as it comes (ADR 0098). What a
//! gateway does itself is left to it: connections, retries, CORS.
//!
//! | module | what |
//! | --- | --- |
//! | `server` | connections, and how they are drained |
//! | `service` | the gRPC services: external processing, health |
//! | `frames` | messages that are not whole yet, and what they hold |
//! | `stream` | one stream: from a request's head to the end of its answer |
//! | `inbound` | messages of a gateway: the order in which they may come, the body of a request |
//! | `heads` | heads of requests and answers in messages, and what is changed of them |
//! | `offer` | the endpoints that a request may go to, in order, and what goes there |
//! | `outbound` | messages to a gateway |
//! | `answers` | how a stream is heard: messages to a gateway, then its end |
//! | `passing` | an engine's answer on its way through |
//! | `metadata` | what gateways and pickers tell each other beside headers |

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
mod passing;
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

/// The protocol's messages, with client and server.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod ext_proc {
    include!("../../../proto/ext_proc.rs");
}

/// How an endpoint picker and its gateways talk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PickerSettings {
    /// Most endpoints that a gateway is told for one request, the best first.
    pub endpoints_max: usize,
    /// Header, and metadata key, that names the endpoints for a request.
    pub destination: HeaderName,
    /// Namespace of the metadata about endpoints.
    pub namespace: String,
    /// Key in that namespace by which a gateway tells which endpoint has answered.
    pub served: String,
    /// Namespace of the metadata that restricts the choice.
    pub subset_namespace: String,
    /// Key in that namespace with the endpoints that may be chosen.
    pub subset: String,
    /// How a gateway sends bodies that does not tell it.
    pub untold_bodies: BodyModes,
}

/// How a gateway sends bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyModes {
    /// Of requests.
    pub requests: BodyMode,
    /// Of answers.
    pub answers: BodyMode,
}

/// How a gateway sends one body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyMode {
    /// In pieces; those that come back are others, whenever they come.
    Duplex,
    /// In pieces; each is answered by itself, after the head.
    Streamed,
    /// In pieces that do not wait for the head's answer; each is answered by itself.
    StreamedEarly,
    /// Whole, after the head is answered.
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

/// What all streams of a picker share.
pub struct Picker {
    proxy: Arc<Proxy>,
    settings: PickerSettings,
    metrics: PickerMetrics,
    /// One task per stream.
    tasks: TaskTracker,
}

impl Picker {
    /// A picker that does what `proxy` does.
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

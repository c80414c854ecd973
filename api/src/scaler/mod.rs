//! KEDA's external scaler: how many engines each model needs, over gRPC
//! (`externalscaler.ExternalScaler`).
//!
//! The metadata of a trigger names the `model`. Every replica answers with the same number, which
//! `state/src/capacity/` computes, so KEDA may ask any of them. A replica that has not caught up
//! with its cluster does not answer, because it would know of no demand and let KEDA remove engines;
//! neither does any for a model of which it has never heard.
//!
//! | module | what |
//! | --- | --- |
//! | `server` | connections, their TLS and bounds |
//! | `service` | the calls |

mod server;
mod service;

use std::sync::Arc;

use state::StateView;

pub use server::{ScalerTls, serve};

use crate::admission::Admission;

/// Generated messages, client and server of KEDA's external scaler.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod externalscaler {
    include!("../../proto/externalscaler.rs");
}

/// Key of a trigger's metadata with the name of the model.
pub const MODEL_KEY: &str = "model";
/// Name of the metric that the scaler offers.
pub const WANTED_METRIC: &str = "quorate-wanted-backends";

/// What the scaler answers from.
#[derive(Clone)]
pub struct Scaler {
    /// The published part of the state.
    pub view: Arc<StateView>,
    /// Knows the models of the config.
    pub admission: Arc<Admission>,
    /// Whether this replica has caught up with its cluster.
    pub has_caught_up: Arc<dyn Fn() -> bool + Send + Sync>,
}

//! gRPC services of a picker: external processing and health checks.
//!
//! Every ready replica reports that it is serving, whether it leads or not. All of them pick, with
//! or without a quorum.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::{self, Stream};
use http::HeaderValue;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health as HealthService;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::ext_proc::ProcessingRequest;
use super::ext_proc::external_processor_server::ExternalProcessor;
use super::inbound::GatewayMessages;
use super::outbound::PickerMessages;
use super::stream::PickerStream;
use super::stream_meter::StreamMeter;
use super::{Picker, PickerAnswers};

/// Maximum number of messages in a stream that wait for the gateway.
const WAITING_MAX: usize = 4;
/// Polling interval for changes of health.
const WATCH_EVERY: Duration = Duration::from_millis(500);

/// Services whose health is this replica's readiness: the whole server (an empty name), a name for
/// readiness probes of Kubernetes, and external processing.
const READINESS: [&str; 3] = [
    "",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
];
const LIVENESS: &str = "liveness";

/// The gRPC services on one connection of a gateway.
#[derive(Clone)]
pub(super) struct PickerService {
    pub(super) picker: Arc<Picker>,
    /// Address of the gateway.
    pub(super) peer: HeaderValue,
    /// Cancelled when this replica stops. This ends all health watches.
    pub(super) drain: CancellationToken,
}

impl Picker {
    /// Serves a stream of the gateway at `peer` in its own task and returns the other side of the
    /// stream. Dropping that side means that the gateway has left.
    ///
    /// # Errors
    /// Returns `RESOURCE_EXHAUSTED` if the maximum number of streams is open.
    pub fn follow(
        self: &Arc<Self>,
        messages: impl Stream<Item = Result<ProcessingRequest, Status>> + Send + 'static,
        peer: HeaderValue,
    ) -> Result<PickerAnswers, Status> {
        let meter = StreamMeter::open(self)?;
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        let (end, ended) = oneshot::channel();
        let stream = PickerStream {
            picker: Arc::clone(self),
            inbound: GatewayMessages::new(messages.boxed()),
            out: PickerMessages {
                sender,
                untaken: self.proxy.settings.timeouts.untaken,
            },
            peer,
            answers: self.settings.bodies,
        };
        self.tasks.spawn(async move {
            let how = stream.run(meter).await;
            // A gateway that has left needs no end.
            let _: Result<(), _> = end.send(how);
        });
        Ok(PickerAnswers::new(receiver, ended))
    }

    /// Returns the health of the service; `None` if its name is unknown.
    fn health(&self, service: &str) -> Option<ServingStatus> {
        if service == LIVENESS {
            return Some(ServingStatus::Serving);
        }
        READINESS
            .contains(&service)
            .then(|| match self.proxy.readiness_gate.is_fit() {
                true => ServingStatus::Serving,
                false => ServingStatus::NotServing,
            })
    }
}

#[tonic::async_trait]
impl ExternalProcessor for PickerService {
    type ProcessStream = PickerAnswers;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let messages = request.into_inner();
        let answers = self.picker.follow(messages, self.peer.clone())?;
        Ok(Response::new(answers.begun().await?))
    }
}

fn said(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}

#[tonic::async_trait]
impl HealthService for PickerService {
    type WatchStream =
        Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send + 'static>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        let status = self.picker.health(&service);
        let status = status.ok_or_else(|| Status::not_found("unknown service"))?;
        Ok(Response::new(said(status)))
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let service = request.into_inner().service;
        let (picker, drain) = (Arc::clone(&self.picker), self.drain.clone());
        let changes = stream::unfold(None, move |last| {
            let (picker, drain, service) = (Arc::clone(&picker), drain.clone(), service.clone());
            async move {
                loop {
                    let is_last = drain.is_cancelled();
                    let now = picker.health(&service);
                    let now = now.unwrap_or(ServingStatus::ServiceUnknown);
                    if last != Some(now) {
                        return Some((Ok(said(now)), Some(now)));
                    }
                    if is_last {
                        return None;
                    }
                    tokio::select! {
                        biased;
                        () = drain.cancelled() => {}
                        () = sleep(WATCH_EVERY) => {}
                    }
                }
            }
        });
        Ok(Response::new(changes.boxed()))
    }
}

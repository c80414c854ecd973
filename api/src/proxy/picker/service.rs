//! The gRPC services of a picker: external processing, and health checks.
//!
//! Every replica that is ready says that it is serving, whichever leads: all of them pick, with a quorum
//! or without.

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
use super::stream::{PickerStream, StreamMeter};
use super::{Picker, PickerAnswers};

/// Most messages of a stream that wait for its gateway.
const WAITING_MAX: usize = 4;
/// How often a change of health is looked for.
const WATCH_EVERY: Duration = Duration::from_millis(500);

/// Names that gateways ask about: all of it, and what a probe of Kubernetes is for.
const READINESS: [&str; 3] = [
    "",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
];
const LIVENESS: &str = "liveness";

/// The services on one connection.
#[derive(Clone)]
pub(super) struct PickerService {
    pub(super) picker: Arc<Picker>,
    /// The gateway's address.
    pub(super) peer: HeaderValue,
    /// Cancelled when this replica stops: then nobody watches its health any longer.
    pub(super) drain: CancellationToken,
}

impl Picker {
    /// Follows a stream of the gateway at `peer` in a task of its own. What it answers is the stream's
    /// other side; whoever drops that has left.
    ///
    /// # Errors
    /// If as many streams are open as there may be.
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
        };
        self.tasks.spawn(async move {
            let how = stream.run(meter).await;
            // Whoever has left need not know.
            let _: Result<(), _> = end.send(how);
        });
        Ok(PickerAnswers::new(receiver, ended))
    }

    /// How the service of this name is; `None`: there is none.
    fn health(&self, service: &str) -> Option<ServingStatus> {
        if service == LIVENESS {
            return Some(ServingStatus::Serving);
        }
        READINESS
            .contains(&service)
            .then(|| match self.proxy.startup.is_fit() {
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
        Ok(Response::new(answers))
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

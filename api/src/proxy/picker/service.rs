//! gRPC services of a picker: external processing and health checks.
//!
//! Every ready replica reports that it is serving, whether it leads or not. All of them pick, with
//! or without a quorum.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, Stream};
use futures_util::{FutureExt as _, StreamExt as _};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response as HttpResponse};
use hyper::body::Incoming;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::body::Body as GrpcBody;
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health as HealthService, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tower::Service as _;

use super::ext_proc::external_processor_server::SERVICE_NAME;
use super::frames::{GatewayFrames, PickerFrames};
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
const READINESS: [&str; 3] = ["", "readiness", SERVICE_NAME];
const LIVENESS: &str = "liveness";
/// Path of external processing.
const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
/// Maximum length of a health request, in bytes: it contains a service name.
const HEALTH_BYTES_MAX: usize = 4096;

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
    /// stream. Dropping that side means that the gateway has left. `messages` are encoded
    /// `ProcessingRequest`s.
    ///
    /// # Errors
    /// Returns `RESOURCE_EXHAUSTED` if the maximum number of streams is open.
    pub fn follow(
        self: &Arc<Self>,
        messages: impl Stream<Item = Result<Bytes, Status>> + Send + 'static,
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
        // Kilobytes, which a task would move several times.
        let stream = Box::pin(stream.run(meter));
        self.tasks.spawn(async move {
            let how = stream.await;
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

/// Response to a call. Errors are statuses in it.
type Served = Result<HttpResponse<GrpcBody>, Infallible>;

impl PickerService {
    /// Serves a call of external processing.
    fn process(&self, messages: Incoming) -> BoxFuture<'static, Served> {
        let messages = GatewayFrames::of(messages, &self.picker);
        let answers = self.picker.follow(messages, self.peer.clone());
        async move {
            let begun = match answers {
                Ok(answers) => answers.begun().await,
                Err(refused) => Err(refused),
            };
            Ok(begun.map_or_else(Status::into_http, |answers| {
                let mut response = HttpResponse::new(GrpcBody::new(PickerFrames::of(answers)));
                let headers = response.headers_mut();
                headers.insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
                response
            }))
        }
        .boxed()
    }
}

impl hyper::service::Service<http::Request<Incoming>> for PickerService {
    type Response = HttpResponse<GrpcBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Served>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        if request.uri().path() == PROCESS {
            return self.process(request.into_body());
        }
        // It knows its own methods, and rejects any other.
        let health = HealthServer::new(self.clone());
        let mut health = health.max_decoding_message_size(HEALTH_BYTES_MAX);
        health.call(request)
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

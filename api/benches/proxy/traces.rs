//! A span collector that discards its input, and the export to it, on their own threads: only the
//! work of a request's thread counts.

use std::future::pending;

use api::traces::{SpanExport, Tracer, TracingMetrics, TracingSettings};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use state::ids::ReplicaId;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::{listen, on_thread};

/// Behaviour of the collector.
#[derive(Clone, Copy)]
pub(super) enum CollectorKind {
    /// Accepts spans.
    Answers,
    /// Accepts connections and never responds.
    IsStuck,
    /// Does not listen.
    IsGone,
}

struct Collector;

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        _: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Creates a tracer that samples `sample_ppm` of a million requests and exports to a collector of
/// this kind.
pub(super) fn spawn_collector(sample_ppm: u32, kind: CollectorKind) -> Tracer {
    let (address, _) = on_thread(move |tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        match kind {
            CollectorKind::Answers => {}
            CollectorKind::IsStuck => {
                // The kernel accepts the connections.
                pending::<()>().await;
            }
            CollectorKind::IsGone => return drop(listener),
        }
        tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Collector))
            .serve_with_incoming(TcpListenerStream::new(listener))
            .await
            .expect("it serves");
    });
    let (tracer, _) = on_thread(move |tell| async move {
        let settings = TracingSettings {
            endpoint: format!("http://{address}"),
            sample_ppm,
            replica: ReplicaId(1),
            cluster: "bench".to_owned(),
        };
        let metrics = TracingMetrics::default();
        let (tracer, export) = SpanExport::new(&settings, metrics).expect("it is a URL");
        tell.send(tracer).expect("main waits for it");
        export.run(CancellationToken::new()).await;
        pending::<()>().await;
    });
    tracer
}

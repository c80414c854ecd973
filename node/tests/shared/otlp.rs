//! A collector of spans: a real tonic server with the official protos, with or without TLS.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

/// A collector with the received spans.
#[derive(Clone, Default)]
pub(crate) struct Collector(Arc<Mutex<Vec<ToldSpan>>>);

/// A span, and the replica that sent it.
#[derive(Clone, Debug)]
pub(crate) struct ToldSpan {
    pub(crate) replica: String,
    pub(crate) span: Span,
}

impl ToldSpan {
    /// Returns the value of an attribute, or an empty text.
    pub(crate) fn attribute(&self, key: &str) -> String {
        value(&self.span.attributes, key)
    }
}

fn value(attributes: &[KeyValue], key: &str) -> String {
    let found = attributes.iter().find(|it| it.key == key);
    let found = found.and_then(|it| it.value.as_ref()?.value.as_ref());
    match found {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(other) => format!("{other:?}"),
        None => String::new(),
    }
}

/// Formats an id as in a `traceparent` header: in lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_replica in request.into_inner().resource_spans {
            let resource = of_replica.resource.unwrap_or_default();
            let replica = value(&resource.attributes, "service.instance.id");
            let spans = of_replica.scope_spans.into_iter().flat_map(|it| it.spans);
            let told = spans.map(|span| ToldSpan {
                replica: replica.clone(),
                span,
            });
            self.0.lock().unwrap().extend(told);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Serves on loopback, with TLS if a certificate is given. Returns the address.
    pub(crate) async fn serve(&self, identity: Option<Identity>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = Server::builder();
        if let Some(identity) = identity {
            let tls = ServerTlsConfig::new().identity(identity);
            server = server.tls_config(tls).unwrap();
        }
        let serving = server
            .add_service(TraceServiceServer::new(self.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(serving);
        address
    }

    /// Returns the received spans of a trace, in order of their start.
    pub(crate) fn spans(&self, trace: &str) -> Vec<ToldSpan> {
        let told = self.0.lock().unwrap();
        let is_part = |it: &&ToldSpan| hex(&it.span.trace_id) == trace;
        let mut spans: Vec<_> = told.iter().filter(is_part).cloned().collect();
        spans.sort_by_key(|it| it.span.start_time_unix_nano);
        spans
    }
}

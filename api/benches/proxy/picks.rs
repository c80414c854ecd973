//! Picks for a gateway: each is a stream of external processing, from a request's headers to those
//! of its response, over one plaintext connection. Measures the picker's thread, not the gateway.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::external_processor_client::ExternalProcessorClient;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{
    HeaderMap, HeaderValue, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use bytes::Bytes;
use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::fleet::{Fleet, spawn_picker};
use crate::{CASE_TIME, MeasuredThread, WARM_UP, bodies, cpu_ns};

/// Number of concurrent streams.
const STREAMS: usize = 16;
/// Size of one piece of a body, in bytes, as in Envoy.
const PIECE_BYTES: usize = 62 * 1024;

/// Prints the cost of a pick, by number of engines and request length.
pub(super) fn compare() {
    println!("\npicks for a gateway, {STREAMS} streams at a time");
    for engines in [8_u16, 64, 512] {
        let addresses: Vec<_> = (0..engines).map(address).collect();
        let fleet = Fleet::of(&addresses);
        let picker = spawn_picker(&fleet);
        for kilobytes in [1, 32, 400] {
            let bodies = Arc::new(bodies(kilobytes * 1024));
            let (us, rate) = measure(&picker, &bodies);
            let case = format!("{engines} engines, {kilobytes} KB");
            println!("{case:<34}{us:>8.1}{rate:>36.0}");
        }
    }
}

/// Returns an engine address without a listener: a picker only returns it.
fn address(number: u16) -> SocketAddr {
    let [high, low] = number.to_be_bytes();
    SocketAddr::from(([10, 0, high, low], 8000))
}

/// Returns the picker's CPU time per pick in us, and picks per second.
fn measure(picker: &MeasuredThread, bodies: &Arc<Vec<Bytes>>) -> (f64, f64) {
    pick(picker.address, bodies, WARM_UP);
    let (before, start) = (cpu_ns(&picker.task), Instant::now());
    let picks = pick(picker.address, bodies, CASE_TIME);
    let (cpu, time) = (cpu_ns(&picker.task) - before, start.elapsed());
    (
        cpu as f64 / 1e3 / picks as f64,
        picks as f64 / time.as_secs_f64(),
    )
}

/// Runs a gateway for `time`; returns the number of picks.
fn pick(at: SocketAddr, bodies: &Arc<Vec<Bytes>>, time: Duration) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime starts").block_on(async {
        let gateway = ExternalProcessorClient::connect(format!("http://{at}"));
        let gateway = gateway.await.expect("the picker listens");
        let (until, next) = (Instant::now() + time, AtomicUsize::new(0));
        let asking = (0..STREAMS).map(async |_| {
            while Instant::now() < until {
                let number = next.fetch_add(1, Relaxed);
                ask(gateway.clone(), &bodies[number % bodies.len()]).await;
            }
        });
        join_all(asking).await;
        next.into_inner()
    })
}

/// Sends one request, and the headers of a response without a body.
async fn ask(mut gateway: ExternalProcessorClient<Channel>, body: &Bytes) {
    let (say, said) = mpsc::channel(body.len().div_ceil(PIECE_BYTES) + 2);
    let tell = async |said| {
        let request = Some(said);
        let message = ProcessingRequest {
            request,
            ..ProcessingRequest::default()
        };
        say.send(message).await.expect("the picker reads on");
    };
    let length = body.len().to_string();
    let posts = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
        ("content-length", &length),
    ];
    tell(ProcessingMessage::RequestHeaders(head(&posts, false))).await;
    let mut left = body.clone();
    while !left.is_empty() {
        let piece = left.split_to(left.len().min(PIECE_BYTES));
        let end_of_stream = left.is_empty();
        tell(ProcessingMessage::RequestBody(HttpBody {
            body: piece,
            end_of_stream,
        }))
        .await;
    }
    let heard = gateway.process(ReceiverStream::new(said)).await;
    let mut heard = heard.expect("the picker answers").into_inner();
    while let Some(message) = heard.message().await.expect("it is picked") {
        if ends_request(&message) {
            let answered = [(":status", "200"), ("content-type", "application/json")];
            tell(ProcessingMessage::ResponseHeaders(head(&answered, true))).await;
        }
    }
}

fn head(fields: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let field = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    let headers = fields.iter().map(field).collect();
    HttpHeaders {
        headers: Some(HeaderMap { headers }),
        end_of_stream,
    }
}

/// Whether this message completes a request.
fn ends_request(message: &ProcessingResponse) -> bool {
    match &message.response {
        Some(Heard::RequestHeaders(_) | Heard::ResponseHeaders(_)) => false,
        Some(Heard::RequestBody(body)) => {
            let common = body.response.as_ref();
            let mutation = common.and_then(|it| it.body_mutation.as_ref()?.mutation.as_ref());
            matches!(mutation, Some(Mutation::StreamedResponse(piece)) if piece.end_of_stream)
        }
        other => panic!("a request was answered by {other:?}"),
    }
}

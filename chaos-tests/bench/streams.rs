//! Measures the memory of a picker that holds many open gateway streams: `cargo run --release -p
//! chaos-tests --bin streams`.
//!
//! Many streams over eight gateway connections ask one real replica for an endpoint, and none ends.
//! In some cases, each stream has its endpoint and waits for the engine's response. In others, it
//! waits for a place at an engine. The resident memory is measured before, with all streams open,
//! and after the gateway has left.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context as _, bail};
use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::external_processor_client::ExternalProcessorClient;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{
    HeaderMap, HeaderValue, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use bytes::Bytes;
use chaos_tests::gateway::{GatewayTls, picker_channel};
use chaos_tests::processes::figures::ProcessFigures;
use chaos_tests::processes::{ClusterOptions, ProcessCluster, until};
use chaos_tests::terminal;
use clap::Parser;
use comfy_table::{Table, presets};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// Number of gateway connections, over which the streams are spread.
const CONNECTIONS: usize = 8;
/// Size of one chunk of a request body, in bytes.
const PIECE_BYTES: usize = 62 * 1024;
/// Config that admits 16384 requests of one gateway over few connections.
macro_rules! limits {
    () => {
        "[limits]\nmax_connections = 64\nmax_requests = 16384\nmax_held_bodies = \"4 GiB\"\n"
    };
}

/// Config in which no stream waits for a place. With `FEW_PLACES`, nearly all streams wait.
const PLACES: &str = concat!("[admission]\nconcurrency = 65535\n", limits!());
const FEW_PLACES: &str = concat!(
    "[admission]\nconcurrency = 8\nmax_wait = \"40days\"\nmax_queue = 65535\ncodel_target = \"1day\"\n",
    limits!()
);

/// A case to measure: what the streams wait for, and the length of their requests.
#[derive(Debug, Clone, Copy)]
struct StreamCase {
    waits_for: &'static str,
    config: &'static str,
    /// Whether each stream gets an endpoint and waits for the engine's response. Otherwise nearly
    /// all wait for a place.
    are_told: bool,
    kilobytes: usize,
}

const CASES: [StreamCase; 4] = [
    case(true, 1),
    case(true, 32),
    case(false, 1),
    case(false, 32),
];

const fn case(are_told: bool, kilobytes: usize) -> StreamCase {
    StreamCase {
        waits_for: if are_told {
            "the engine's answer"
        } else {
            "a place at an engine"
        },
        config: if are_told { PLACES } else { FEW_PLACES },
        are_told,
        kilobytes,
    }
}

/// Measures the memory of a picker with many open streams.
#[derive(Debug, Clone, Parser)]
struct StreamsArgs {
    /// Number of streams open at once; at most 16384.
    #[arg(long, default_value_t = 10_000)]
    streams: usize,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args = StreamsArgs::parse();
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    let columns = [
        "each waits for",
        "request",
        "before",
        "open",
        "a stream",
        "after",
    ];
    table.set_header(columns);
    for case in &CASES {
        let what = format!("{} KB, waiting for {}", case.kilobytes, case.waits_for);
        table.add_row(measure(args.streams, case).await.context(what)?);
    }
    println!("{} streams\n{table}", args.streams);
    Ok(terminal::exit_code(true))
}

async fn measure(streams: usize, case: &StreamCase) -> anyhow::Result<[String; 6]> {
    let options = ClusterOptions {
        replicas: 1,
        engines: 1,
        has_pickers: true,
        is_secure: false,
        config: case.config,
        ..ClusterOptions::default()
    };
    let cluster = ProcessCluster::start(options).await?;
    let before = ProcessFigures::of(&cluster).await?.rss_bytes;
    let gateway = OpenStreams::open(cluster.picker_addrs()[0], streams, case);
    until("all streams are open", async || {
        let is_open = match case.are_told {
            true => gateway.told.load(Relaxed) == streams,
            false => {
                let figures = ProcessFigures::of(&cluster).await?;
                figures.in_flight >= streams as u64
            }
        };
        Ok(is_open || gateway.failed.load(Relaxed) > 0)
    })
    .await?;
    if gateway.failed.load(Relaxed) > 0 {
        bail!(gateway.end().await.err().context("a stream ended")?);
    }
    let open = ProcessFigures::of(&cluster).await?.rss_bytes;
    drop(gateway);
    cluster.wait_idle().await?;
    let after = ProcessFigures::of(&cluster).await?.rss_bytes;
    cluster.stop();
    let mib = |bytes: u64| format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20));
    let each = open.saturating_sub(before) as f64 / streams as f64 / 1024.0;
    Ok([
        case.waits_for.to_owned(),
        format!("{} KB", case.kilobytes),
        mib(before),
        mib(open),
        format!("{each:.1} KiB"),
        mib(after),
    ])
}

/// Streams that stay open until this is dropped.
struct OpenStreams {
    tasks: JoinSet<anyhow::Result<()>>,
    /// Number of streams that got an endpoint.
    told: Arc<AtomicUsize>,
    failed: Arc<AtomicUsize>,
}

impl OpenStreams {
    fn open(picker: SocketAddr, streams: usize, case: &StreamCase) -> Self {
        let channels: Vec<_> = (0..CONNECTIONS)
            .map(|_| picker_channel(picker, &GatewayTls::Anonymous))
            .collect();
        let (told, failed) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let mut tasks = JoinSet::new();
        for number in 0..streams {
            let channel = channels[number % CONNECTIONS].clone();
            let body = body(number, case.kilobytes * 1024);
            let (told, failed) = (Arc::clone(&told), Arc::clone(&failed));
            tasks.spawn(async move {
                let ended = hold(channel, number, body, &told).await;
                failed.fetch_add(1, Relaxed);
                ended
            });
        }
        Self {
            tasks,
            told,
            failed,
        }
    }

    /// Waits until a stream ends, and returns the reason.
    async fn end(mut self) -> anyhow::Result<()> {
        self.tasks.join_next().await.context("none was opened")??
    }
}

/// Asks for an endpoint for one request, counts it in `told`, and keeps the stream open.
async fn hold(
    channel: Channel,
    number: usize,
    mut body: Bytes,
    told: &AtomicUsize,
) -> anyhow::Result<()> {
    let mut gateway = ExternalProcessorClient::new(channel);
    let (say, said) = mpsc::channel(body.len().div_ceil(PIECE_BYTES) + 1);
    let (length, user) = (body.len().to_string(), format!("user-{number}"));
    let fields = [
        (":method", "POST"),
        (":path", "/v1/completions"),
        ("content-type", "application/json"),
        ("content-length", &length),
        ("x-quorate-user", &user),
    ];
    say.send(message(ProcessingMessage::RequestHeaders(head(&fields))))
        .await?;
    while !body.is_empty() {
        let piece = body.split_to(body.len().min(PIECE_BYTES));
        let end_of_stream = body.is_empty();
        let piece = HttpBody {
            body: piece,
            end_of_stream,
        };
        say.send(message(ProcessingMessage::RequestBody(piece)))
            .await?;
    }
    let heard = gateway.process(ReceiverStream::new(said)).await?;
    let mut heard = heard.into_inner();
    while let Some(message) = heard.message().await? {
        if ends_request(&message)? {
            told.fetch_add(1, Relaxed);
        }
    }
    bail!("the picker ended the stream")
}

fn message(said: ProcessingMessage) -> ProcessingRequest {
    ProcessingRequest {
        request: Some(said),
        ..ProcessingRequest::default()
    }
}

fn head(fields: &[(&str, &str)]) -> HttpHeaders {
    let field = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    let headers = fields.iter().map(field).collect();
    HttpHeaders {
        headers: Some(HeaderMap { headers }),
        end_of_stream: false,
    }
}

/// Returns the body of a request of about `bytes` bytes with a unique beginning.
fn body(number: usize, bytes: usize) -> Bytes {
    let line = format!("Stream {number} asks for a story. ");
    let prompt = line.repeat(bytes.div_ceil(line.len()));
    let body = json!({
        "model": "emulated", "prompt": prompt.get(..bytes), "max_tokens": 16, "stream": true,
    });
    Bytes::from(body.to_string())
}

/// Returns whether the message returns the last part of the request to the gateway.
fn ends_request(message: &ProcessingResponse) -> anyhow::Result<bool> {
    Ok(match &message.response {
        Some(Heard::RequestHeaders(_)) => false,
        Some(Heard::RequestBody(body)) => {
            let common = body.response.as_ref();
            let mutation = common.and_then(|it| it.body_mutation.as_ref()?.mutation.as_ref());
            matches!(mutation, Some(Mutation::StreamedResponse(piece)) if piece.end_of_stream)
        }
        other => bail!("a request was answered by {other:?}"),
    })
}

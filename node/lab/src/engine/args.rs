//! `quorate engine`: its flags, and its entry point, which runs an engine until a signal.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

use super::events::{EventEncoding, PublisherFaults};
use super::model::EngineShape;
use super::offload::{OffloadArgs, OffloadOptions};
use super::{
    EmulatedEngine, EngineOptions, EventsOptions, LoadError, LoraOptions, RoomMode, RoomOptions,
    TransferOptions,
};

/// Run an emulated vLLM engine.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    /// Address to listen on; port 0 picks a free one
    #[arg(long, value_name = "ADDR")]
    listen: SocketAddr,
    /// Name of the served model
    #[arg(long, value_name = "NAME", default_value = "emulated")]
    model: String,
    /// Number of KV cache blocks, including vLLM's reserved null block
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    num_gpu_blocks: u32,
    /// Tokens (of four bytes) per block
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    block_size: u32,
    /// Prompt tokens computed per second, over all requests
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    prefill_tokens_per_s: u32,
    /// Data-parallel ranks behind the port, each with its own KV cache
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    data_parallel_size: u16,
    /// Fixed milliseconds of a decode step, to which each request that decodes adds 1/64
    #[arg(long, value_name = "MS", default_value_t = 20.0, value_parser = positive)]
    decode_ms: f64,
    /// Maximum number of running requests
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: u32,
    /// Maximum number of tokens computed per step
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_batched_tokens: u32,
    /// Factor by which the engine runs faster than its configured times and rates
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive)]
    speed: f64,
    /// Seed of the generated words
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Name of a LoRA adapter to serve; may be given more than once
    #[arg(long, value_name = "NAME")]
    lora: Vec<String>,
    /// Maximum number of adapters in memory
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    max_loras: u32,
    /// Milliseconds to load an adapter
    #[arg(long, value_name = "MS", default_value_t = 200.0, value_parser = positive)]
    lora_load_ms: f64,
    #[command(flatten)]
    offload: OffloadArgs,
    /// Describe blocks of the tiers below the GPU in their KV events, as with vLLM's option of this
    /// name; otherwise these events only have hashes
    #[arg(long, requires = "cpu_blocks", requires = "kv_events")]
    self_describing_kv_events: bool,
    /// Transfer KV blocks to and from other engines, as vLLM's NIXL connector does
    #[arg(long)]
    kv_transfer: bool,
    /// Milliseconds of a transfer before its first token
    #[arg(long, value_name = "MS", default_value_t = 5.0, value_parser = positive, requires = "kv_transfer")]
    kv_transfer_ms: f64,
    /// Tokens whose blocks are transferred per second
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..), requires = "kv_transfer")]
    kv_transfer_tokens_per_s: u32,
    /// Lose every Nth transfer; 0: none
    #[arg(long, value_name = "N", default_value_t = 0, requires = "kv_transfer")]
    kv_transfer_lost_every: u32,
    /// What to do with a request whose blocks cannot be fetched
    #[arg(
        long,
        value_name = "WHAT",
        value_enum,
        default_value_t,
        requires = "kv_transfer"
    )]
    kv_load_failure: LoadError,
    /// Compute only prompts or only responses; engines are paired in bootstrap rooms, as in SGLang
    /// [default: compute both]
    #[arg(long, value_name = "MODE", value_enum, conflicts_with = "kv_transfer")]
    disaggregation_mode: Option<RoomMode>,
    /// Bootstrap address at which a prefill engine accepts decode engines
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "127.0.0.1:8998",
        requires = "disaggregation_mode"
    )]
    disaggregation_bootstrap: SocketAddr,
    /// Lose every Nth transfer to a decode engine; 0: none
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        requires = "disaggregation_mode"
    )]
    disaggregation_lost_every: u32,
    /// Seconds that a request waits for the other engine before it fails
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = positive, requires = "disaggregation_mode")]
    disaggregation_timeout_s: f64,
    /// Publish KV events at this endpoint, such as tcp://127.0.0.1:5557; each further rank at the
    /// next port
    #[arg(long, value_name = "ENDPOINT", value_parser = endpoint)]
    kv_events: Option<SocketAddr>,
    /// Serve replays of KV events at this endpoint; each further rank at the next port
    #[arg(long, value_name = "ENDPOINT", value_parser = endpoint, requires = "kv_events")]
    kv_replay: Option<SocketAddr>,
    /// Encoding of KV events
    #[arg(
        long,
        value_name = "FORM",
        default_value = "map",
        requires = "kv_events"
    )]
    kv_format: EventEncoding,
    /// Faults of KV events, separated by commas: drop=SHARE, reorder=SHARE, duplicate=SHARE,
    /// restart-after=MESSAGES, clear-after=MESSAGES, stall=TIME, seed=N
    #[arg(long, value_name = "FAULTS", requires = "kv_events")]
    fault: Option<PublisherFaults>,
}

fn endpoint(text: &str) -> Result<SocketAddr, String> {
    let address = text.strip_prefix("tcp://").unwrap_or(text);
    address
        .parse()
        .map_err(|_| "expected tcp://ADDRESS:PORT".to_owned())
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e9 => Ok(number),
        _ => Err("expected a number above 0 and at most 1e9".to_owned()),
    }
}

impl From<EngineArgs> for EngineOptions {
    fn from(args: EngineArgs) -> Self {
        let events = args.kv_events.map(|events| EventsOptions {
            events,
            replay: args.kv_replay,
            form: args.kv_format,
            faults: args.fault.clone().unwrap_or_default(),
        });
        let transfer = args.kv_transfer.then(|| TransferOptions {
            base: Duration::from_secs_f64(args.kv_transfer_ms / 1e3),
            tokens_per_s: args.kv_transfer_tokens_per_s,
            lost_every: args.kv_transfer_lost_every,
            on_failure: args.kv_load_failure,
        });
        let rooms = args.disaggregation_mode.map(|mode| RoomOptions {
            mode,
            bootstrap: args.disaggregation_bootstrap,
            transfer: TransferOptions {
                lost_every: args.disaggregation_lost_every,
                ..TransferOptions::default()
            },
            patience: Duration::from_secs_f64(args.disaggregation_timeout_s),
        });
        Self {
            events,
            transfer,
            rooms,
            offload: OffloadOptions {
                is_described: args.self_describing_kv_events,
                ..args.offload.into()
            },
            listen: args.listen,
            data_parallel_size: args.data_parallel_size,
            model: args.model,
            shape: EngineShape {
                num_gpu_blocks: args.num_gpu_blocks,
                block_size: args.block_size,
                max_num_seqs: args.max_num_seqs,
                max_num_batched_tokens: args.max_num_batched_tokens,
                prefill_tokens_per_s: args.prefill_tokens_per_s,
                decode: Duration::from_secs_f64(args.decode_ms / 1e3),
            },
            speed: args.speed,
            seed: args.seed,
            lora: LoraOptions {
                names: args.lora,
                max_loras: args.max_loras,
                load: Duration::from_secs_f64(args.lora_load_ms / 1e3),
            },
            ..Self::default()
        }
    }
}

/// Serves until SIGTERM or SIGINT. Prints the addresses once they are bound.
///
/// # Errors
/// If an address cannot be bound, or signals cannot be handled.
pub async fn run(args: EngineArgs) -> anyhow::Result<ExitCode> {
    let listen = args.listen;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let engine = EmulatedEngine::start(args.into())
        .await
        .with_context(|| format!("listen on {listen}"))?;
    println!("engine listens on {}", engine.url());
    if let Some(bootstrap) = engine.bootstrap() {
        println!("bootstrap at {bootstrap}");
    }
    if let Some(events) = engine.kv_events() {
        println!("kv events at {events}");
    }
    if let Some(replay) = engine.kv_replay() {
        println!("kv replays at {replay}");
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    engine.stop().await;
    Ok(ExitCode::SUCCESS)
}

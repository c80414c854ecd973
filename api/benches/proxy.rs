//! CPU per proxied request on one core, kernel included: `cargo bench -p api --bench proxy`.
//!
//! The proxy runs alone on one thread with its own runtime, whose CPU time the kernel counts
//! (`/proc/.../schedstat`, nanoseconds). Clients, engine, state and outbox run on other threads and
//! do not count. `pump` is the same traffic through a thread that only copies bytes: the floor that
//! two sockets and their system calls set. CPU time, not elapsed time, so that a busy machine blurs
//! the figures little.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use api::admission::Admission;
use api::backends::{Backends, Health, ProbeSettings};
use api::clock::Clock;
use api::ports::{BoxFuture, Propose, ProposeError};
use api::prompt::{ModelSettings, Tokenizer, parse};
use api::proxy::{Proxy, ProxyMetrics, ProxySettings, Server};
use api::routing::{
    AttemptEnd, DispatchTerms, OutboxSettings, Router, RouterParts, RoutingRequest, SelectSettings,
    UserName,
};
use bytes::Bytes;
use state::RouterState;
use state::command::{BackendSpec, Command, Committed, Envelope, Lane, Origin};
use state::ids::{LogIndex, ReplicaId, SessionId};
use state::policy::PolicyConfig;
use state::users::FairnessSettings;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// How long each case is measured.
const CASE_TIME: Duration = Duration::from_millis(2500);
const WARM_UP: Duration = Duration::from_millis(300);
/// Different prompts, so that decisions are not all the same.
const PROMPTS: usize = 64;
const ENGINES: usize = 4;
/// Events of a streamed answer.
const EVENTS: usize = 32;

/// Who sends requests.
static ADA: LazyLock<UserName> = LazyLock::new(|| UserName::bounded("ada"));

fn main() {
    let engine = spawn_engine();
    let fleet = Fleet::new(engine);
    let (proxy, proxy_task) = spawn_proxy(&fleet);
    let (pump, pump_task) = spawn_pump(engine);
    println!("us of CPU per request on the measured thread, user and kernel\n");
    println!(
        "{:<34}{:>8}{:>8}{:>12}",
        "case", "proxy", "pump", "requests/s"
    );
    for (name, body_bytes, is_streaming, connections) in [
        ("1 KB, 16 connections", 1024, false, 16),
        ("32 KB, 16 connections", 32 * 1024, false, 16),
        ("1 KB, 1 connection", 1024, false, 1),
        ("32 KB, 1 connection", 32 * 1024, false, 1),
        ("1 KB, 32 events, 16 connections", 1024, true, 16),
    ] {
        let requests = Arc::new(requests(body_bytes, is_streaming));
        let (us, rate) = measure(proxy, &proxy_task, &requests, connections);
        let (floor_us, _) = measure(pump, &pump_task, &requests, connections);
        println!("{name:<34}{us:>8.1}{floor_us:>8.1}{rate:>12.0}");
    }
    println!("\nof which, alone and warm, us");
    for body_bytes in [1024, 32 * 1024] {
        phases(&fleet, body_bytes);
    }
}

/// Runs requests for a while; answers us of `task`'s CPU per request and requests per second.
fn measure(
    address: SocketAddr,
    task: &str,
    requests: &Arc<Vec<Vec<u8>>>,
    connections: usize,
) -> (f64, f64) {
    drive(address, requests, connections, WARM_UP);
    let (cpu_before, start) = (cpu_ns(task), Instant::now());
    let done = drive(address, requests, connections, CASE_TIME);
    let (cpu, time) = (cpu_ns(task) - cpu_before, start.elapsed());
    (
        cpu as f64 / 1e3 / done as f64,
        done as f64 / time.as_secs_f64(),
    )
}

/// CPU time of a thread so far, by its `/proc` name.
fn cpu_ns(task: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{task}/schedstat")).expect("linux");
    text.split(' ')
        .next()
        .and_then(|ns| ns.parse().ok())
        .expect("schedstat begins with a number")
}

/// Runs `work` on a thread of its own; answers what it said first and the thread's `/proc` name.
fn on_thread<T, F>(
    work: impl FnOnce(std::sync::mpsc::Sender<T>) -> F + Send + 'static,
) -> (T, String)
where
    T: Send + 'static,
    F: Future<Output = ()>,
{
    let (tell_task, task) = std::sync::mpsc::channel();
    let (tell, told) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let link = std::fs::read_link("/proc/thread-self").expect("linux");
        tell_task
            .send(link.display().to_string())
            .expect("main waits for it");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime starts").block_on(work(tell));
    });
    let task = task.recv().expect("the thread tells its name");
    (told.recv().expect("the thread tells its address"), task)
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    (listener, address)
}

/// Requests as bytes on the wire: a long shared beginning, different ends.
fn requests(body_bytes: usize, is_streaming: bool) -> Vec<Vec<u8>> {
    let request = |number: usize| {
        let stream = if is_streaming { ",\"stream\":true" } else { "" };
        let frame = format!(
            "{{\"model\":\"m\"{stream},\"messages\":[{{\"role\":\"user\",\"content\":\"\"}}]}}"
        );
        let shared =
            "Answer with care, and say so when you do not know.\\n".repeat(body_bytes / 52 + 1);
        let text_bytes = body_bytes - frame.len();
        let text = &shared[..text_bytes * 3 / 4];
        let text = text.trim_end_matches('\\');
        let own = format!("question {number:>4} ").repeat(text_bytes / 14 + 1);
        let text = format!("{text}{}", &own[..text_bytes - text.len()]);
        let body = frame.replace("\"content\":\"\"", &format!("\"content\":\"{text}\""));
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: router:8080\r\nuser-agent: bench\r\n\
             accept: application/json\r\nauthorization: Bearer sk-{number}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    };
    (0..PROMPTS).map(request).collect()
}

/// Clients in a closed loop; answers how many requests were answered.
fn drive(
    address: SocketAddr,
    requests: &Arc<Vec<Vec<u8>>>,
    connections: usize,
    time: Duration,
) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime starts").block_on(async {
        let until = Instant::now() + time;
        let clients: Vec<_> = (0..connections)
            .map(|number| tokio::spawn(client(address, Arc::clone(requests), number, until)))
            .collect();
        let mut done = 0;
        for client in clients {
            done += client.await.expect("clients do not panic");
        }
        done
    })
}

async fn client(
    address: SocketAddr,
    requests: Arc<Vec<Vec<u8>>>,
    first: usize,
    until: Instant,
) -> usize {
    let mut stream = TcpStream::connect(address)
        .await
        .expect("the proxy listens");
    stream.set_nodelay(true).expect("a socket option");
    let mut buffer = vec![0; 64 * 1024];
    let mut done = 0;
    while Instant::now() < until {
        let request = &requests[(first + done) % requests.len()];
        stream.write_all(request).await.expect("the proxy reads");
        let mut got = 0;
        while !is_whole(&buffer[..got]) {
            let length = stream
                .read(&mut buffer[got..])
                .await
                .expect("the proxy answers");
            assert!(
                length > 0,
                "cut off: {}",
                String::from_utf8_lossy(&buffer[..got])
            );
            got += length;
        }
        assert!(
            buffer.starts_with(b"HTTP/1.1 200"),
            "{}",
            String::from_utf8_lossy(&buffer[..got])
        );
        done += 1;
    }
    done
}

/// Both kinds of answer end in a way that is easy to see.
fn is_whole(answer: &[u8]) -> bool {
    answer.ends_with(b"\"END\"}") || answer.ends_with(b"\r\n0\r\n\r\n")
}

fn spawn_engine() -> SocketAddr {
    let (address, _) = on_thread(|tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        loop {
            let (stream, _) = listener.accept().await.expect("it listens");
            tokio::spawn(engine_connection(stream));
        }
    });
    address
}

/// Answers every request with the same document or stream.
async fn engine_connection(mut stream: TcpStream) {
    stream.set_nodelay(true).expect("a socket option");
    let text = "x".repeat(400);
    let document = format!(
        "{{\"id\":\"c\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}}}}],\
         \"usage\":{{\"prompt_tokens\":300,\"completion_tokens\":100,\"total_tokens\":400}},\"z\":\"END\"}}"
    );
    let document = format!(
        "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{document}",
        document.len()
    );
    let mut buffer = vec![0; 128 * 1024];
    let mut got = 0;
    loop {
        let Ok(length @ 1..) = stream.read(&mut buffer[got..]).await else {
            return;
        };
        got += length;
        let Some(head) = buffer[..got]
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
        else {
            continue;
        };
        let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
        let length = text
            .split("content-length: ")
            .nth(1)
            .and_then(|rest| rest.split('\r').next());
        let length: usize = length
            .and_then(|length| length.parse().ok())
            .expect("a length");
        if got < head + 4 + length {
            continue;
        }
        let is_streaming = buffer[head..got]
            .windows(13)
            .any(|window| window == b"\"stream\":true");
        got = 0;
        if is_streaming {
            stream_answer(&mut stream).await;
        } else if stream.write_all(document.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn stream_answer(stream: &mut TcpStream) {
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream
        .write_all(head.as_bytes())
        .await
        .expect("the proxy reads");
    for number in 0..EVENTS {
        let event = format!(
            "data: {{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1763630000,\
             \"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" token\"}},\"logprobs\":null,\
             \"finish_reason\":null}}],\"usage\":{{\"prompt_tokens\":300,\"total_tokens\":400,\"completion_tokens\":{number}}}}}\n\n"
        );
        let chunk = format!("{:x}\r\n{event}\r\n", event.len());
        stream
            .write_all(chunk.as_bytes())
            .await
            .expect("the proxy reads");
        // Events of a real engine come one by one.
        tokio::task::yield_now().await;
    }
    let last = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    stream
        .write_all(last.as_bytes())
        .await
        .expect("the proxy reads");
}

fn spawn_pump(engine: SocketAddr) -> (SocketAddr, String) {
    on_thread(move |tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        loop {
            let (mut client, _) = listener.accept().await.expect("it listens");
            tokio::spawn(async move {
                client.set_nodelay(true).expect("a socket option");
                let mut engine = TcpStream::connect(engine)
                    .await
                    .expect("the engine listens");
                engine.set_nodelay(true).expect("a socket option");
                // It ends when the client does.
                drop(tokio::io::copy_bidirectional(&mut client, &mut engine).await);
            });
        }
    })
}

fn spawn_proxy(fleet: &Fleet) -> (SocketAddr, String) {
    let mut settings = ProxySettings::new(ReplicaId(1));
    settings.pool.idle_timeout = Duration::from_secs(60);
    let metrics = Arc::new(ProxyMetrics::default());
    let (router, backends) = (Arc::clone(&fleet.router), Arc::clone(&fleet.backends));
    on_thread(move |tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        let admission = Arc::new(Admission::new(&router));
        let serving = Arc::clone(&admission);
        tokio::spawn(async move { serving.run(CancellationToken::new()).await });
        let proxy = Arc::new(Proxy::new(&router, admission, backends, settings, metrics));
        Server::new(listener, proxy)
            .run(CancellationToken::new(), Duration::ZERO)
            .await;
    })
}

/// The state with the next log index: a cluster of one that commits at once.
struct Log(Mutex<(RouterState, u64)>);

impl Log {
    fn apply(&self, envelope: Envelope) -> Committed {
        let mut log = self.0.lock().expect("nobody panics");
        log.1 += 1;
        let index = LogIndex(log.1);
        let reply = log.0.apply(index, envelope);
        Committed { index, reply }
    }
}

impl Propose for Log {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        Box::pin(async move { Ok(self.apply(envelope)) })
    }
}

struct Fleet {
    router: Arc<Router>,
    backends: Arc<Backends>,
    log: Arc<Log>,
}

impl Fleet {
    /// Four backends, all of them the one engine.
    fn new(engine: SocketAddr) -> Self {
        let log = Arc::new(Log(Mutex::new((RouterState::new(), 0))));
        let view = log.0.lock().expect("nobody panics").0.view();
        let backends = Arc::new(Backends::new(ProbeSettings::default()));
        let name = "*".to_owned();
        let models = vec![ModelSettings {
            name,
            tokenizer: Tokenizer::character(),
            block_size: Some(128),
        }];
        let router = Arc::new(Router::new(RouterParts {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models,
            replica: ReplicaId(1),
            session: SessionId(1),
            outbox: OutboxSettings::default(),
            overrides: Vec::new(),
            select: SelectSettings::default(),
            clock: Clock::default(),
        }));
        for (seq, command) in (1..).zip(commands(engine)) {
            let origin = Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Admin,
                seq,
            };
            log.apply(Envelope {
                origin,
                proposed_at_ms: 1,
                command,
            });
        }
        for backend in &view.registry().backends {
            let (waiting, running, kv_usage_permille) = (0, 0, 0);
            let detail = None;
            let health = Health {
                is_healthy: true,
                detail,
                waiting,
                running,
                kv_usage_permille,
                adapters: None,
            };
            backends.assume(backend.handle.slot, &health);
        }
        let fleet = Self {
            router,
            backends,
            log,
        };
        let (router, log) = (Arc::clone(&fleet.router), Arc::clone(&fleet.log));
        on_thread(move |tell| async move {
            tell.send(()).expect("main waits for it");
            router
                .run_outbox(log, CancellationToken::new(), Duration::ZERO)
                .await;
        });
        fleet
    }
}

/// A cluster whose backends are all at `engine`.
fn commands(engine: SocketAddr) -> Vec<Command> {
    let mut commands = vec![Command::InitCluster {
        hash_seed: 7,
        policy: PolicyConfig::Cost(Default::default()),
        fairness: FairnessSettings::default(),
    }];
    commands.extend((0..ENGINES).map(|number| {
        Command::PutBackend(BackendSpec {
            id: format!("engine-{number}"),
            url: format!("http://{engine}"),
            models: vec!["m".to_owned()],
            labels: [].into(),
            capacity_blocks: Some(30_000),
            kv_events: None,
            kv_replay: None,
        })
    }));
    commands
}

/// What the steps between reading and forwarding take, one after the other.
fn phases(fleet: &Fleet, body_bytes: usize) {
    let bodies: Vec<Bytes> = requests(body_bytes, false)
        .into_iter()
        .map(|request| {
            let head = request
                .windows(4)
                .position(|four| four == b"\r\n\r\n")
                .expect("a head");
            Bytes::from(request).slice(head + 4..)
        })
        .collect();
    let router = &fleet.router;
    let path = "/v1/chat/completions";
    let parsed: Vec<_> = bodies
        .iter()
        .map(|body| parse(path, body).expect("well formed"))
        .collect();
    let identities: Vec<_> = parsed
        .iter()
        .map(|parsed| router.reader().identify(parsed))
        .collect();
    let ask = |i: usize| RoutingRequest {
        model: "m",
        identity: &identities[i],
        request_id: "0123456789abcdef0123456789abcdef",
        user: &ADA,
        headers: None,
        policy: None,
        labels: &[],
        excluded: &[],
        waiting_here: 0,
    };
    let decisions: Vec<_> = (0..PROMPTS)
        .map(|i| {
            router
                .decider()
                .decide(&ask(i), tokio::time::Instant::now())
                .expect("a backend is healthy")
        })
        .collect();
    let now = tokio::time::Instant::now;
    let us = [
        time_us(|i| drop(parse(path, &bodies[i]))),
        time_us(|i| drop(router.reader().identify(&parsed[i]))),
        time_us(|i| drop(router.decider().decide(&ask(i), now()))),
        time_us(|i| {
            router
                .dispatcher()
                .dispatch(&decisions[i], &ask(i), DispatchTerms::default(), now())
                .end(AttemptEnd::Finished, now());
        }),
    ];
    println!(
        "{:>6} bytes: parse {:.1}, identify {:.1}, decide {:.1}, dispatch and end {:.1}",
        body_bytes, us[0], us[1], us[2], us[3]
    );
}

/// Mean us of this thread's CPU that `work` takes over the prompts.
fn time_us(mut work: impl FnMut(usize)) -> f64 {
    const ROUNDS: usize = 400;
    // The kernel brings the figure up to date when the thread is switched out.
    let cpu = || {
        thread::yield_now();
        cpu_ns("thread-self")
    };
    let before = cpu();
    for _ in 0..ROUNDS {
        (0..PROMPTS).for_each(&mut work);
    }
    (cpu() - before) as f64 / 1e3 / (ROUNDS * PROMPTS) as f64
}

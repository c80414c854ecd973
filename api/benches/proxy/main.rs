//! CPU per proxied request on one core, kernel included: `cargo bench -p api --bench proxy`.
//!
//! The proxy runs alone on one thread with its own runtime, whose CPU time the kernel counts
//! (`/proc/.../schedstat`, nanoseconds). Clients, engine, state and outbox run on other threads and
//! do not count. `pump` sends the same traffic through a thread that only copies bytes: the minimum
//! for two sockets and their system calls. `TLS` is the proxy with TLS to its clients. CPU time
//! instead of elapsed time keeps the figures stable on a busy machine. Picks for gateways alone:
//! `cargo bench -p api --bench proxy -- picks`. Tracing alone, with a collector that responds,
//! hangs or is down: `-- traced`.

mod clients;
mod engine;
mod fleet;
mod picks;
mod tls;
mod traces;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use api::prompt::parse;
use api::routing::{AttemptEnd, DispatchTerms, RequestStages, RoutingRequest};
use bytes::Bytes;
use tokio::net::TcpListener;

use crate::clients::{ADA, ClientKind, PROMPTS, drive, requests};
use crate::engine::{spawn_engine, spawn_pump};
use crate::fleet::{Fleet, spawn_proxy};
use crate::tls::TestCertificate;
use crate::traces::{CollectorKind, spawn_collector};

/// Duration of each measurement.
const CASE_TIME: Duration = Duration::from_millis(2500);
const WARM_UP: Duration = Duration::from_millis(300);

fn main() {
    if std::env::args().any(|arg| arg == "picks") {
        return picks::compare();
    }
    let engine = spawn_engine();
    let fleet = Fleet::new(engine);
    let kept = ClientKind::kept();
    if std::env::args().any(|arg| arg == "traced") {
        return compare_traced(&fleet, &kept);
    }
    let certificate = TestCertificate::new();
    let proxy = spawn_proxy(&fleet, None, None);
    let tls_proxy = spawn_proxy(&fleet, Some(certificate.listener()), None);
    let pump = spawn_pump(engine);
    let kept_tls = ClientKind::kept().with_tls(&certificate.client());
    println!("us of CPU per request on the measured thread, user and kernel\n");
    println!(
        "{:<34}{:>8}{:>8}{:>8}{:>12}",
        "case", "proxy", "TLS", "pump", "requests/s"
    );
    for (name, body_bytes, is_streaming, connections) in [
        ("1 KB, 16 connections", 1024, false, 16),
        ("32 KB, 16 connections", 32 * 1024, false, 16),
        ("1 KB, 1 connection", 1024, false, 1),
        ("32 KB, 1 connection", 32 * 1024, false, 1),
        ("1 KB, 32 events, 16 connections", 1024, true, 16),
    ] {
        let requests = Arc::new(requests(body_bytes, is_streaming));
        let (us, rate) = measure(&proxy, &kept, &requests, connections);
        let (tls_us, _) = measure(&tls_proxy, &kept_tls, &requests, connections);
        let (floor_us, _) = measure(&pump, &kept, &requests, connections);
        println!("{name:<34}{us:>8.1}{tls_us:>8.1}{floor_us:>8.1}{rate:>12.0}");
    }
    println!("\na connection for each request of 1 KB, 16 clients");
    let requests = Arc::new(requests(1024, false));
    for (name, proxy, client) in [
        ("in the clear", &proxy, ClientKind::once()),
        (
            "TLS, session resumed",
            &tls_proxy,
            ClientKind::once().with_tls(&certificate.client()),
        ),
        (
            "TLS, full handshake",
            &tls_proxy,
            ClientKind::once().with_tls(&certificate.forgetful_client()),
        ),
    ] {
        let (us, _) = measure(proxy, &client, &requests, 16);
        println!(
            "{name:<34}{us:>8.1}     {:.0} a second on one core",
            1e6 / us
        );
    }
    compare_traced(&fleet, &kept);
    picks::compare();
    println!("\nof which, alone and warm, us");
    for body_bytes in [1024, 32 * 1024] {
        phases(&fleet, body_bytes);
    }
}

/// Prints the cost of a request by sampling rate and behaviour of the collector.
fn compare_traced(fleet: &Fleet, kept: &ClientKind) {
    println!("\ntraced, 1 KB, 32 events, 16 connections");
    let requests = Arc::new(requests(1024, true));
    let all = 1_000_000;
    for (name, traced) in [
        ("off", None),
        ("1 %", Some((10_000, CollectorKind::Answers))),
        ("100 %", Some((all, CollectorKind::Answers))),
        (
            "100 %, the collector is stuck",
            Some((all, CollectorKind::IsStuck)),
        ),
        (
            "100 %, the collector is gone",
            Some((all, CollectorKind::IsGone)),
        ),
    ] {
        let tracer = traced.map(|(sample_ppm, kind)| spawn_collector(sample_ppm, kind));
        let proxy = spawn_proxy(fleet, None, tracer);
        let (us, rate) = measure(&proxy, kept, &requests, 16);
        println!("{name:<34}{us:>8.1}{rate:>28.0}");
    }
}

/// Address at which a measured thread listens, and the thread's path below `/proc`.
struct MeasuredThread {
    address: SocketAddr,
    task: String,
}

/// Sends requests for [`CASE_TIME`]; returns the thread's CPU time per request in us, and requests
/// per second.
fn measure(
    thread: &MeasuredThread,
    client: &ClientKind,
    requests: &Arc<Vec<Vec<u8>>>,
    connections: usize,
) -> (f64, f64) {
    drive(thread.address, client, requests, connections, WARM_UP);
    let (cpu_before, start) = (cpu_ns(&thread.task), Instant::now());
    let done = drive(thread.address, client, requests, connections, CASE_TIME);
    let (cpu, time) = (cpu_ns(&thread.task) - cpu_before, start.elapsed());
    (
        cpu as f64 / 1e3 / done as f64,
        done as f64 / time.as_secs_f64(),
    )
}

/// Returns the CPU time that a thread has used so far, in nanoseconds, given its path below
/// `/proc`.
fn cpu_ns(task: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{task}/schedstat")).expect("linux");
    text.split(' ')
        .next()
        .and_then(|ns| ns.parse().ok())
        .expect("schedstat begins with a number")
}

/// Runs `work` on its own thread and returns the address at which it listens.
fn listening<F>(
    work: impl FnOnce(std::sync::mpsc::Sender<SocketAddr>) -> F + Send + 'static,
) -> MeasuredThread
where
    F: Future<Output = ()>,
{
    let (address, task) = on_thread(work);
    MeasuredThread { address, task }
}

/// Runs `work` on its own thread; returns its first message and the thread's path below `/proc`.
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

/// Returns the bodies of [`requests`].
fn bodies(body_bytes: usize) -> Vec<Bytes> {
    let requests = requests(body_bytes, false).into_iter();
    let body = |request: Vec<u8>| {
        let head = request.windows(4).position(|four| four == b"\r\n\r\n");
        Bytes::from(request).slice(head.expect("a head") + 4..)
    };
    requests.map(body).collect()
}

/// Measures the steps between reading and forwarding one by one.
fn phases(fleet: &Fleet, body_bytes: usize) {
    let bodies = bodies(body_bytes);
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
        session: None,
        headers: None,
        policy: None,
        labels: &[],
        excluded: &[],
        waiting_here: 0,
        client: None,
        endpoints: None,
        stages: RequestStages::Monolithic,
        room: Default::default(),
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

/// Returns the mean CPU time of this thread per call of `work`, in us.
fn time_us(mut work: impl FnMut(usize)) -> f64 {
    const ROUNDS: usize = 400;
    // The kernel updates the figure when the thread is switched out.
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

//! HTTP/1.1 requests that two servers in a row could read differently, and values that could become
//! headers of the request to an engine.
//!
//! A plain request follows each such request. Its response shows whether the connection stayed
//! open. The heads that engines saw show how the router read the first request.

use std::fmt::Write as _;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::context::{ATTACKER, AbuseContext, CHAT, PATIENCE, chat, chat_body, outcome};
use crate::hostile::client;
use crate::processes::access::key;

/// Length of a chunk extension that exceeds the limit, in bytes.
const EXTENSION_BYTES: usize = 64 << 10;
/// Second request that a server sees if it misreads the length of the first.
const HIDDEN: &str = "POST /v1/hidden HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n";
/// Statuses if the request is rejected and the connection closes.
const REFUSED: &[&str] = &["400"];
/// Statuses if only the head is rejected. The request's end is clear, so the connection stays open.
const REFUSED_ALONE: &[&str] = &["400", "200"];
/// Statuses if the request is served by its chunks and the connection closes (RFC 9112, 6.1).
const SERVED_LAST: &[&str] = &["200"];

struct Shape {
    name: &'static str,
    /// Lines of the head after the API key.
    lines: String,
    body: String,
    /// Expected statuses of the responses, in order.
    expected: &'static [&'static str],
}

fn shape(name: &'static str, lines: &str, body: String, expected: &'static [&str]) -> Shape {
    Shape {
        name,
        lines: lines.to_owned(),
        body,
        expected,
    }
}

/// Returns the body of a plain request, encoded as one chunk.
fn chunked() -> String {
    let body = plain();
    format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
}

fn plain() -> String {
    String::from_utf8(chat_body("hello", false).to_vec()).expect("it is JSON")
}

fn shapes() -> Vec<Shape> {
    let (lengths, codings) = (lengths().into_iter(), codings().into_iter());
    lengths
        .chain(codings)
        .chain(heads())
        .chain(chunks())
        .collect()
}

/// Returns requests with invalid or repeated lengths.
fn lengths() -> Vec<Shape> {
    let (cl, length) = ("content-length: ", plain().len());
    let hidden = plain() + HIDDEN;
    let cases = [
        ("two lengths", format!("{cl}{length}\r\n{cl}0\r\n"), &hidden),
        ("a list of lengths", format!("{cl}{length}, 0\r\n"), &hidden),
        ("a signed length", format!("{cl}+{length}\r\n"), &plain()),
        ("a negative length", format!("{cl}-1\r\n"), &plain()),
        (
            "a huge length",
            format!("{cl}99999999999999999999999\r\n"),
            &plain(),
        ),
    ];
    let cases = cases.into_iter();
    cases
        .map(|(name, lines, body)| shape(name, &lines, body.clone(), REFUSED))
        .collect()
}

/// Returns requests with chunks beside a length, or with invalid transfer codings.
fn codings() -> Vec<Shape> {
    let (te, cl) = ("transfer-encoding: chunked\r\n", "content-length: 5\r\n");
    let cases = [
        ("length, then chunks", format!("{cl}{te}"), SERVED_LAST),
        ("chunks, then length", format!("{te}{cl}"), SERVED_LAST),
        (
            "another coding",
            "transfer-encoding: xchunked\r\n".to_owned(),
            REFUSED,
        ),
        (
            "chunks inside",
            "transfer-encoding: chunked, identity\r\n".to_owned(),
            REFUSED,
        ),
        (
            "a space before the colon",
            "transfer-encoding : chunked\r\n".to_owned(),
            REFUSED,
        ),
        (
            "a folded line",
            "transfer-encoding:\r\n chunked\r\n".to_owned(),
            REFUSED,
        ),
    ];
    let cases = cases.into_iter();
    cases
        .map(|(name, lines, expected)| shape(name, &lines, chunked(), expected))
        .collect()
}

/// Returns requests with invalid header lines before the length.
fn heads() -> Vec<Shape> {
    let cases = [
        (
            "a folded header",
            "x-a: 1\r\n content-length: 5\r\n",
            REFUSED,
        ),
        ("a bare CR", "x-a: 1\rcontent-length: 0\r\n", REFUSED),
        ("a NUL", "x-a: 1\0\r\n", REFUSED),
        ("a name with a space", "x a: 1\r\n", REFUSED),
        ("a line without a name", ": 1\r\n", REFUSED),
        ("two hosts", "host: evil.example\r\n", REFUSED_ALONE),
    ];
    let cases = cases.into_iter();
    cases
        .map(|(name, line, expected)| {
            let lines = format!("{line}content-length: {}\r\n", plain().len());
            shape(name, &lines, plain(), expected)
        })
        .collect()
}

/// Returns requests with invalid chunk sizes or long chunk extensions.
fn chunks() -> Vec<Shape> {
    let length = plain().len();
    let sizes = [
        ("a signed chunk", format!("+{length:x}")),
        ("a chunk in 0x", format!("0x{length:x}")),
        ("a huge chunk", "fffffffffffffffff".to_owned()),
        ("a chunk without a size", String::new()),
        ("a chunk that is longer", format!("{:x}", length - 2)),
        (
            "long extensions of a chunk",
            format!("{length:x};a={}", "e".repeat(EXTENSION_BYTES)),
        ),
    ];
    let sizes = sizes.into_iter();
    sizes
        .map(|(name, size)| {
            let body = format!("{size}\r\n{}\r\n0\r\n\r\n", plain());
            shape(name, "transfer-encoding: chunked\r\n", body, REFUSED)
        })
        .collect()
}

/// Sends each shape to one of the replicas. Checks the responses and what engines saw.
pub(super) async fn smuggling(context: &AbuseContext) -> anyhow::Result<()> {
    for (number, shape) in shapes().iter().enumerate() {
        let replica = number % context.data.len();
        let statuses = send(context, replica, shape).await.context(shape.name)?;
        ensure!(
            statuses == shape.expected,
            "{}: answered {statuses:?}, expected {:?}",
            shape.name,
            shape.expected
        );
        let served = statuses.iter().filter(|status| *status == "200").count();
        let seen = context.seen.take_heads();
        let is_plain = |head: &String| head.starts_with("POST /v1/chat/completions ");
        ensure!(
            seen.len() <= served && seen.iter().all(is_plain),
            "{}: engines saw {seen:?}",
            shape.name
        );
        let has_both = |head: &&String| {
            let head = head.to_ascii_lowercase();
            head.contains("content-length") && head.contains("transfer-encoding")
        };
        ensure!(
            !seen.iter().any(|head| has_both(&head)),
            "{}: {seen:?}",
            shape.name
        );
        context.count(statuses.join(" and "));
    }
    Ok(())
}

async fn send(
    context: &AbuseContext,
    replica: usize,
    shape: &Shape,
) -> anyhow::Result<Vec<String>> {
    let mut stream = context.connect(replica, b"http/1.1").await?;
    let bearer = key(ATTACKER);
    let mut text = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bearer}\r\n\
         content-type: application/json\r\n{}\r\n{}",
        shape.lines, shape.body
    );
    let _ = write!(
        text,
        "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bearer}\r\n\
         connection: close\r\n\r\n"
    );
    let mut answer = Vec::new();
    let exchange = timeout(PATIENCE, async {
        // The server may close before everything is sent, and reset after the response.
        let _ = stream.write_all(text.as_bytes()).await;
        let _ = stream.flush().await;
        let _ = stream.read_to_end(&mut answer).await;
    });
    exchange.await.context("no end in time")?;
    let answer = String::from_utf8_lossy(&answer);
    let heads = answer.split("HTTP/1.1 ").skip(1);
    Ok(heads.map(|head| head.chars().take(3).collect()).collect())
}

/// Checks that values from a client become no header, log line or request of their own.
pub(super) async fn injection(context: &AbuseContext) -> anyhow::Result<()> {
    const EVIL: [&str; 4] = [
        "a\r\nx-injected: 1",
        "a\nx-injected: 1",
        "a\r\n\r\nPOST /v1/hidden HTTP/1.1\r\n",
        "a\u{0}\u{7f}\u{1b}[31m\u{85}",
    ];
    for (number, evil) in EVIL.iter().enumerate() {
        let replica = number % context.data.len();
        for member in ["user", "model", "prompt_cache_key", "safety_identifier"] {
            let mut asked = chat(ATTACKER, "plain.injection", false);
            let mut body: serde_json::Value = serde_json::from_slice(&asked.body)?;
            body[member] = (*evil).into();
            asked.body = body.to_string().into();
            let to = context.data[replica];
            let asking = client::ask(&context.access, super::context::FROM, to, asked);
            let (status, text) = outcome(asking).await;
            let status = status.with_context(|| format!("{member} {evil:?}: {text}"))?;
            ensure!(
                !status.is_server_error(),
                "{member} {evil:?}: {status} {text}"
            );
            context.count(status.as_str());
        }
        let seen = context.seen.take_heads();
        let is_clean = |head: &String| {
            let is_line =
                |line: &str| line.starts_with("x-injected") || line.contains("/v1/hidden");
            !head.split(['\r', '\n']).any(is_line)
        };
        ensure!(seen.iter().all(is_clean), "engines saw {seen:?}");
    }
    Ok(())
}

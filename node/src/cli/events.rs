//! `quorate events`: follows changes in the cluster, as one replica sees them.
//!
//! For a minute, a broken stream is resumed after the last received event, at the same replica or
//! at the next one that responds. A replica that cannot resume there reports `missed`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use lab::terminal;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::client::AdminTarget;
use super::decisions::time;
use super::read::{ReadArgs, details, shown};
use super::table::cell;
use crate::json_client::{JsonAnswer, no_answer};

/// Maximum length of an event, in bytes. Replicas send far shorter ones.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// Maximum time for which a broken stream is retried.
const RESUME_MAX: Duration = Duration::from_secs(60);
/// First and longest pause before a retry.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Arguments of `quorate events`.
#[derive(Debug, clap::Args)]
pub(super) struct EventsArgs {
    /// Begin with the last N events that the replica noticed since it started, at most 1024
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=1024))]
    last: u16,
    #[command(flatten)]
    read: ReadArgs,
}

/// Runs `quorate events` until no replica serves a stream any more.
pub(super) async fn run(args: EventsArgs) -> anyhow::Result<ExitCode> {
    let is_json = args.read.json;
    let mut stream = EventStream::new(args.read.target, args.last);
    loop {
        let event = stream.next().await?;
        match is_json {
            true => terminal::print(shown(&event.to_string()))?,
            // It tells programs where the stream begins.
            false if event["event"] == "connected" => {}
            false => terminal::print(line(event))?,
        }
    }
}

/// Stream of events, in order, from whichever replica responds.
struct EventStream {
    target: AdminTarget,
    /// Number of past events to begin with.
    past: u16,
    /// The open stream, with the URL of its replica; `None` if it is not open yet or broke.
    open: Option<(String, Incoming)>,
    arrived: PartialEvents,
    /// Id of the last event that had one; `None` before the first.
    last: Option<HeaderValue>,
    pause: Duration,
    /// Time at which the stream broke; `None` after it is resumed.
    broken: Option<Instant>,
}

/// Reason why a stream could not be opened.
enum OpenError {
    /// The failure may be temporary, so a retry may help.
    Passing(anyhow::Error),
    Lasting(anyhow::Error),
}

impl EventStream {
    fn new(target: AdminTarget, past: u16) -> Self {
        Self {
            target,
            past,
            open: None,
            arrived: PartialEvents::default(),
            last: None,
            pause: PAUSES.0,
            broken: None,
        }
    }

    /// Returns the next event, resuming a broken stream.
    async fn next(&mut self) -> anyhow::Result<Value> {
        loop {
            if let Some((id, event)) = self.arrived.next() {
                let id = id.and_then(|id| HeaderValue::try_from(id).ok());
                self.last = id.or(self.last.take());
                return Ok(event);
            }
            let Some((url, body)) = &mut self.open else {
                self.reopen().await?;
                continue;
            };
            match body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        self.arrived.take(&bytes)?;
                        (self.pause, self.broken) = (PAUSES.0, None);
                    }
                }
                Some(Err(error)) => {
                    eprintln!("{url}: the stream broke off: {error}");
                    self.leave(false);
                }
                None => {
                    eprintln!("{url}: the replica ended the stream");
                    self.leave(true);
                }
            }
        }
    }

    /// Closes the stream. A replica that ended it itself is leaving, so another one is asked first.
    fn leave(&mut self, is_ended: bool) {
        self.open = None;
        self.arrived = PartialEvents::default();
        self.broken = self.broken.or(Some(Instant::now()));
        if is_ended {
            self.target.skip_replica();
        }
    }

    /// Opens a stream. If one was open before, retries until [`RESUME_MAX`] after it broke.
    async fn reopen(&mut self) -> anyhow::Result<()> {
        loop {
            if self.broken.is_some() {
                tokio::time::sleep(self.pause).await;
                self.pause = (self.pause * 2).min(PAUSES.1);
            }
            let error = match self.ask().await {
                Ok(open) => {
                    self.open = Some(open);
                    return Ok(());
                }
                Err(OpenError::Lasting(error)) => return Err(error),
                Err(OpenError::Passing(error)) => error,
            };
            match self.broken {
                Some(broken) if broken.elapsed() < RESUME_MAX => self.target.skip_replica(),
                _ => return Err(error),
            }
        }
    }

    /// Requests a stream from the first replica that responds.
    async fn ask(&self) -> Result<(String, Incoming), OpenError> {
        let settled = self.target.select_replica(false).await;
        settled.map_err(OpenError::Passing)?;
        let url = self.target.url("/admin/v1/events");
        let url = match (&self.last, self.past) {
            (Some(_), _) | (None, 0) => url,
            (None, past) => format!("{url}?last={past}"),
        };
        let request = self.request(&url).map_err(OpenError::Lasting)?;
        let connector = self.target.connector().map_err(OpenError::Lasting)?;
        let answer = connector.client().request(request).await;
        let what = || format!("GET {url}");
        let response = answer
            .map_err(|error| no_answer(&error))
            .with_context(what)
            .map_err(OpenError::Passing)?;
        let status = response.status();
        if status.is_success() {
            return Ok((url, response.into_body()));
        }
        let problem = JsonAnswer::read(response).await;
        let error = match problem.and_then(|answer| answer.success()) {
            Ok(_) => anyhow!("the response is not an event stream"),
            Err(error) => error,
        };
        let error = error.context(what());
        Err(match status {
            StatusCode::SERVICE_UNAVAILABLE => OpenError::Passing(error),
            _ => OpenError::Lasting(error),
        })
    }

    fn request(&self, url: &str) -> anyhow::Result<Request<Empty<Bytes>>> {
        let mut request = Request::get(url).body(Empty::new())?;
        let headers = request.headers_mut();
        if let Some(authorization) = self.target.authorization()? {
            headers.insert(AUTHORIZATION, authorization);
        }
        if let Some(last) = &self.last {
            headers.insert("last-event-id", last.clone());
        }
        Ok(request)
    }
}

/// Bytes of server-sent events that have arrived but were not returned yet.
#[derive(Debug, Default)]
struct PartialEvents(Vec<u8>);

impl PartialEvents {
    fn take(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        if self.0.len() + bytes.len() > EVENT_BYTES_MAX {
            bail!("an event is longer than {EVENT_BYTES_MAX} bytes");
        }
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the next complete event, with its id if it has one. Skips comments.
    fn next(&mut self) -> Option<(Option<String>, Value)> {
        loop {
            let end = self.0.windows(2).position(|pair| pair == b"\n\n")?;
            let event: Vec<u8> = self.0.drain(..end + 2).collect();
            let event = event_of(&String::from_utf8_lossy(&event));
            if event.is_some() {
                return event;
            }
        }
    }
}

fn event_of(text: &str) -> Option<(Option<String>, Value)> {
    let field = |name: &str| {
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim_start)
    };
    let mut event: Value = serde_json::from_str(field("data")?).ok()?;
    // Events about the stream itself have their name only outside the data.
    let name = event.get("event").is_none().then(|| field("event"));
    let fields = event.as_object_mut()?;
    if let Some(name) = name {
        fields.insert("event".to_owned(), json!(name));
    }
    Some((field("id").map(ToOwned::to_owned), event))
}

/// Formats an event as a line of text.
fn line(mut event: Value) -> String {
    let at = match event["at_ms"].take() {
        Value::Null => "-".to_owned(),
        ms => time(&ms),
    };
    let name = cell(&event["event"].take());
    if let Some(fields) = event.as_object_mut() {
        fields.retain(|field, _| !["at_ms", "event"].contains(&field.as_str()));
    }
    let fields = details(&event);
    let fields = fields.lines().map(|line| {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        format!("{name}={}", value.trim_start())
    });
    format!("{at}  {name}  {}", fields.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn events_parse_in_any_chunks() {
        let sent = concat!(
            "event: connected\ndata: {\"applied_index\":7}\n\n",
            ": keep-alive\n\n",
            "id: 1\nevent: leader\ndata: {\"at_ms\":1000,\"event\":\"leader\",\"leader\":2,\"term\":3}\n\n",
        );
        for size in [1, 7, sent.len()] {
            let mut stream = PartialEvents::default();
            let mut lines = Vec::new();
            for bytes in sent.as_bytes().chunks(size) {
                stream.take(bytes).unwrap();
                lines.extend(std::iter::from_fn(|| stream.next()).map(|(_, event)| line(event)));
            }
            assert_eq!(
                lines,
                [
                    "-  connected  applied_index=7",
                    "1970-01-01T00:00:01.000Z  leader  leader=2 term=3"
                ]
            );
        }
    }

    #[derive(clap::Parser)]
    struct Args {
        #[command(flatten)]
        target: AdminTarget,
    }

    /// Acts as a replica that sends one text per stream and then closes it. Returns the requests'
    /// heads.
    async fn breaking(listener: TcpListener, texts: &[&str]) -> Vec<String> {
        let mut heads = Vec::new();
        for text in texts {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            heads.push(String::from_utf8(head).unwrap().to_lowercase());
            let length = text.len();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                 transfer-encoding: chunked\r\n\r\n{length:x}\r\n{text}\r\n"
            );
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
        heads
    }

    #[tokio::test]
    async fn a_broken_stream_resumes_after_the_last_event() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = listener.local_addr().unwrap().to_string();
        let texts = [
            "id: e-1\nevent: role\ndata: {\"n\":1}\n\nid: e-2\nevent: role\ndata: {\"n\"",
            "id: e-1\nevent: connected\ndata: {}\n\nid: e-2\nevent: role\ndata: {\"n\":2}\n\n",
            "event: role\ndata: {\"n\":3}\n\n",
            "event: role\ndata: {\"n\":4}\n\n",
        ];
        let serving = tokio::spawn(async move { breaking(listener, &texts).await });
        let args = Args::parse_from(["events", "--admin", &admin]);
        let mut stream = EventStream::new(args.target, 0);
        let mut seen = Vec::new();
        while seen.len() < 5 {
            seen.push(stream.next().await.unwrap()["n"].clone());
        }
        // A partial event is received again in full, and no event twice.
        assert_eq!(seen, [json!(1), Value::Null, json!(2), json!(3), json!(4)]);
        let heads = serving.await.unwrap();
        assert!(!heads[0].contains("last-event-id"), "{}", heads[0]);
        assert!(heads[1].contains("last-event-id: e-1\r\n"), "{}", heads[1]);
        for head in &heads[2..] {
            assert!(head.contains("last-event-id: e-2\r\n"), "{head}");
        }
    }
}

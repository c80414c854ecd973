//! `quorate events`: follows what changes in the cluster, as one replica sees it.

use std::process::ExitCode;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::Request;
use http::header::AUTHORIZATION;
use http_body_util::{BodyExt, Empty};
use lab::terminal;
use serde_json::{Value, json};

use super::decisions::time;
use super::read::{ReadArgs, details, shown};
use super::table::cell;
use crate::json_client::{JsonAnswer, no_answer};

/// Longest event that is read, in bytes: a replica sends none of this size.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Runs `quorate events` until the replica ends the stream.
pub(super) async fn run(args: ReadArgs) -> anyhow::Result<ExitCode> {
    args.target.settle(false).await?;
    let url = args.target.url("/admin/v1/events");
    let client = args.target.connector()?.client();
    let mut request = Request::get(&url).body(Empty::<Bytes>::new())?;
    if let Some(authorization) = args.target.authorization()? {
        request.headers_mut().insert(AUTHORIZATION, authorization);
    }
    let response = client.request(request).await;
    let response = response
        .map_err(|error| no_answer(&error))
        .with_context(|| format!("GET {url}"))?;
    if !response.status().is_success() {
        let problem = JsonAnswer::read(response).await;
        problem
            .and_then(|answer| answer.success())
            .with_context(|| format!("GET {url}"))?;
        bail!("GET {url}: the answer is no stream");
    }
    let mut body = response.into_body();
    let mut stream = PartialEvents::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.with_context(|| format!("GET {url}: the stream broke off"))?;
        if let Ok(bytes) = frame.into_data() {
            stream.take(&bytes)?;
        }
        while let Some(event) = stream.next() {
            terminal::print(match args.json {
                true => shown(&event.to_string()),
                false => line(event),
            })?;
        }
    }
    bail!("GET {url}: the replica ended the stream")
}

/// Server-sent events that have arrived in part.
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

    /// Returns the next whole event; comments are none.
    fn next(&mut self) -> Option<Value> {
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

fn event_of(text: &str) -> Option<Value> {
    let field = |name: &str| {
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim_start)
    };
    let mut event: Value = serde_json::from_str(field("data")?).ok()?;
    // Those that tell of the stream itself have their name beside the data only.
    let name = event.get("event").is_none().then(|| field("event"));
    let fields = event.as_object_mut()?;
    if let Some(name) = name {
        fields.insert("event".to_owned(), json!(name));
    }
    Some(event)
}

/// An event as a line of text.
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
    use super::*;

    #[test]
    fn events_are_read_in_any_pieces() {
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
                lines.extend(std::iter::from_fn(|| stream.next()).map(line));
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
}

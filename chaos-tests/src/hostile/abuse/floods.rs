//! Floods of HTTP/2 frames. Each frame costs the server more than its sender.

use anyhow::ensure;
use futures_util::future::try_join_all;

use super::context::{ATTACKER, AbuseContext, chat_body};
use super::frames::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, FloodEnd, FloodUntil, HEADERS, PING, PRIORITY,
    RST_STREAM, SETTINGS, WINDOW_UPDATE, chat_fields, field, flood, frame,
};
use crate::processes::access::key;

/// Number of streams that the flood of resets opens.
const RESETS: usize = 4000;
/// Number of frames in the other floods.
const FRAMES: usize = 20_000;
/// Payload of a reset with the error code `CANCEL`.
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// Sends the frames of `what` to all replicas concurrently. Counts and returns the outcomes.
async fn each(
    context: &AbuseContext,
    until: FloodUntil,
    what: impl Fn() -> Box<dyn Iterator<Item = Vec<u8>> + Send>,
) -> anyhow::Result<Vec<FloodEnd>> {
    let replicas = 0..context.data.len();
    let floods = replicas.map(|replica| flood(context, replica, until, what()));
    let ends = try_join_all(floods).await?;
    for end in &ends {
        context.count(end.name());
    }
    Ok(ends)
}

/// Floods replicas with streams: opens them with whole requests and resets each immediately
/// (CVE-2023-44487).
pub(super) async fn rapid_reset(context: &AbuseContext) -> anyhow::Result<()> {
    let ends = each(context, FloodUntil::Ping, || {
        let head = chat_fields(&key(ATTACKER), &[]);
        let body = chat_body("hello", true);
        let streams = (0..RESETS * context.scale).map(move |number| {
            let stream = u32::try_from(2 * number + 1).expect("there are few");
            let mut frames = frame(HEADERS, END_HEADERS, stream, &head);
            frames.extend(frame(DATA, END_STREAM, stream, &body));
            frames.extend(frame(RST_STREAM, 0, stream, &CANCEL));
            frames
        });
        Box::new(streams)
    })
    .await?;
    for end in ends {
        // A server may close the connection with ENHANCE_YOUR_CALM (11) after too many resets of
        // streams that it has not handled yet.
        let calms = end.goaway.is_none_or(|reason| reason == 11);
        ensure!(calms && !end.is_stalled, "{end:?}");
    }
    Ok(())
}

/// Sends a head that never ends, in many frames, full or empty (CVE-2024-27316).
pub(super) async fn continuations(context: &AbuseContext) -> anyhow::Result<()> {
    for fill in [100, 0] {
        let ends = each(context, FloodUntil::Ping, || {
            let head = frame(HEADERS, 0, 1, &chat_fields(&key(ATTACKER), &[]));
            let more = field("x-more", &"m".repeat(fill));
            let more = if fill == 0 { Vec::new() } else { more };
            let frames = (0..FRAMES * context.scale).map(move |_| frame(CONTINUATION, 0, 1, &more));
            Box::new(std::iter::once(head).chain(frames))
        })
        .await?;
        for end in ends {
            ensure!(!end.is_open, "taken: {end:?}");
        }
    }
    Ok(())
}

/// Sends a small head that is very large after decompression. No engine may receive it.
pub(super) async fn unpacked(context: &AbuseContext) -> anyhow::Result<()> {
    const REFERENCES: usize = 8000;
    let ends = each(context, FloodUntil::Answer, || {
        let mut head = chat_fields(&key(ATTACKER), &[]);
        // Adds the field to the table as its first entry, then refers to it by number.
        let mut entry = field("x-large", &"l".repeat(3000));
        entry[0] = 0x40;
        head.extend(entry);
        head.extend([0xbe; REFERENCES]);
        let request = frame(HEADERS, END_HEADERS | END_STREAM, 1, &head);
        Box::new(std::iter::once(request))
    })
    .await?;
    for end in ends {
        // A head of 24 MB is refused, one way or another.
        ensure!(!end.is_stalled, "{end:?}");
    }
    ensure!(context.seen.take_heads().is_empty(), "an engine was asked");
    Ok(())
}

/// Sends frames that require a response, and reads no response. Unsent responses must not pile up
/// in the server.
pub(super) async fn unread_answers(context: &AbuseContext) -> anyhow::Result<()> {
    for kind in [SETTINGS, PING] {
        let ends = each(context, FloodUntil::Unread, || {
            let payload: &[u8] = if kind == PING { b"whatever" } else { &[] };
            // Far more than the sockets' buffers hold.
            let one = frame(kind, 0, 0, payload);
            let frames = (0..FRAMES * context.scale).map(move |_| one.repeat(64));
            Box::new(frames)
        })
        .await?;
        for end in ends {
            ensure!(end.sent < FRAMES * context.scale, "all were taken: {end:?}");
        }
    }
    Ok(())
}

/// Floods replicas with control frames while reading responses: frames that require a response, and
/// frames that do not.
pub(super) async fn control_frames(context: &AbuseContext) -> anyhow::Result<()> {
    let kinds: [(u8, u32, &[u8]); 4] = [
        (SETTINGS, 0, &[]),
        (PING, 0, b"whatever"),
        (PRIORITY, 1, &[0, 0, 0, 0, 16]),
        (WINDOW_UPDATE, 0, &[0, 0, 0, 1]),
    ];
    for (kind, stream, payload) in kinds {
        let ends = each(context, FloodUntil::Ping, || {
            let one = frame(kind, 0, stream, payload);
            Box::new((0..FRAMES * context.scale).map(move |_| one.clone()))
        })
        .await?;
        for end in ends {
            ensure!(!end.is_stalled, "frames of kind {kind}: {end:?}");
        }
    }
    Ok(())
}

/// Sends a request body of empty frames without end.
pub(super) async fn empty_data(context: &AbuseContext) -> anyhow::Result<()> {
    let ends = each(context, FloodUntil::Ping, || {
        let head = frame(HEADERS, END_HEADERS, 1, &chat_fields(&key(ATTACKER), &[]));
        let empty = frame(DATA, 0, 1, &[]);
        let frames = (0..FRAMES * context.scale).map(move |_| empty.clone());
        Box::new(std::iter::once(head).chain(frames))
    })
    .await?;
    for end in ends {
        ensure!(!end.is_stalled, "{end:?}");
    }
    Ok(())
}

/// Sends heads with fields that HTTP/2 forbids. None of them may reach an engine.
pub(super) async fn forbidden_fields(context: &AbuseContext) -> anyhow::Result<()> {
    let bodies = [
        ("x-evil", "a\r\nx-injected: 1"),
        ("x-evil", "a\nb"),
        ("x-evil", "a\0b"),
        ("x-evil\r\nx-injected", "1"),
        ("X-Evil", "upper case"),
        ("transfer-encoding", "chunked"),
        ("connection", "keep-alive"),
        ("content-length", "7"),
        (":path", "/v1/completions"),
        (":method", "GET\r\n"),
    ];
    for forbidden in bodies {
        let ends = each(context, FloodUntil::Answer, || {
            let head = chat_fields(&key(ATTACKER), &[forbidden]);
            let mut request = frame(HEADERS, END_HEADERS, 1, &head);
            request.extend(frame(DATA, END_STREAM, 1, &chat_body("hello", false)));
            Box::new(std::iter::once(request))
        })
        .await?;
        let seen = context.seen.take_heads();
        ensure!(seen.is_empty(), "{forbidden:?} reached an engine: {seen:?}");
        for end in ends {
            // A response reports an invalid request.
            ensure!(!end.is_stalled, "{forbidden:?}: {end:?}");
        }
    }
    Ok(())
}

//! Checks whether the engine publishes KV events that a replica can follow.

use api::engines::kv_transport::endpoint::KvEndpoint;
use api::engines::kv_transport::socket::{SocketMessage, Sockets as _, Zmq};
use api::engines::kv_transport::{AdvertisedEvents, ask_where_published, named_publisher, wire};
use state::BlockSizes;
use state::kv_events::{KvReason, KvRejection};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::answers::fresh_chat;
use super::client::EngineClient;
use super::{CheckOutcome, CheckResult};

const NAME: &str = "KV events";
const QUEUE_MESSAGES: usize = 64;

pub(super) async fn check(
    client: &EngineClient,
    model: &str,
    named: Option<&(KvEndpoint, Option<KvEndpoint>)>,
) -> CheckResult {
    let (setting, sources) = match named {
        None => ("\"auto\"", ask_where_published(&client.url).await),
        Some((events, replay)) => (
            "that endpoint",
            named_publisher(&client.url, events, replay.as_ref()),
        ),
    };
    let sources = match sources {
        Ok(sources) => sources,
        Err(why) => {
            let therefore = "what it has cached is inferred from requests (leases), unless \
                             kv_events names its publisher";
            return CheckResult::new(NAME, CheckOutcome::No, why, therefore);
        }
    };
    match follow(client, model, &sources).await {
        Err(why) => {
            let found = format!("{}: {why}", sources.events);
            let therefore = "what it has cached is inferred from requests (leases)";
            CheckResult::new(NAME, CheckOutcome::No, found, therefore)
        }
        Ok(seen) => {
            let ranks = sources.ranks;
            let found = format!(
                "{}, {ranks} rank(s), blocks of {} tokens, replay: {}",
                sources.events, seen.block_size, seen.replay
            );
            let (outcome, therefore) = judge(&seen, setting);
            CheckResult::new(NAME, outcome, found, therefore)
        }
    }
}

/// Returns what a replica makes of these events, by the rules of the replicated state.
fn judge(seen: &SeenEvents, setting: &str) -> (CheckOutcome, String) {
    let (engine, router) = (seen.block_size, BlockSizes::of_lone_engine(seen.block_size));
    if !engine.is_multiple_of(router) {
        let why = KvReason::Refused(KvRejection::BlockSize { engine, router });
        let therefore = format!(
            "{why}, so what it has cached is inferred from requests (leases): start it with larger \
             blocks (SGLang: --page-size 16)"
        );
        return (CheckOutcome::No, therefore);
    }
    match seen.is_replayed {
        true => (
            CheckOutcome::Yes,
            format!("kv_events = {setting} gives exact ownership, with a tokenizer"),
        ),
        false => (
            CheckOutcome::Partly,
            format!(
                "kv_events = {setting} is exact until the first missed message, then leases: set a \
                 replay_endpoint"
            ),
        ),
    }
}

/// Properties of the publisher, as found by following its events.
struct SeenEvents {
    block_size: u32,
    is_replayed: bool,
    replay: String,
}

async fn follow(
    client: &EngineClient,
    model: &str,
    sources: &AdvertisedEvents,
) -> Result<SeenEvents, String> {
    let deadline = Instant::now() + client.patience;
    let (queue, mut incoming) = mpsc::channel(QUEUE_MESSAGES);
    let sockets = Zmq::default();
    let subscription = sockets.subscribe(sources.side, sources.events.clone(), queue);
    let subscription = tokio::spawn(subscription);
    let stored = async {
        match next(&mut incoming, deadline).await? {
            SocketMessage::Connected => {}
            other => return Err(format!("no subscription: {other:?}")),
        }
        // A publisher registers a subscription a moment after the connection, so the request is
        // repeated until its blocks appear.
        loop {
            let chat = fresh_chat(model, 2);
            let asked = client.post("/v1/chat/completions", &chat).await;
            asked.map_err(|error| error.to_string())?;
            while let Ok(Some(message)) =
                tokio::time::timeout(client.patience / 8, incoming.recv()).await
            {
                match message {
                    SocketMessage::Message(number, payload) => {
                        if let Some(size) = block_size(&payload)? {
                            return Ok((number, size));
                        }
                    }
                    SocketMessage::Broke(why) => return Err(why),
                    SocketMessage::Connected | SocketMessage::End => {}
                }
            }
            if Instant::now() >= deadline {
                return Err("nothing was published about a request".to_owned());
            }
        }
    };
    let stored = stored.await;
    subscription.abort();
    let (number, block_size) = stored?;
    let (is_replayed, replay) = match &sources.replay {
        None => (false, "none".to_owned()),
        Some(address) => {
            let (queue, mut incoming) = mpsc::channel(QUEUE_MESSAGES);
            let replayed = tokio::spawn(sockets.replay(address.clone(), number, queue));
            let first = next(&mut incoming, Instant::now() + client.patience).await;
            replayed.abort();
            match first {
                Ok(SocketMessage::Message(first, _)) if first == number => (true, "yes".to_owned()),
                Ok(other) => (false, format!("{other:?}")),
                Err(why) => (false, why),
            }
        }
    };
    Ok(SeenEvents {
        block_size,
        is_replayed,
        replay,
    })
}

async fn next(
    incoming: &mut mpsc::Receiver<SocketMessage>,
    deadline: Instant,
) -> Result<SocketMessage, String> {
    match timeout_at(deadline, incoming.recv()).await {
        Ok(Some(message)) => Ok(message),
        Ok(None) => Err("the publisher closed the connection".to_owned()),
        Err(_) => Err("the publisher does not respond".to_owned()),
    }
}

/// Returns the tokens per block, from the first `BlockStored` event in a message.
fn block_size(payload: &[u8]) -> Result<Option<u32>, String> {
    let decoded = wire::decode(payload);
    let decoded =
        decoded.map_err(|error| format!("what it publishes cannot be decoded: {error}"))?;
    let stored = decoded.events.iter().find_map(|event| match event {
        wire::EngineEvent::Stored(stored) => Some(stored.block_size),
        wire::EngineEvent::Removed(_) | wire::EngineEvent::Cleared | wire::EngineEvent::Unknown => {
            None
        }
    });
    Ok(stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_with_too_small_blocks_is_not_exact() {
        let judged = |block_size, is_replayed| {
            let seen = SeenEvents {
                block_size,
                is_replayed,
                replay: String::new(),
            };
            judge(&seen, "\"auto\"")
        };
        let (outcome, therefore) = judged(1, true);
        assert_eq!(outcome, CheckOutcome::No);
        assert!(
            therefore.starts_with("its blocks have 1 tokens, the router's 16, so"),
            "{therefore}"
        );
        for size in [8, 16, 24, 32, 784] {
            assert_eq!(judged(size, true).0, CheckOutcome::Yes, "{size}");
            assert_eq!(judged(size, false).0, CheckOutcome::Partly, "{size}");
        }
    }
}

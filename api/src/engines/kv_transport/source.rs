//! Discovers an engine's event source before following it: the model of blocks without an adapter
//! and, with `kv_events = "auto"`, the endpoints.
//!
//! An engine announces the ports at which it publishes itself. It cannot make this replica listen
//! or connect to other hosts or to sockets of this machine: only the config can request that.

use std::net::IpAddr;
use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;
use state::Backend;

use super::endpoint::{KvAddress, KvEndpoint, KvEventsSource, ListeningSide};
use crate::engines::backends::{EngineDialer, EngineHeaders, ProbeClient};

/// Maximum length of a response body, in bytes.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Maximum time to wait for one response.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Addresses of one data-parallel rank's sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankSource {
    pub(crate) rank: u16,
    pub(crate) side: ListeningSide,
    pub(crate) events: KvAddress,
    pub(crate) replay: Option<KvAddress>,
}

/// Event sources of an engine, according to its responses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineSources {
    /// Model of blocks without an adapter; `None` if there are several.
    pub(crate) model: Option<String>,
    /// Whether the engine answered as SGLang does; false also if it was not asked.
    pub(crate) is_sglang: bool,
    pub(crate) ranks: Vec<RankSource>,
}

#[derive(Deserialize)]
struct SourceModels {
    data: Vec<SourceModel>,
}

/// A listed model or adapter. vLLM lists adapters next to their base models (`parent`).
#[derive(Deserialize)]
struct SourceModel {
    id: String,
    #[serde(default)]
    parent: Option<String>,
}

/// A publisher as described by vLLM's `/kv_event_sources` and by SGLang's `kv_events_config`.
#[derive(Deserialize)]
struct Publisher {
    #[serde(default = "yes")]
    enable_kv_cache_events: bool,
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
    /// Whether SGLang listens at the endpoint; `None` if the endpoint determines it.
    #[serde(default)]
    bind: Option<bool>,
}

fn yes() -> bool {
    true
}

const UNSAID: &str = "the engine does not report where it publishes KV events: set kv_events";

/// Response of SGLang to `GET /server_info`. The flag is a string that contains JSON.
#[derive(Deserialize)]
struct ServerInfo {
    #[serde(default)]
    kv_events_config: Option<String>,
    #[serde(default)]
    dp_size: Option<u16>,
}

/// Queries the event sources of `backend`'s engine, with the credentials `headers`, if any.
pub(crate) async fn find(
    backend: &Backend,
    headers: Option<EngineHeaders>,
    dialer: &EngineDialer,
) -> Result<EngineSources, String> {
    let spec = &backend.spec;
    let source = spec.kv_events.as_deref().unwrap_or_default();
    let source: KvEventsSource = source.parse().map_err(|bad| format!("kv_events: {bad}"))?;
    let client = ProbeClient::new(&spec.url, headers, (ANSWER_MAX, dialer));
    let mut client = client.map_err(|failure| failure.to_string())?;
    let host = host(&spec.url);
    let model = match &spec.models[..] {
        [only] if only != "*" => Some(only.clone()),
        _ => {
            let answer = get(&mut client, "/v1/models").await?;
            let answer = answer.ok_or("the engine lists no models")?;
            base_model(&answer)?
        }
    };
    let (ranks, is_sglang) = match source {
        KvEventsSource::At(events) => {
            let replay = spec.kv_replay.as_deref().map(str::parse::<KvEndpoint>);
            let replay = replay
                .transpose()
                .map_err(|bad| format!("kv_replay: {bad}"))?;
            (ranks_of(&events, replay.as_ref(), &host)?, false)
        }
        KvEventsSource::Auto => ask_where(&mut client, &host).await?,
    };
    Ok(EngineSources {
        model,
        is_sglang,
        ranks,
    })
}

/// Event endpoints that an engine announces or that an operator configures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdvertisedEvents {
    /// Side that listens for connections.
    pub side: ListeningSide,
    /// Address of the first rank's events.
    pub events: KvAddress,
    /// Address of the first rank's replays, if the engine offers any.
    pub replay: Option<KvAddress>,
    /// Number of data-parallel ranks.
    pub ranks: usize,
}

/// Queries the engine at `url` for its event endpoints, as with `kv_events = "auto"`.
///
/// # Errors
/// Returns a description of the failure.
pub async fn ask_where_published(url: &str) -> Result<AdvertisedEvents, String> {
    let client = ProbeClient::new(url, None, (ANSWER_MAX, &EngineDialer::default()));
    let mut client = client.map_err(|failure| failure.to_string())?;
    first_of(ask_where(&mut client, &host(url)).await?.0)
}

/// Returns the event endpoints of the engine at `url` as an operator configures them.
///
/// # Errors
/// Returns an error if a rank's port would exceed 65535.
pub fn named_publisher(
    url: &str,
    events: &KvEndpoint,
    replay: Option<&KvEndpoint>,
) -> Result<AdvertisedEvents, String> {
    first_of(ranks_of(events, replay, &host(url))?)
}

fn first_of(ranks: Vec<RankSource>) -> Result<AdvertisedEvents, String> {
    let count = ranks.len();
    let first = ranks.into_iter().next();
    first
        .map(|first| AdvertisedEvents {
            side: first.side,
            events: first.events,
            replay: first.replay,
            ranks: count,
        })
        .ok_or_else(|| "the engine publishes no KV events".to_owned())
}

/// Returns the event endpoints that the engine announces, and whether it does so as SGLang does.
async fn ask_where(
    client: &mut ProbeClient,
    host: &str,
) -> Result<(Vec<RankSource>, bool), String> {
    if let Some(answer) = get(client, "/kv_event_sources").await? {
        return Ok((read_sources(&answer, host)?, false));
    }
    match get(client, "/server_info").await? {
        Some(answer) => Ok((read_server_info(&answer, host)?, true)),
        None => Err(UNSAID.to_owned()),
    }
}

/// Parses vLLM's response and returns the endpoints by rank.
fn read_sources(answer: &[u8], host: &str) -> Result<Vec<RankSource>, String> {
    let sources: std::collections::BTreeMap<String, Publisher> =
        serde_json::from_slice(answer).map_err(|error| format!("/kv_event_sources: {error}"))?;
    let mut ranks = Vec::new();
    for (rank, publisher) in sources {
        let rank = rank
            .parse()
            .map_err(|_| "/kv_event_sources: no rank".to_owned())?;
        let (events, replay) = endpoints(&publisher, host)?;
        // In this form, each rank has its own ports.
        ranks.extend(
            ranks_of(&events, replay.as_ref(), host)?
                .into_iter()
                .map(|source| RankSource { rank, ..source }),
        );
    }
    match ranks.is_empty() {
        true => Err("the engine publishes no KV events".to_owned()),
        false => Ok(ranks),
    }
}

fn read_server_info(answer: &[u8], host: &str) -> Result<Vec<RankSource>, String> {
    let bad = |error| format!("/server_info: {error}");
    let info: serde_json::Value = serde_json::from_slice(answer).map_err(bad)?;
    // vLLM serves unrelated content under this path (with VLLM_SERVER_DEV_MODE).
    if info.get("kv_events_config").is_none() {
        return Err(UNSAID.to_owned());
    }
    let info = ServerInfo::deserialize(info).map_err(bad)?;
    let config = info.kv_events_config.filter(|config| !config.is_empty());
    let config = config.ok_or("the engine publishes no KV events")?;
    let mut publisher: Publisher = serde_json::from_str(&config).map_err(bad)?;
    // Unlike vLLM, SGLang listens there.
    let is_any = |endpoint: &String| endpoint.contains("0.0.0.0");
    if publisher.endpoint.as_ref().is_some_and(is_any) {
        publisher.bind.get_or_insert(true);
    }
    let (mut events, mut replay) = endpoints(&publisher, host)?;
    events.ranks = info.dp_size.unwrap_or(1).max(1);
    if let Some(replay) = &mut replay {
        replay.ranks = events.ranks;
    }
    ranks_of(&events, replay.as_ref(), host)
}

/// Returns the endpoints that an engine at `host` announces.
fn endpoints(
    publisher: &Publisher,
    host: &str,
) -> Result<(KvEndpoint, Option<KvEndpoint>), String> {
    let is_zmq = publisher.publisher.as_deref().is_none_or(|it| it == "zmq");
    if !publisher.enable_kv_cache_events || !is_zmq {
        return Err("the engine publishes no KV events".to_owned());
    }
    let events = publisher.endpoint.as_deref().unwrap_or("tcp://*:5557");
    let looks_bound = ["ipc://", "bind:"].iter().any(|it| events.starts_with(it))
        || events.contains('*')
        || events.contains("::");
    if !publisher.bind.unwrap_or(looks_bound) {
        return Err(format!(
            "the engine dials {events}: name kv_events = \"bind:{events}\""
        ));
    }
    let replay = publisher
        .replay_endpoint
        .as_deref()
        .filter(|it| !it.is_empty());
    let own = |endpoint| own_endpoint(endpoint, host);
    Ok((own(events)?, replay.map(own).transpose()?))
}

/// Parses an endpoint reported by an engine at `host` and checks that it is the engine's own.
fn own_endpoint(text: &str, host: &str) -> Result<KvEndpoint, String> {
    let mut endpoint: KvEndpoint = text.parse().map_err(|bad| format!("{text}: {bad}"))?;
    let is_own = match &mut endpoint.address {
        KvAddress::Ipc(_) => is_this_machine(host),
        KvAddress::Tcp { host: named, .. } => {
            // The engine announces a wildcard address, so it is reached at `host`.
            if matches!(named.as_deref(), Some("[::]" | "0.0.0.0")) {
                *named = None;
            }
            named.as_deref().is_none_or(|named| named == host)
        }
    };
    match endpoint.side {
        ListeningSide::Engine if is_own => Ok(endpoint),
        ListeningSide::Engine | ListeningSide::Here => Err(format!(
            "the engine at {host} names {text}, which is not on its host: if that is right, name it in kv_events"
        )),
    }
}

/// Whether `host` is `localhost` or a loopback address, so that its engine runs on this machine.
fn is_this_machine(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    let is_loopback = |address: IpAddr| address.is_loopback();
    host == "localhost" || address.parse().is_ok_and(is_loopback)
}

fn ranks_of(
    events: &KvEndpoint,
    replay: Option<&KvEndpoint>,
    host: &str,
) -> Result<Vec<RankSource>, String> {
    let of_rank = |rank| {
        let replay = replay.map(|replay| replay.of_rank(rank, host));
        Some(RankSource {
            rank,
            side: events.side,
            events: events.of_rank(rank, host)?,
            replay: match replay {
                Some(address) => Some(address?),
                None => None,
            },
        })
    };
    let ranks: Option<Vec<RankSource>> = (0..events.ranks).map(of_rank).collect();
    ranks.ok_or("there are not so many ports".to_owned())
}

fn base_model(answer: &[u8]) -> Result<Option<String>, String> {
    let models: SourceModels =
        serde_json::from_slice(answer).map_err(|error| format!("/v1/models: {error}"))?;
    let mut bases = models
        .data
        .into_iter()
        .filter(|model| model.parent.is_none());
    let first = bases.next().ok_or("the engine lists no models")?;
    Ok(bases.next().is_none().then_some(first.id))
}

/// Returns the body of a successful response; `None` if the engine does not know the path.
async fn get(client: &mut ProbeClient, path: &str) -> Result<Option<bytes::Bytes>, String> {
    let answer = client.get(path, BODY_BYTES_MAX).await;
    let answer = answer.map_err(|failure| format!("{path}: {failure}"))?;
    match answer.status {
        status if status.is_success() => Ok(Some(answer.body)),
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => Ok(None),
        status => Err(format!("{path}: status {}", status.as_u16())),
    }
}

/// Returns the host of a backend's URL, which was validated on registration.
fn host(url: &str) -> String {
    let uri = url.parse::<http::Uri>().unwrap_or_default();
    uri.host().unwrap_or("localhost").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(found: Result<Vec<RankSource>, String>) -> String {
        match found {
            Ok(ranks) => ranks
                .iter()
                .map(|it| {
                    let replay = it.replay.as_ref().map(ToString::to_string);
                    format!("{} {} {}\n", it.rank, it.events, replay.unwrap_or_default())
                })
                .collect(),
            Err(why) => why,
        }
    }

    #[test]
    fn vllm_publishers_are_read_per_rank() {
        let answer = br#"{
            "0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                  "replay_endpoint": "tcp://*:5600", "buffer_steps": 10000, "topic": ""},
            "1": {"endpoint": "tcp://*:5558", "replay_endpoint": null}
        }"#;
        let found = shown(read_sources(answer, "gpu"));
        assert_eq!(
            found,
            "0 tcp://gpu:5557 tcp://gpu:5600\n1 tcp://gpu:5558 \n"
        );
        let off = shown(read_sources(
            br#"{"0": {"enable_kv_cache_events": false}}"#,
            "gpu",
        ));
        assert_eq!(off, "the engine publishes no KV events");
        let dials = shown(read_sources(
            br#"{"0": {"endpoint": "tcp://10.0.0.9:5557"}}"#,
            "gpu",
        ));
        assert!(dials.contains("bind:tcp://10.0.0.9:5557"), "{dials}");
    }

    #[test]
    fn an_engine_may_not_redirect_readers_to_other_hosts() {
        let told = |events: &str, replay: &str, host| {
            let answer =
                format!(r#"{{"0": {{"endpoint": {events:?}, "replay_endpoint": {replay:?}}}}}"#);
            shown(read_sources(answer.as_bytes(), host))
        };
        for (events, replay) in [
            ("tcp://evil::1:5557", ""),
            ("tcp://[fe80::1]:5557", ""),
            ("ipc:///run/docker.sock", ""),
            ("bind:tcp://*:22", ""),
            ("bind:ipc:///run/x", ""),
            ("tcp://*:5557", "tcp://169.254.169.254:80"),
            ("tcp://*:5557", "ipc:///run/docker.sock"),
            ("tcp://*:5557", "bind:tcp://*:22"),
        ] {
            let found = told(events, replay, "gpu");
            assert!(
                found.contains("not on its host"),
                "{events} {replay}: {found}"
            );
        }
        assert_eq!(
            told("tcp://[::]:5557", "tcp://0.0.0.0:5600", "gpu"),
            "0 tcp://gpu:5557 tcp://gpu:5600\n"
        );
        assert_eq!(
            told("tcp://[::1]:5557", "", "[::1]"),
            "0 tcp://[::1]:5557 \n"
        );
        for host in ["localhost", "127.0.0.1", "[::1]"] {
            assert_eq!(told("ipc:///run/kv", "", host), "0 ipc:///run/kv \n");
        }
    }

    #[test]
    fn sglang_publisher_ports_are_derived_per_rank() {
        let answer = br#"{
            "dp_size": 2,
            "kv_events_config": "{\"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5557\"}"
        }"#;
        let found = shown(read_server_info(answer, "gpu"));
        assert_eq!(found, "0 tcp://gpu:5557 \n1 tcp://gpu:5558 \n");
        let told = |endpoint: &str, bind: &str| {
            let config = format!(r#"{{"publisher": "zmq", "endpoint": "{endpoint}"{bind}}}"#);
            let info = serde_json::json!({ "kv_events_config": config });
            shown(read_server_info(info.to_string().as_bytes(), "gpu"))
        };
        let here = "0 tcp://gpu:5557 \n";
        assert_eq!(told("tcp://0.0.0.0:5557", ""), here);
        assert_eq!(told("tcp://gpu:5557", r#", "bind": true"#), here);
        for (endpoint, bind) in [
            ("tcp://gpu:5557", ""),
            ("tcp://*:5557", r#", "bind": false"#),
        ] {
            assert!(
                told(endpoint, bind).starts_with("the engine dials"),
                "{endpoint}"
            );
        }
        let off = shown(read_server_info(br#"{"kv_events_config": null}"#, "gpu"));
        assert_eq!(off, "the engine publishes no KV events");
        // From 0.12 on, vLLM responds like this, and may publish events.
        let vllm = shown(read_server_info(br#"{"vllm_config": "model='m'"}"#, "gpu"));
        assert_eq!(vllm, UNSAID);
    }

    #[test]
    fn the_base_model_excludes_adapters() {
        let one = br#"{"data": [{"id": "base", "parent": null}, {"id": "ada", "parent": "base"}]}"#;
        assert_eq!(base_model(one), Ok(Some("base".to_owned())));
        assert_eq!(
            base_model(br#"{"data": [{"id": "a"}, {"id": "b"}]}"#),
            Ok(None)
        );
        assert!(base_model(br#"{"data": []}"#).is_err());
    }
}

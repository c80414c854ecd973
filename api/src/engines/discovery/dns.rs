//! `kind = "dns"`: engines at the addresses of a host name, resolved again when its TTL expires, or
//! earlier if the configured interval is shorter.
//!
//! A name without records counts as a failed lookup, so that a zone that loads late removes no
//! engine. A lookup of SRV records also fails if that of one of their hosts fails. A host without
//! addresses is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};
use state::discovery::{EngineCondition, ListedEngine, RefusedEngine};

use super::source_status::{DiscoveryBoard, SourceReading};
use super::{DnsSource, EngineTemplate};
use crate::engines::backends::EngineDialer;

/// Minimum interval between lookups, whatever the TTL.
const INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Maximum pause before a failed lookup is retried.
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Timeout of a query to a name server.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of concurrent lookups of the hosts in service records.
const HOSTS_AT_ONCE: usize = 16;
/// Maximum number of hosts in service records that are looked up.
const HOSTS_MAX: usize = 4096;

/// Result of a lookup, with the time for which it is valid.
#[derive(Debug, Default)]
struct NameAnswer {
    places: BTreeSet<(IpAddr, u16)>,
    refused: Vec<RefusedEngine>,
    ttl: Duration,
}

/// Reports the addresses of the name to `board` for as long as it is polled.
pub(super) async fn follow(
    source: &DnsSource,
    template: &EngineTemplate,
    (board, dialer): (&DiscoveryBoard, &EngineDialer),
) {
    let mut resolver = None;
    loop {
        let looked = look(source, &mut resolver).await;
        let wait = match &looked {
            Ok(answer) => answer.ttl.min(source.interval),
            Err(_) => source.interval.min(RETRY_MAX),
        };
        let looked = looked.map(|answer| reading(answer, template, dialer));
        board.record_report(&template.source, looked);
        tokio::time::sleep(wait.max(INTERVAL_MIN)).await;
    }
}

/// Converts the addresses of a lookup to engines, and refuses those that the rules do not allow.
fn reading(answer: NameAnswer, template: &EngineTemplate, dialer: &EngineDialer) -> SourceReading {
    let mut reading = SourceReading {
        engines: Vec::with_capacity(answer.places.len()),
        refused: answer.refused,
    };
    for (ip, port) in answer.places {
        match dialer.check_told(ip) {
            Ok(()) => reading.engines.push(ListedEngine {
                spec: template.at(None, (ip, port), &BTreeMap::new()),
                condition: EngineCondition::Ready,
            }),
            Err(refused) => reading.refused.push(RefusedEngine {
                engine: SocketAddr::new(ip, port).to_string(),
                reason: refused.to_string(),
            }),
        }
    }
    reading
}

async fn look(
    source: &DnsSource,
    resolver: &mut Option<TokioResolver>,
) -> Result<NameAnswer, String> {
    let resolver = match resolver {
        Some(resolver) => resolver,
        None => resolver.insert(resolver_of(source).map_err(|error| error.to_string())?),
    };
    let name = &*source.name;
    match source.port {
        None => services(resolver, name).await,
        Some(port) => addresses(resolver, (name, port)).await,
    }
    .map_err(|error| match error.is_no_records_found() {
        true if error.is_nx_domain() => format!("the name {name} does not exist"),
        true => format!("the name {name} has no records of this kind"),
        false => format!("look up {name}: {error}"),
    })
}

/// Record types in the order of preference. AAAA is queried only without A records, because an
/// engine with both is one engine.
const KINDS: [RecordType; 2] = [RecordType::A, RecordType::AAAA];

fn resolver_of(source: &DnsSource) -> Result<TokioResolver, NetError> {
    let mut builder = match source.resolver {
        None => TokioResolver::builder_tokio()?,
        Some(address) => {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            for connection in &mut server.connections {
                connection.port = address.port();
            }
            let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        }
    };
    let options = builder.options_mut();
    // The TTL determines the interval between lookups.
    options.cache_size = 0;
    options.timeout = TIMEOUT;
    builder.build()
}

/// Looks up the addresses of `name`: records of the first of [`KINDS`] that has any.
async fn addresses(
    resolver: &TokioResolver,
    (name, port): (&str, u16),
) -> Result<NameAnswer, NetError> {
    let mut nothing = None;
    for kind in KINDS {
        match resolver.lookup(name, kind).await {
            Ok(found) => {
                let records = found.answers();
                let addresses = records.iter().filter_map(|record| match &record.data {
                    RData::A(address) => Some(IpAddr::from(address.0)),
                    RData::AAAA(address) => Some(IpAddr::from(address.0)),
                    _ => None,
                });
                return Ok(NameAnswer {
                    places: addresses.map(|ip| (ip, port)).collect(),
                    refused: Vec::new(),
                    ttl: ttl(records.iter().map(|record| record.ttl)),
                });
            }
            Err(error) if error.is_no_records_found() => nothing = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(nothing.unwrap_or_else(|| NetError::from("no kind of record was asked for")))
}

/// Looks up the service records of `name`, then the addresses of their hosts.
async fn services(resolver: &TokioResolver, name: &str) -> Result<NameAnswer, NetError> {
    let found = resolver.lookup(name, RecordType::SRV).await?;
    let records = found.answers();
    let hosts: BTreeSet<(String, u16)> = records
        .iter()
        .filter_map(|record| match &record.data {
            RData::SRV(service) => Some((service.target.to_string(), service.port)),
            _ => None,
        })
        .take(HOSTS_MAX)
        .collect();
    let mut answer = NameAnswer {
        ttl: ttl(records.iter().map(|record| record.ttl)),
        ..NameAnswer::default()
    };
    let looking = hosts.into_iter().map(|(host, port)| async move {
        let looked = addresses(resolver, (&host, port)).await;
        (host, looked)
    });
    let mut looked = stream::iter(looking).buffer_unordered(HOSTS_AT_ONCE);
    while let Some((host, looked)) = looked.next().await {
        match looked {
            Ok(found) => {
                answer.ttl = answer.ttl.min(found.ttl);
                answer.places.extend(found.places);
            }
            Err(error) if error.is_no_records_found() => answer.refused.push(RefusedEngine {
                engine: host,
                reason: "the host has no address".to_owned(),
            }),
            Err(error) => return Err(error),
        }
    }
    Ok(answer)
}

fn ttl(seconds: impl Iterator<Item = u32>) -> Duration {
    Duration::from_secs(seconds.min().unwrap_or(0).into())
}

//! A name whose records change, served by a DNS server on loopback.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use hickory_resolver::proto::rr::rdata::{A, AAAA, SOA, SRV};
use hickory_resolver::proto::rr::{LowerName, Name, RData, Record, RecordType};
use hickory_server::Server;
use hickory_server::store::in_memory::InMemoryZoneHandler;
use hickory_server::zone_handler::{AxfrPolicy, Catalog, ZoneType};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::AbortHandle;

use super::*;
use crate::engines::discovery::DnsSource;
use crate::engines::discovery::dns::follow;

/// A DNS server of the zone `test.`, which runs until it is dropped.
struct Zone {
    at: SocketAddr,
    zone: Arc<InMemoryZoneHandler>,
    server: Server<Catalog>,
    serial: u32,
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

/// Returns sockets for UDP and TCP with one port. The port of one may be taken for the other.
async fn sockets() -> (UdpSocket, TcpListener) {
    loop {
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = udp.local_addr().unwrap();
        match TcpListener::bind(at).await {
            Ok(tcp) => return (udp, tcp),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse),
        }
    }
}

impl Zone {
    async fn start() -> Self {
        let zone: InMemoryZoneHandler =
            InMemoryZoneHandler::empty(name("test."), ZoneType::Primary, AxfrPolicy::Deny);
        let zone = Arc::new(zone);
        let mut catalog = Catalog::new();
        catalog.upsert(LowerName::from(name("test.")), vec![Arc::clone(&zone) as _]);
        let mut server = Server::new(catalog);
        let (udp, tcp) = sockets().await;
        let at = udp.local_addr().unwrap();
        server.register_socket(udp);
        server.register_listener(tcp, PATIENCE, 65_535);
        let mut this = Self {
            at,
            zone,
            server,
            serial: 0,
        };
        let soa = SOA::new(name("ns.test."), name("me.test."), 1, 60, 60, 60, 1);
        this.put("test.", 1, RData::SOA(soa)).await;
        this
    }

    async fn put(&mut self, owner: &str, ttl: u32, data: RData) {
        self.serial += 1;
        let record = Record::from_rdata(name(owner), ttl, data);
        self.zone.upsert(record, self.serial).await;
    }

    /// Points the name `owner` to exactly these addresses.
    async fn lead(&mut self, owner: &str, hosts: &[u8]) {
        self.forget(owner, RecordType::A).await;
        for host in hosts {
            let address = A(Ipv4Addr::new(10, 0, 0, *host));
            self.put(owner, 1, RData::A(address)).await;
        }
    }

    async fn forget(&mut self, owner: &str, kind: RecordType) {
        let key = hickory_resolver::proto::rr::RrKey::new(LowerName::from(name(owner)), kind);
        self.zone.records_mut().await.remove(&key);
    }

    fn source(&self, host: &str) -> DnsSource {
        DnsSource {
            name: host.to_owned(),
            port: (!host.starts_with('_')).then_some(8000),
            interval: Duration::from_secs(3600),
            resolver: Some(self.at),
        }
    }
}

/// A task that follows a name until it is dropped, with its board.
struct Following(Arc<DiscoveryBoard>, AbortHandle);

impl Drop for Following {
    fn drop(&mut self) {
        self.1.abort();
    }
}

fn following(source: DnsSource) -> Following {
    let board = board(SourceKind::Dns(source.clone()));
    let told = Arc::clone(&board);
    let task = tokio::spawn(async move {
        follow(&source, &template("it"), (&told, &dialer())).await;
    });
    Following(board, task.abort_handle())
}

#[tokio::test]
async fn dns_follows_the_ttl_and_keeps_engines_on_failure() {
    let mut zone = Zone::start().await;
    zone.lead("engines.test.", &[7, 8]).await;
    // The TTL is one second, the interval an hour.
    let it = following(zone.source("engines.test."));
    let first = says(&it.0, "10-0-0-7-8000 10-0-0-8-8000").await;
    assert_eq!(first.engines[0].spec.url, "http://10.0.0.7:8000");
    zone.lead("engines.test.", &[8, 9]).await;
    says(&it.0, "10-0-0-8-8000 10-0-0-9-8000").await;
    zone.lead("engines.test.", &[]).await;
    let why = fails(&it.0).await;
    assert!(why.starts_with("the name engines.test. "), "{why}");
    zone.lead("engines.test.", &[9]).await;
    says(&it.0, "10-0-0-9-8000").await;
    zone.server.shutdown_gracefully().await.unwrap();
    let why = fails(&it.0).await;
    assert!(why.starts_with("look up engines.test.: "), "{why}");
}

#[tokio::test]
async fn srv_records_resolve_to_hosts_and_ipv6_is_a_fallback() {
    let mut zone = Zone::start().await;
    let service = |port, host: &str| RData::SRV(SRV::new(0, 0, port, name(host)));
    zone.put("_http._tcp.test.", 60, service(81, "a.test."))
        .await;
    zone.put("_http._tcp.test.", 60, service(82, "b.test."))
        .await;
    zone.put("_http._tcp.test.", 60, service(83, "none.test."))
        .await;
    zone.lead("a.test.", &[1]).await;
    let six = AAAA(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));
    zone.put("b.test.", 60, RData::AAAA(six)).await;
    let it = following(zone.source("_http._tcp.test."));
    let reading = says(&it.0, "10-0-0-1-81 fd00--2-82").await;
    assert_eq!(reading.refused[0].engine, "none.test.");
    let six = following(zone.source("b.test."));
    let reading = says(&six.0, "fd00--2-8000").await;
    assert_eq!(reading.engines[0].spec.url, "http://[fd00::2]:8000");
    let none = following(zone.source("_grpc._tcp.test."));
    let why = fails(&none.0).await;
    assert!(why.ends_with("_grpc._tcp.test. does not exist"), "{why}");
}

#[tokio::test]
async fn disallowed_dns_addresses_are_refused_individually() {
    let mut zone = Zone::start().await;
    zone.lead("engines.test.", &[1]).await;
    for address in [[127, 0, 0, 1], [169, 254, 169, 254], [0, 0, 0, 0]] {
        let data = RData::A(A(Ipv4Addr::from(address)));
        zone.put("engines.test.", 60, data).await;
    }
    let source = zone.source("engines.test.");
    let board = board(SourceKind::Dns(source.clone()));
    let told = Arc::clone(&board);
    let task = tokio::spawn(async move {
        follow(&source, &template("it"), (&told, &EngineDialer::default())).await;
    });
    let reading = says(&board, "10-0-0-1-8000").await;
    let refused: Vec<_> = reading.refused.iter().map(|it| &*it.engine).collect();
    assert_eq!(
        refused,
        ["0.0.0.0:8000", "127.0.0.1:8000", "169.254.169.254:8000"]
    );
    task.abort();
}

#[tokio::test]
async fn a_dns_answer_of_a_thousand_addresses_is_complete() {
    let mut zone = Zone::start().await;
    for number in 0..1000_u16 {
        let [high, low] = number.to_be_bytes();
        let data = RData::A(A(Ipv4Addr::new(10, 1, high, low)));
        zone.put("engines.test.", 60, data).await;
    }
    // The response is too long for a datagram.
    let it = following(zone.source("engines.test."));
    let told = async {
        loop {
            if let Some(reading) = it.0.reading("it") {
                return reading.engines.len();
            }
            it.0.changed().await;
        }
    };
    let told = tokio::time::timeout(PATIENCE, told).await;
    assert_eq!(told.expect("it answers in time"), 1000);
}

//! Replicas that find each other by name, with a real name server.
//!
//! `cluster.peers_dns` is resolved by the system. Each replica therefore gets the test's
//! `resolv.conf` in its own mount namespace, which only root may create.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use hickory_server::Server;
use hickory_server::proto::rr::rdata::{A, SOA};
use hickory_server::proto::rr::{LowerName, Name, RData, Record, RecordType, RrKey};
use hickory_server::store::in_memory::InMemoryZoneHandler;
use hickory_server::zone_handler::{AxfrPolicy, Catalog, ZoneType};
use tempfile::TempDir;
use tokio::net::UdpSocket;
use tokio::runtime::Runtime;

use super::process::{Replica, free, get, until};

/// A name server for the zone `test.`, and the loopback hosts in it.
struct Names {
    runtime: Runtime,
    zone: Arc<InMemoryZoneHandler>,
    _server: Server<Catalog>,
    /// Second and third byte of all addresses, unique to this test.
    net: [u8; 2],
    peer_port: u16,
    serial: u32,
    resolv_conf: TempDir,
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

impl Names {
    /// Starts a name server at port 53, the only one that `resolv.conf` supports.
    fn start() -> Self {
        let [peers] = free();
        let [high, low] = peers.port().to_be_bytes();
        let net = [high.max(1), low];
        let at = SocketAddr::from((Ipv4Addr::new(127, net[0], net[1], 53), 53));
        let runtime = Runtime::new().unwrap();
        let zone: InMemoryZoneHandler =
            InMemoryZoneHandler::empty(name("test."), ZoneType::Primary, AxfrPolicy::Deny);
        let zone = Arc::new(zone);
        let mut catalog = Catalog::new();
        catalog.upsert(LowerName::from(name("test.")), vec![Arc::clone(&zone) as _]);
        let server = runtime.block_on(async {
            let mut server = Server::new(catalog);
            server.register_socket(UdpSocket::bind(at).await.unwrap());
            server
        });
        let resolv_conf = TempDir::new().unwrap();
        let text = format!("nameserver {}\noptions timeout:1\n", at.ip());
        std::fs::write(resolv_conf.path().join("resolv.conf"), text).unwrap();
        let mut this = Self {
            runtime,
            zone,
            _server: server,
            net,
            peer_port: peers.port(),
            serial: 0,
            resolv_conf,
        };
        let soa = SOA::new(name("ns.test."), name("me.test."), 1, 60, 60, 60, 1);
        this.put("test.", RData::SOA(soa));
        this
    }

    fn put(&mut self, owner: &str, data: RData) {
        self.serial += 1;
        let record = Record::from_rdata(name(owner), 1, data);
        self.runtime.block_on(self.zone.upsert(record, self.serial));
    }

    fn address(&self, host: u8) -> Ipv4Addr {
        Ipv4Addr::new(127, self.net[0], self.net[1], host)
    }

    /// Makes `peers.test.` resolve to these hosts only.
    fn lead(&mut self, hosts: &[u8]) {
        let key = RrKey::new(LowerName::from(name("peers.test.")), RecordType::A);
        self.runtime.block_on(async {
            self.zone.records_mut().await.remove(&key);
        });
        for host in hosts {
            let address = self.address(*host);
            self.put("peers.test.", RData::A(A(address)));
        }
    }

    /// Starts replica `id` at a host, in a folder.
    fn replica(&self, dir: TempDir, id: u8, host: u8) -> Replica {
        let peer = SocketAddr::from((self.address(host), self.peer_port));
        let config = format!(
            "[cluster]\npeers_dns = \"peers.test:{}\"\nbootstrap_expect = 3\n",
            self.peer_port
        );
        let resolv_conf = self.resolv_conf.path().join("resolv.conf");
        Replica::start_in(dir, id, peer, &config, |command| {
            in_namespace(&command, &resolv_conf)
        })
    }
}

/// Wraps a command in a namespace with another `/etc/resolv.conf`. The shell replaces itself with
/// the program, so that signals reach it.
fn in_namespace(command: &Command, resolv_conf: &Path) -> Command {
    let mut wrapped = Command::new("unshare");
    let script = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
    wrapped.args(["--mount", "sh", "-c", script]);
    wrapped.arg(resolv_conf).arg(command.get_program());
    wrapped.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped
}

fn may_unshare() -> bool {
    let tried = Command::new("unshare").args(["--mount", "true"]).output();
    tried.is_ok_and(|tried| tried.status.success())
}

/// Returns the addresses of the members that a replica with a quorum knows.
fn members(replica: &Replica) -> Vec<String> {
    let Some(cluster) = get(replica.admin, "/admin/v1/cluster").map(|it| it.json()) else {
        return Vec::new();
    };
    if cluster["has_quorum"] != true {
        return Vec::new();
    }
    let members = cluster["members"].as_object().cloned().unwrap_or_default();
    let mut addresses: Vec<String> = members
        .values()
        .map(|it| it["peer"].as_str().unwrap().to_owned())
        .collect();
    addresses.sort();
    addresses
}

#[test]
fn replicas_find_each_other_by_a_changing_dns_name() {
    if !may_unshare() {
        eprintln!("skipped: only root may make a mount namespace");
        return;
    }
    let mut names = Names::start();
    let at = |names: &Names, hosts: &[u8]| {
        let at = |host: &u8| format!("{}:{}", names.address(*host), names.peer_port);
        hosts.iter().map(at).collect::<Vec<_>>()
    };
    // The name resolves to two of the replicas and to an address without one.
    names.lead(&[1, 2, 9]);
    let dir = || TempDir::new().unwrap();
    let one = names.replica(dir(), 1, 1);
    let two = names.replica(dir(), 2, 2);
    let three = names.replica(dir(), 3, 3);
    one.process
        .says(&["waiting for 3 replicas, found 2", "Connection refused"]);
    three
        .process
        .says(&["waiting for replica 1, the lowest id", "Connection refused"]);
    names.lead(&[1, 2, 3]);
    let all = at(&names, &[1, 2, 3]);
    until("the three are one cluster", || {
        [&one, &two, &three].iter().all(|it| members(it) == all)
    });

    // One returns at another address, with its store.
    let Replica { process, dir, .. } = three;
    drop(process);
    names.lead(&[1, 2, 4]);
    let three = names.replica(dir, 3, 4);
    let all = at(&names, &[1, 2, 4]);
    until("the others know its new address", || {
        [&one, &two, &three].iter().all(|it| members(it) == all)
    });

    // A new replica also finds the cluster by name.
    names.lead(&[1, 2, 4, 5]);
    let four = names.replica(TempDir::new().unwrap(), 4, 5);
    let all = at(&names, &[1, 2, 4, 5]);
    until("the fourth is let in", || members(&four) == all);
}

//! Addresses and config files of a cluster's processes.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::Context as _;

use super::access::ClusterSecrets;
use super::options::{Addresses, ClusterOptions, Site};
use crate::netns::NetnsNetwork;

/// Number of ports per replica.
const PORTS: usize = 4;
/// Fixed data port, used like the following ports if every replica has a host of its own.
const DATA_PORT: u16 = 7080;
const ADMIN_PORT: u16 = 7081;
const PEER_PORT: u16 = 7082;
const PICKER_PORT: u16 = 7083;
const ENGINE_PORT: u16 = 7100;

/// Addresses of all processes of a cluster.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) replicas: Vec<Addresses>,
    pub(super) engines: Vec<SocketAddr>,
    /// Numbers of the replicas that found the cluster.
    pub(super) founders: Vec<usize>,
    /// Network of the hosts; `None` on loopback.
    pub(super) network: Option<NetnsNetwork>,
}

impl Layout {
    /// Assigns all addresses and creates the hosts, if any.
    pub(super) fn new(options: &ClusterOptions) -> anyhow::Result<Self> {
        let replicas = usize::from(options.replicas) + usize::from(options.spares);
        let engines = usize::from(options.engines);
        let mut layout = match options.site {
            Site::Loopback => Self::on_loopback(replicas, engines)?,
            Site::Namespaces => Self::on_hosts(replicas, engines)?,
        };
        layout.founders = (0..usize::from(options.replicas)).collect();
        Ok(layout)
    }

    fn on_loopback(replicas: usize, engines: usize) -> anyhow::Result<Self> {
        let ports = lab::ports::free(PORTS * replicas + engines)?;
        let at = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let (replica_ports, engine_ports) = ports.split_at(PORTS * replicas);
        let of_replica = |ports: &[u16]| Addresses {
            data: at(ports[0]),
            admin: at(ports[1]),
            peer: at(ports[2]),
            picker: at(ports[3]),
            peer_host: Ipv4Addr::LOCALHOST.to_string(),
        };
        Ok(Self {
            replicas: replica_ports.chunks(PORTS).map(of_replica).collect(),
            engines: engine_ports.iter().map(|port| at(*port)).collect(),
            founders: Vec::new(),
            network: None,
        })
    }

    /// Assigns addresses on one host per replica, and on a last host for the engines.
    fn on_hosts(replicas: usize, engines: usize) -> anyhow::Result<Self> {
        let network = NetnsNetwork::start(replicas + 1)?;
        let of_replica = |number: usize| {
            let clients = IpAddr::from(network.client_address(number));
            Addresses {
                data: (clients, DATA_PORT).into(),
                admin: (clients, ADMIN_PORT).into(),
                picker: (clients, PICKER_PORT).into(),
                peer: (network.peer_address(number), PEER_PORT).into(),
                peer_host: host_name(number),
            }
        };
        let engine_host = IpAddr::from(network.client_address(replicas));
        let of_engine = |port: u16| SocketAddr::from((engine_host, port));
        let layout = Self {
            replicas: (0..replicas).map(of_replica).collect(),
            engines: (ENGINE_PORT..).map(of_engine).take(engines).collect(),
            founders: Vec::new(),
            network: Some(network),
        };
        for number in 0..replicas {
            layout.write_hosts(number)?;
        }
        Ok(layout)
    }

    /// Writes the addresses of all replicas to the hosts file of the host of replica `number`.
    pub(super) fn write_hosts(&self, number: usize) -> anyhow::Result<()> {
        let Some(network) = &self.network else {
            return Ok(());
        };
        let names: Vec<(String, Ipv4Addr)> = (0..self.replicas.len())
            .map(|other| (host_name(other), network.peer_address(other)))
            .collect();
        network.set_names(number, &names)
    }

    /// Moves the host of a replica to another peer address.
    pub(super) fn move_replica(&mut self, number: usize) -> anyhow::Result<()> {
        let network = self.network.as_mut();
        let network = network.context("this needs hosts in network namespaces")?;
        network.move_host(number)?;
        let address = network.peer_address(number);
        self.replicas[number].peer.set_ip(address.into());
        Ok(())
    }

    /// Returns the network namespace of a replica; `None` on loopback.
    pub(super) fn namespace(&self, number: usize) -> Option<&str> {
        let network = self.network.as_ref();
        network.map(|network| network.namespace(number))
    }

    /// Returns the network namespace of the engines; `None` on loopback.
    pub(super) fn engine_namespace(&self) -> Option<&str> {
        self.namespace(self.replicas.len())
    }
}

/// Way in which a replica becomes part of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplicaOrigin {
    /// The replica founds the cluster together with others. There are this many founders in total.
    Founder(u8),
    /// The replica joins the cluster through any other replica.
    Joiner,
}

/// Returns the contents of a replica's config file.
pub(super) fn config(
    layout: &Layout,
    (number, id): (usize, u8),
    origin: ReplicaOrigin,
    data_dir: &Path,
    (options, secrets): (&ClusterOptions, Option<&ClusterSecrets>),
) -> String {
    let own = &layout.replicas[number];
    let quoted = |others: &mut dyn Iterator<Item = &Addresses>| {
        let names: Vec<String> = others
            .map(|other| format!("{:?}", other.peer_name()))
            .collect();
        names.join(", ")
    };
    let membership = match origin {
        ReplicaOrigin::Founder(count) => {
            let founders = layout.founders.iter();
            let peers = quoted(&mut founders.map(|founder| &layout.replicas[*founder]));
            format!("peers = [{peers}]\nbootstrap_expect = {count}")
        }
        ReplicaOrigin::Joiner => {
            let mut others = layout.replicas.iter().filter(|other| *other != own);
            format!("join = [{}]", quoted(&mut others))
        }
    };
    // A test's namespaces contain no other hosts.
    let is_off_loopback = !own.admin.ip().is_loopback() || !own.peer.ip().is_loopback();
    let is_insecure = is_off_loopback && secrets.is_none();
    // Clients may thus name users in requests, as on loopback.
    let trusted = match is_off_loopback {
        true => "trusted_proxies = [\"198.18.0.0/15\"]\n",
        false => "",
    };
    let has_keys = options.users_config.contains("api_keys_file");
    let keys = secrets.filter(|_| !has_keys).map(ClusterSecrets::users);
    let picker = match options.has_pickers {
        true => format!("picker = \"{}\"\n", own.picker),
        false => String::new(),
    };
    let mut text = format!(
        "insecure = {is_insecure}\n[node]\nid = {id}\ndata_dir = {:?}\n\n\
         [listen]\n{picker}data = \"{}\"\nadmin = \"{}\"\npeer = \"{}\"\nadvertise = {:?}\n\n\
         [cluster]\n{membership}\n{}\n\n\
         [users]\nexpose = \"full\"\n{trusted}{}\n{}\n",
        data_dir.display().to_string(),
        own.data,
        own.admin,
        own.peer,
        own.peer_host,
        options.cluster_config,
        options.users_config,
        keys.unwrap_or_default(),
    );
    text.extend(secrets.map(|secrets| secrets.tables(id)));
    let engines = layout.engines.iter().chain(options.outside_engines);
    for (engine, address) in engines.enumerate() {
        let _ = write!(
            text,
            "[[backends]]\nid = \"engine-{}\"\nurl = \"http://{address}\"\n{}\n\n",
            engine + 1,
            options.backend_config.replace("$N", &engine.to_string()),
        );
    }
    text.push_str(options.config);
    text
}

fn host_name(number: usize) -> String {
    format!("replica-{}.test", number + 1)
}

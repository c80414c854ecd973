//! Hosts for processes. Each host is a network namespace, and a bridge joins them.
//!
//! The bridge is in the namespace of this process, which can thus reach every host. A host has two
//! addresses on one interface, one for clients and one for peers. A test can thus cut the traffic
//! between peers while clients go on, or move a host for its peers alone. Each host resolves names
//! by its own hosts file, which can change at any time.
//!
//! The names of namespaces, links and the bridge contain the id of this process. Dropping the
//! [`NetnsNetwork`] removes everything, and the next process removes the remains of killed ones.
//! The module needs root, `ip` and `nft`. It does not use netem, which many kernels lack, as
//! nftables can drop packets at random, too.

use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context as _, ensure};

use crate::command::{run, run_with_input};

/// Prefix of every namespace name.
const NAME_PREFIX: &str = "quorate-";
/// Folder whose files `ip netns exec` shows in place of those in `/etc`.
const ETC_NETNS: &str = "/etc/netns";
/// Maximum number of hosts, whose numbers are part of their addresses.
const HOSTS_MAX: usize = 40;
/// Offset of a host's peer address from its client address.
const PEER_OFFSET: u8 = 50;
/// Offset of the peer address that a host moves to.
const MOVED_OFFSET: u8 = 100;
const BRIDGE_HOST: u8 = 254;

/// A network of hosts joined by a bridge, which is removed on drop.
#[derive(Debug)]
pub struct NetnsNetwork {
    /// Third byte of all addresses.
    subnet: u8,
    hosts: Vec<NetnsHost>,
}

#[derive(Debug)]
struct NetnsHost {
    name: String,
    has_moved: bool,
}

/// Share of packets that are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketLoss {
    /// All packets are dropped.
    All,
    /// This percentage of packets is dropped, at random.
    Percent(u8),
}

/// One direction of the traffic between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPair {
    /// Host that sends the packets.
    pub from: usize,
    /// Host that receives the packets, and drops them.
    pub to: usize,
}

/// Returns the reason why namespaces are not available here, or `None` if they are.
#[must_use]
pub fn why_not() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".to_owned());
    }
    for tool in [&["ip", "-V"], &["nft", "-v"]] {
        if let Err(error) = run(tool) {
            return Some(format!("{error:#}"));
        }
    }
    None
}

impl NetnsNetwork {
    /// Creates `hosts` network namespaces on one bridge, after removing those of earlier runs.
    ///
    /// # Errors
    /// If there are more than `HOSTS_MAX`, or a command fails; see [`why_not`].
    pub fn start(hosts: usize) -> anyhow::Result<Self> {
        ensure!(hosts <= HOSTS_MAX, "{hosts} hosts, at most {HOSTS_MAX}");
        remove_leftovers();
        let subnet = u8::try_from(process::id() % 256).expect("a remainder of 256");
        let mut network = Self {
            subnet,
            hosts: Vec::new(),
        };
        let bridge = bridge_name();
        run(&["ip", "link", "add", &bridge, "type", "bridge"])?;
        let address = format!("{}/24", network.address(BRIDGE_HOST));
        run(&["ip", "address", "add", &address, "dev", &bridge])?;
        run(&["ip", "link", "set", &bridge, "up"])?;
        for number in 0..hosts {
            network.add_host(number)?;
        }
        Ok(network)
    }

    /// Returns the namespace of a host, for commands that run in it with `ip netns exec`.
    #[must_use]
    pub fn namespace(&self, host: usize) -> &str {
        &self.hosts[host].name
    }

    /// Returns the address of a host for clients.
    #[must_use]
    pub fn client_address(&self, host: usize) -> Ipv4Addr {
        self.address(host_byte(host))
    }

    /// Returns the address of a host for peers.
    #[must_use]
    pub fn peer_address(&self, host: usize) -> Ipv4Addr {
        let moved = if self.hosts[host].has_moved {
            MOVED_OFFSET
        } else {
            PEER_OFFSET
        };
        self.address(host_byte(host) + moved)
    }

    /// Drops packets in the directions `ways`, in place of any earlier loss.
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn lose(&self, loss: PacketLoss, ways: &[HostPair]) -> anyhow::Result<()> {
        for host in 0..self.hosts.len() {
            let mut rules = String::from("flush chain inet chaos input\n");
            for way in ways.iter().filter(|way| way.to == host) {
                let chance = match loss {
                    PacketLoss::All => String::new(),
                    PacketLoss::Percent(percent) => format!("numgen random mod 100 < {percent} "),
                };
                let _ = writeln!(
                    rules,
                    "add rule inet chaos input ip saddr {{ {}, {} }} {chance}drop",
                    // A connection that the host opened itself may use either address.
                    self.client_address(way.from),
                    self.peer_address(way.from)
                );
            }
            self.nft(host, &rules)?;
        }
        Ok(())
    }

    /// Lets every packet between hosts through.
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn heal(&self) -> anyhow::Result<()> {
        self.lose(PacketLoss::All, &[])
    }

    /// Takes a host's only link down or up.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn set_link(&self, host: usize, is_up: bool) -> anyhow::Result<()> {
        let to = if is_up { "up" } else { "down" };
        run(&["ip", "link", "set", &link_name(host), to])
    }

    /// Moves a host to another peer address. The old address no longer works.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn move_host(&mut self, host: usize) -> anyhow::Result<()> {
        let old = format!("{}/24", self.peer_address(host));
        self.hosts[host].has_moved = !self.hosts[host].has_moved;
        let new = format!("{}/24", self.peer_address(host));
        let name = &self.hosts[host].name;
        run(&["ip", "-n", name, "address", "del", &old, "dev", "eth0"])?;
        run(&["ip", "-n", name, "address", "add", &new, "dev", "eth0"])
    }

    /// Writes the hosts file of a host. Changes the file in place, so that running processes see it
    /// immediately.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn set_names(&self, host: usize, names: &[(String, Ipv4Addr)]) -> anyhow::Result<()> {
        let mut text = String::from("127.0.0.1 localhost\n");
        for (name, address) in names {
            let _ = writeln!(text, "{address} {name}");
        }
        let path = etc_folder(&self.hosts[host].name).join("hosts");
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }

    fn add_host(&mut self, number: usize) -> anyhow::Result<()> {
        let name = format!("{NAME_PREFIX}{}-{number}", process::id());
        let folder = etc_folder(&name);
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        self.hosts.push(NetnsHost {
            name: name.clone(),
            has_moved: false,
        });
        self.set_names(number, &[])?;
        run(&["ip", "netns", "add", &name])?;
        let link = link_name(number);
        run(&[
            "ip", "link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &name,
        ])?;
        run(&["ip", "link", "set", &link, "master", &bridge_name(), "up"])?;
        for address in [self.client_address(number), self.peer_address(number)] {
            let address = format!("{address}/24");
            run(&["ip", "-n", &name, "address", "add", &address, "dev", "eth0"])?;
        }
        run(&["ip", "-n", &name, "link", "set", "eth0", "up"])?;
        run(&["ip", "-n", &name, "link", "set", "lo", "up"])?;
        self.nft(
            number,
            "add table inet chaos\n\
             add chain inet chaos input { type filter hook input priority 0; }\n",
        )
    }

    fn nft(&self, host: usize, rules: &str) -> anyhow::Result<()> {
        let name = &self.hosts[host].name;
        run_with_input(&["ip", "netns", "exec", name, "nft", "-f", "-"], rules)
    }

    /// Returns an address of this network, in the range reserved for network tests (RFC 2544).
    fn address(&self, last: u8) -> Ipv4Addr {
        Ipv4Addr::new(198, 18, self.subnet, last)
    }
}

impl Drop for NetnsNetwork {
    fn drop(&mut self) {
        for (number, host) in self.hosts.iter().enumerate() {
            // The kernel removes a namespace asynchronously, but the link immediately.
            let _ = run(&["ip", "link", "del", &link_name(number)]);
            remove_namespace(&host.name);
        }
        let _ = run(&["ip", "link", "del", &bridge_name()]);
    }
}

/// Removes the namespaces of processes that have ended.
fn remove_leftovers() {
    let Ok(folder) = fs::read_dir("/run/netns") else {
        return;
    };
    for name in folder.flatten().map(|entry| entry.file_name()) {
        let name = name.to_string_lossy().into_owned();
        let owner = name
            .strip_prefix(NAME_PREFIX)
            .and_then(|rest| rest.split_once('-'))
            .and_then(|(owner, _)| owner.parse::<u32>().ok());
        let Some(owner) = owner else { continue };
        if !Path::new(&format!("/proc/{owner}")).exists() {
            remove_namespace(&name);
            let _ = run(&["ip", "link", "del", &format!("qb{owner}")]);
        }
    }
}

/// Removes a namespace with its end of the link, which also removes the other end.
fn remove_namespace(name: &str) {
    let _ = run(&["ip", "netns", "del", name]);
    let _ = fs::remove_dir_all(etc_folder(name));
}

fn etc_folder(name: &str) -> PathBuf {
    Path::new(ETC_NETNS).join(name)
}

fn bridge_name() -> String {
    format!("qb{}", process::id())
}

/// Returns the name of a host's link, which has at most 15 bytes, the limit of the kernel.
fn link_name(host: usize) -> String {
    format!("qv{}-{host}", process::id())
}

fn host_byte(host: usize) -> u8 {
    u8::try_from(host + 1).expect("hosts are few")
}

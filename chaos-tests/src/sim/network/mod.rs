//! The network between simulated replicas, which carries whole calls, and delays, loses, repeats,
//! holds and cuts them.
//!
//! Messages are below tonic's generated code and above HTTP/2. A message is the head of a call with
//! its body, or one piece of a streamed body. The latency of each is drawn from the seed, so calls
//! overtake each other. Pieces of one stream keep their order, as with TCP. A message sent in one
//! step of the world arrives in a later step at the earliest.
//!
//! Connections are modelled as far as callers notice. They are refused while there is no listener,
//! break immediately when the other process ends, and break after seconds of silence when nothing
//! comes through. A paused host accepts connections and queues the messages that it receives.

mod body;
mod call;
mod deliver;
mod link;
mod packet;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lab::rng::Rng;
use raft::{ConnectError, PeerService};
use tokio::runtime::Handle;
use tonic::Status;

use self::call::Call;
pub use self::call::SimTransport;
pub use self::link::{LOSS_PERMILLE_BAD, Link, LinkCut, REPEATS_PERMILLE_BAD};
use self::packet::{CallSide, Packet, PlannedPacket};
use super::trace::Trace;

/// Interval at which silent connections are looked for, in microseconds.
const LOOK_EVERY_US: u64 = 100_000;
/// Range of the silence after which a connection counts as broken, in microseconds. It models pings
/// a second apart with a timeout of two seconds.
const SILENCE_US: std::ops::Range<u64> = 2_000_000..3_000_000;
/// Label of the network's draws, which separates them from others under the same seed.
const RNG_LABEL: u64 = 0x6e65_7477;

/// The simulated network. Clones share it.
#[derive(Clone)]
pub struct SimNetwork(Arc<Mutex<NetworkState>>);

/// Counts of messages, calls and connections in the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct NetworkCounts {
    /// Number of messages that arrived.
    pub delivered: u64,
    /// Number of messages that a bad or cut link lost.
    pub lost: u64,
    /// Number of messages that a cut link or a paused host held and that were delivered later.
    pub held: u64,
    /// Number of calls that arrived a second time.
    pub repeated: u64,
    /// Number of connections that broke.
    pub broken: u64,
    /// Number of streams that a broken connection cut off.
    pub streams_cut: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostPower {
    Down,
    Up,
    Paused,
}

/// The machine of a replica, as the network sees it.
struct SimHost {
    power: HostPower,
    /// Number of times the machine was powered on.
    run: u64,
    /// Service that accepts calls; `None` while the process does not listen.
    service: Option<PeerService>,
    runtime: Option<Handle>,
    /// Packets that arrived while the process was paused.
    inbox: VecDeque<Packet>,
}

struct SimConnection {
    from: u8,
    from_run: u64,
    to: u8,
    /// Run of the process that accepted the connection; `None` until then.
    to_run: Option<u64>,
    is_broken: bool,
    /// Time since which nothing has come through, and the maximum duration of that silence.
    silent: Option<(u64, u64)>,
    /// Notifies the caller once the other side has accepted or refused the connection.
    opened: Option<tokio::sync::oneshot::Sender<Result<(), ConnectError>>>,
}

struct NetworkState {
    now_us: u64,
    looked_us: u64,
    rng: Rng,
    links: BTreeMap<(u8, u8), Link>,
    hosts: BTreeMap<u8, SimHost>,
    connections: BTreeMap<u64, SimConnection>,
    calls: BTreeMap<u64, Call>,
    queue: BinaryHeap<Reverse<PlannedPacket>>,
    /// Hosts that no call reaches. Their own calls are answered.
    deaf: BTreeSet<u8>,
    /// Packets that wait for a link to heal, by the link's sender and receiver.
    held: BTreeMap<(u8, u8), Vec<Packet>>,
    planned: u64,
    last_id: u64,
    trace: Trace,
    counts: NetworkCounts,
}

/// Returns the host and port of a replica's peer listener.
#[must_use]
pub fn address_of(id: u8) -> String {
    format!("10.0.0.{id}:7000")
}

fn host_of(address: &str) -> Option<u8> {
    address
        .strip_prefix("10.0.0.")?
        .strip_suffix(":7000")?
        .parse()
        .ok()
}

impl SimNetwork {
    /// Creates a network without hosts, whose links are sound.
    #[must_use]
    pub fn new(seed: u64, trace: Trace) -> Self {
        Self(Arc::new(Mutex::new(NetworkState {
            now_us: 0,
            looked_us: 0,
            rng: Rng::new(seed, RNG_LABEL),
            links: BTreeMap::new(),
            hosts: BTreeMap::new(),
            connections: BTreeMap::new(),
            calls: BTreeMap::new(),
            queue: BinaryHeap::new(),
            deaf: BTreeSet::new(),
            held: BTreeMap::new(),
            planned: 0,
            last_id: 0,
            trace,
            counts: NetworkCounts::default(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a host with a process on `runtime`, and returns the transport of its replica.
    #[must_use]
    pub fn power_on(&self, id: u8, runtime: Handle) -> SimTransport {
        let mut state = self.lock();
        let run = state.hosts.get(&id).map_or(0, |host| host.run) + 1;
        let host = SimHost {
            power: HostPower::Up,
            run,
            service: None,
            runtime: Some(runtime),
            inbox: VecDeque::new(),
        };
        state.hosts.insert(id, host);
        SimTransport::new(self.clone(), id, run)
    }

    /// Ends the process of a host. Its kernel resets the connections that it can reach.
    pub fn power_off(&self, id: u8) {
        let mut state = self.lock();
        let Some(host) = state.hosts.get_mut(&id) else {
            return;
        };
        host.power = HostPower::Down;
        host.service = None;
        host.runtime = None;
        host.inbox.clear();
        let ends = |connection: &SimConnection| connection.from == id || connection.to == id;
        let ended: Vec<u64> = state
            .connections
            .iter()
            .filter(|(_, connection)| ends(connection))
            .map(|(number, _)| *number)
            .collect();
        for number in ended {
            let connection = &state.connections[&number];
            let (other, side) = match connection.from == id {
                true => (connection.to, CallSide::Server),
                false => (connection.from, CallSide::Client),
            };
            state.forget_calls(number, side.other());
            state.send(
                id,
                other,
                Packet::Reset {
                    connection: number,
                    side,
                },
            );
        }
    }

    /// Pauses the process of a host. The host's kernel goes on.
    pub fn pause(&self, id: u8) {
        if let Some(host) = self.lock().hosts.get_mut(&id)
            && host.power == HostPower::Up
        {
            host.power = HostPower::Paused;
        }
    }

    /// Resumes the process of a host, which receives the queued packets.
    pub fn resume(&self, id: u8) {
        let mut state = self.lock();
        let Some(host) = state.hosts.get_mut(&id) else {
            return;
        };
        if host.power != HostPower::Paused {
            return;
        }
        host.power = HostPower::Up;
        for packet in std::mem::take(&mut host.inbox) {
            state.deliver(self, packet);
        }
    }

    /// Advances the network to `now_us` and delivers all packets that are due.
    pub fn step(&self, now_us: u64) {
        let mut state = self.lock();
        state.now_us = now_us;
        while let Some(Reverse(next)) = state.queue.peek()
            && next.due_us <= now_us
        {
            let Some(Reverse(next)) = state.queue.pop() else {
                break;
            };
            state.arrive(self, next.packet);
        }
        if now_us >= state.looked_us + LOOK_EVERY_US {
            state.looked_us = now_us;
            state.look_for_silence(self);
        }
    }

    /// Cuts the link from one host to another.
    pub fn cut(&self, from: u8, to: u8, how: LinkCut) {
        self.change_link(from, to, |link| link.cut = Some(how));
    }

    /// Repairs the link from one host to another and sends the packets that it held.
    pub fn heal(&self, from: u8, to: u8) {
        let mut state = self.lock();
        state.link(from, to).cut = None;
        for packet in state.held.remove(&(from, to)).unwrap_or_default() {
            state.counts.held += 1;
            state.send(from, to, packet);
        }
    }

    /// Blocks calls to a host, like a firewall for one direction. Its own calls are answered.
    pub fn deafen(&self, id: u8) {
        self.lock().deaf.insert(id);
    }

    /// Lets calls reach a host again and sends the packets that were held.
    pub fn hear(&self, id: u8) {
        let mut state = self.lock();
        state.deaf.remove(&id);
        let hosts: Vec<u8> = state.hosts.keys().copied().collect();
        for from in hosts {
            for packet in state.held.remove(&(from, id)).unwrap_or_default() {
                state.counts.held += 1;
                // Held again if the link itself is cut.
                state.send(from, id, packet);
            }
        }
    }

    /// Changes properties of the link from one host to another.
    pub fn change_link(&self, from: u8, to: u8, change: impl FnOnce(&mut Link)) {
        change(self.lock().link(from, to));
    }

    /// Breaks every connection from one host to another, on both lanes, in the middle of their
    /// transfers.
    pub fn break_connections(&self, from: u8, to: u8) {
        let mut state = self.lock();
        let between: Vec<u64> = state
            .connections
            .iter()
            .filter(|(_, it)| (it.from, it.to) == (from, to) && !it.is_broken)
            .map(|(number, _)| *number)
            .collect();
        for number in between {
            state.break_off(self, number);
        }
    }

    /// Drops all hosts, calls and packets, to break a reference cycle: services and calls in flight
    /// hold transports, which hold the network.
    pub fn end(&self) {
        let mut state = self.lock();
        let hosts = std::mem::take(&mut state.hosts);
        let calls = std::mem::take(&mut state.calls);
        let under_way = (
            std::mem::take(&mut state.queue),
            std::mem::take(&mut state.held),
        );
        let connections = std::mem::take(&mut state.connections);
        // Dropping some of it calls the network.
        drop(state);
        drop((hosts, calls, under_way, connections));
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> NetworkCounts {
        self.lock().counts
    }
}

impl NetworkState {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn link(&mut self, from: u8, to: u8) -> &mut Link {
        let rng = &mut self.rng;
        self.links
            .entry((from, to))
            .or_insert_with(|| Link::draw(rng))
    }

    /// Sends a packet over a link, which loses, holds or delays it.
    fn send(&mut self, from: u8, to: u8, packet: Packet) {
        let link = self.link(from, to).clone();
        let is_of_stream = self.is_of_stream(&packet);
        let is_unheard = self.deaf.contains(&to) && packet.side() == Some(CallSide::Server);
        if let Some(cut) = link.cut.or(is_unheard.then_some(LinkCut::Drops)) {
            if cut == LinkCut::Holds || is_of_stream {
                self.held.entry((from, to)).or_default().push(packet);
            } else {
                self.counts.lost += 1;
            }
            return;
        }
        if link::is_drawn(&mut self.rng, link.loss_permille) {
            self.counts.lost += 1;
            let is_noticed = is_of_stream || self.rng.below(2) == 0;
            if is_noticed && let Some(connection) = self.connection_of(&packet) {
                let due_us = self.now_us + 1000 * self.rng.below(300);
                self.plan(due_us, Packet::Break { connection });
            }
            return;
        }
        let is_repeated = matches!(packet, Packet::Request { .. })
            && link::is_drawn(&mut self.rng, link.repeats_permille);
        if is_repeated && let Some(repeat) = packet.repeat() {
            self.counts.repeated += 1;
            let late_us = link.latency_us(&mut self.rng) + self.rng.below(link.stray_us + 1);
            let due_us = self.now_us + late_us;
            self.plan(due_us, repeat);
        }
        let mut due_us = self.now_us + link.latency_us(&mut self.rng);
        if let Some((call, side)) = packet.ordered_in()
            && let Some(call) = self.calls.get_mut(&call)
        {
            let last = call.last_due(side);
            due_us = due_us.max(*last);
            *last = due_us;
        }
        self.plan(due_us, packet);
    }

    fn plan(&mut self, due_us: u64, packet: Packet) {
        self.planned += 1;
        let order = self.planned;
        self.queue.push(Reverse(PlannedPacket {
            due_us,
            order,
            packet,
        }));
    }

    /// Returns whether the packet's call waits for it without a timeout. TCP retransmits such a
    /// packet or breaks, so it is not lost on a healthy connection.
    fn is_of_stream(&self, packet: &Packet) -> bool {
        match packet {
            Packet::Piece { .. } | Packet::Reset { .. } => true,
            Packet::Request { call, .. } | Packet::Response { call, .. } => {
                self.calls.get(call).is_some_and(Call::is_stream)
            }
            Packet::Open { .. }
            | Packet::Opened { .. }
            | Packet::Break { .. }
            | Packet::Broken { .. }
            | Packet::Cancel { .. } => false,
        }
    }

    fn connection_of(&self, packet: &Packet) -> Option<u64> {
        match packet {
            Packet::Open { connection }
            | Packet::Opened { connection, .. }
            | Packet::Reset { connection, .. }
            | Packet::Break { connection }
            | Packet::Broken { connection, .. } => Some(*connection),
            Packet::Request { call, .. }
            | Packet::Response { call, .. }
            | Packet::Piece { call, .. }
            | Packet::Cancel { call } => Some(self.calls.get(call)?.connection),
        }
    }

    /// Returns the receiver of a packet; `None` if its connection is gone.
    fn receiver_of(&self, packet: &Packet) -> Option<u8> {
        if let Packet::Request { to, .. } = packet {
            return Some(*to);
        }
        let side = packet.side()?;
        let connection = self.connections.get(&self.connection_of(packet)?)?;
        Some(match side {
            CallSide::Client => connection.from,
            CallSide::Server => connection.to,
        })
    }

    /// Handles the arrival of a packet: its receiver gets it, unless it is held or dropped.
    fn arrive(&mut self, network: &SimNetwork, packet: Packet) {
        if let Packet::Break { connection } = packet {
            self.break_off(network, connection);
            return;
        }
        let Some(receiver) = self.receiver_of(&packet) else {
            return;
        };
        if let Some(host) = self.hosts.get_mut(&receiver)
            && host.power == HostPower::Paused
            && !packet.is_for_kernel()
        {
            self.counts.held += 1;
            host.inbox.push_back(packet);
            return;
        }
        self.deliver(network, packet);
    }

    /// Breaks silent connections after their timeout. Each side detects the break by itself.
    fn look_for_silence(&mut self, network: &SimNetwork) {
        let now_us = self.now_us;
        let numbers: Vec<u64> = self.connections.keys().copied().collect();
        for number in numbers {
            let connection = &self.connections[&number];
            if connection.is_broken {
                continue;
            }
            let (from, to) = (connection.from, connection.to);
            let is_cut = |link: (u8, u8)| self.links.get(&link).is_some_and(|it| it.cut.is_some());
            let is_up = |id: u8, run: Option<u64>| {
                let host = self.hosts.get(&id);
                host.is_some_and(|host| {
                    host.power == HostPower::Up && run.is_none_or(|run| run == host.run)
                })
            };
            let is_silent = is_cut((from, to))
                || is_cut((to, from))
                || self.deaf.contains(&to)
                || !is_up(from, Some(connection.from_run))
                || !is_up(to, connection.to_run);
            let silent = connection.silent;
            let next = match (is_silent, silent) {
                (false, _) => None,
                (true, None) => {
                    let bound = SILENCE_US.end - SILENCE_US.start;
                    Some((now_us, SILENCE_US.start + self.rng.below(bound)))
                }
                (true, Some((since_us, bound_us))) if now_us - since_us >= bound_us => {
                    self.break_off(network, number);
                    continue;
                }
                (true, silent) => silent,
            };
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.silent = next;
            }
        }
    }

    /// Breaks a connection on both sides at once.
    fn break_off(&mut self, network: &SimNetwork, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        if std::mem::replace(&mut connection.is_broken, true) {
            return;
        }
        self.counts.broken += 1;
        for side in [CallSide::Client, CallSide::Server] {
            self.arrive(
                network,
                Packet::Broken {
                    connection: number,
                    side,
                },
            );
        }
    }

    /// Notifies the process on one side that its connection is gone.
    fn end_side(&mut self, number: u64, side: CallSide) {
        if side == CallSide::Client
            && let Some(connection) = self.connections.get_mut(&number)
        {
            connection.is_broken = true;
            if let Some(opened) = connection.opened.take() {
                // The client may have given up.
                let _gone = opened.send(Err("connection reset".to_owned().into()));
            }
        }
        self.forget_calls(number, side);
    }

    /// Ends one side of every call over a connection.
    fn forget_calls(&mut self, number: u64, side: CallSide) {
        let of_it = |call: &Call| call.connection == number;
        for call in self.calls.values_mut().filter(|call| of_it(call)) {
            if call.is_stream() {
                self.counts.streams_cut += 1;
            }
            call.end(side);
        }
        self.calls.retain(|_, call| !call.is_over());
    }
}

/// Returns the error that a caller gets whose connection is gone.
fn broken() -> Status {
    Status::unavailable("connection broken")
}

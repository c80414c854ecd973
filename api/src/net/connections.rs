//! Counts connections and requests per client address, and selects the longest idle connections to
//! close when room is needed.
//!
//! The table is locked when a connection opens or closes, but never by a request. A request counts
//! in its own connection and in the counts of its address. The table is only as large as what is
//! open.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

/// Length of the IPv6 prefix that identifies one client: a site gets a network of this size.
const V6_CLIENT_BITS: u32 = 64;

/// Connections of all clients, and the limits of connections and requests per address.
pub(crate) struct ClientTable {
    connections: Mutex<ConnectionTable>,
    epoch: Instant,
    connections_per_address_max: AtomicUsize,
    requests_per_address_max: AtomicUsize,
}

#[derive(Default)]
struct ConnectionTable {
    last: u64,
    /// Connections in the order in which they opened.
    by_id: BTreeMap<u64, Arc<ClientConnection>>,
    /// Counts of addresses with a connection.
    by_address: BTreeMap<IpAddr, Arc<AddressCounts>>,
}

/// Numbers of open connections and requests of one client address.
#[derive(Default)]
struct AddressCounts {
    /// Number of open connections. It changes only under the table's lock.
    connections: AtomicUsize,
    requests: AtomicUsize,
}

/// A client connection.
pub(crate) struct ClientConnection {
    /// Counts of the client's address; `None` if it has no limit.
    address_counts: Option<Arc<AddressCounts>>,
    /// Number of requests whose response has not ended.
    open: AtomicUsize,
    /// Time at which the last request ended or else the connection opened, in milliseconds since
    /// the epoch of the table.
    idle_since_ms: AtomicU64,
    is_closing: AtomicBool,
    leave: Notify,
}

/// Guard of a connection in the table. Dropping it removes the connection.
pub(crate) struct ConnectionGuard {
    clients: Arc<ClientTable>,
    address: IpAddr,
    id: u64,
    pub(crate) connection: Arc<ClientConnection>,
}

/// Guard of a request on a connection, from its head to the end of its response.
pub(crate) struct ConnectionRequestGuard {
    clients: Arc<ClientTable>,
    connection: Arc<ClientConnection>,
}

impl ClientTable {
    pub(crate) fn new(connections_per_address_max: usize, requests_per_address_max: usize) -> Self {
        Self {
            connections: Mutex::default(),
            epoch: Instant::now(),
            connections_per_address_max: connections_per_address_max.into(),
            requests_per_address_max: requests_per_address_max.into(),
        }
    }

    /// Replaces the limits for later connections and requests.
    pub(crate) fn limit(
        &self,
        connections_per_address_max: usize,
        requests_per_address_max: usize,
    ) {
        self.connections_per_address_max
            .store(connections_per_address_max, Relaxed);
        self.requests_per_address_max
            .store(requests_per_address_max, Relaxed);
    }

    /// Registers a connection from `address`; `None` if the address has reached the limit. A
    /// connection that `is_exempt` serves many clients and has no limits.
    pub(crate) fn register(
        self: &Arc<Self>,
        address: IpAddr,
        is_exempt: bool,
    ) -> Option<ConnectionGuard> {
        let address = client_of(address);
        let mut connections = self.connections();
        let address_counts =
            (!is_exempt).then(|| Arc::clone(connections.by_address.entry(address).or_default()));
        if let Some(address_counts) = &address_counts {
            if address_counts.connections() >= self.connections_per_address_max.load(Relaxed) {
                return None;
            }
            address_counts.connections.fetch_add(1, Relaxed);
        }
        connections.last += 1;
        let id = connections.last;
        let connection = Arc::new(ClientConnection {
            address_counts,
            open: AtomicUsize::new(0),
            idle_since_ms: AtomicU64::new(self.now_ms()),
            is_closing: AtomicBool::new(false),
            leave: Notify::new(),
        });
        connections.by_id.insert(id, Arc::clone(&connection));
        Some(ConnectionGuard {
            clients: Arc::clone(self),
            address,
            id,
            connection,
        })
    }

    /// Asks up to `count` idle connections to close, the longest idle first, and returns their
    /// number. While an address with idle connections has more than an equal share of all
    /// connections, only connections of such addresses are closed. An address with hundreds of
    /// connections thus cannot displace one with a few.
    pub(crate) fn close_idle(&self, count: usize) -> usize {
        let connections = self.connections();
        let equal_share = connections.equal_share();
        let idle = connections
            .by_id
            .values()
            .filter(|connection| connection.can_leave());
        let (above, within): (Vec<_>, Vec<_>) = idle
            .map(|connection| (connection.idle_since_ms.load(Relaxed), connection))
            .partition(|(_, connection)| connection.connections_of_address() > equal_share);
        let mut idle = if above.is_empty() { within } else { above };
        if count == 0 || idle.is_empty() {
            return 0;
        }
        let count = count.min(idle.len());
        idle.select_nth_unstable_by_key(count - 1, |(since, _)| *since);
        for (_, connection) in &idle[..count] {
            connection.is_closing.store(true, Relaxed);
            connection.leave.notify_one();
        }
        count
    }

    /// Returns the number of open connections.
    pub(crate) fn len(&self) -> usize {
        self.connections().by_id.len()
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn connections(&self) -> MutexGuard<'_, ConnectionTable> {
        // Every change leaves the table well formed.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionTable {
    /// Returns the number of connections per address in an equal division, rounded down. Addresses
    /// without a limit count as one address.
    fn equal_share(&self) -> usize {
        let limited: usize = self.by_address.values().map(|it| it.connections()).sum();
        let others = usize::from(limited < self.by_id.len());
        self.by_id.len() / (self.by_address.len() + others).max(1)
    }
}

impl AddressCounts {
    fn connections(&self) -> usize {
        self.connections.load(Relaxed)
    }
}

impl ClientConnection {
    /// Returns the number of connections of the address; 0 if it has no limit.
    fn connections_of_address(&self) -> usize {
        self.address_counts
            .as_ref()
            .map_or(0, |address_counts| address_counts.connections())
    }

    /// Whether no request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.open.load(Relaxed) == 0
    }

    fn can_leave(&self) -> bool {
        self.is_idle() && !self.is_closing.load(Relaxed)
    }

    /// Waits until the connection is asked to close.
    pub(crate) async fn told_to_leave(&self) {
        self.leave.notified().await;
    }
}

impl ConnectionGuard {
    /// Begins a request on the connection. Also returns whether the address is within its limit.
    pub(crate) fn begin_request(&self) -> (ConnectionRequestGuard, bool) {
        ConnectionRequestGuard::begin(&self.clients, &self.connection)
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut connections = self.clients.connections();
        connections.by_id.remove(&self.id);
        let Some(address_counts) = &self.connection.address_counts else {
            return;
        };
        if address_counts.connections.fetch_sub(1, Relaxed) == 1 {
            connections.by_address.remove(&self.address);
        }
    }
}

impl ConnectionRequestGuard {
    fn begin(clients: &Arc<ClientTable>, connection: &Arc<ClientConnection>) -> (Self, bool) {
        connection.open.fetch_add(1, Relaxed);
        let address_counts = connection.address_counts.as_ref();
        let before =
            address_counts.map(|address_counts| address_counts.requests.fetch_add(1, Relaxed));
        let requests_max = clients.requests_per_address_max.load(Relaxed);
        let is_within = before.is_none_or(|before| before < requests_max);
        let request_guard = Self {
            clients: Arc::clone(clients),
            connection: Arc::clone(connection),
        };
        (request_guard, is_within)
    }
}

impl Drop for ConnectionRequestGuard {
    fn drop(&mut self) {
        if let Some(address_counts) = &self.connection.address_counts {
            address_counts.requests.fetch_sub(1, Relaxed);
        }
        let now_ms = self.clients.now_ms();
        self.connection.idle_since_ms.store(now_ms, Relaxed);
        self.connection.open.fetch_sub(1, Relaxed);
    }
}

/// Returns the address that identifies the client: an IPv4 address itself, or the network of an
/// IPv6 address.
#[must_use]
pub fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let network = u128::from(address) & (u128::MAX << (128 - V6_CLIENT_BITS));
            IpAddr::V6(Ipv6Addr::from(network))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn connections_are_bounded_per_address_or_ipv6_network() {
        let clients = Arc::new(ClientTable::new(2, 1));
        let first = clients.register(address("2001:db8::1"), false).unwrap();
        let second = clients.register(address("2001:db8::2:2"), false).unwrap();
        assert!(clients.register(address("2001:db8::3"), false).is_none());
        let _other = clients.register(address("2001:db8:0:1::1"), false).unwrap();
        let _exempt = clients.register(address("2001:db8::4"), true).unwrap();
        let (request_guard, is_within) = first.begin_request();
        assert!(is_within);
        assert!(
            !second.begin_request().1,
            "one at a time, on whichever connection"
        );
        drop(request_guard);
        assert!(second.begin_request().1);
        drop(first);
        let _third = clients.register(address("2001:db8::3"), false).unwrap();
        drop(second);
        assert_eq!(clients.connections().by_address.len(), 2);
    }

    #[test]
    fn mapped_and_plain_ipv4_addresses_are_one_client() {
        let clients = Arc::new(ClientTable::new(1, 1));
        let _first = clients.register(address("192.0.2.7"), false).unwrap();
        assert!(
            clients
                .register(address("::ffff:192.0.2.7"), false)
                .is_none()
        );
        assert!(clients.register(address("192.0.2.8"), false).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_connections_close_first_and_busy_ones_stay() {
        let clients = Arc::new(ClientTable::new(9, 9));
        let mut seated = Vec::new();
        for _ in 0..4 {
            seated.push(clients.register(address("192.0.2.7"), false).unwrap());
            tokio::time::advance(std::time::Duration::from_millis(10)).await;
        }
        let (request_guard, _) = seated[1].begin_request();
        drop(seated[0].begin_request());
        assert_eq!(clients.close_idle(1), 1);
        let told = |at: usize| seated[at].connection.is_closing.load(Relaxed);
        assert_eq!([0, 1, 2, 3].map(told), [false, false, true, false]);
        seated[2].connection.told_to_leave().await;
        assert_eq!(clients.close_idle(9), 2, "nobody is told twice");
        assert!(!told(1));
        drop(request_guard);
        assert_eq!(clients.close_idle(9), 1);
        assert_eq!(clients.close_idle(9), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_above_their_equal_share_make_room_first() {
        let clients = Arc::new(ClientTable::new(99, 99));
        let connect = |text: &str, is_exempt| clients.register(address(text), is_exempt).unwrap();
        let first = connect("192.0.2.1", false);
        let balancer = connect("192.0.2.9", true);
        tokio::time::advance(std::time::Duration::from_secs(60)).await;
        let crowd: Vec<_> = (0..7).map(|_| connect("192.0.2.7", false)).collect();
        assert_eq!(clients.close_idle(4), 4);
        let told = |guard: &ConnectionGuard| guard.connection.is_closing.load(Relaxed);
        assert_eq!(crowd.iter().filter(|guard| told(guard)).count(), 4);
        assert_eq!(clients.close_idle(4), 3, "no more than have too many");
        assert!(!told(&first) && !told(&balancer));
        drop(crowd);
        assert_eq!(clients.close_idle(4), 2, "then by time alone");
    }
}

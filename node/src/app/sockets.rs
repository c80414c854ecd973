//! The listening sockets of a replica. They are bound first, so that a port conflict is reported
//! before the replica affects the cluster.

use std::net::SocketAddr;

use anyhow::Context;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

use crate::config::ListenConfig;

/// Maximum length of the system's queue of unaccepted connections.
const BACKLOG: i32 = 4096;

/// Bound listening sockets of a replica.
#[derive(Debug)]
pub struct BoundSockets {
    /// Listener for clients.
    pub data: TcpListener,
    /// Listener for the admin API.
    pub admin: TcpListener,
    /// Listener for other replicas.
    pub peer: TcpListener,
    /// Listener for scrapers and probes; `None` if not configured.
    pub metrics: Option<TcpListener>,
    /// Listener for gateways that request endpoints; `None` if not configured.
    pub picker: Option<TcpListener>,
    /// Listener for KEDA; `None` if not configured.
    pub scaler: Option<TcpListener>,
}

/// Actual addresses of a replica, including ports that the system chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// Address for clients.
    pub data: SocketAddr,
    /// Address of the admin API.
    pub admin: SocketAddr,
    /// Address for other replicas.
    pub peer: SocketAddr,
    /// Address for scrapers and probes; `None` if not configured.
    pub metrics: Option<SocketAddr>,
    /// Address for gateways that request endpoints; `None` if not configured.
    pub picker: Option<SocketAddr>,
    /// Address for KEDA; `None` if not configured.
    pub scaler: Option<SocketAddr>,
}

impl BoundSockets {
    /// Binds all sockets. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Fails if an address cannot be bound, and names its setting.
    pub fn bind(listen: &ListenConfig) -> anyhow::Result<Self> {
        Ok(Self {
            data: bind("listen.data", listen.data)?,
            admin: bind("listen.admin", listen.admin)?,
            peer: bind("listen.peer", listen.peer)?,
            metrics: (listen.metrics.map(|at| bind("listen.metrics", at))).transpose()?,
            picker: (listen.picker.map(|at| bind("listen.picker", at))).transpose()?,
            scaler: (listen.scaler.map(|at| bind("listen.scaler", at))).transpose()?,
        })
    }

    /// Returns the bound addresses.
    ///
    /// # Errors
    /// Fails if the system does not report an address.
    pub fn addresses(&self) -> anyhow::Result<Addresses> {
        Ok(Addresses {
            data: self.data.local_addr()?,
            admin: self.admin.local_addr()?,
            peer: self.peer.local_addr()?,
            metrics: address_of(self.metrics.as_ref())?,
            picker: address_of(self.picker.as_ref())?,
            scaler: address_of(self.scaler.as_ref())?,
        })
    }
}

fn address_of(listener: Option<&TcpListener>) -> std::io::Result<Option<SocketAddr>> {
    listener.map(TcpListener::local_addr).transpose()
}

fn bind(setting: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    listener(address).with_context(|| format!("{setting}: listen at {address}"))
}

fn listener(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    // Lets a restarted replica reuse its port although old connections linger.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

//! The three listening sockets of a replica: bound before anything else, so that a port in use is
//! told before a cluster is disturbed.

use std::net::SocketAddr;

use anyhow::Context;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

use crate::config::Listen;

/// Connections the system holds for us until they are accepted.
const BACKLOG: i32 = 4096;

/// Bound sockets.
#[derive(Debug)]
pub struct BoundSockets {
    /// Clients.
    pub data: TcpListener,
    /// Admin API.
    pub admin: TcpListener,
    /// Other replicas.
    pub peer: TcpListener,
}

/// Where a replica really listens, the ports the system chose included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// Clients.
    pub data: SocketAddr,
    /// Admin API.
    pub admin: SocketAddr,
    /// Other replicas.
    pub peer: SocketAddr,
}

impl BoundSockets {
    /// Binds all three. Call it within a tokio runtime.
    ///
    /// # Errors
    /// Names the setting whose address cannot be bound.
    pub fn bind(listen: &Listen) -> anyhow::Result<Self> {
        Ok(Self {
            data: bind("listen.data", listen.data)?,
            admin: bind("listen.admin", listen.admin)?,
            peer: bind("listen.peer", listen.peer)?,
        })
    }

    /// Where they are bound.
    ///
    /// # Errors
    /// Those of the system.
    pub fn addresses(&self) -> anyhow::Result<Addresses> {
        Ok(Addresses {
            data: self.data.local_addr()?,
            admin: self.admin.local_addr()?,
            peer: self.peer.local_addr()?,
        })
    }
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
    // A restarted replica takes its port back although old connections linger.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

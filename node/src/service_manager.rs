//! Notifies a service manager, as with systemd's `Type=notify`, when the replica listens and when
//! it leaves, and feeds its watchdog. Sends datagrams to the socket in `NOTIFY_SOCKET`, if it is
//! set.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use crate::app::Addresses;

/// Environment variable with the manager's socket: a path, or a name after `@` or a zero byte.
const SOCKET: &str = "NOTIFY_SOCKET";
/// Environment variable with the watchdog timeout, in microseconds.
const WATCHDOG: &str = "WATCHDOG_USEC";
/// Environment variable with the id of the only process that the watchdog watches, if set.
const WATCHDOG_PID: &str = "WATCHDOG_PID";
/// Time that a replica may take to flush its updates and exit, in addition to the drain.
const ENDING: Duration = Duration::from_secs(15);

/// The service manager that started this process, if any.
#[derive(Debug)]
pub(crate) struct ServiceManager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// Maximum interval between two notifications that the watchdog accepts, if it is enabled.
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Returns the manager that the environment names, if any.
    pub(crate) fn of_environment() -> Self {
        let socket = std::env::var_os(SOCKET).and_then(|name| {
            let opened = address(&name).and_then(|to| Ok((socket()?, to)));
            opened
                .inspect_err(|error| {
                    tracing::warn!(%error, socket = ?name, "could not notify the service manager");
                })
                .ok()
        });
        let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
        let is_ours = number(WATCHDOG_PID).is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number(WATCHDOG).filter(|us| is_ours && *us > 0);
        Self {
            socket,
            watchdog: watchdog.map(Duration::from_micros),
        }
    }

    /// Reports that the replica listens. It may not be in a cluster yet: the same operator may
    /// start the other replicas only after it.
    pub(crate) fn ready(&self, at: Addresses) {
        let Addresses {
            data, admin, peer, ..
        } = at;
        self.tell(&format!(
            "READY=1\nSTATUS=listening at {data}, admin {admin}, peer {peer}\n"
        ));
    }

    /// Reports that the replica leaves, which takes at most `longest`.
    pub(crate) fn stopping(&self, longest: Duration) {
        let patience = longest.saturating_add(ENDING).as_micros();
        self.tell(&format!(
            "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC={patience}\n"
        ));
    }

    /// Feeds the watchdog at twice the required rate, which shows that the runtime runs tasks.
    pub(crate) async fn feed_watchdog(&self) -> Infallible {
        let Some(within) = self.watchdog else {
            return std::future::pending().await;
        };
        let mut times = tokio::time::interval((within / 2).max(Duration::from_millis(1)));
        loop {
            times.tick().await;
            self.tell("WATCHDOG=1\n");
        }
    }

    fn tell(&self, text: &str) {
        let Some((socket, to)) = &self.socket else {
            return;
        };
        if let Err(error) = socket.send_to_addr(text.as_bytes(), to) {
            tracing::warn!(%error, "could not notify the service manager");
        }
    }
}

/// Returns a non-blocking socket, because a manager that does not read must not block a replica.
fn socket() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@' | 0, abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name),
        _ => SocketAddr::from_pathname(name),
    }
}

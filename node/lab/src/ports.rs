//! Ports for processes that start later, or that stop and start again.
//!
//! The ports are below the kernel's default range for outgoing connections (32768 and up), so that
//! no connection takes one while its process is down. A process hands out a port again only after
//! it has tried all others, and concurrent processes usually begin at different ports.

use std::io;
use std::net::TcpListener;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;
/// Multiplier that spreads consecutive process ids (2^32 divided by the golden ratio).
const SPREAD: u32 = 2_654_435_769;

static PORTS: LazyLock<Ports> = LazyLock::new(|| {
    let high = std::process::id().wrapping_mul(SPREAD) >> 16;
    Ports::from(u16::try_from(high).unwrap_or(0))
});

/// Returns `count` unused ports on loopback.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] if fewer are free.
pub fn free(count: usize) -> io::Result<Vec<u16>> {
    PORTS.free(count)
}

struct Ports(AtomicU32);

impl Ports {
    fn from(place: u16) -> Self {
        Self(AtomicU32::new(place.into()))
    }

    fn free(&self, count: usize) -> io::Result<Vec<u16>> {
        let next = || {
            let place = self.0.fetch_add(1, Ordering::Relaxed) % u32::from(COUNT);
            FIRST + u16::try_from(place).unwrap_or(0)
        };
        let tried = (0..COUNT).map(|_| next());
        let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        let found: Vec<_> = tried.filter(is_free).take(count).collect();
        if found.len() < count {
            let told = format!("only {} of {count} ports are free", found.len());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, told));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ports_are_unique() {
        let ports: BTreeSet<_> = (0..50).flat_map(|_| free(3).unwrap()).collect();
        assert_eq!(ports.len(), 150);
    }

    #[test]
    fn ports_are_tried_in_rotation() {
        let ports = Ports::from(u16::MAX - 5);
        let found: BTreeSet<_> = (0..10).flat_map(|_| ports.free(1).unwrap()).collect();
        let next = ports.0.load(Ordering::Relaxed);
        assert_eq!(found.len(), 10);
        assert!(next >= u32::from(u16::MAX) + 5, "{next}");
    }

    #[test]
    fn a_listening_port_is_not_free() {
        let place = 7000;
        let port = Ports::from(place).free(1).unwrap()[0];
        let _listening = TcpListener::bind(("127.0.0.1", port)).unwrap();
        assert!(!Ports::from(place).free(20).unwrap().contains(&port));
    }
}

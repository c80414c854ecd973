//! Notifications of a replica to its service manager (I140).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use tempfile::TempDir;

use super::process::{Replica, free};

/// Watchdog timeout, in microseconds.
const WATCHDOG_US: u32 = 200_000;

/// Starts a replica whose service manager is this test.
fn start(dir: TempDir, name: &str) -> Replica {
    let [peer] = free();
    Replica::start_in(dir, 1, peer, "deadline = \"2s\"\n", |mut command| {
        command.env("NOTIFY_SOCKET", name);
        command.env("WATCHDOG_USEC", WATCHDOG_US.to_string());
        command
    })
}

/// Waits for a message with this beginning, and returns its lines.
fn told(manager: &UnixDatagram, beginning: &str) -> Vec<String> {
    let mut buffer = [0; 1024];
    loop {
        let length = manager.recv(&mut buffer).expect("a message in time");
        let text = String::from_utf8(buffer[..length].to_vec()).unwrap();
        if text.starts_with(beginning) {
            return text.lines().map(str::to_owned).collect();
        }
    }
}

fn hears_of_it(manager: &UnixDatagram, replica: &Replica) {
    manager
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let ready = told(manager, "READY=1");
    assert!(
        ready[1].contains(&format!("listening at {}", replica.data)),
        "{ready:?}"
    );
    told(manager, "WATCHDOG=1");
    told(manager, "WATCHDOG=1");
    replica.process.signal("TERM");
    let stopping = told(manager, "STOPPING=1");
    // The configured drain, plus the time to flush updates.
    assert_eq!(
        stopping[1..],
        ["STATUS=draining", "EXTEND_TIMEOUT_USEC=17000000"]
    );
    replica.process.says(&["draining"]);
}

#[test]
fn the_service_manager_is_notified_of_start_life_and_stop() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let replica = start(dir, path.to_str().unwrap());
    hears_of_it(&manager, &replica);
}

#[test]
fn the_service_manager_may_use_an_abstract_socket() {
    let dir = TempDir::new().unwrap();
    let name = format!("quorate-test-{}", std::process::id());
    let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let replica = start(dir, &format!("@{name}"));
    hears_of_it(&manager, &replica);
}

#[test]
fn a_missing_service_manager_blocks_nothing() {
    let dir = TempDir::new().unwrap();
    let gone = dir.path().join("gone").display().to_string();
    let replica = start(dir, &gone);
    replica
        .process
        .says(&["WARN", "could not notify the service manager"]);
    replica.process.says(&["accepting requests"]);
}

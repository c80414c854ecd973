//! More clients than the process may have descriptors.

use std::net::{SocketAddr, TcpStream};
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::process::{Engine, Replica, free, get, program, until};

/// Number of idle connections.
const CLIENTS: usize = 400;

/// Wraps a command with a limit of descriptors that it cannot raise.
fn limited(command: &Command) -> Command {
    let args = command.get_args().map(|arg| arg.to_str().unwrap());
    let words = [command.get_program().to_str().unwrap()]
        .into_iter()
        .chain(args);
    let line: Vec<_> = words.map(|word| format!("'{word}'")).collect();
    let line = format!("ulimit -n 256; exec {}", line.join(" "));
    program("sh", &["-c", &line])
}

fn start(id: u8, peers: &[SocketAddr; 3], config: &str) -> Replica {
    let peer = peers[usize::from(id) - 1];
    let dir = tempfile::TempDir::new().unwrap();
    Replica::start_in(dir, id, peer, config, |command| limited(&command))
}

#[test]
fn idle_clients_leave_descriptors_to_other_connections() {
    let limit = getrlimit(Resource::Nofile);
    // The clients are in this process.
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    let engine = Engine::start();
    let peers = free();
    let config = format!(
        "[cluster]\npeers = [\"{}\", \"{}\", \"{}\"]\n[[backends]]\nid = \"e\"\nurl = \"{}\"\n",
        peers[0], peers[1], peers[2], engine.url
    );
    let replicas = [1, 2, 3].map(|id| start(id, &peers, &config));
    for replica in &replicas {
        replica.ready();
    }
    let first = &replicas[0];
    first.process.says(&[
        "WARN",
        "descriptors=256",
        "wanted=33056",
        "max_connections=64",
    ]);
    let crowd: Vec<TcpStream> = (0..CLIENTS)
        .map(|_| TcpStream::connect(first.data).unwrap())
        .collect();
    for replica in &replicas {
        until("a client of the same data listener is served", || {
            replica.chat("emulated", "").status == 200
        });
        assert_eq!(get(replica.data, "/health").unwrap().status, 200);
        // On a busy machine, an election may be in progress.
        until("the replica is ready", || {
            replica.admin("/readyz")["status"] == "ready"
        });
        let metrics = get(replica.admin, "/metrics").unwrap();
        assert_eq!(metrics.status, 200);
        let cluster = replica.admin("/admin/v1/cluster");
        let mut members = cluster["members"].as_object().unwrap().values();
        assert!(
            members.all(|member| member["is_connected"] == true),
            "{cluster}"
        );
    }
    assert_eq!(crowd.len(), CLIENTS);
    let log = first.process.log();
    assert!(!log.contains("accept failed"), "{log}");
}

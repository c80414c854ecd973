//! Replicas and engines as processes, as an operator starts them.

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use tempfile::TempDir;

/// Limit of every wait: a broken replica fails the test after this time.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Waits for a condition that stays true once it is.
pub(super) fn until(what: &str, condition: impl FnMut() -> bool) {
    assert!(is_met(condition), "not in time: {what}");
}

fn is_met(mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if condition() {
            return true;
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    false
}

/// Returns unused loopback addresses that no other call in this process gets.
pub(super) fn free<const N: usize>() -> [SocketAddr; N] {
    let ports: [u16; N] = lab::ports::free(N).unwrap().try_into().unwrap();
    ports.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
}

/// Returns a command without the environment settings of the user who runs the tests.
pub(super) fn program(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("QUORATE_") {
            command.env_remove(name);
        }
    }
    command.args(args);
    command
}

/// Writes a file that only its owner may read, as required for secrets; returns its path.
pub(super) fn private_file(dir: &Path, name: &str, text: &str) -> String {
    let file = dir.join(name);
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    file.display().to_string()
}

/// A process that is killed when dropped.
pub(super) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    pub(super) fn start(mut command: Command, log: PathBuf) -> Self {
        let stderr = File::create(&log).unwrap();
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(stderr).spawn().unwrap();
        Self { child, log }
    }

    /// Returns its log so far.
    pub(super) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until a line of its log contains all of these texts.
    pub(super) fn says(&self, texts: &[&str]) {
        let has_all = |line: &str| texts.iter().all(|text| line.contains(text));
        let is_said = || self.log().lines().any(has_all);
        assert!(is_met(is_said), "{texts:?} in {}", self.log());
    }

    pub(super) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(sent.unwrap().success());
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// An emulated engine that serves requests.
pub(super) struct Engine {
    pub(super) url: String,
    _process: Process,
    _dir: TempDir,
}

impl Engine {
    pub(super) fn start() -> Self {
        let dir = TempDir::new().unwrap();
        let [address] = free();
        let listen = address.to_string();
        let args = ["engine", "--speed", "50", "--listen", &listen];
        let command = program(env!("CARGO_BIN_EXE_quorate"), &args);
        let process = Process::start(command, dir.path().join("log"));
        until("the engine answers", || get(address, "/health").is_some());
        Self {
            url: format!("http://{address}"),
            _process: process,
            _dir: dir,
        }
    }
}

/// A replica with its own folder.
pub(super) struct Replica {
    pub(super) process: Process,
    pub(super) data: SocketAddr,
    pub(super) admin: SocketAddr,
    /// Its config, its data in `data`, and files of the test.
    pub(super) dir: TempDir,
}

impl Replica {
    /// Starts replica `id` with additional lines of config.
    pub(super) fn start(id: u8, peer: SocketAddr, config: &str) -> Self {
        let dir = TempDir::new().unwrap();
        Self::start_in(dir, id, peer, config, |command| command)
    }

    /// Starts a replica like [`Replica::start`], in a given folder and with a modified command.
    pub(super) fn start_in(
        dir: TempDir,
        id: u8,
        peer: SocketAddr,
        config: &str,
        by: impl FnOnce(Command) -> Command,
    ) -> Self {
        let [data, admin] = free();
        let data_dir = dir.path().join("data");
        let text = format!(
            "[node]\nid = {id}\ndata_dir = {data_dir:?}\n[listen]\ndata = \"{data}\"\n\
             admin = \"{admin}\"\npeer = \"{peer}\"\n[drain]\ndns_ttl = \"0s\"\n{config}"
        );
        let process = Self::serve(&dir, &text, by);
        Self {
            process,
            data,
            admin,
            dir,
        }
    }

    /// Starts a replica with a complete config, which sets its addresses.
    pub(super) fn start_text(dir: TempDir, text: &str, [data, admin]: [SocketAddr; 2]) -> Self {
        Self {
            process: Self::serve(&dir, text, |command| command),
            data,
            admin,
            dir,
        }
    }

    fn serve(dir: &TempDir, text: &str, by: impl FnOnce(Command) -> Command) -> Process {
        let file = dir.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        let args = ["serve", "--config", file.to_str().unwrap()];
        let command = by(program(env!("CARGO_BIN_EXE_quorate"), &args));
        Process::start(command, dir.path().join("log"))
    }

    /// Waits until it is ready.
    pub(super) fn ready(&self) {
        let is_ready = || {
            let answer = get(self.admin, "/readyz");
            answer.is_some_and(|answer| answer.json()["status"] == "ready")
        };
        assert!(is_met(is_ready), "not ready: {}", self.process.log());
    }

    /// Returns the path of a file in its folder, which may not exist.
    pub(super) fn file(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Returns the response of its admin API.
    pub(super) fn admin(&self, path: &str) -> Value {
        get(self.admin, path).unwrap().json()
    }

    /// Sends a chat completion request for this model with additional headers.
    pub(super) fn chat(&self, model: &str, headers: &str) -> Answer {
        let body = format!(
            r#"{{"model":"{model}","max_tokens":1,"messages":[{{"role":"user","content":"hi"}}]}}"#
        );
        send(
            self.data,
            "POST",
            "/v1/chat/completions",
            headers,
            Some(&body),
        )
        .unwrap()
    }
}

/// A response over HTTP/1.1.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// Status line and headers in lower case.
    pub(super) head: String,
    pub(super) body: String,
}

impl Answer {
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no json: {}", self.body))
    }

    /// Returns the `code` of an error in OpenAI's format.
    pub(super) fn code(&self) -> Value {
        self.json()["error"]["code"].clone()
    }
}

pub(super) fn get(address: SocketAddr, path: &str) -> Option<Answer> {
    send(address, "GET", path, "", None)
}

/// Sends one request on its own connection. Returns `None` if there is no response. `headers`
/// consists of complete lines, each with its line end.
pub(super) fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: Option<&str>,
) -> Option<Answer> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    exchange(stream, (address, method, path), headers, body)
}

/// Sends `GET` over TLS to a listener whose certificate the authority in `ca` signed.
pub(super) fn get_over_tls(
    address: SocketAddr,
    ca: &Path,
    path: &str,
    headers: &str,
) -> Option<Answer> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(ca).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::from(address.ip());
    let session = ClientConnection::new(Arc::new(config), name).unwrap();
    let stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let stream = StreamOwned::new(session, stream);
    exchange(stream, (address, "GET", path), headers, None)
}

fn exchange(
    mut stream: impl Read + Write,
    (address, method, path): (SocketAddr, &str, &str),
    headers: &str,
    body: Option<&str>,
) -> Option<Answer> {
    let content = body.map_or_else(String::new, |body| {
        let bytes = body.len();
        format!("content-type: application/json\r\ncontent-length: {bytes}\r\n")
    });
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}{content}\r\n{}",
        body.unwrap_or_default()
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer {
        status,
        head: head.to_lowercase(),
        body: body.to_owned(),
    })
}

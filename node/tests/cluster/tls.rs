//! TLS of the data listener, with certificates made by `quorate cert`.

#[path = "tls_admin.rs"]
mod admin;
#[path = "tls_engines.rs"]
mod engines_behind_tls;
#[path = "tls_picker.rs"]
mod gateways;
#[path = "tls_peers.rs"]
mod peers;

use std::net::SocketAddr;
use std::process::Command as Process;

use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, HandshakeKind, ProtocolVersion, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;

/// A folder of certificates.
pub(super) struct Certs(pub(super) PathBuf);

impl Certs {
    /// Creates an authority, and certificates for these replicas.
    pub(super) fn new(dir: &Path, replicas: &[&str]) -> Self {
        let certs = Self(dir.to_owned());
        certs.make(&["ca"]);
        let mut args = vec!["node"];
        args.extend(replicas.iter().flat_map(|id| ["--replica", *id]));
        certs.make(&args);
        certs
    }

    /// Runs `quorate cert` for this folder.
    pub(super) fn make(&self, args: &[&str]) {
        let (done, told) = self.run(args);
        assert!(done, "{args:?}: {told}");
    }

    fn run(&self, args: &[&str]) -> (bool, String) {
        let mut command = Process::new(env!("CARGO_BIN_EXE_quorate"));
        let command = command.arg("cert").args(args).arg("--out").arg(&self.0);
        let output = command.output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        (output.status.success(), told)
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Reads a certificate in the form in which a connection presents it.
    fn shown(&self, name: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.file(name)).unwrap()
    }

    /// Replaces the files `to` with the files `from` of another folder, as careful operators do.
    pub(super) fn replace(&self, from: &Self, to: &str) {
        for extension in ["key", "crt"] {
            let name = format!("{to}.{extension}");
            let beside = self.file("beside");
            std::fs::copy(from.file(&name), &beside).unwrap();
            std::fs::rename(&beside, self.file(&name)).unwrap();
        }
    }

    /// Returns a client that trusts this authority and presents the certificate `name`, if any.
    pub(super) fn client(&self, name: Option<&str>) -> ClientConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(self.shown("ca.crt")).unwrap();
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        match name {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let key = PrivateKeyDer::from_pem_file(self.file(&format!("{name}.key")));
                let chain = vec![self.shown(&format!("{name}.crt"))];
                builder.with_client_auth_cert(chain, key.unwrap()).unwrap()
            }
        }
    }
}

/// Connects to `at`, and expects a certificate for `127.0.0.1`.
async fn connect(at: SocketAddr, config: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TcpStream::connect(at).await.unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

/// Requests the models over HTTP/1.1. A TLS 1.3 handshake may fail only now.
async fn models(stream: TlsStream<TcpStream>) -> Result<StatusCode, hyper::Error> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let driving = tokio::spawn(connection);
    let request = Request::get("/v1/models").header("host", "127.0.0.1");
    let request = request.body(Full::<Bytes>::default()).unwrap();
    let status = sender.send_request(request).await?.status();
    drop(sender);
    driving.await.unwrap()?;
    Ok(status)
}

/// Returns the certificate that a listener presents.
async fn shows(at: SocketAddr, config: ClientConfig) -> Option<CertificateDer<'static>> {
    let stream = connect(at, config).await.ok()?;
    let shown = stream.get_ref().1.peer_certificates()?.first()?;
    Some(shown.clone().into_owned())
}

/// Returns `[tls.data]` with the certificate of a replica, and `more`.
fn data_section(certs: &Certs, id: usize, more: &str) -> String {
    let name = |extension: &str| certs.file(&format!("replica-{id}.{extension}"));
    format!(
        "[tls.data]\ncert_file = {:?}\nkey_file = {:?}\n{more}\n",
        name("crt"),
        name("key")
    )
}

/// Starts a replica with `more` in its config.
async fn replica(dir: &TempDir, engines: &[EngineHandle], more: &str) -> Replica {
    let bound = BoundSockets::bind(&anywhere()).unwrap();
    let peer = bound.addresses().unwrap().peer.to_string();
    config(1, &[peer], engines, dir.path());
    let replica = Replica::run(extended(dir.path(), 1, more), bound);
    Http::new().ready(&[replica.addresses]).await;
    replica
}

fn anywhere() -> ListenConfig {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    ListenConfig {
        data: any,
        admin: any,
        peer: any,
        metrics: None,
        picker: None,
        scaler: None,
        advertise: None,
    }
}

/// Returns the config of a replica with `more` in its file.
pub(super) fn extended(dir: &Path, id: usize, more: &str) -> Config {
    let file = dir.join(format!("n{id}.toml"));
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text + more).unwrap();
    read(file).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tls_listener_answers_plaintext_clients_with_an_error() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1=127.0.0.1"]);
    let engines = engines(1).await;
    let replica = replica(&dir, &engines, &data_section(&certs, 1, "")).await;
    let at = replica.addresses.data;

    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_protocol_versions(&[version]).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certs.shown("ca.crt")).unwrap();
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        for protocol in [&b"h2"[..], b"http/1.1"] {
            config.alpn_protocols = vec![protocol.to_vec()];
            let stream = connect(at, config.clone()).await.unwrap();
            let session = stream.get_ref().1;
            assert_eq!(session.alpn_protocol(), Some(protocol));
            let is_version = session.protocol_version() == Some(version.version);
            assert!(is_version, "{:?}", session.protocol_version());
            if protocol == b"http/1.1" {
                assert_eq!(models(stream).await.unwrap(), StatusCode::OK);
            }
        }
        // The responses have delivered session tickets.
        let stream = connect(at, config).await.unwrap();
        let kind = stream.get_ref().1.handshake_kind();
        assert_eq!(kind, Some(HandshakeKind::Resumed), "{version:?}");
    }

    let name = ServerName::try_from("other.example").unwrap();
    let stream = TcpStream::connect(at).await.unwrap();
    let connector = TlsConnector::from(Arc::new(certs.client(None)));
    let wrong = connector
        .connect(name, stream)
        .await
        .unwrap_err()
        .to_string();
    assert!(wrong.contains("other.example"), "{wrong}");

    let mut clear = TcpStream::connect(at).await.unwrap();
    let request = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n";
    clear.write_all(request).await.unwrap();
    let mut answer = String::new();
    clear.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("this port requires TLS"), "{answer}");
    let page = format!("http://{}/metrics", replica.addresses.admin);
    let failed = "quorate_proxy_tls_handshakes_failed_total 2";
    let is_counted = async || Http::new().text(&page).await.contains(failed);
    until("both are counted", is_counted).await;
    let page = Http::new().text(&page).await;
    let expiry = page.lines().find(|line| line.starts_with("quorate_tls_"));
    let (name, left) = expiry.unwrap().rsplit_once(' ').unwrap();
    assert_eq!(
        name,
        "quorate_tls_certificate_expiry_seconds{section=\"tls.data\"}"
    );
    let left: i64 = left.parse().unwrap();
    let year = 365 * 86_400;
    assert!((year - 3600..=year).contains(&left), "{left}");
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_reload_drops_no_stream() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1=127.0.0.1"]);
    let engines = engines(1).await;
    let replica = replica(&dir, &engines, &data_section(&certs, 1, "")).await;
    let at = replica.addresses.data;

    let stream = connect(at, certs.client(None)).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let body = json!({ "model": "emulated", "prompt": SYSTEM, "max_tokens": 900, "stream": true });
    let ask = || {
        Request::post("/v1/completions")
            .header("host", "127.0.0.1")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap()
    };
    let mut open = sender.send_request(ask()).await.unwrap().into_body();
    let first = open.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.starts_with(b"data: "), "{first:?}");

    // An invalid certificate: the old one stays, while the next ones are watched for.
    std::fs::write(certs.file("replica-1.crt"), "not yet").unwrap();
    let next = Certs::new(&dir.path().join("next"), &["1=127.0.0.1"]);
    let shown = shows(at, certs.client(None)).await;
    assert!(shown.is_some(), "a broken file changes nothing");
    certs.replace(&next, "replica-1");
    let expected = Some(next.shown("replica-1.crt"));
    let is_new = async || shows(at, next.client(None)).await == expected;
    until("the new certificate is shown", is_new).await;
    assert!(
        shows(at, certs.client(None)).await.is_none(),
        "the old one is gone"
    );

    let rest = open.collect().await.unwrap().to_bytes();
    assert!(rest.ends_with(b"data: [DONE]\n\n"), "cut off");
    // The connection was opened with the old certificate, and stays open.
    sender.ready().await.unwrap();
    let answer = sender.send_request(ask()).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_certificates_must_be_of_the_configured_authority() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1"]);
    certs.make(&["client", "ada"]);
    let stranger = Certs::new(&dir.path().join("stranger"), &["1"]);
    stranger.make(&["client", "eve"]);
    for name in ["eve.crt", "eve.key"] {
        std::fs::copy(stranger.file(name), certs.file(name)).unwrap();
    }
    let engines = engines(1).await;
    let asks = format!("client_ca_file = {:?}", certs.file("ca.crt"));
    let replica = replica(&dir, &engines, &data_section(&certs, 1, &asks)).await;
    let at = replica.addresses.data;
    for (name, is_served) in [(Some("ada"), true), (Some("eve"), false), (None, false)] {
        let asked = match connect(at, certs.client(name)).await {
            Ok(stream) => {
                assert_eq!(
                    stream.get_ref().1.protocol_version(),
                    Some(ProtocolVersion::TLSv1_3)
                );
                models(stream).await.map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        assert_eq!(asked.is_ok(), is_served, "{name:?}: {asked:?}");
    }
    replica.leave().await;
}

#[tokio::test]
async fn certificate_errors_name_key_file_and_expectation() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1", "2"]);
    config(1, &[], &[], dir.path());
    let plain = std::fs::read_to_string(dir.path().join("n1.toml")).unwrap();
    let fault = |section: &str| {
        let file = dir.path().join("n1.toml");
        std::fs::write(&file, format!("{plain}[tls.data]\n{section}")).unwrap();
        read(file).unwrap_err()
    };
    let file = |name: &str| format!("{:?}", certs.file(name));
    let (crt, key) = (file("replica-1.crt"), file("replica-1.key"));
    std::fs::set_permissions(
        certs.file("replica-2.key"),
        std::os::unix::fs::PermissionsExt::from_mode(0o644),
    )
    .unwrap();
    for (section, expected) in [
        (
            format!("cert_file = {crt}"),
            vec!["tls.data.cert_file is set, tls.data.key_file is not"],
        ),
        (
            format!("cert_file = \"/none\"\nkey_file = {key}"),
            vec![
                "tls.data.cert_file: \"/none\": No such file",
                "a certificate in PEM",
            ],
        ),
        (
            format!("cert_file = {key}\nkey_file = {key}"),
            vec!["replica-1.key\": holds no certificate in PEM"],
        ),
        (
            format!("cert_file = {crt}\nkey_file = {crt}"),
            vec!["tls.data.key_file", "replica-1.crt\": everybody may use it"],
        ),
        (
            format!("cert_file = {}\nkey_file = {key}", file("replica-2.crt")),
            vec!["replica-1.key\": is not the key of", "replica-2.crt"],
        ),
        (
            format!("cert_file = {crt}\nkey_file = {}", file("replica-2.key")),
            vec!["everybody may use it (mode 644)", "chmod 600"],
        ),
        (
            format!("cert_file = {crt}\nkey_file = {key}\nclient_ca_file = {key}"),
            vec!["tls.data.client_ca_file", "certificates of authorities"],
        ),
    ] {
        let told = fault(&section);
        for part in expected {
            assert!(told.contains(part), "{part:?} in {told}");
        }
    }
    let (done, told) = certs.run(&["ca"]);
    assert!(!done && told.contains("ca.crt exists"), "{told}");
}

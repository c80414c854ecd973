//! TLS of the admin listener: its certificate, authentication of operators, and commands that use
//! it.

use std::process::Output;

use ::admin::{AdminRole, NewToken};

use super::*;

/// Returns `[tls.admin]` with the certificate of replica 1, and the authority for operators.
fn admin_section(certs: &Certs) -> String {
    format!(
        "[tls.admin]\ncert_file = {:?}\nkey_file = {:?}\nclient_ca_file = {:?}\n",
        certs.file("replica-1.crt"),
        certs.file("replica-1.key"),
        certs.file("ca.crt")
    )
}

/// Starts a replica with `more` in its config and waits until it serves clients.
async fn guarded(dir: &TempDir, engines: &[EngineHandle], more: &str) -> Replica {
    guarded_on(&anywhere(), dir, engines, more).await
}

async fn guarded_on(
    listen: &ListenConfig,
    dir: &TempDir,
    engines: &[EngineHandle],
    more: &str,
) -> Replica {
    let bound = BoundSockets::bind(listen).unwrap();
    let peer = bound.addresses().unwrap().peer.to_string();
    config(1, &[peer], engines, dir.path());
    let replica = Replica::run(extended(dir.path(), 1, more), bound);
    let url = format!("http://{}/readyz", replica.addresses.data);
    let is_ready = async || Http::new().get(&url).await.0 == StatusCode::OK;
    until("clients are served", is_ready).await;
    replica
}

/// Starts a replica like [`guarded`], with an admin listener that is also reachable at addresses
/// outside its certificate.
async fn everywhere(dir: &TempDir, engines: &[EngineHandle], more: &str) -> Replica {
    let any = ListenConfig {
        admin: "0.0.0.0:0".parse().unwrap(),
        ..anywhere()
    };
    guarded_on(&any, dir, engines, more).await
}

/// Sends a request to the admin listener on its own connection.
async fn ask(
    at: SocketAddr,
    tls: ClientConfig,
    (method, path): (&str, &str),
    token: Option<&str>,
) -> Result<(u16, Value), String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let stream = connect(at, tls).await.map_err(|it| told(&it))?;
    let io = TokioIo::new(stream);
    let (mut sender, connection) = http1::handshake(io).await.map_err(|it| told(&it))?;
    let driving = tokio::spawn(connection);
    let mut request = Request::builder().method(method).uri(path);
    request = request.header("host", "127.0.0.1");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request.body(Full::<Bytes>::default()).unwrap();
    let answer = sender.send_request(request).await.map_err(|it| told(&it))?;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    driving.abort();
    Ok((status, serde_json::from_slice(&body).unwrap_or_default()))
}

/// Runs a command without the environment settings of the user who runs the tests.
fn command(args: &[&str]) -> Output {
    let mut command = Process::new(env!("CARGO_BIN_EXE_quorate"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("QUORATE_") {
            command.env_remove(name);
        }
    }
    command.args(args).output().unwrap()
}

fn told(output: &Output) -> String {
    let told = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8(told).unwrap()
}

const DRAIN: (&str, &str) = ("POST", "/admin/v1/backends/engine-0/drain");
const READ: (&str, &str) = ("GET", "/admin/v1/cluster");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_listener_speaks_tls_and_reloads_certificates() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1=127.0.0.1"]);
    certs.make(&["client", "ada", "--role", "viewer"]);
    let engines = engines(1).await;
    let replica = guarded(&dir, &engines, &admin_section(&certs)).await;
    let at = replica.addresses.admin;
    let ada = || certs.client(Some("ada"));
    let (status, cluster) = ask(at, ada(), READ, None).await.unwrap();
    assert_eq!(status, 200, "{cluster}");
    let label = &cluster["members"]["1"]["labels"]["admin"];
    assert_eq!(*label, format!("https://{at}"));

    let mut clear = TcpStream::connect(at).await.unwrap();
    let request = b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n";
    clear.write_all(request).await.unwrap();
    let mut answer = String::new();
    clear.read_to_string(&mut answer).await.unwrap();
    for part in [
        "HTTP/1.1 400 ",
        "application/problem+json",
        "this port requires TLS; use https://",
    ] {
        assert!(answer.contains(part), "{answer}");
    }

    // An event stream survives a change of certificates.
    let stream = connect(at, ada()).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("/admin/v1/events").header("host", "127.0.0.1");
    let request = request.body(Full::<Bytes>::default()).unwrap();
    let mut events = sender.send_request(request).await.unwrap().into_body();
    let first = events.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.starts_with(b"event: connected"), "{first:?}");
    let next = Certs::new(&dir.path().join("next"), &["1=127.0.0.1"]);
    certs.replace(&next, "replica-1");
    let expected = Some(next.shown("replica-1.crt"));
    let is_new = async || shows(at, next.client(None)).await == expected;
    until("the new certificate is shown", is_new).await;
    let still = tokio::time::timeout(Duration::ZERO, events.frame()).await;
    assert!(still.is_err(), "it goes on: {still:?}");

    let open = ("GET", "/livez");
    assert_eq!(ask(at, next.client(None), open, None).await.unwrap().0, 200);
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_grants_the_role_it_names() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1=127.0.0.1"]);
    certs.make(&["client", "ada", "--role", "operator"]);
    certs.make(&["client", "vi", "--role", "viewer"]);
    certs.make(&["client", "plain"]);
    certs.make(&["client", "other", "--role", "admin", "--cluster", "test"]);
    let stranger = Certs::new(&dir.path().join("stranger"), &["1"]);
    stranger.make(&["client", "eve", "--role", "admin"]);
    for name in ["eve.crt", "eve.key"] {
        std::fs::copy(stranger.file(name), certs.file(name)).unwrap();
    }
    let token = NewToken::draw("to", AdminRole::Viewer).unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, &token.line).unwrap();
    let more = format!(
        "{}[admin]\ntokens_file = {tokens:?}\n",
        admin_section(&certs)
    );
    let engines = engines(1).await;
    let replica = guarded(&dir, &engines, &more).await;
    let at = replica.addresses.admin;
    let status = async |name: Option<&str>, asked, token: Option<&str>| {
        let answer = ask(at, certs.client(name), asked, token).await;
        answer.unwrap_or_else(|why| panic!("{name:?} {asked:?}: {why}"))
    };
    let (right, wrong) = (Some(token.secret.as_str()), Some("wrong"));
    for (name, asked, token, expected) in [
        (Some("ada"), DRAIN, None, 200),
        (Some("vi"), READ, None, 200),
        (Some("vi"), DRAIN, None, 403),
        (Some("plain"), READ, None, 403),
        (Some("other"), READ, None, 403),
        (Some("replica-1"), READ, None, 403),
        (None, READ, None, 401),
        (None, READ, right, 200),
        // A token takes precedence over the certificate.
        (Some("ada"), DRAIN, right, 403),
        (Some("ada"), DRAIN, wrong, 401),
        (Some("plain"), READ, right, 200),
        (None, ("GET", "/livez"), None, 200),
    ] {
        let (found, answer) = status(name, asked, token).await;
        assert_eq!(found, expected, "{name:?} {asked:?} {token:?}: {answer}");
    }
    let (_, refused) = status(Some("other"), READ, None).await;
    let detail = refused["detail"].as_str().unwrap();
    for part in [
        "role-viewer.quorate.quorate.internal",
        "role-admin.test.quorate.internal",
    ] {
        assert!(detail.contains(part), "{detail}");
    }
    let eve = ask(at, certs.client(Some("eve")), READ, None).await;
    assert!(eve.is_err(), "{eve:?}");

    let (_, audit) = status(Some("vi"), ("GET", "/admin/v1/audit"), None).await;
    let calls = audit["calls"].as_array().unwrap().iter();
    let calls: Vec<_> = calls
        .map(|call| json!([call["who"], call["role"], call["by"], call["status"]]))
        .collect();
    let expected = [
        json!(["to", "viewer", "token", 403]),
        json!(["vi", "viewer", "certificate", 403]),
        json!(["ada", "operator", "certificate", 200]),
    ];
    assert_eq!(calls, expected);
    assert_eq!(audit["writes"][0]["who"], "ada");
    let (_, told) = status(Some("vi"), READ, None).await;
    assert_eq!(told["id"], 1);
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_use_tls_and_report_a_name_mismatch() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1"]);
    certs.make(&["client", "ada", "--role", "admin"]);
    let stranger = Certs::new(&dir.path().join("stranger"), &["1"]);
    let engines = engines(1).await;
    let replica = everywhere(&dir, &engines, &admin_section(&certs)).await;
    let addresses = replica.addresses;
    let port = addresses.admin.port();
    let (right, wrong) = (
        format!("https://127.0.0.1:{port}"),
        format!("https://127.0.0.2:{port}"),
    );
    let file = |name: &str| certs.file(name).display().to_string();
    let (ca, cert, key) = (file("ca.crt"), file("ada.crt"), file("ada.key"));
    let as_ada = |url: &str, args: &[&str]| {
        let files = [
            "--ca-file",
            &ca,
            "--cert-file",
            &cert,
            "--key-file",
            &key,
            "--admin",
            url,
        ];
        command(&[args, &files].concat())
    };
    let done = |output: &Output| assert!(output.status.success(), "{}", told(output));
    done(&as_ada(&right, &["status"]));
    done(&as_ada(&right, &["backend", "drain", "engine-0"]));
    let backup = dir.path().join("backup").display().to_string();
    done(&as_ada(&right, &["backup", &backup]));
    // A server with the wrong certificate is skipped, and reported if no other is left.
    done(&as_ada(&format!("{wrong},{right}"), &["backend"]));
    let nobody = as_ada(&format!("{wrong},http://127.0.0.1:{port}"), &["backend"]);
    let nobody = told(&nobody);
    assert!(nobody.contains("this port requires TLS"), "{nobody}");
    for (args, parts) in [
        (
            &["status", "--admin", &wrong, "--ca-file", &ca][..],
            &[
                "expected a certificate for \"127.0.0.2\", found one for",
                "127.0.0.1",
            ][..],
        ),
        (&["status", "--admin", &right], &["--ca-file"]),
        (
            &["status", "--admin", &right, "--ca-file", "/none"],
            &["--ca-file: \"/none\": No such file"],
        ),
        (
            &["status", "--admin", &right, "--ca-file", &ca],
            &["401", "--token-file", "--cert-file"],
        ),
        (&["status", "--cert-file", &cert], &["--key-file"]),
    ] {
        let output = command(args);
        let told = told(&output);
        assert!(!output.status.success(), "{told}");
        for part in parts {
            assert!(told.contains(part), "{part:?} in {told}");
        }
    }
    let unknown = stranger.file("ca.crt").display().to_string();
    let output = command(&["status", "--admin", &right, "--ca-file", &unknown]);
    assert!(told(&output).contains("not trusted here"), "{output:?}");
    let data = format!("https://{}", addresses.data);
    let output = command(&["status", "--admin", &data, "--ca-file", &ca]);
    assert!(told(&output).contains("does not use TLS"), "{output:?}");
    replica.leave().await;
}

#[test]
fn a_reachable_admin_listener_must_be_encrypted() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1"]);
    let token = NewToken::draw("ada", AdminRole::Admin).unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, &token.line).unwrap();
    let file = dir.path().join("n1.toml");
    let loaded = |text: &str, flags: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let reached = ["node.id=1", "listen.admin=10.0.0.1:8081"];
        let flags = reached.iter().chain(flags).map(|flag| (*flag).to_owned());
        let origin = Origin {
            file: Some(file.clone()),
            flags: flags.collect(),
            ..Origin::default()
        };
        load(&origin).map(drop).map_err(|faults| faults.to_string())
    };
    let with_tokens = format!("[admin]\ntokens_file = {tokens:?}\n");
    let in_the_clear = loaded(&with_tokens, &[]).unwrap_err();
    for part in [
        "listen.admin is 10.0.0.1:8081, which others can reach, and tls.admin.cert_file is not set",
        "tls.admin.terminated_upstream = true",
    ] {
        assert!(in_the_clear.contains(part), "{in_the_clear}");
    }
    let upstream = "tls.admin.terminated_upstream=true";
    assert_eq!(loaded(&with_tokens, &[upstream]), Ok(()));
    assert_eq!(loaded("", &["insecure=true"]), Ok(()));
    let for_nobody = loaded("", &[upstream]).unwrap_err();
    assert!(
        for_nobody.contains("admin.tokens_file is not set"),
        "{for_nobody}"
    );
    let section = admin_section(&certs);
    assert_eq!(loaded(&section, &[]), Ok(()));
    let twice = loaded(&section, &[upstream]).unwrap_err();
    assert!(twice.contains("one place where TLS ends"), "{twice}");
    let partial = loaded("[tls.admin]\nclient_ca_file = \"a\"\n", &["insecure=true"]);
    assert!(
        partial
            .unwrap_err()
            .contains("tls.admin.client_ca_file is set, tls.admin.cert_file is not")
    );
}

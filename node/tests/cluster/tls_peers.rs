//! Three replicas that authenticate each other with certificates, also while their authority
//! changes.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Returns `[tls.peer]` with the certificate of a replica.
fn peer_section(certs: &Certs, id: usize) -> String {
    let name = |extension: &str| certs.file(&format!("replica-{id}.{extension}"));
    format!(
        "[tls.peer]\ncert_file = {:?}\nkey_file = {:?}\nca_file = {:?}\n",
        name("crt"),
        name("key"),
        certs.file("ca.crt")
    )
}

/// Creates certificates of three replicas, by one authority.
fn certificates(dir: &Path) -> Certs {
    Certs::new(dir, &["1=127.0.0.1", "2=127.0.0.1", "3=127.0.0.1"])
}

/// Starts three replicas with certificates in one folder.
fn secure_cluster(certs: &Certs, engines: &[EngineHandle], dir: &TempDir) -> Vec<Replica> {
    let hosts = [0; 3].map(|_| Certs(certs.0.clone()));
    secure_cluster_on(&hosts, engines, dir)
}

/// Starts three replicas with certificates for peers and clients, each with its own folder.
fn secure_cluster_on(hosts: &[Certs], engines: &[EngineHandle], dir: &TempDir) -> Vec<Replica> {
    let bound: Vec<_> = (0..3)
        .map(|_| BoundSockets::bind(&anywhere()).unwrap())
        .collect();
    let peers = bound
        .iter()
        .map(|it| it.addresses().unwrap().peer.to_string());
    let peers: Vec<_> = peers.collect();
    let start = |(id, sockets): (usize, BoundSockets)| {
        config(id, &peers, engines, dir.path());
        let certs = &hosts[id - 1];
        let more = data_section(certs, id, "") + &peer_section(certs, id);
        Replica::run(extended(dir.path(), id, &more), sockets)
    };
    (1..).zip(bound).map(start).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_with_certificates_form_a_cluster_and_serve() {
    let dir = TempDir::new().unwrap();
    let certs = certificates(&dir.path().join("certs"));
    let engines = engines(1).await;
    let mut replicas = secure_cluster(&certs, &engines, &dir);
    let (http, at) = (Http::new(), addresses(&replicas));
    http.ready(&at).await;
    for replica in &at {
        let stream = connect(replica.data, certs.client(None)).await.unwrap();
        assert_eq!(models(stream).await.unwrap(), StatusCode::OK);
    }
    // A request at a follower goes through the leader.
    let put = json!({ "weight_milli": 2000 });
    let url = format!("http://{}/admin/v1/users/ada", at[0].admin);
    let (status, _, told) = http.send(Method::PUT, &url, &put).await;
    assert_eq!(status, StatusCode::OK, "{told}");
    http.agree(&at).await;
    let (config, addresses) = replicas.remove(1).leave().await;
    replicas.insert(1, Replica::again((config, addresses)));
    http.ready(&at).await;
    http.agree(&at).await;
    leave(replicas).await;
}

#[tokio::test]
async fn a_wrong_peer_certificate_is_refused_at_start() {
    let dir = TempDir::new().unwrap();
    let certs = certificates(&dir.path().join("certs"));
    let others = certificates(&dir.path().join("others"));
    let fault = |more: &str| {
        config(1, &[], &[], dir.path());
        let file = dir.path().join("n1.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text + more).unwrap();
        read(file).unwrap_err()
    };
    let told = fault(&peer_section(&certs, 2));
    for part in [
        "tls.peer.cert_file",
        "replica-1.quorate",
        "replica-2.quorate",
    ] {
        assert!(told.contains(part), "{told}");
    }
    let ours = certs.file("ca.crt");
    let theirs = peer_section(&others, 1);
    let theirs = theirs.replace(
        &format!("{:?}", others.file("ca.crt")),
        &format!("{ours:?}"),
    );
    let told = fault(&theirs);
    assert!(told.contains("tls.peer.cert_file"), "{told}");
    assert!(
        told.contains(&format!("an authority in {ours:?}")),
        "{told}"
    );
    let secret = dir.path().join("secret");
    let told = fault(&format!(
        "{}[tls.data]\ncert_file = {secret:?}\n",
        peer_section(&certs, 1)
    ));
    assert!(told.contains("tls.data.key_file is not"), "{told}");
}

#[test]
fn a_reachable_peer_listener_must_be_protected() {
    let dir = TempDir::new().unwrap();
    let certs = certificates(&dir.path().join("certs"));
    let file = dir.path().join("n1.toml");
    std::fs::write(&file, "").unwrap();
    let loaded = |flags: &[&str]| {
        let reached = ["node.id=1", "listen.peer=10.0.0.1:8082"];
        let flags = reached.iter().chain(flags).map(|flag| (*flag).to_owned());
        load(&Origin {
            file: Some(file.clone()),
            flags: flags.collect(),
            ..Origin::default()
        })
    };
    let told = loaded(&[]).unwrap_err().to_string();
    assert!(
        told.contains("listen.peer is 10.0.0.1:8082, which others can reach"),
        "{told}"
    );
    assert!(loaded(&["insecure=true"]).is_ok());
    std::fs::write(&file, peer_section(&certs, 1)).unwrap();
    assert!(loaded(&[]).is_ok());
    let optional = ["cluster.authentication_optional=true"];
    let told = loaded(&optional).unwrap_err().to_string();
    let why = "cluster.authentication_optional is set";
    assert!(told.contains(why), "{told}");
}

/// Returns a client that trusts these authorities.
fn trusting(certs: &[&Certs]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    for certs in certs {
        roots.add(certs.shown("ca.crt")).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// Whether the peer listener accepts a client with the certificate of `replica-3`.
async fn listens_to(at: SocketAddr, certs: &Certs, trusted: &[&Certs]) -> bool {
    let mut config = certs.client(Some("replica-3"));
    config.alpn_protocols = vec![b"h2".to_vec()];
    let mut roots = RootCertStore::empty();
    for certs in trusted {
        roots.add(certs.shown("ca.crt")).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        rustls::client::WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
    config
        .dangerous()
        .set_certificate_verifier(verifier.build().unwrap());
    let Ok(mut stream) = connect(at, config).await else {
        return false;
    };
    // HTTP/2 starts with settings from both sides.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
    stream.write_all(preface).await.is_ok() && stream.read_u8().await.is_ok()
}

/// Returns a host's folder with the files of one replica.
fn host(dir: &TempDir, id: usize, from: &Certs) -> Certs {
    let host = Certs(dir.path().join(format!("host-{id}")));
    std::fs::create_dir_all(&host.0).unwrap();
    host.replace(from, &format!("replica-{id}"));
    std::fs::copy(from.file("ca.crt"), host.file("ca.crt")).unwrap();
    host
}

/// Sets the authorities that a host trusts.
fn trust(host: &Certs, authorities: &[&Certs]) {
    let text: String = authorities
        .iter()
        .map(|it| std::fs::read_to_string(it.file("ca.crt")).unwrap())
        .collect();
    std::fs::write(host.file("beside"), text).unwrap();
    std::fs::rename(host.file("beside"), host.file("ca.crt")).unwrap();
}

/// Sends requests on new connections until stopped; returns their number and the failures.
async fn asking(at: SocketAddr, tls: ClientConfig, stop: Arc<AtomicBool>) -> (usize, Vec<String>) {
    let (mut asked, mut failed) = (0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        asked += 1;
        let answered = async {
            let stream = connect(at, tls.clone())
                .await
                .map_err(|it| it.to_string())?;
            let io = TokioIo::new(stream);
            let (mut sender, connection) =
                http1::handshake(io).await.map_err(|it| it.to_string())?;
            let driving = tokio::spawn(connection);
            let body = json!({ "model": "emulated", "prompt": SYSTEM, "max_tokens": 2 });
            let request = Request::post("/v1/completions")
                .header("host", "127.0.0.1")
                .header("content-type", "application/json")
                .body(Full::new(Bytes::from(body.to_string())))
                .unwrap();
            let answer = sender.send_request(request).await;
            let answer = answer.map_err(|it| it.to_string())?;
            let status = answer.status();
            let body = answer.into_body().collect().await;
            body.map_err(|it| it.to_string())?;
            driving.abort();
            match status {
                StatusCode::OK => Ok(()),
                other => Err(other.to_string()),
            }
        };
        if let Err(why) = answered.await {
            failed.push(why);
        }
    }
    (asked, failed)
}

/// Protection of connections between replicas before the move to certificates.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Clear,
    Secret,
}

/// Restarts each replica with `more` in its config, one after the other, while clients use the
/// others; no request may fail.
async fn restart_each(
    replicas: &mut Vec<Replica>,
    dir: &TempDir,
    texts: &[String],
    more: impl Fn(usize) -> String,
) {
    let at = addresses(replicas);
    for (nth, text) in texts.iter().enumerate() {
        let stop = Arc::new(AtomicBool::new(false));
        let others = at.iter().enumerate().filter(|(other, _)| *other != nth);
        let load = others.map(|(_, at)| {
            let (url, stop) = (format!("http://{}/v1/completions", at.data), stop.clone());
            tokio::spawn(async move {
                let (mut asked, mut failed) = (0, Vec::new());
                let body = json!({ "model": "emulated", "prompt": SYSTEM, "max_tokens": 2 });
                while !stop.load(Ordering::Relaxed) {
                    asked += 1;
                    let (status, _, told) = Http::new().send(Method::POST, &url, &body).await;
                    if status != StatusCode::OK {
                        failed.push(told.to_string());
                    }
                }
                (asked, failed)
            })
        });
        let load: Vec<_> = load.collect();
        let (_, bound_at) = replicas.remove(nth).leave().await;
        let file = dir.path().join(format!("n{}.toml", nth + 1));
        std::fs::write(&file, text.clone() + &more(nth + 1)).unwrap();
        let again = Replica::again((read(file).unwrap(), bound_at));
        replicas.insert(nth, again);
        Http::new().ready(&at).await;
        Http::new().agree(&at).await;
        stop.store(true, Ordering::Relaxed);
        for client in load {
            let (asked, failed) = client.await.unwrap();
            assert!(asked > 0 && failed.is_empty(), "of {asked}: {failed:?}");
        }
    }
}

async fn moves_to_certificates(before: Before) {
    let dir = TempDir::new().unwrap();
    let certs = certificates(&dir.path().join("certs"));
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "s".repeat(40)).unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&secret, private).unwrap();
    let had = match before {
        Before::Clear => String::new(),
        Before::Secret => format!("secret_file = {secret:?}\n"),
    };
    let engines = engines(1).await;
    let bound: Vec<_> = (0..3)
        .map(|_| BoundSockets::bind(&anywhere()).unwrap())
        .collect();
    let peers = bound
        .iter()
        .map(|it| it.addresses().unwrap().peer.to_string());
    let peers: Vec<_> = peers.collect();
    let (mut replicas, mut plain, mut first) = (Vec::new(), Vec::new(), Vec::new());
    for (id, sockets) in (1..).zip(bound) {
        config(id, &peers, &engines, dir.path());
        let file = dir.path().join(format!("n{id}.toml"));
        let text = std::fs::read_to_string(&file).unwrap();
        let beginning = |keys: &str| text.replace("[cluster]\n", &format!("[cluster]\n{keys}"));
        std::fs::write(&file, beginning(&had)).unwrap();
        replicas.push(Replica::run(read(file).unwrap(), sockets));
        first.push(beginning(&format!("authentication_optional = true\n{had}")));
        plain.push(text);
    }
    let at = addresses(&replicas);
    Http::new().ready(&at).await;
    restart_each(&mut replicas, &dir, &first, |id| peer_section(&certs, id)).await;
    restart_each(&mut replicas, &dir, &plain, |id| peer_section(&certs, id)).await;
    for at in &at {
        assert!(listens_to(at.peer, &certs, &[&certs]).await);
    }
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plaintext_cluster_moves_to_certificates_under_load() {
    moves_to_certificates(Before::Clear).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_with_a_secret_moves_to_certificates_under_load() {
    moves_to_certificates(Before::Secret).await;
}

/// Restarts the second replica, which then opens new connections to all others.
async fn restart_second(replicas: &mut Vec<Replica>, at: &[Addresses]) {
    let left = replicas.remove(1).leave().await;
    replicas.insert(1, Replica::again(left));
    Http::new().ready(at).await;
    Http::new().agree(at).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_moves_to_a_new_authority_under_load() {
    let dir = TempDir::new().unwrap();
    let old = certificates(&dir.path().join("old"));
    let new = certificates(&dir.path().join("new"));
    let hosts: Vec<_> = (1..=3).map(|id| host(&dir, id, &old)).collect();
    let engines = engines(2).await;
    let mut replicas = secure_cluster_on(&hosts, &engines, &dir);
    let at = addresses(&replicas);
    Http::new().ready(&at).await;
    let stop = Arc::new(AtomicBool::new(false));
    let tls = || trusting(&[&old, &new]);
    let load = |at: &Addresses| tokio::spawn(asking(at.data, tls(), Arc::clone(&stop)));
    // None at the second replica, because clients would notice its restart.
    let load = [load(&at[0]), load(&at[0]), load(&at[2])];

    for host in &hosts {
        trust(host, &[&old, &new]);
    }
    for at in &at {
        let heard = async || listens_to(at.peer, &new, &[&old]).await;
        until("replicas of the new authority are listened to", heard).await;
    }
    for (id, host) in (1..).zip(&hosts) {
        let name = format!("replica-{id}");
        host.replace(&new, &name);
        let (at, expected) = (&at[id - 1], new.shown(&format!("{name}.crt")));
        let is_shown = async || {
            shows(at.data, tls()).await.as_ref() == Some(&expected)
                && listens_to(at.peer, &new, &[&new]).await
        };
        until("the new certificate is shown", is_shown).await;
    }
    restart_second(&mut replicas, &at).await;
    for host in &hosts {
        trust(host, &[&new]);
    }
    for at in &at {
        let is_over = async || !listens_to(at.peer, &old, &[&new]).await;
        until("replicas of the old authority are strangers", is_over).await;
    }
    restart_second(&mut replicas, &at).await;

    stop.store(true, Ordering::Relaxed);
    for client in load {
        let (asked, failed) = client.await.unwrap();
        assert!(asked > 20, "{asked}");
        assert!(failed.is_empty(), "{} of {asked}: {failed:?}", failed.len());
    }
    leave(replicas).await;
}

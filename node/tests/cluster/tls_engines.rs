//! Engines behind TLS are always verified, whatever connects to them.

use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

/// Terminates TLS with the certificate `name` in front of an engine; returns its port.
async fn in_front_of(engine: &EngineHandle, certs: &Certs, name: &str) -> u16 {
    let key = PrivateKeyDer::from_pem_file(certs.file(&format!("{name}.key"))).unwrap();
    let chain = vec![certs.shown(&format!("{name}.crt"))];
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let engine = engine.url().strip_prefix("http://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, engine) = (acceptor.clone(), engine.clone());
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await?;
                let mut engine = TcpStream::connect(engine).await?;
                tokio::io::copy_bidirectional(&mut stream, &mut engine).await
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_engines_serve_only_with_a_valid_certificate() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1=engine.internal"]);
    let stranger = Certs::new(&dir.path().join("stranger"), &["1"]);
    let engines = engines(1).await;
    let right = in_front_of(&engines[0], &certs, "replica-1").await;
    let wrong = in_front_of(&engines[0], &stranger, "replica-1").await;
    let more = format!(
        "[tls.backends]\nca_file = {:?}\n\
         [[backends]]\nid = \"right\"\nurl = \"https://127.0.0.1:{right}\"\n\
         server_name = \"engine.internal\"\n\
         [[backends]]\nid = \"by-host\"\nurl = \"https://localhost:{right}\"\n\
         [[backends]]\nid = \"wrong-name\"\nurl = \"https://127.0.0.1:{right}/v\"\n\
         server_name = \"other.internal\"\n\
         [[backends]]\nid = \"wrong-authority\"\nurl = \"https://127.0.0.1:{wrong}\"\n",
        certs.file("ca.crt")
    );
    let replica = replica(&dir, &[], &more).await;
    let (http, at) = (Http::new(), replica.addresses);
    let url = format!("http://{}/admin/v1/backends", at.admin);
    let is_known = async || {
        let (_, told) = http.get(&url).await;
        let told = told["backends"].as_array().unwrap().iter();
        let told: Vec<_> = told.map(Value::to_string).collect();
        told.len() == 4
            && told[0].contains("\"by-host\"")
            && told[0].contains("\"is_healthy\":true")
            && told[1].contains("\"is_healthy\":true")
            && told[2].contains("UnknownIssuer")
            && told[3].contains("other.internal")
            && told[3].contains("engine.internal")
    };
    until("two engines are healthy, two say why not", is_known).await;
    let mut served = BTreeSet::new();
    for question in 0..8 {
        let headers = http
            .chat(&at, &format!("user-{question}"), "Is it lit?")
            .await;
        served.insert(headers["x-quorate-backend"].to_str().unwrap().to_owned());
    }
    let right = ["by-host", "right"].map(str::to_owned).into();
    assert!(served.is_subset(&right), "{served:?}");
    // A backend from the admin API is verified like those from the config.
    let put = json!({ "url": format!("https://127.0.0.1:{wrong}/x") });
    let (status, _, told) = http.send(Method::PUT, &format!("{url}/later"), &put).await;
    assert_eq!(status, StatusCode::OK, "{told}");
    let is_refused = async || {
        let (_, told) = http.get(&url).await;
        let mut told = told["backends"].as_array().unwrap().iter();
        let later = told.find(|backend| backend["id"] == "later");
        later.is_some_and(|it| it.to_string().contains("UnknownIssuer"))
    };
    until("the engine is not trusted", is_refused).await;
    replica.leave().await;
}

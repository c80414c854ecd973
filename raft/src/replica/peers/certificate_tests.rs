//! Checks which callers are served if replicas have certificates, over real connections.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tonic::Code;

use super::tests::info_request;
use super::tests::messages;
use crate::net::{
    ConnectError, ConnectFailure, PeerClient, PeerSecret, PeerTls, PeerTlsConfigs, Secret, Tcp,
    Transport, certificate_names, client,
};
use crate::testing;

const CLUSTER: &str = "quorate";

struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().der().clone();
        let issuer = Issuer::new(params, key);
        Self {
            certificate,
            issuer,
        }
    }

    /// Returns the TLS configs of replica `id` of a cluster.
    fn replica(&self, cluster: &str, id: u8) -> PeerTls {
        self.shows(cluster, certificate_names(cluster, id).to_vec())
    }

    /// Returns the TLS configs of a caller whose certificate has `names`.
    fn shows(&self, cluster: &str, names: Vec<String>) -> PeerTls {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(names).unwrap();
        let chain = vec![params.signed_by(&key, &self.issuer).unwrap().der().clone()];
        let key = || PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let (roots, provider) = (Arc::new(roots), rustls::crypto::ring::default_provider());
        let provider = Arc::new(provider);
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.unwrap())
            .with_single_cert(chain.clone(), key());
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key());
        let (server, client) = (Arc::new(server.unwrap()), Arc::new(client.unwrap()));
        PeerTls::new(cluster, move || PeerTlsConfigs {
            server: server.clone(),
            client: client.clone(),
        })
    }
}

async fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Dials `address`, expecting the replica `id` there.
async fn dial(
    address: &str,
    id: u64,
    set_up: impl FnOnce(Tcp) -> Tcp,
) -> Result<PeerClient, ConnectError> {
    let tcp = set_up(Tcp::new(listener().await.0).unwrap());
    let connected = tcp.connect_to(id, address.to_owned()).await;
    connected.map(client)
}

/// Returns the error of a call for an introduction.
async fn refusal(mut caller: PeerClient) -> tonic::Status {
    let response = caller.info(info_request()).await;
    response.unwrap_err()
}

#[tokio::test]
async fn a_peer_must_present_the_certificate_of_its_id() {
    let authority = Authority::new();
    let (listener, address) = listener().await;
    let tcp = Tcp::new(listener).unwrap();
    let tcp = tcp.with_certificates(authority.replica(CLUSTER, 1));
    let (replica, _) = testing::replica_over(1, tcp, vec![address.clone()]).await;
    let mut status = replica.watch();
    let leads = status.wait_for(|status| status.role == crate::Role::Leader && status.caught_up);
    leads.await.unwrap();
    let header = replica.let_in(2).await;
    let with = |tls: PeerTls| move |tcp: Tcp| tcp.with_certificates(tls);

    let two = with(authority.replica(CLUSTER, 2));
    let mut two = dial(&address, 1, two).await.unwrap();
    assert!(two.info(info_request()).await.is_ok());
    two.messages(messages(header)).await.unwrap();
    let three = with(authority.replica(CLUSTER, 3));
    let mut three = dial(&address, 1, three).await.unwrap();
    let refused = three.messages(messages(header)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    let both =
        "expected a certificate of replica 2 of cluster \"quorate\", this one is of replica [3]";
    assert_eq!(refused.message(), both);

    // Other holders of a certificate from the authority are not replicas.
    let operator = with(authority.shows(CLUSTER, vec!["ada.example".to_owned()]));
    let refused = refusal(dial(&address, 1, operator).await.unwrap()).await;
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    assert!(
        refused
            .message()
            .contains("replica-1.quorate.quorate.internal"),
        "{refused}"
    );
    let clear = dial(&address, 1, |tcp| tcp).await.unwrap();
    assert!(refusal(clear).await.message().ends_with("no [tls.peer]"));

    // A replica dialled by mistake is not spoken to.
    let wrong_id = with(authority.replica(CLUSTER, 2));
    let wrong_id = dial(&address, 5, wrong_id).await.unwrap_err();
    let wrong_cluster = with(authority.replica("staging", 1));
    let wrong_cluster = dial(&address, 1, wrong_cluster).await.unwrap_err();
    for (error, expected) in [
        (wrong_id, "replica-5.quorate.quorate.internal"),
        (wrong_cluster, "replica-1.staging.quorate.internal"),
    ] {
        assert_eq!(error.kind, ConnectFailure::Certificate, "{error}");
        assert!(error.why.contains(expected), "{error}");
        assert!(
            error.why.contains("replica-1.quorate.quorate.internal"),
            "{error}"
        );
    }
    let stranger = with(Authority::new().replica(CLUSTER, 2));
    let stranger = dial(&address, 1, stranger).await.unwrap_err();
    assert_eq!(stranger.kind, ConnectFailure::Certificate, "{stranger}");
    let secret = |tcp: Tcp| {
        tcp.with_secret(PeerSecret {
            secret: Secret::new(&[7; 32]).unwrap(),
            is_optional: false,
            cluster_name: CLUSTER.to_owned(),
            id: 2,
        })
    };
    let secret = dial(&address, 1, secret).await.unwrap_err();
    assert_eq!(secret.kind, ConnectFailure::Secret, "{secret}");
    replica.shutdown().await;
}

#[tokio::test]
async fn a_stranger_without_certificate_checks_is_not_served() {
    let authority = Authority::new();
    let (listener, address) = listener().await;
    let tcp = Tcp::new(listener).unwrap();
    let tcp = tcp.with_certificates(authority.replica(CLUSTER, 1));
    let (replica, _) = testing::replica_over(1, tcp, vec![address.clone()]).await;
    // It trusts the authority, but its own certificate is from another one.
    let stranger = Authority::new();
    let stranger = Authority {
        certificate: authority.certificate.clone(),
        issuer: stranger.issuer,
    };
    let tls = stranger.replica(CLUSTER, 2);
    // With TLS 1.3 its side of the handshake completes before it is refused.
    let served = match dial(&address, 1, |tcp| tcp.with_certificates(tls)).await {
        Ok(mut caller) => caller.info(info_request()).await.is_ok(),
        Err(_) => false,
    };
    assert!(!served);
    replica.shutdown().await;
}

/// Configures replica `id` before (0), during (1) and after (2) a cluster's move to certificates.
fn step(
    step: usize,
    id: u8,
    has_secret: bool,
    authority: &Authority,
) -> impl FnOnce(Tcp) -> Tcp + use<> {
    let tls = authority.replica(CLUSTER, id);
    let secret = PeerSecret {
        secret: Secret::new(&[7; 32]).unwrap(),
        is_optional: false,
        cluster_name: CLUSTER.to_owned(),
        id,
    };
    move |tcp| {
        let tcp = match has_secret && step < 2 {
            true => tcp.with_secret(secret),
            false => tcp,
        };
        match step {
            0 => tcp,
            1 => tcp.with_optional_certificates(tls),
            _ => tcp.with_certificates(tls),
        }
    }
}

async fn is_served(caller: Result<PeerClient, ConnectError>) -> bool {
    match caller {
        Ok(mut caller) => caller.info(info_request()).await.is_ok(),
        Err(_) => false,
    }
}

#[tokio::test]
async fn certificates_can_be_rolled_out_one_replica_at_a_time() {
    let authority = Authority::new();
    let cases = [false, true].into_iter();
    for (has_secret, ours) in cases.flat_map(|it| (0..3).map(move |step| (it, step))) {
        let (listener, address) = listener().await;
        let set_up = step(ours, 1, has_secret, &authority);
        let tcp = set_up(Tcp::new(listener).unwrap());
        let (replica, _) = testing::replica_over(1, tcp, vec![address.clone()]).await;
        for theirs in 0..3_usize {
            let set_up = step(theirs, 2, has_secret, &authority);
            let served = is_served(dial(&address, 1, set_up).await).await;
            assert_eq!(served, ours.abs_diff(theirs) < 2, "{ours} {theirs}");
        }
        let strange = step(2, 2, has_secret, &Authority::new());
        let served = is_served(dial(&address, 1, strange).await).await;
        assert!(!served, "{ours}: of another authority");
        let served = is_served(dial(&address, 1, |tcp| tcp).await).await;
        assert_eq!(served, !has_secret && ours < 2, "{ours}: in the clear");
        replica.shutdown().await;
    }
}

#[tokio::test]
async fn a_plaintext_replica_reports_its_missing_certificate() {
    let (listener, address) = listener().await;
    let tcp = Tcp::new(listener).unwrap();
    let (replica, _) = testing::replica_over(1, tcp, vec![address.clone()]).await;
    let tls = Authority::new().replica(CLUSTER, 2);
    let error = dial(&address, 1, |tcp| tcp.with_certificates(tls)).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind, ConnectFailure::Certificate, "{error}");
    assert_eq!(error.why, "it has no [tls.peer]");
    replica.shutdown().await;
}

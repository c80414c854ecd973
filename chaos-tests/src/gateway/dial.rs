//! Connections to pickers, with TLS that verifies nothing, like a gateway's default.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use api::net::tls::MaybeTls;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::GatewayTls;

/// Returns a channel to the picker at `at`, which connects on first use.
pub fn picker_channel(at: SocketAddr, tls: &GatewayTls) -> Channel {
    let tls = tls.clone();
    let dial = service_fn(move |_| {
        let tls = tls.clone();
        async move {
            let stream = TcpStream::connect(at).await?;
            stream.set_nodelay(true)?;
            let stream = match unverified(&tls)? {
                None => MaybeTls::Clear(stream),
                Some(config) => {
                    let name = ServerName::from(at.ip());
                    let connector = TlsConnector::from(Arc::new(config));
                    let spoken = connector.connect(name, stream).await?;
                    MaybeTls::Tls(Box::new(TlsStream::Client(spoken)))
                }
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    Endpoint::from_static("http://picker").connect_with_connector_lazy(dial)
}

/// Returns a TLS config that verifies no certificate; `None` if connections use no TLS.
fn unverified(tls: &GatewayTls) -> io::Result<Option<ClientConfig>> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.expect("ring knows all of them");
    let builder = builder.dangerous();
    let verifier = Arc::new(AcceptAnyCertificate(provider));
    let builder = builder.with_custom_certificate_verifier(verifier);
    let mut config = match tls {
        GatewayTls::Clear => return Ok(None),
        GatewayTls::Anonymous => builder.with_no_client_auth(),
        GatewayTls::Shown {
            cert_file,
            key_file,
        } => {
            let chain = CertificateDer::pem_file_iter(cert_file).map_err(io::Error::other)?;
            let chain = chain.collect::<Result<_, _>>().map_err(io::Error::other)?;
            let key = PrivateKeyDer::from_pem_file(key_file).map_err(io::Error::other)?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(io::Error::other)?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Some(config))
}

/// Certificate verifier that accepts any certificate whose key the other side proves to possess.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, cert, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, cert, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

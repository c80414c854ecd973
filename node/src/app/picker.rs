//! The endpoint picker of a replica: listener, certificate and metrics.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use api::metrics::Metrics;
use api::proxy::picker::{Picker, PickerMetrics, PickerServer, PickerTls};
use api::proxy::{DrainResult, Proxy};
use futures_util::future::BoxFuture;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::tls::ReplicaCertificates;
use crate::config::Config;

/// Components from which a picker is built.
pub(super) struct PickerParts {
    /// Listener for gateways; `None` if the replica has no picker.
    pub(super) listener: Option<TcpListener>,
    pub(super) proxy: Arc<Proxy>,
    /// Returns the maximum time that open streams may take to end.
    pub(super) deadline: Box<dyn Fn() -> Duration + Send + Sync>,
    pub(super) no_more: CancellationToken,
}

impl PickerParts {
    /// Returns a future that serves gateways, or `None` without a listener. It does nothing before
    /// it is polled.
    ///
    /// # Errors
    /// Fails if no certificate can be created, or the listener's address is unknown.
    pub(super) fn serving(
        self,
        config: &Config,
        tls: &ReplicaCertificates,
        metrics: &Metrics,
    ) -> anyhow::Result<Option<BoxFuture<'static, DrainResult>>> {
        let Some(listener) = self.listener else {
            return Ok(None);
        };
        let shown = PickerMetrics::default();
        metrics.register(|registry| shown.register(registry));
        let picker = Picker::new(self.proxy, config.picker, shown);
        let tls = certificates(config, tls)?;
        let address = listener.local_addr()?;
        tracing::info!(picker = %address, "replica picks endpoints for gateways");
        let server = PickerServer::new(listener, picker, tls);
        Ok(Some(server.run_until(self.no_more, self.deadline)))
    }
}

/// Returns the TLS setup of the listener; `None` if it does not use TLS.
fn certificates(config: &Config, tls: &ReplicaCertificates) -> anyhow::Result<Option<PickerTls>> {
    if let Some(files) = tls.picker.clone() {
        return Ok(Some(Box::new(move || files.current())));
    }
    if config.tls.picker.in_the_clear {
        return Ok(None);
    }
    let own = self_signed().context("make a certificate for listen.picker")?;
    Ok(Some(Box::new(move || Arc::clone(&own))))
}

/// Creates a self-signed certificate, for gateways that do not verify it.
fn self_signed() -> anyhow::Result<Arc<ServerConfig>> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?;
    let builder = builder.with_no_client_auth();
    let mut config = builder.with_single_cert(vec![made.cert.into()], key.into())?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

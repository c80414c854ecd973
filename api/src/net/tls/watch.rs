//! Reloads certificates when their files change, and on request.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio_util::sync::CancellationToken;

use super::certificates::{CertificateSource, Certificates, Reload};
use crate::files::file_stamp::look_regularly;

/// Number of days before expiry from which each start and reload logs a warning.
const WARN_DAYS: f64 = 14.0;

/// All certificates of a replica.
#[derive(Clone, Default)]
pub struct CertificateWatch {
    all: Vec<Arc<dyn Reload>>,
}

impl CertificateWatch {
    /// Adds the certificates of a listener or client. Logs a warning if they expire soon.
    pub fn add<S: CertificateSource>(&mut self, certificates: Arc<Certificates<S>>) {
        warn_of_expiry(&*certificates);
        self.all.push(certificates);
    }

    /// Reads all files again. Certificates with an error stay unchanged. Returns the number of
    /// reloaded ones, and the errors.
    pub fn reload(&self) -> (usize, Vec<String>) {
        let mut faults = Vec::new();
        for certificates in &self.all {
            if let Err(fault) = reload(&**certificates) {
                faults.push(fault);
            }
        }
        (self.all.len() - faults.len(), faults)
    }

    /// Reloads the certificates whose files have changed.
    fn look(&self) {
        for certificates in &self.all {
            if certificates.is_stale() {
                // The error is logged already.
                drop(reload(&**certificates));
            }
        }
    }

    /// Polls the files until `stop` and reloads those that have changed.
    pub async fn follow(self, stop: CancellationToken) {
        if self.all.is_empty() {
            return;
        }
        look_regularly(move || self.look(), stop).await;
    }
}

fn reload(certificates: &dyn Reload) -> Result<(), String> {
    let section = certificates.section();
    match certificates.reload() {
        Ok(()) => {
            if let Some(certificate) = certificates.certificate() {
                let days_left = certificate.days_left(SystemTime::now());
                let names = certificate.names.join(" ");
                tracing::info!(section, names, days_left, "reloaded certificates");
            }
            warn_of_expiry(certificates);
            Ok(())
        }
        Err(fault) => {
            let fault = fault.to_string();
            tracing::error!(
                section,
                fault,
                "could not reload certificates; keeping the old ones"
            );
            Err(fault)
        }
    }
}

fn warn_of_expiry(certificates: &dyn Reload) {
    let section = certificates.section();
    let Some(certificate) = certificates.certificate() else {
        return;
    };
    let days_left = certificate.days_left(SystemTime::now());
    if days_left < 0.0 {
        tracing::error!(section, days_left, "the certificate has expired");
    } else if days_left < WARN_DAYS {
        tracing::warn!(section, days_left, "the certificate expires soon");
    }
}

/// Collector of the time until each certificate expires.
pub struct CertificateMetrics(pub CertificateWatch);

impl fmt::Debug for CertificateMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateMetrics")
    }
}

impl Collector for CertificateMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let certificates = self.0.all.iter();
        let known = certificates.filter_map(|it| Some((it.section(), it.certificate()?)));
        let mut family = encoder.encode_descriptor(
            "quorate_tls_certificate_expiry_seconds",
            "Time until the certificate expires; negative once it has",
            None,
            MetricType::Gauge,
        )?;
        for (section, certificate) in known {
            let left = ConstGauge::new(certificate.seconds_left(SystemTime::now()));
            let labels = [("section", section)];
            left.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

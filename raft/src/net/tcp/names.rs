//! The names of replicas in certificates: DNS names below a domain that is reserved for private use,
//! so that no public authority signs one, and any private one can.

use rustls::pki_types::CertificateDer;

const DOMAIN: &str = "quorate.internal";

/// Name that the certificate of every replica of the cluster has.
pub(super) fn any_replica(cluster: &str) -> String {
    format!("replica.{cluster}.{DOMAIN}")
}

/// Name that only the certificate of this replica has.
pub(super) fn one_replica(cluster: &str, id: u64) -> String {
    format!("replica-{id}.{cluster}.{DOMAIN}")
}

/// The names that a replica's certificate has for its peers.
#[must_use]
pub fn certificate_names(cluster: &str, id: u8) -> [String; 2] {
    [one_replica(cluster, id.into()), any_replica(cluster)]
}

/// The ids of replicas of `cluster` that a certificate names.
pub(super) fn ids(certificate: &CertificateDer<'_>, cluster: &str) -> Vec<u64> {
    let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else {
        return Vec::new();
    };
    let below = format!(".{cluster}.{DOMAIN}").to_ascii_lowercase();
    let id = |name: &str| {
        let name = name.to_ascii_lowercase();
        let id = name.strip_prefix("replica-")?.strip_suffix(&below)?;
        // One way of writing it only.
        id.parse::<u64>().ok().filter(|it| it.to_string() == id)
    };
    certificate.valid_dns_names().filter_map(id).collect()
}

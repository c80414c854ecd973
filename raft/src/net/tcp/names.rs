//! Names of replicas in certificates: DNS names below a domain reserved for private use, so that no
//! public authority signs them and any private one can.

use rustls::pki_types::CertificateDer;

const DOMAIN: &str = "quorate.internal";

/// Returns the name that the certificate of every replica of `cluster` contains.
pub(super) fn any_replica(cluster: &str) -> String {
    format!("replica.{cluster}.{DOMAIN}")
}

/// Returns the name that only the certificate of the replica `id` contains.
pub(super) fn one_replica(cluster: &str, id: u64) -> String {
    format!("replica-{id}.{cluster}.{DOMAIN}")
}

/// Returns the names that the certificate of the replica `id` must contain.
#[must_use]
pub fn certificate_names(cluster: &str, id: u8) -> [String; 2] {
    [one_replica(cluster, id.into()), any_replica(cluster)]
}

/// Returns the ids of the replicas of `cluster` that `certificate` names.
pub(super) fn ids(certificate: &CertificateDer<'_>, cluster: &str) -> Vec<u64> {
    let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else {
        return Vec::new();
    };
    let below = format!(".{cluster}.{DOMAIN}").to_ascii_lowercase();
    let id = |name: &str| {
        let name = name.to_ascii_lowercase();
        let id = name.strip_prefix("replica-")?.strip_suffix(&below)?;
        // Accept only the canonical spelling.
        id.parse::<u64>().ok().filter(|it| it.to_string() == id)
    };
    certificate.valid_dns_names().filter_map(id).collect()
}

//! Operators that authenticate with a certificate.
//!
//! The listener's authorities determine which certificates count. A DNS name in a certificate
//! states its holder's role in a cluster: `role-operator.CLUSTER.quorate.internal`. Such names are
//! below the domain that also contains the names of replicas. So one authority can sign for
//! replicas, operators and several clusters, and none of them passes for another.

use std::sync::Arc;

use super::roles::{AdminRole, CallerProof, Operator};
use super::tokens::check_token_name;
use api::net::tls::CertificateFacts;

const DOMAIN: &str = "quorate.internal";

/// Returns the certificate name that grants `role` in `cluster`.
#[must_use]
pub fn role_name(cluster: &str, role: AdminRole) -> String {
    format!("role-{role}.{cluster}.{DOMAIN}")
}

/// Client certificate of a call's connection.
#[derive(Debug, Clone)]
pub(super) struct CallerCertificate(pub(super) Arc<CertificateFacts>);

/// Recognises the operators of one cluster by certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertifiedOperators {
    /// Certificate names that grant each role, strongest role first.
    names: Vec<(String, AdminRole)>,
}

impl CertifiedOperators {
    /// Creates rules that recognise the operators of cluster `name`.
    #[must_use]
    pub fn of_cluster(name: &str) -> Self {
        let roles = AdminRole::ALL.into_iter().rev();
        Self {
            names: roles.map(|role| (role_name(name, role), role)).collect(),
        }
    }

    /// Returns the holder of a certificate, with the strongest role that it names.
    ///
    /// # Errors
    /// States what was expected and what was found.
    pub(super) fn operator(
        &self,
        certificate: &CertificateFacts,
        unix_s: i64,
    ) -> Result<Operator, String> {
        // The handshake checked the validity, but a connection may outlive it.
        if certificate.not_after_s < unix_s {
            return Err("the certificate has expired".to_owned());
        }
        let is_in = |name: &str| {
            let mut found = certificate.names.iter();
            found.any(|it| it.eq_ignore_ascii_case(name))
        };
        let Some((_, role)) = self.names.iter().find(|(name, _)| is_in(name)) else {
            let expected: Vec<_> = self.names.iter().map(|(name, _)| name.as_str()).collect();
            return Err(format!(
                "expected a certificate for {}, found one for {:?}",
                expected.join(" or "),
                certificate.names
            ));
        };
        let name = &certificate.subject;
        check_token_name(name)
            .map_err(|expected| format!("{name:?} as common name: {expected}"))?;
        Ok(Operator {
            name: name.as_str().into(),
            role: *role,
            by: CallerProof::Certificate,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(subject: &str, names: &[&str]) -> CertificateFacts {
        CertificateFacts {
            subject: subject.to_owned(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            not_after_s: 100,
        }
    }

    #[test]
    fn a_certificate_grants_a_role_in_one_cluster() {
        let operators = CertifiedOperators::of_cluster("Prod");
        let role_of = |subject: &str, names: &[&str]| {
            operators
                .operator(&certificate(subject, names), 100)
                .map(|it| (it.name.to_string(), it.role))
        };
        let ada = |role| Ok(("ada".to_owned(), role));
        let viewer = "role-viewer.prod.quorate.internal";
        let admin = "role-admin.prod.quorate.internal";
        assert_eq!(role_of("ada", &[viewer]), ada(AdminRole::Viewer));
        assert_eq!(role_of("ada", &["a", viewer, admin]), ada(AdminRole::Admin));
        for (subject, names, fault) in [
            ("ada", &[][..], "expected a certificate for role-admin.Prod"),
            (
                "ada",
                &["role-admin.test.quorate.internal"],
                "found one for [\"role-admin.test",
            ),
            (
                "replica-1",
                &["replica-1.prod.quorate.internal"],
                "role-viewer.Prod",
            ),
            ("ada", &["role-root.prod.quorate.internal"], "expected"),
            ("ada\nbo", &[admin], "\"ada\\nbo\" as common name"),
            ("", &[admin], "\"\" as common name"),
        ] {
            let told = role_of(subject, names).unwrap_err();
            assert!(told.contains(fault), "{told}");
        }
        let late = operators.operator(&certificate("ada", &[admin]), 101);
        assert_eq!(late.unwrap_err(), "the certificate has expired");
    }
}

//! Roles of operators, and the permissions that routes require.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

/// What an operator may do. Each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AdminRole {
    /// May read.
    Viewer,
    /// May change backends, users, API keys, policy and admission, end sessions, transfer
    /// leadership, take snapshots, record requests, reload the config and set the log level.
    Operator,
    /// May change the membership, and back up or restore the whole state.
    Admin,
}

/// An authenticated caller: the holder of a token or certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Operator {
    pub(super) name: Arc<str>,
    pub(super) role: AdminRole,
    pub(super) by: CallerProof,
}

/// How a caller authenticates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum CallerProof {
    Token,
    Certificate,
}

impl CallerProof {
    /// Returns the name used in the audit.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Certificate => "certificate",
        }
    }
}

/// Error for text that names no role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected viewer, operator or admin")]
pub struct AdminRoleError;

impl AdminRole {
    /// All roles, weakest first.
    pub const ALL: [Self; 3] = [Self::Viewer, Self::Operator, Self::Admin];

    /// Returns the name used in a tokens file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for AdminRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AdminRole {
    type Err = AdminRoleError;

    fn from_str(text: &str) -> Result<Self, AdminRoleError> {
        let mut all = Self::ALL.into_iter();
        all.find(|role| role.name() == text).ok_or(AdminRoleError)
    }
}

/// Permission that a call requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Permission {
    /// No permission: orchestrators call the path, and the response is harmless.
    Open,
    /// The role `viewer`, or none if the config makes `/metrics` public.
    Scrape,
    /// The contained role or a stronger one.
    Role(AdminRole),
}

impl Permission {
    /// Returns the weakest role that has this permission.
    pub(super) fn role(self) -> AdminRole {
        match self {
            Self::Open | Self::Scrape => AdminRole::Viewer,
            Self::Role(role) => role,
        }
    }

    /// Whether calls are audited: those that require more than read access are.
    pub(super) fn is_audited(self) -> bool {
        self.role() > AdminRole::Viewer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_named_and_ordered() {
        for role in AdminRole::ALL {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
        assert!(AdminRole::ALL.is_sorted());
        assert_eq!("root".parse::<AdminRole>(), Err(AdminRoleError));
    }
}

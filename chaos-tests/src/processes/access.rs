//! Certificates, tokens and API keys of a secure cluster, which the program's own commands create,
//! and the credentials of clients.
//!
//! Peers authenticate each other's ids. Data and admin listeners use TLS. Operators have a token,
//! and each user has an API key. The same tests run in both modes: [`ClusterOptions::is_secure`].
//!
//! [`ClusterOptions::is_secure`]: super::ClusterOptions::is_secure

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use api::net::tls::{
    CertificateFiles, CertificateSource as _, ClientConfig, ClientFiles, MaybeTls, NamedFile,
};
use http::HeaderValue;
use lab::connector::secured;
use lab::replay::targets::TargetAccess;
use tokio::io::{AsyncRead, AsyncWrite};

/// Environment variable that makes all process tests use a secure cluster.
const SECURE: &str = "QUORATE_TEST_SECURE";
/// Prefix of API keys. A user's key is this prefix followed by the user's name.
const KEY_PREFIX: &str = "sk-chaos-";
/// Users of some tests, in addition to the numbered users.
const USERS: &[&str] = &["anonymous", "greedy", "modest", "eager"];
/// Number of users with numbered names, and number of replicas with users of their own.
const NUMBERED: usize = 16;
/// Number of users per replica.
const OF_REPLICA: usize = 4;

/// Returns whether the environment requests a secure cluster for all process tests.
#[must_use]
pub fn is_secure_by_default() -> bool {
    std::env::var_os(SECURE).is_some_and(|value| value == "1")
}

/// Access of a client: over TLS with an API key, or in the clear without one.
#[derive(Debug, Clone, Default)]
pub struct ClientAccess {
    /// TLS config with the trusted authority; `None` without encryption.
    tls: Option<Arc<ClientConfig>>,
}

impl ClientAccess {
    /// Returns whether the cluster uses TLS and requires API keys.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.tls.is_some()
    }

    /// Returns the TLS config with the trusted authority; `None` without encryption.
    #[must_use]
    pub fn tls(&self) -> Option<&Arc<ClientConfig>> {
        self.tls.as_ref()
    }

    /// Returns the same access with a protocol to negotiate by ALPN, as HTTP/2 clients do.
    #[must_use]
    pub fn speaking(&self, protocol: &[u8]) -> Self {
        let tls = self.tls.as_deref().cloned();
        let tls = tls.map(|mut tls| {
            tls.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(tls)
        });
        Self { tls }
    }

    /// Performs the TLS handshake with the server at `to`, if the cluster uses TLS.
    ///
    /// # Errors
    /// If the handshake fails.
    pub async fn secure<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        to: SocketAddr,
    ) -> io::Result<MaybeTls<S>> {
        match &self.tls {
            None => Ok(MaybeTls::Clear(stream)),
            Some(tls) => secured(tls, &to.ip().to_string(), stream).await,
        }
    }

    /// Returns the TLS config and key prefix for a load's targets; `None` without TLS.
    pub(super) fn of_targets(&self) -> Option<TargetAccess> {
        self.tls.clone().map(|tls| TargetAccess {
            tls,
            key_prefix: KEY_PREFIX.to_owned(),
        })
    }
}

/// Returns a user's API key on a secure cluster.
#[must_use]
pub fn key(user: &str) -> String {
    format!("{KEY_PREFIX}{user}")
}

/// Credentials of a secure cluster.
#[derive(Debug)]
pub(super) struct ClusterSecrets {
    folder: PathBuf,
    binary: PathBuf,
    pub(super) access: ClientAccess,
    /// Value of the `Authorization` header that operators send.
    pub(super) authorization: HeaderValue,
}

impl ClusterSecrets {
    /// Creates an authority, a token and API keys in `folder`.
    pub(super) fn make(binary: &Path, folder: PathBuf) -> anyhow::Result<Self> {
        let out = folder.display().to_string();
        quorate(binary, &["cert", "ca", "--out", &out])?;
        quorate(binary, &["cert", "client", "stranger", "--out", &out])?;
        let token = folder.join("token");
        let file = token.display().to_string();
        let create = ["token", "create", "--role", "admin", "chaos", "--out"];
        let line = quorate(binary, &[&create[..], &[&file]].concat())?;
        fs::write(folder.join("tokens"), line).context("write the tokens")?;
        fs::write(folder.join("keys"), keys()).context("write the keys")?;
        let secret = fs::read_to_string(&token).context("read the token")?;
        let authorization = HeaderValue::from_str(&format!("Bearer {}", secret.trim()))?;
        let files = ClientFiles {
            authorities: Some(NamedFile::new("ca", &folder.join("ca.crt"))),
            ..ClientFiles::default()
        };
        Ok(Self {
            access: ClientAccess {
                tls: Some(files.load()?.config),
            },
            folder,
            binary: binary.to_owned(),
            authorization,
        })
    }

    /// Creates a certificate for a replica's id and these addresses, unless there is one.
    pub(super) fn certify(&self, id: u8, hosts: &[String]) -> anyhow::Result<()> {
        if self.file(&format!("replica-{id}.crt")).is_file() {
            return Ok(());
        }
        let out = self.folder.display().to_string();
        let replica = format!("{id}={}", hosts.join(","));
        let node = ["cert", "node", "--replica", &replica, "--out", &out];
        quorate(&self.binary, &node).map(drop)
    }

    /// Returns the access of a client with a certificate of the cluster that names no replica.
    pub(super) fn stranger(&self) -> anyhow::Result<ClientAccess> {
        let named = |name| NamedFile::new("stranger", &self.file(name));
        let files = ClientFiles {
            authorities: Some(named("ca.crt")),
            certificate: Some(CertificateFiles {
                cert: named("stranger.crt"),
                key: named("stranger.key"),
            }),
            protocols: &[b"h2"],
            ..ClientFiles::default()
        };
        let tls = Some(files.load()?.config);
        Ok(ClientAccess { tls })
    }

    /// Returns the tables of a replica's config that make it secure.
    pub(super) fn tables(&self, id: u8) -> String {
        let mut text = format!("[admin]\ntokens_file = {:?}\n\n", self.file("tokens"));
        let [certificate, private_key] =
            ["crt", "key"].map(|extension| self.file(&format!("replica-{id}.{extension}")));
        for listener in ["data", "admin", "peer"] {
            let _ = writeln!(
                text,
                "[tls.{listener}]\ncert_file = {certificate:?}\nkey_file = {private_key:?}"
            );
        }
        let _ = writeln!(text, "ca_file = {:?}\n", self.file("ca.crt"));
        text
    }

    /// Returns the line of a replica's `[users]` table that names the file with API keys.
    pub(super) fn users(&self) -> String {
        format!("api_keys_file = {:?}\n", self.file("keys"))
    }

    /// Returns the command-line flags with the credentials to call a replica.
    pub(super) fn flags(&self) -> Vec<String> {
        let file = |name| self.file(name).display().to_string();
        vec![
            "--ca-file".to_owned(),
            file("ca.crt"),
            "--token-file".to_owned(),
            file("token"),
        ]
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Returns the contents of the file with API keys: a line per user, with the key and the name.
fn keys() -> String {
    let named = USERS.iter().map(|user| (*user).to_owned());
    let numbered = (0..NUMBERED).flat_map(|number| {
        let of_replica = (0..OF_REPLICA).map(move |user| format!("user-{number}-{user}"));
        of_replica.chain([number.to_string(), format!("user-{number}")])
    });
    let mut text = String::new();
    for user in named.chain(numbered) {
        let _ = writeln!(text, "{} {user}", key(&user));
    }
    text
}

fn quorate(binary: &Path, args: &[&str]) -> anyhow::Result<String> {
    let done = Command::new(binary).args(args).output();
    let done = done.with_context(|| format!("run quorate {args:?}"))?;
    let told = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "quorate {args:?}: {told}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

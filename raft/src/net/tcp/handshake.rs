//! A cluster's secret, and the handshake in which two replicas prove to each other that they know
//! the secret.
//!
//! The handshake is Noise `NNpsk0`: an ephemeral key pair on each side, mixed with the secret. A
//! key unique to the connection encrypts everything after it, so the data cannot be read, altered
//! or replayed. A recorded connection stays unreadable even if the secret leaks later. In the
//! handshake each side also announces its id and the name of its configured cluster.
//!
//! ```text
//! from the dialer      "quonois1", then a frame: the first message with a `Hello`
//! from the listener    `+` and a frame: the second message with a `Hello`
//!                      `!`: the secrets differ; `-`: this side has none
//! then, both ways      frames
//! frame                length (2 bytes, big-endian), ciphertext
//! ```
//!
//! HTTP/2 starts with other bytes in both directions, so a peer without a secret is recognisable.

use std::fmt;
use std::io;

use prost::Message;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::encrypted::{EncryptedStream, FRAME_BYTES_MAX};
use crate::wire::proto::Hello;

/// First bytes that the dialer sends if the connection starts with a handshake.
pub(super) const MAGIC: &[u8; 8] = b"quonois1";
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Minimum length of a secret, in bytes.
const SECRET_BYTES_MIN: usize = 32;
/// Maximum length of a handshake message, in bytes.
const HANDSHAKE_BYTES_MAX: usize = 512;
/// First byte of the listener's response if the peer knows the secret.
const PROVEN: u8 = b'+';
const DIFFERS: u8 = b'!';
pub(super) const HAS_NONE: u8 = b'-';

/// Secret that the members of a cluster share.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Derives the secret from a file's content; surrounding white space is ignored.
    ///
    /// # Errors
    /// Fails if the content is shorter than 32 bytes.
    pub fn new(content: &[u8]) -> Result<Self, String> {
        let content = content.trim_ascii();
        if content.len() < SECRET_BYTES_MIN {
            let bytes = content.len();
            return Err(format!(
                "{bytes} bytes, at least {SECRET_BYTES_MIN} expected"
            ));
        }
        let mut hash = Sha256::new();
        hash.update(b"quorate peer secret 1\0");
        hash.update(content);
        Ok(Self(hash.finalize().into()))
    }

    fn builder(&self) -> Result<snow::Builder<'_>, snow::Error> {
        snow::Builder::new(PATTERN.parse()?).psk(0, &self.0)
    }
}

/// Secret of a replica's cluster, with the cluster name and id that the replica announces in
/// handshakes.
#[derive(Debug, Clone)]
pub struct PeerSecret {
    /// The cluster's secret.
    pub secret: Secret,
    /// Whether to accept replicas without the secret too, while the secret is rolled out to a
    /// running cluster.
    pub is_optional: bool,
    /// Name of the cluster in this replica's config.
    pub cluster_name: String,
    /// Id of this replica.
    pub id: u8,
}

/// Reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("it has another cluster.secret_file")]
    Differs,
    #[error("it has no cluster.secret_file")]
    HasNone,
    #[error("it has a cluster.secret_file, this replica has none")]
    WeHaveNone,
    #[error("it is configured for cluster {theirs:?}, this replica for {ours:?}")]
    OtherName { theirs: String, ours: String },
    #[error("it has no [tls.peer]")]
    HasNoTls,
    #[error("it has [tls.peer], this replica has none")]
    WeHaveNoTls,
    #[error("tls: {0}")]
    Certificate(String),
    #[error("the handshake is malformed")]
    Malformed,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<snow::Error> for HandshakeError {
    fn from(_: snow::Error) -> Self {
        Self::Malformed
    }
}

impl PeerSecret {
    fn hello(&self) -> Vec<u8> {
        let hello = Hello {
            cluster_name: self.cluster_name.clone(),
            id: self.id.into(),
        };
        hello.encode_to_vec()
    }

    /// Checks the peer's hello message, which names its cluster, and returns its id.
    fn check(&self, hello: &[u8]) -> Result<u64, HandshakeError> {
        let hello = Hello::decode(hello).map_err(|_| HandshakeError::Malformed)?;
        if hello.cluster_name != self.cluster_name {
            return Err(HandshakeError::OtherName {
                theirs: hello.cluster_name.chars().take(80).collect(),
                ours: self.cluster_name.clone(),
            });
        }
        Ok(hello.id)
    }

    /// Runs the dialer's side of the handshake.
    pub(super) async fn connect<S>(
        &self,
        mut stream: S,
    ) -> Result<EncryptedStream<S>, HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut noise = self.secret.builder()?.build_initiator()?;
        let mut message = [0; HANDSHAKE_BYTES_MAX];
        let length = noise.write_message(&self.hello(), &mut message)?;
        let first = [&MAGIC[..], &frame(&message[..length])].concat();
        stream.write_all(&first).await?;
        // A peer without the handshake may close at once, or speak HTTP/2.
        match stream.read_u8().await {
            Ok(PROVEN) => {}
            Ok(DIFFERS) => return Err(HandshakeError::Differs),
            Ok(_) | Err(_) => return Err(HandshakeError::HasNone),
        }
        let answer = read_frame(&mut stream).await?;
        let length = noise.read_message(&answer, &mut message)?;
        self.check(&message[..length])?;
        Ok(EncryptedStream::new(stream, noise.into_transport_mode()?))
    }

    /// Runs the listener's side of the handshake after [`MAGIC`] was read. Returns the peer's id.
    pub(super) async fn accept<S>(
        &self,
        mut stream: S,
    ) -> Result<(EncryptedStream<S>, u64), HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut noise = self.secret.builder()?.build_responder()?;
        let first = read_frame(&mut stream).await?;
        let mut message = [0; HANDSHAKE_BYTES_MAX];
        let Ok(length) = noise.read_message(&first, &mut message) else {
            stream.write_all(&[DIFFERS]).await?;
            return Err(HandshakeError::Differs);
        };
        let from = self.check(&message[..length]);
        // Announce our name even if it differs, so that the peer can log it.
        let length = noise.write_message(&self.hello(), &mut message)?;
        let second = [&[PROVEN][..], &frame(&message[..length])].concat();
        stream.write_all(&second).await?;
        Ok((
            EncryptedStream::new(stream, noise.into_transport_mode()?),
            from?,
        ))
    }
}

fn frame(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).expect("messages of a handshake are short");
    [&length.to_be_bytes()[..], bytes].concat()
}

async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, HandshakeError> {
    const _: () = assert!(HANDSHAKE_BYTES_MAX <= FRAME_BYTES_MAX);
    let length = usize::from(stream.read_u16().await?);
    if length > HANDSHAKE_BYTES_MAX {
        return Err(HandshakeError::Malformed);
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

/// Reads the first message of a handshake as the listener does; `None` if it is invalid. For
/// fuzzing.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_first(secret: &Secret, bytes: &[u8]) -> Option<Hello> {
    let mut noise = secret.builder().ok()?.build_responder().ok()?;
    let mut message = [0; HANDSHAKE_BYTES_MAX];
    let bytes = bytes.get(..HANDSHAKE_BYTES_MAX).unwrap_or(bytes);
    let length = noise.read_message(bytes, &mut message).ok()?;
    Hello::decode(&message[..length]).ok()
}

/// Writes the first message of a handshake as the dialer does. For fuzzing.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn write_first(secret: &Secret, hello: &Hello) -> Vec<u8> {
    let builder = secret.builder().expect("the pattern is known");
    let mut noise = builder.build_initiator().expect("the pattern is known");
    let mut message = vec![0; HANDSHAKE_BYTES_MAX];
    let written = noise.write_message(&hello.encode_to_vec(), &mut message);
    message.truncate(written.expect("a hello is short"));
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_must_be_long_and_is_never_printed() {
        assert!(Secret::new(&[b'a'; 31]).is_err());
        assert!(Secret::new(&[b' '; 40]).is_err());
        let secret = Secret::new(&[b'a'; 32]).unwrap();
        assert_eq!(format!("{secret:?}"), "Secret");
        let line = [&[b'a'; 32][..], b"\n"].concat();
        assert_eq!(
            Secret::new(&line).unwrap().0,
            secret.0,
            "a file ends with a line"
        );
        assert_ne!(Secret::new(&[b'b'; 32]).unwrap().0, secret.0);
    }

    #[test]
    fn the_first_message_requires_the_secret_to_read() {
        let [ours, theirs] = [[1; 32], [2; 32]].map(|content| Secret::new(&content).unwrap());
        let hello = Hello {
            cluster_name: "quorate".to_owned(),
            id: 3,
        };
        let first = write_first(&ours, &hello);
        assert_eq!(read_first(&ours, &first), Some(hello));
        assert_eq!(read_first(&theirs, &first), None);
        for at in 0..first.len() {
            let mut changed = first.clone();
            changed[at] ^= 1;
            assert_eq!(read_first(&ours, &changed), None, "byte {at}");
        }
    }
}

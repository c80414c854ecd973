//! Fuzz target for messages between replicas, see [`crate::fuzzing`].

use super::gossip::GossipMessage;

/// Decodes a peer's message. Encoding it again must restore the bytes, except for forms that are
/// never sent: an explicit empty backlog, and explicit empty shares and figures.
pub fn exchange(bytes: &[u8]) {
    if let Some(message) = GossipMessage::read(bytes) {
        assert_eq!(GossipMessage::read(&message.write()), Some(message));
        let is_explicit = match bytes[0] {
            2 => message.backlog.is_empty(),
            3 => message.shares.is_empty(),
            4 => message.figures.is_empty(),
            _ => false,
        };
        if !is_explicit {
            assert_eq!(&message.write()[..], bytes);
        }
    }
}

/// Returns messages as replicas send them.
#[must_use]
pub fn exchange_seeds() -> Vec<Vec<u8>> {
    let message = |claim, backlog, load, shares, figures| {
        let message = GossipMessage {
            claim,
            backlog,
            load,
            shares,
            figures,
        };
        message.write().to_vec()
    };
    vec![
        message(&[1; 25], &[], &[1, 0, 1, 1, 1, 1], &[], &[]),
        message(&[], &[7; 40], &[1], &[], &[]),
        message(&[1; 25], &[7; 300], &[], &[], &[]),
        message(&[1; 25], &[], &[1], &[1; 40], &[]),
        message(&[1; 25], &[], &[1], &[1; 40], &[2; 200]),
    ]
}

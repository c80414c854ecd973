//! What replicas ask each other about decisions: to store records, or to find one.

use crate::files::ring::RingPosition;

const STORE: u8 = 1;
const FIND: u8 = 2;

/// A question of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerQuestion<'a> {
    /// Store these records, which lie between two places of the asking replica's archive. The
    /// answer is the place up to which its records are stored.
    Store {
        start: RingPosition,
        end: RingPosition,
        frames: &'a [u8],
    },
    /// Find the newest request with this id. The answer is its record, or nothing.
    Find { id: &'a [u8] },
}

impl<'a> PeerQuestion<'a> {
    pub(super) fn write(self) -> Vec<u8> {
        match self {
            Self::Store { start, end, frames } => {
                let (start, end) = (start.0.to_le_bytes(), end.0.to_le_bytes());
                [&[STORE][..], &start, &end, frames].concat()
            }
            Self::Find { id } => [&[FIND][..], id].concat(),
        }
    }

    pub(super) fn read(bytes: &'a [u8]) -> Option<Self> {
        let place = |bytes: &'a [u8]| {
            let (place, rest) = bytes.split_first_chunk()?;
            Some((RingPosition(u64::from_le_bytes(*place)), rest))
        };
        match bytes.split_first()? {
            (&STORE, rest) => {
                let (start, rest) = place(rest)?;
                let (end, frames) = place(rest)?;
                Some(Self::Store { start, end, frames })
            }
            (&FIND, id) => Some(Self::Find { id }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_questions_encode_to_golden_bytes_and_back() {
        let store = PeerQuestion::Store {
            start: RingPosition(1),
            end: RingPosition(0x0203),
            frames: b"frames",
        };
        let golden = b"\x01\x01\0\0\0\0\0\0\0\x03\x02\0\0\0\0\0\0frames";
        assert_eq!(store.write(), golden);
        assert_eq!(PeerQuestion::read(golden), Some(store));
        let find = PeerQuestion::Find { id: b"id" };
        assert_eq!(find.write(), b"\x02id");
        assert_eq!(PeerQuestion::read(b"\x02id"), Some(find));
        for malformed in [&b""[..], b"\x03id", &golden[..16]] {
            assert_eq!(PeerQuestion::read(malformed), None);
        }
    }
}

//! The user table in snapshots. It is written from a frozen copy, and every bound is checked when
//! it is read back.

use super::UserDefaults;
use super::map::UserMap;
use super::table::{Users, UsersTotals};
use super::user::User;
use crate::encoding;
use crate::ids::UserKey;

/// Maximum number of users in one section of a snapshot.
const USERS_PER_PIECE: usize = 4096;

/// Frozen copy of the user table, from which snapshots are written.
pub(crate) struct UsersImage {
    map: UserMap,
    totals: UsersTotals,
}

impl UsersImage {
    /// Encodes what is kept in addition to the users.
    pub(crate) fn totals(&self) -> Vec<u8> {
        encoding::to_bytes(&self.totals)
    }

    /// Encodes all users in pieces of at most [`USERS_PER_PIECE`] users.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.map.iter(), USERS_PER_PIECE)
    }
}

impl Users {
    pub(crate) fn freeze(&self) -> UsersImage {
        UsersImage {
            map: self.map.clone(),
            totals: self.totals.clone(),
        }
    }

    /// Adds the users encoded in one piece. Returns a description of the fault if the piece is
    /// invalid.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(UserKey, User)>;
        for (key, user) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            if !user.is_valid() || self.map.len() >= self.users_max {
                return Err(format!("user {key} is out of bounds"));
            }
            self.index(key, &user);
            if !self.map.insert_new(key, user) {
                return Err(format!("user {key} stands twice"));
            }
        }
        Ok(())
    }

    /// Replaces what is kept in addition to the users. Returns a description of the fault if it is
    /// invalid.
    pub(crate) fn restore_totals(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.totals = encoding::from_bytes::<_, { encoding::SECTION_BYTES_MAX }>(bytes)?;
        let valid = UserDefaults::validate(&self.totals.defaults);
        valid.map_err(|reject| format!("the defaults of users: {reject}"))
    }
}

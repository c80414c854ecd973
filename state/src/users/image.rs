//! The user table in snapshots. It is written from a frozen copy, and every bound is checked when
//! it is read back.

use super::table::{Users, UsersImage};
use super::{AdmissionAccount, DefaultPlan, User, UserPlan};
use crate::encoding;
use crate::ids::UserKey;

/// Maximum number of users in one section of a snapshot.
const USERS_PER_PIECE: usize = 4096;

impl UsersImage {
    /// Encodes the totals that are kept in addition to the users.
    pub(crate) fn totals(&self) -> Vec<u8> {
        encoding::to_bytes(&self.totals)
    }

    /// Encodes the users' admission accounts in pieces of at most [`USERS_PER_PIECE`] users.
    pub(crate) fn admission_accounts(&self) -> impl Iterator<Item = Vec<u8>> {
        let account =
            |(key, user): (&UserKey, &User)| Some((*key, user.admission_account.clone()?));
        let mut accounts = self.map.iter().filter_map(account).peekable();
        std::iter::from_fn(move || {
            accounts.peek()?;
            let piece: Vec<_> = accounts.by_ref().take(USERS_PER_PIECE).collect();
            Some(encoding::to_bytes(&piece))
        })
    }

    /// Encodes the users' plans in pieces of at most [`USERS_PER_PIECE`] users.
    pub(crate) fn plans(&self) -> impl Iterator<Item = Vec<u8>> {
        let plan = |(key, user): (&UserKey, &User)| Some((*key, user.plan.clone()?));
        let mut plans = self.map.iter().filter_map(plan).peekable();
        std::iter::from_fn(move || {
            plans.peek()?;
            let piece: Vec<_> = plans.by_ref().take(USERS_PER_PIECE).collect();
            Some(encoding::to_bytes(&piece))
        })
    }

    /// Encodes the defaults for users without their own values; `None` if they were never set.
    pub(crate) fn defaults(&self) -> Option<Vec<u8>> {
        self.defaults.as_ref().map(encoding::to_bytes)
    }

    /// Encodes the keys of configured users who follow the default weight, in the same way as
    /// [`UsersImage::pieces`].
    pub(crate) fn unweighted(&self) -> impl Iterator<Item = Vec<u8>> {
        let users = self.map.iter().filter(|(_, user)| user.is_unweighted);
        let mut keys = users.map(|(key, _)| *key).peekable();
        std::iter::from_fn(move || {
            keys.peek()?;
            let piece: Vec<UserKey> = keys.by_ref().take(USERS_PER_PIECE).collect();
            Some(encoding::to_bytes(&piece))
        })
    }

    /// Encodes all users in pieces of at most [`USERS_PER_PIECE`] users.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        let mut users = self.map.iter().peekable();
        std::iter::from_fn(move || {
            users.peek()?;
            let piece: Vec<(&UserKey, &User)> = users.by_ref().take(USERS_PER_PIECE).collect();
            Some(encoding::to_bytes(&piece))
        })
    }
}

impl Users {
    /// Adds the users encoded in one piece. Returns a description of the fault if the piece is
    /// invalid.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(UserKey, User)>;
        for (key, user) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            let in_flight = &user.in_flight;
            let is_valid = user.weight_milli > 0
                && in_flight.is_sorted_by(|a, b| a.0 < b.0)
                && in_flight.iter().all(|(_, requests)| *requests > 0);
            if !is_valid || self.map.len() >= self.users_max {
                return Err(format!("user {key} is out of bounds"));
            }
            self.index(key, &user);
            if !self.map.insert_new(key, user) {
                return Err(format!("user {key} stands twice"));
            }
        }
        Ok(())
    }

    /// Adds the admission accounts encoded in one piece to existing users. Returns a description of
    /// the fault if the piece is invalid.
    pub(crate) fn restore_standings(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(UserKey, Box<AdmissionAccount>)>;
        for (key, account) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)?
        {
            let is_free = self
                .map
                .get(&key)
                .is_some_and(|it| it.admission_account.is_none());
            if !is_free || !account.is_valid() {
                return Err(format!(
                    "what admission keeps of user {key} is out of bounds"
                ));
            }
            self.change(key, |user| {
                user.admission_account = Some(account);
                false
            });
        }
        Ok(())
    }

    /// Adds the plans encoded in one piece to existing users. Returns a description of the fault if
    /// the piece is invalid.
    pub(crate) fn restore_plans(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(UserKey, Box<UserPlan>)>;
        for (key, plan) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            let is_free = self.map.get(&key).is_some_and(|it| it.plan.is_none());
            if !is_free || !plan.is_valid() {
                return Err(format!("the plan of user {key} is out of bounds"));
            }
            self.change(key, |user| {
                user.plan = Some(plan);
                false
            });
        }
        Ok(())
    }

    pub(crate) fn restore_defaults(&mut self, bytes: &[u8]) -> Result<(), String> {
        let plan: DefaultPlan = encoding::from_bytes::<_, { encoding::SECTION_BYTES_MAX }>(bytes)?;
        if plan.weight_milli == 0 || plan.budget.validate().is_err() {
            return Err("the defaults of users are out of bounds".to_owned());
        }
        self.defaults = Some(plan);
        Ok(())
    }

    /// Marks the existing users in one piece as followers of the default weight. Returns a
    /// description of the fault if the piece is invalid.
    pub(crate) fn restore_unweighted(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<UserKey>;
        for key in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            let is_plain = |user: &User| user.is_configured && !user.is_unweighted;
            if !self.map.get(&key).is_some_and(is_plain) {
                return Err(format!("user {key} has no weight to follow the default's"));
            }
            self.change(key, |user| {
                user.is_unweighted = true;
                false
            });
        }
        Ok(())
    }

    /// Returns the counter of the user who last stopped waiting, as in `Users::last_left`; `None`
    /// if no user ever stopped waiting.
    pub(crate) fn last_left(&self) -> Option<u64> {
        self.last_left
    }

    pub(crate) fn restore_last_left(&mut self, last_left: Option<u64>) {
        self.last_left = last_left;
    }

    pub(crate) fn restore_totals(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.totals = encoding::from_bytes::<_, { encoding::SECTION_BYTES_MAX }>(bytes)?;
        Ok(())
    }
}

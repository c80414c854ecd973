//! Names from the code, such as outcomes, in stored records.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

/// Maximum number of different names that are read. Builds have some hundred.
const LABELS_MAX: usize = 1000;
/// What is read in place of further names.
const OTHER: &str = "other";

/// A name from the code or the config of this replica, or of another one that wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Label(pub(crate) &'static str);

impl Label {
    /// Returns the label with this name. Names are never freed, but each is kept once, and there
    /// are at most [`LABELS_MAX`].
    pub(crate) fn named(name: &str) -> Self {
        static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = names.get(name) {
            return Self(known);
        }
        if names.len() == LABELS_MAX {
            return Self(OTHER);
        }
        let name: &'static str = Box::leak(name.into());
        names.insert(name);
        Self(name)
    }
}

impl Encode for Label {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.0.encode(encoder)
    }
}

impl<C> Decode<C> for Label {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        Ok(Self::named(&String::decode(decoder)?))
    }
}

bincode::impl_borrow_decode!(Label);

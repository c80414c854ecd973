//! Keys of what the listeners take from outside and pass on: `[admin]`.

use super::keys::Absent::Unset;
use super::keys::{Key, Kind, key};

pub(super) const LISTENER_KEYS: &[Key] = &[key(
    "admin.hosts",
    Kind::Hosts,
    Unset,
    "Host names that the admin listener is asked as, beside addresses, `localhost`, the host of `listen.advertise` and the machine's own name; requests to other names get a 421 (docs/SECURITY.md).",
)];

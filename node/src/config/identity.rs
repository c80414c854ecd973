//! `node.id`: a number, or `from-hostname` to derive it from the host name.

use state::ids::ReplicaId;

/// File from which the kernel's host name is read.
const HOSTNAME: &str = "/proc/sys/kernel/hostname";
/// Value of `node.id` that derives the id from the host name.
const FROM_HOSTNAME: &str = "from-hostname";

/// Source of this replica's id, as `node.id` states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdSource {
    /// This id.
    Number(ReplicaId),
    /// The number at the end of the host name, plus one.
    Hostname,
}

impl IdSource {
    /// Parses a value of `node.id`; `None` if it is not valid.
    pub(super) fn read(text: &str) -> Option<Self> {
        if text == FROM_HOSTNAME {
            return Some(Self::Hostname);
        }
        let id = text.parse().ok().filter(|id| *id > 0)?;
        Some(Self::Number(ReplicaId(id)))
    }

    /// Formats the value as it is written in a config.
    pub(super) fn show(&self) -> String {
        match self {
            Self::Number(id) => id.to_string(),
            Self::Hostname => FROM_HOSTNAME.to_owned(),
        }
    }
}

/// Returns this host's name; empty if it cannot be read.
pub(super) fn host() -> String {
    let name = std::fs::read_to_string(HOSTNAME).unwrap_or_default();
    name.trim().to_owned()
}

/// Returns the id of the replica on the host `host`: 1 for `quorate-0`, because ids begin at 1 and
/// ordinals at 0. `None` if the name does not end with a number from 0 to 254 after a `-`.
pub(super) fn id_of_host(host: &str) -> Option<ReplicaId> {
    let first = host.split('.').next()?;
    let (_, ordinal) = first.rsplit_once('-')?;
    let is_number = ordinal.bytes().all(|byte| byte.is_ascii_digit());
    let ordinal: u8 = ordinal.parse().ok().filter(|_| is_number)?;
    ordinal.checked_add(1).map(ReplicaId)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_id_follows_the_last_dash_of_the_host_name() {
        for (host, id) in [
            ("quorate-0", 1),
            ("quorate-254", 255),
            ("router-7-2", 3),
            ("quorate-1.quorate-peers.llm.svc.cluster.local", 2),
        ] {
            assert_eq!(id_of_host(host), Some(ReplicaId(id)), "{host}");
        }
        for host in [
            "",
            "quorate",
            "quorate-",
            "quorate-255",
            "quorate-+1",
            "gpu-a",
            "a.b-1",
        ] {
            assert_eq!(id_of_host(host), None, "{host}");
        }
    }

    #[test]
    fn replica_id_is_a_positive_number_or_from_the_host_name() {
        assert_eq!(
            IdSource::read("255"),
            Some(IdSource::Number(ReplicaId(255)))
        );
        assert_eq!(IdSource::read("from-hostname"), Some(IdSource::Hostname));
        for wrong in ["0", "256", "-1", "", "hostname"] {
            assert_eq!(IdSource::read(wrong), None, "{wrong}");
        }
    }
}

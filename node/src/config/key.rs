//! What is said of a key: where it stands, what values it takes, what stands for it.

/// What values a key takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A whole number within bounds, both included.
    Integer {
        /// Least value.
        min: i64,
        /// Greatest value.
        max: i64,
    },
    /// A whole number from 1, `"adaptive"` or `"unlimited"`.
    Concurrency,
    /// `true` or `false`.
    Flag,
    /// Any text that is not empty.
    Text,
    /// One of a few words.
    Choice {
        /// Words this version honours.
        now: &'static [&'static str],
        /// Words that are reserved; refused as not available.
        later: &'static [&'static str],
    },
    /// A time span such as `"20ms"` or `"1m 30s"`, from a millisecond to a day.
    Duration,
    /// A time span that may be zero, up to a day.
    DurationOrZero,
    /// Two time spans, the lesser first: `"150ms..300ms"`.
    DurationRange,
    /// A number of bytes: `65536`, `"32MiB"`, `"500kB"`.
    Size,
    /// IP address and port to listen on.
    Address,
    /// `host:port`.
    HostPort,
    /// A list of `host:port`.
    HostPorts,
    /// A list of `api_key`, `header:NAME`, `body:user`.
    Identities,
    /// A list of host names.
    Hosts,
    /// A list of IP addresses and prefixes of them.
    Prefixes,
    /// A list of names, maybe empty: visible ASCII without commas.
    Names,
    /// A list of paths without a query.
    Paths,
    /// A list of texts, none of them empty.
    Texts,
    /// A list of HTTP statuses.
    Statuses,
    /// `tokenizer` of a model.
    Tokenizer,
    /// `http://host:port`.
    Url,
    /// `/path` of a URL.
    UrlPath,
    /// A table of texts by name.
    Labels,
}

/// What stands for a key that is set nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    /// The key must be set.
    Required,
    /// The key has no value then; what follows from that is in its description.
    Unset,
    /// This value, written as in an environment variable.
    Default(&'static str),
}

/// One key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    /// With its section: `node.id`. Of an entry of a list of tables: the last part only.
    pub path: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// What stands for it when it is set nowhere.
    pub absent: Absent,
    /// One sentence for the schema and for people.
    pub about: &'static str,
}

pub(super) const fn key(
    path: &'static str,
    kind: Kind,
    absent: Absent,
    about: &'static str,
) -> Key {
    Key {
        path,
        kind,
        absent,
        about,
    }
}

pub(super) const COUNT: Kind = Kind::Integer {
    min: 1,
    max: u32::MAX as i64,
};
pub(super) const COUNT_OR_ZERO: Kind = Kind::Integer {
    min: 0,
    max: u32::MAX as i64,
};

impl Key {
    /// The environment variable that sets it: `QUORATE_NODE__ID`.
    #[must_use]
    pub(super) fn variable(&self) -> String {
        format!(
            "QUORATE_{}",
            self.path
                .replace('.', "__")
                .replace('-', "_")
                .to_uppercase()
        )
    }

    /// Section and last part of the path: `("routing.cost", "near_permille")`.
    #[must_use]
    pub(super) fn split(&self) -> (&'static str, &'static str) {
        self.path.rsplit_once('.').unwrap_or(("", self.path))
    }
}

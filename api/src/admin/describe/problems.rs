//! Kinds of problems that calls of the admin API return, and the meaning of each type.

/// Content type of problems.
pub(in super::super) const MEDIA_TYPE: &str = "application/problem+json";

/// A kind of problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct ProblemKind {
    pub(in super::super) status: u16,
    /// Last part of the type.
    pub(in super::super) name: &'static str,
    /// When it is answered, and what helps.
    pub(in super::super) what: &'static str,
}

macro_rules! kinds {
    ($($id:ident = $status:literal $name:literal, $what:literal;)*) => {
        $(
            pub(in super::super) const $id: ProblemKind = ProblemKind {
                status: $status,
                name: $name,
                what: $what,
            };
        )*

        /// All kinds.
        pub(in super::super) const ALL: &[ProblemKind] = &[$($id),*];
    };
}

kinds! {
    INVALID = 400 "invalid", "Something in the request is not valid; `field` names it.";
    NO_TLS = 400 "tls", "The listener speaks TLS and was spoken to in the clear.";
    UNAUTHORIZED = 401 "unauthorized", "No token and no certificate, or a token that nobody has.";
    ROLE = 403 "role", "The caller's role does not suffice; `needed_role` names the one that does.";
    CERTIFICATE = 403 "certificate", "The certificate is of no operator.";
    OTHER_SITE = 403 "other-site", "A browser sent the request on behalf of another site.";
    NOT_FOUND = 404 "not-found", "There is no object of this name.";
    UNKNOWN_PATH = 404 "unknown-path", "There is no such path.";
    DIGEST_NOT_KEPT = 404 "digest-not-kept", "The digest at this index is not kept; `nearest_index` is one that is.";
    WRONG_METHOD = 405 "wrong-method", "The path does not take this method; `Allow` lists those that it takes.";
    BODY_TIMEOUT = 408 "body-timeout", "The body did not arrive in time.";
    REFUSED = 409 "refused", "The cluster cannot do this as it is.";
    NOT_INITIALISED = 409 "not-initialised", "The cluster is not founded yet.";
    ALREADY_INITIALISED = 409 "already-initialised", "The cluster is founded already.";
    STALE_SESSION = 409 "stale-session", "The replica's session was ended meanwhile; try again.";
    KEY_TAKEN = 409 "key-taken", "There is a key of this id or secret.";
    NOT_OF_SOURCE = 409 "not-of-source", "The backend is not that of the source.";
    USER_BUSY = 409 "user-busy", "The user has requests under way.";
    LIMIT = 409 "limit", "The cluster has as many of these as it may.";
    NOT_APPLIED = 409 "not-applied", "The index is not applied here yet; `applied_index` says how far it is.";
    RECORDING = 409 "recording-under-way", "A recording is under way here; it can be stopped.";
    RESTORE_UNDER_WAY = 409 "restore-under-way", "A restore is under way, or was aborted.";
    NOT_EMPTY = 409 "not-empty", "The cluster has users or blocks; `force` replaces them.";
    CHANGED = 412 "changed", "What `If-Match` names is not what is there; read it again.";
    BODY_TOO_LARGE = 413 "body-too-large", "The body is longer than 1 MiB.";
    TOO_LARGE = 413 "too-large", "The write is too large for the log.";
    CONTENT_TYPE = 415 "content-type", "The path does not take a body of this type.";
    UNKNOWN_HOST = 421 "unknown-host", "The listener does not go by that name.";
    CONFIG_FAULTS = 422 "config-faults", "The config has faults, which `faults` lists; nothing was changed.";
    TOO_MANY_WRONG_TOKENS = 429 "too-many-wrong-tokens", "Too many wrong tokens came from this address.";
    BACKUP = 500 "backup", "The backup cannot be made.";
    RESTORE = 500 "restore", "The restore broke.";
    NOT_RELOADABLE = 501 "not-reloadable", "This process does not read its config again.";
    LOG_LEVEL_FIXED = 501 "log-level-fixed", "This process does not change its log.";
    NO_QUORUM = 503 "no-quorum", "No quorum of the cluster answers.";
    BUSY = 503 "limit", "As many of these are under way as may be.";
    STOPPING = 503 "stopping", "The replica is stopping.";
    OUTCOME_UNKNOWN = 504 "outcome-unknown", "The write may or may not take effect; `outcome` is `unknown`.";
}

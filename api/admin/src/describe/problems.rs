//! Kinds of problems that calls of the admin API return, and the meaning of each type.

/// Content type of problems.
pub(crate) const MEDIA_TYPE: &str = "application/problem+json";

/// A kind of problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProblemKind {
    pub(crate) status: u16,
    /// Last part of the problem's type, such as `no-quorum`.
    pub(crate) name: &'static str,
    /// When the problem occurs, and what the caller can do.
    pub(crate) what: &'static str,
}

macro_rules! kinds {
    ($($id:ident = $status:literal $name:literal, $what:literal;)*) => {
        $(
            pub(crate) const $id: ProblemKind = ProblemKind {
                status: $status,
                name: $name,
                what: $what,
            };
        )*

        /// All kinds of problems.
        pub(crate) const ALL: &[ProblemKind] = &[$($id),*];
    };
}

kinds! {
    INVALID = 400 "invalid", "The request is not valid; `field` names the field at fault.";
    NO_TLS = 400 "tls", "The listener requires TLS, and the request came without it.";
    UNAUTHORIZED = 401 "unauthorized", "The token or certificate is missing, or the token is unknown.";
    ROLE = 403 "role", "The caller's role is not sufficient; `needed_role` names the required one.";
    CERTIFICATE = 403 "certificate", "The certificate does not name an operator.";
    OTHER_SITE = 403 "other-site", "A browser sent the request on behalf of another site.";
    NOT_FOUND = 404 "not-found", "There is no object with this name.";
    UNKNOWN_PATH = 404 "unknown-path", "The path does not exist.";
    DIGEST_NOT_KEPT = 404 "digest-not-kept", "The digest at this index is no longer kept; `nearest_index` is the nearest index with one.";
    WRONG_METHOD = 405 "wrong-method", "The path does not accept this method; `Allow` lists the accepted ones.";
    BODY_TIMEOUT = 408 "body-timeout", "The body did not arrive in time.";
    REFUSED = 409 "refused", "The cluster cannot do this in its current state.";
    NOT_INITIALISED = 409 "not-initialised", "The cluster has not been founded yet.";
    ALREADY_INITIALISED = 409 "already-initialised", "The cluster has already been founded.";
    STALE_SESSION = 409 "stale-session", "The replica's session has ended in the meantime; try again.";
    KEY_TAKEN = 409 "key-taken", "A key with this id or secret already exists.";
    NOT_OF_SOURCE = 409 "not-of-source", "The backend does not belong to this source.";
    USER_BUSY = 409 "user-busy", "The user has requests in progress.";
    LIMIT = 409 "limit", "The cluster has reached the maximum number of these objects.";
    NOT_APPLIED = 409 "not-applied", "This replica has not applied the index yet; `applied_index` is the last one it has applied.";
    RECORDING = 409 "recording-under-way", "A recording is running at this replica; stop it first.";
    RESTORE_UNDER_WAY = 409 "restore-under-way", "A restore is in progress, or was aborted.";
    NOT_EMPTY = 409 "not-empty", "The cluster has users or blocks; `force` replaces them.";
    CHANGED = 412 "changed", "`If-Match` does not name the current version; read it again.";
    BODY_TOO_LARGE = 413 "body-too-large", "The body is longer than 1 MiB.";
    TOO_LARGE = 413 "too-large", "The write is too large for the log.";
    CONTENT_TYPE = 415 "content-type", "The path does not accept a body of this type.";
    UNKNOWN_HOST = 421 "unknown-host", "The listener is not known by this host name; see `admin.hosts`.";
    CONFIG_FAULTS = 422 "config-faults", "The config has faults, which `faults` lists; nothing was changed.";
    TOO_MANY_WRONG_TOKENS = 429 "too-many-wrong-tokens", "Too many wrong tokens came from this address.";
    BACKUP = 500 "backup", "The backup cannot be made.";
    RESTORE = 500 "restore", "The restore failed.";
    NOT_RELOADABLE = 501 "not-reloadable", "This process cannot reload its config.";
    LOG_LEVEL_FIXED = 501 "log-level-fixed", "This process cannot change its log level.";
    NO_QUORUM = 503 "no-quorum", "The cluster has no quorum.";
    BUSY = 503 "limit", "The maximum number of these calls is already in progress.";
    STOPPING = 503 "stopping", "The replica is stopping.";
    OUTCOME_UNKNOWN = 504 "outcome-unknown", "The write may or may not take effect; `outcome` is `unknown`.";
}

//! The table of the admin listener's routes.

use super::super::describe::problems::{
    BACKUP, BUSY, CONFIG_FAULTS, DIGEST_NOT_KEPT, KEY_TAKEN, LOG_LEVEL_FIXED, NOT_APPLIED,
    NOT_EMPTY, NOT_FOUND, NOT_RELOADABLE, RESTORE, RESTORE_UNDER_WAY, STOPPING, USER_BUSY,
};
use super::super::describe::served;
use super::super::{
    admission, audit, backends, backup, bins, cluster, config, console, decisions, discovery,
    explain, keys, log_level, openapi, ownership, policy, prefixes, probes, reload, replicas,
    restore, session_trees, sessions, stream, usage, user_defaults, users, waiting, whoami,
};
use super::call::{ADMIN, OPEN, OPERATOR, SCRAPE, VIEWER, delete, get, post, put};
use super::recordings::{LAST_RECORDING, RECORDING_FILE, RECORDINGS, STOP_RECORDING, WHAT_IF};
use super::{RouteInfo, index};

/// All paths of the admin listener, with their methods and handlers.
pub(crate) const ROUTES: &[RouteInfo] = &[
    RouteInfo {
        path: "/",
        calls: &[get(
            "console",
            OPEN,
            "The console, a web page. It contains no data.",
            || served(console::page),
        )],
    },
    RouteInfo {
        path: "/console/{file}",
        calls: &[get(
            "consoleFile",
            OPEN,
            "A style sheet, script or image of the console. It contains no data.",
            || served(console::file),
        )
        .fails(&[NOT_FOUND])],
    },
    RouteInfo {
        path: "/admin/v1",
        calls: &[get(
            "paths",
            VIEWER,
            "A web page that lists all paths.",
            || served(index),
        )],
    },
    RouteInfo {
        path: "/livez",
        calls: &[get("livez", OPEN, "Whether the process responds.", || {
            served(probes::livez)
        })],
    },
    RouteInfo {
        path: "/readyz",
        calls: &[get(
            "readyz",
            OPEN,
            "Whether the replica accepts traffic.",
            || served(probes::readyz),
        )],
    },
    RouteInfo {
        path: "/metrics",
        calls: &[get(
            "metrics",
            SCRAPE,
            "Metrics of this replica, for Prometheus.",
            || served(probes::metrics),
        )],
    },
    RouteInfo {
        path: "/admin/v1/openapi.json",
        calls: &[get(
            "getOpenApi",
            VIEWER,
            "This API, as an OpenAPI 3.1 document.",
            || served(openapi::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/cluster",
        calls: &[get(
            "getCluster",
            VIEWER,
            "Role, leader, term, indexes and members, as known to this replica.",
            || served(cluster::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/whoami",
        calls: &[get(
            "whoAmI",
            VIEWER,
            "Name and role of the caller.",
            || served(whoami::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/replicas",
        calls: &[get(
            "getReplicas",
            VIEWER,
            "All replicas: what this one knows about each, and what each reports about itself.",
            || served(replicas::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/cluster/members",
        calls: &[post(
            "addMember",
            ADMIN,
            "Adds a replica as a learner, which follows the log but does not vote.",
            || served(cluster::add),
        )],
    },
    RouteInfo {
        path: "/admin/v1/cluster/members/{id}",
        calls: &[delete(
            "removeMember",
            ADMIN,
            "Removes a member permanently.",
            || served(cluster::remove),
        )],
    },
    RouteInfo {
        path: "/admin/v1/cluster/members/{id}/promote",
        calls: &[post(
            "promoteMember",
            ADMIN,
            "Makes a learner a voter, once it has caught up.",
            || served(cluster::promote),
        )],
    },
    RouteInfo {
        path: "/admin/v1/cluster/transfer-leader",
        calls: &[post(
            "transferLeader",
            OPERATOR,
            "Transfers leadership to a given voter, or to the most up-to-date one.",
            || served(cluster::transfer),
        )],
    },
    RouteInfo {
        path: "/admin/v1/cluster/snapshot",
        calls: &[post(
            "takeSnapshot",
            OPERATOR,
            "Takes a snapshot of this replica's state.",
            || served(cluster::snapshot),
        )],
    },
    RouteInfo {
        path: "/admin/v1/cluster/backup",
        calls: &[get(
            "getBackup",
            ADMIN,
            "The whole state as a file, for `restore`.",
            || served(backup::backup),
        )
        .fails(&[BACKUP, BUSY, RESTORE_UNDER_WAY])],
    },
    RouteInfo {
        path: "/admin/v1/cluster/restore",
        calls: &[post(
            "restoreBackup",
            ADMIN,
            "Replaces the state with a backup.",
            || served(restore::restore),
        )
        .fails(&[NOT_EMPTY, RESTORE, RESTORE_UNDER_WAY])],
    },
    RouteInfo {
        path: "/admin/v1/digest",
        calls: &[get(
            "getDigest",
            VIEWER,
            "Digest of the state, the same on every replica at the same index. Waits for \
 a later index, for two seconds at most.",
            || served(cluster::digest),
        )
        .fails(&[BUSY, DIGEST_NOT_KEPT, NOT_APPLIED])],
    },
    RouteInfo {
        path: "/admin/v1/backends",
        calls: &[get(
            "listBackends",
            VIEWER,
            "The registered backends by id, with everything known about each.",
            || served(backends::list),
        )],
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}",
        calls: &[
            get("getBackend", VIEWER, "One backend.", || {
                served(backends::show)
            })
            .fails(&[NOT_FOUND]),
            put(
                "putBackend",
                OPERATOR,
                "Registers a backend, or changes it. Accepts what `GET` returns.",
                || served(backends::put),
            ),
            delete(
                "deleteBackend",
                OPERATOR,
                "Removes a backend. Requests in progress run to their end.",
                || served(backends::remove),
            )
            .fails(&[NOT_FOUND]),
        ],
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}/drain",
        calls: &[post(
            "drainBackend",
            OPERATOR,
            "Stops new requests to a backend.",
            || served(backends::drain),
        )
        .fails(&[NOT_FOUND])],
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}/undrain",
        calls: &[post(
            "undrainBackend",
            OPERATOR,
            "Resumes requests to a backend.",
            || served(backends::undrain),
        )
        .fails(&[NOT_FOUND])],
    },
    RouteInfo {
        path: "/admin/v1/discovery",
        calls: &[get(
            "getDiscovery",
            VIEWER,
            "Engines that the sources reported to this replica, and their registration.",
            || served(discovery::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/users",
        calls: &[get(
            "listUsers",
            VIEWER,
            "All users, ordered by the hash of their names.",
            || served(users::list),
        )],
    },
    RouteInfo {
        path: "/admin/v1/users/defaults",
        calls: &[
            get(
                "getUserDefaults",
                VIEWER,
                "The defaults of users. A user of this name is at `/admin/v1/users/%64efaults`.",
                || served(user_defaults::show),
            ),
            put(
                "putUserDefaults",
                OPERATOR,
                "Replaces the defaults of users.",
                || served(user_defaults::put),
            ),
        ],
    },
    RouteInfo {
        path: "/admin/v1/users/{name}",
        calls: &[
            get(
                "getUser",
                VIEWER,
                "One user: counters, weight, limits, budget, waiting requests.",
                || served(users::show),
            )
            .fails(&[NOT_FOUND]),
            put(
                "putUser",
                OPERATOR,
                "Replaces the settings of a user, or creates it. The defaults apply to absent \
 fields. Accepts what `GET` returns.",
                || served(users::put),
            ),
            delete(
                "deleteUser",
                OPERATOR,
                "Deletes a user with its counters, weight and limits.",
                || served(users::remove),
            )
            .fails(&[NOT_FOUND, USER_BUSY]),
        ],
    },
    RouteInfo {
        path: "/admin/v1/users/{name}/forgive",
        calls: &[post(
            "forgiveUser",
            OPERATOR,
            "Resets a user's usage of its limits and budgets; counters stay.",
            || served(users::forgive),
        )
        .fails(&[NOT_FOUND])],
    },
    RouteInfo {
        path: "/admin/v1/usage",
        calls: &[get(
            "getUsage",
            VIEWER,
            "Usage by user, API key, model and day, and what it costs at this replica's prices.",
            || served(usage::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/sessions",
        calls: &[get(
            "listSessions",
            VIEWER,
            "Sessions of agents and chats, those used last first.",
            || served(sessions::list),
        )],
    },
    RouteInfo {
        path: "/admin/v1/sessions/{id}",
        calls: &[get("getSession", VIEWER, "A session.", || served(sessions::show))
            .fails(&[NOT_FOUND])],
    },
    RouteInfo {
        path: "/admin/v1/session-trees",
        calls: &[get(
            "listSessionTrees",
            VIEWER,
            "Trees of sessions with their figures and homes, those used last first.",
            || served(session_trees::list),
        )],
    },
    RouteInfo {
        path: "/admin/v1/session-trees/{root}",
        calls: &[
            get(
                "getSessionTree",
                VIEWER,
                "A tree of sessions: its figures and its sessions.",
                || served(session_trees::show),
            )
            .fails(&[NOT_FOUND]),
            delete(
                "endSessionTree",
                OPERATOR,
                "Ends all sessions of a tree. Its requests go on, and the next one of each session \
 begins it anew.",
                || served(session_trees::end),
            )
            .fails(&[NOT_FOUND]),
        ],
    },
    RouteInfo {
        path: "/admin/v1/waiting",
        calls: &[get(
            "getWaiting",
            VIEWER,
            "Users whose requests wait at this replica, longest wait first.",
            || served(waiting::list),
        )],
    },
    RouteInfo {
        path: "/admin/v1/keys",
        calls: &[
            get(
                "listKeys",
                VIEWER,
                "The API keys by id, without their secrets.",
                || served(keys::list),
            ),
            post(
                "createKey",
                OPERATOR,
                "Creates an API key. Its secret is returned only once.",
                || served(keys::create),
            )
            .fails(&[KEY_TAKEN]),
        ],
    },
    RouteInfo {
        path: "/admin/v1/keys/{id}",
        calls: &[
            get("getKey", VIEWER, "One API key.", || served(keys::show)).fails(&[NOT_FOUND]),
            delete(
                "revokeKey",
                OPERATOR,
                "Revokes an API key permanently.",
                || served(keys::revoke),
            )
            .fails(&[NOT_FOUND]),
        ],
    },
    RouteInfo {
        path: "/admin/v1/keys/{id}/rotate",
        calls: &[post(
            "rotateKey",
            OPERATOR,
            "Gives an API key a new secret, which is returned only once.",
            || served(keys::rotate),
        )
        .fails(&[KEY_TAKEN, NOT_FOUND])],
    },
    RouteInfo {
        path: "/admin/v1/ownership",
        calls: &[get(
            "getOwnership",
            VIEWER,
            "Number of owned blocks per backend, per model and in total.",
            || served(ownership::counts),
        )],
    },
    RouteInfo {
        path: "/admin/v1/ownership/prefixes",
        calls: &[get(
            "getSharedPrefixes",
            VIEWER,
            "Prefixes that this replica's last requests share, and their owners.",
            || served(prefixes::list),
        )],
    },
    RouteInfo {
        path: "/admin/v1/blocks/{hash}",
        calls: &[get(
            "getBlockOwners",
            VIEWER,
            "The owners of a prefix, by the hash of its last block, 16 hex digits.",
            || served(ownership::owners),
        )],
    },
    RouteInfo {
        path: "/admin/v1/explain",
        calls: &[post(
            "explain",
            VIEWER,
            "How a request would be routed, and why. Changes nothing.",
            || served(explain::explain),
        )
        .fails(&[STOPPING])],
    },
    RouteInfo {
        path: "/admin/v1/decisions",
        calls: &[get(
            "listDecisions",
            VIEWER,
            "The last decisions of all replicas, as far as they are on this replica's disk, newest first.",
            || served(decisions::list),
        )
        .fails(&[STOPPING])],
    },
    RouteInfo {
        path: "/admin/v1/decisions/{request_id}",
        calls: &[get(
            "getDecision",
            VIEWER,
            "One request with all decisions: candidates, scores and outcome. Peers are asked if this replica has none.",
            || served(decisions::show),
        )
        .fails(&[NOT_FOUND])],
    },
    RECORDINGS,
    LAST_RECORDING,
    RECORDING_FILE,
    STOP_RECORDING,
    WHAT_IF,
    RouteInfo {
        path: "/admin/v1/policy",
        calls: &[
            get(
                "getPolicy",
                VIEWER,
                "The routing policy, in general or of one model.",
                || served(policy::show),
            ),
            put(
                "putPolicy",
                OPERATOR,
                "Replaces the routing policy, in general or of one model, on every replica \
 at one log index.",
                || served(policy::put),
            ),
            delete(
                "deletePolicy",
                OPERATOR,
                "Removes the policy of one model, which follows the general one from then on.",
                || served(policy::remove),
            )
            .fails(&[NOT_FOUND]),
        ],
    },
    RouteInfo {
        path: "/admin/v1/routing",
        calls: &[
            get(
                "getRouting",
                VIEWER,
                "Routing settings other than the policy.",
                || served(policy::show_routing),
            ),
            put(
                "putRouting",
                OPERATOR,
                "Replaces the routing settings other than the policy.",
                || served(policy::put_routing),
            ),
        ],
    },
    RouteInfo {
        path: "/admin/v1/config",
        calls: &[get(
            "getConfig",
            VIEWER,
            "Every setting: its value in this replica's config, in the cluster, and in effect.",
            || served(config::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/config/reload",
        calls: &[post(
            "reloadConfig",
            OPERATOR,
            "Reloads this replica's config, as SIGHUP does.",
            || served(reload::reload),
        )
        .fails(&[CONFIG_FAULTS, NOT_RELOADABLE, STOPPING])],
    },
    RouteInfo {
        path: "/admin/v1/log",
        calls: &[
            get(
                "getLogLevel",
                VIEWER,
                "The log level of this replica.",
                || served(log_level::show),
            )
            .fails(&[LOG_LEVEL_FIXED]),
            put(
                "putLogLevel",
                OPERATOR,
                "Changes the log level of this replica, until it restarts.",
                || served(log_level::put),
            )
            .fails(&[LOG_LEVEL_FIXED]),
        ],
    },
    RouteInfo {
        path: "/admin/v1/bins",
        calls: &[get(
            "getBins",
            VIEWER,
            "Bins of output lengths per model, queues here, limits per backend.",
            || served(bins::show),
        )],
    },
    RouteInfo {
        path: "/admin/v1/admission",
        calls: &[
            get(
                "getAdmission",
                VIEWER,
                "How requests are admitted: order, limits, queue.",
                || served(admission::show),
            ),
            put(
                "putAdmission",
                OPERATOR,
                "Replaces the admission settings, on every replica at one log index. Without `usage_days`, \
                 that one stays.",
                || served(admission::put),
            ),
        ],
    },
    RouteInfo {
        path: "/admin/v1/audit",
        calls: &[get(
            "listAudit",
            VIEWER,
            "The last administrative writes, newest first, and who made them.",
            || served(audit::audit),
        )],
    },
    RouteInfo {
        path: "/admin/v1/events",
        calls: &[get(
            "getEvents",
            VIEWER,
            "Changes in the cluster, as this replica notices them, as server-sent events.",
            || served(stream::events),
        )
        .fails(&[BUSY])],
    },
];

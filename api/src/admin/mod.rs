//! The admin API: what operators query and change, on its own listener.
//!
//! Reads answer from this replica's state, with the index at which it was read.
//! `?read=linearizable` first waits until everything committed before is applied here. Writes go
//! through the log and answer with the index at which they were committed, or say that their
//! outcome is unknown. Errors are problem+json.
//!
//! The listener has no authentication of its own: it belongs on loopback or a private network.
//! Requests that a browser sends on behalf of another site are rejected (`origin`).

mod admission;
mod answer;
mod backends;
mod backup;
mod bins;
mod cluster;
mod config;
mod decisions;
mod explain;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod listener;
mod origin;
mod ownership;
mod policy;
mod probes;
mod problem;
mod restore;
mod stream;
mod users;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware;
use axum::response::Html;
use axum::routing::{MethodRouter, delete, get, post, put};
use http::StatusCode;
use state::StateView;
use tokio::sync::Semaphore;

pub use explain::explain_offline;
pub use listener::serve;
pub use stream::STREAMS_MAX;

use crate::admission::Admission;
use crate::backends::Backends;
use crate::clock::Clock;
use crate::divergence::Digests;
use crate::error::Problem;
use crate::events::EventBus;
use crate::kv_events::board::StreamBoard;
use crate::metrics::{Metrics, ScrapedReplica};
use crate::ports::Cluster;
use crate::proxy::{DecisionLog, RequestReader};
use crate::readiness::ReadinessCheck;
use crate::routing::{Decider, LoadTable, SharedOutbox};
use crate::settings::SharedFileSettings;
use origin::{OwnNames, own_site};

/// Maximum length of a request body, in bytes.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// Default number of entries in a list.
pub const PAGE_ENTRIES_DEFAULT: usize = 100;
/// Maximum number of entries in a list.
pub const PAGE_ENTRIES_MAX: usize = 1000;

/// Dependencies of the admin API of one replica.
pub struct Admin {
    /// The log and the members.
    pub cluster: Arc<dyn Cluster>,
    /// Published part of the state.
    pub view: Arc<StateView>,
    /// The data plane's reading of requests, for `explain`.
    pub requests: Arc<RequestReader>,
    /// The data plane's last decisions.
    pub decisions: Arc<DecisionLog>,
    /// Decides, for `explain`.
    pub decider: Arc<Decider>,
    /// Requests in flight.
    pub load: Arc<LoadTable>,
    /// What the log does not know yet.
    pub outbox: Arc<SharedOutbox>,
    /// Dates backups.
    pub clock: Clock,
    /// Queues of waiting requests.
    pub admission: Arc<Admission>,
    /// Health of the engines.
    pub backends: Arc<Backends>,
    /// Metrics for `/metrics`.
    pub metrics: Arc<Metrics>,
    /// Digests by index.
    pub digests: Arc<Digests>,
    /// KV event streams that this replica reads.
    pub kv_board: Arc<StreamBoard>,
    /// Events for `/admin/v1/events`.
    pub events: EventBus,
    /// Whether this replica should get traffic.
    pub readiness: Arc<ReadinessCheck>,
    /// What this replica was configured with.
    pub file: SharedFileSettings,
    /// Host names of the listener, in addition to addresses and `localhost`.
    pub hosts: Vec<String>,
}

/// State shared by the handlers.
#[derive(Clone)]
struct AdminState {
    admin: Arc<Admin>,
    /// One permit per open event stream.
    streams: Arc<Semaphore>,
    /// A single permit, for the backup being sent.
    backups: Arc<Semaphore>,
}

impl std::ops::Deref for AdminState {
    type Target = Admin;

    fn deref(&self) -> &Admin {
        &self.admin
    }
}

/// One path of the API, as listed on the index page.
struct RouteInfo {
    path: &'static str,
    methods: &'static str,
    what: &'static str,
    handlers: fn() -> MethodRouter<AdminState>,
}

const ROUTES: &[RouteInfo] = &[
    RouteInfo {
        path: "/livez",
        methods: "GET",
        what: "the process answers",
        handlers: || get(probes::livez),
    },
    RouteInfo {
        path: "/readyz",
        methods: "GET",
        what: "the replica takes traffic; 503 with reasons otherwise",
        handlers: || get(probes::readyz),
    },
    RouteInfo {
        path: "/metrics",
        methods: "GET",
        what: "OpenMetrics text",
        handlers: || get(probes::metrics),
    },
    RouteInfo {
        path: "/admin/v1/cluster",
        methods: "GET",
        what: "role, leader, term, indexes, members",
        handlers: || get(cluster::show),
    },
    RouteInfo {
        path: "/admin/v1/cluster/members",
        methods: "POST",
        what: "add a learner: {\"id\",\"address\"}",
        handlers: || post(cluster::add),
    },
    RouteInfo {
        path: "/admin/v1/cluster/members/{id}",
        methods: "DELETE",
        what: "remove a member",
        handlers: || delete(cluster::remove),
    },
    RouteInfo {
        path: "/admin/v1/cluster/members/{id}/promote",
        methods: "POST",
        what: "make a learner a voter",
        handlers: || post(cluster::promote),
    },
    RouteInfo {
        path: "/admin/v1/cluster/transfer-leader",
        methods: "POST",
        what: "hand leadership over: {\"to\"} or nothing",
        handlers: || post(cluster::transfer),
    },
    RouteInfo {
        path: "/admin/v1/cluster/snapshot",
        methods: "POST",
        what: "take a snapshot",
        handlers: || post(cluster::snapshot),
    },
    RouteInfo {
        path: "/admin/v1/cluster/backup",
        methods: "GET",
        what: "the state as a file; ?read=local without a quorum",
        handlers: || get(backup::backup),
    },
    RouteInfo {
        path: "/admin/v1/cluster/restore",
        methods: "POST",
        what: "put a backup in the state's place; ?force=true if the cluster has users or blocks",
        handlers: || post(restore::restore),
    },
    RouteInfo {
        path: "/admin/v1/digest",
        methods: "GET",
        what: "128-bit digest of the state; ?index=N",
        handlers: || get(cluster::digest),
    },
    RouteInfo {
        path: "/admin/v1/backends",
        methods: "GET",
        what: "registered backends; ?limit ?cursor",
        handlers: || get(backends::list),
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}",
        methods: "GET PUT DELETE",
        what: "one backend",
        handlers: || {
            get(backends::show)
                .merge(put(backends::put))
                .merge(delete(backends::remove))
        },
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}/drain",
        methods: "POST",
        what: "give it no new requests",
        handlers: || post(backends::drain),
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}/undrain",
        methods: "POST",
        what: "give it requests again",
        handlers: || post(backends::undrain),
    },
    RouteInfo {
        path: "/admin/v1/users",
        methods: "GET",
        what: "users by key; ?limit ?cursor",
        handlers: || get(users::list),
    },
    RouteInfo {
        path: "/admin/v1/users/{name}",
        methods: "GET PUT DELETE",
        what: "one user; PUT {\"weight_milli\", \"limits\"}, either; DELETE without requests only",
        handlers: || {
            get(users::show)
                .merge(put(users::put))
                .merge(delete(users::remove))
        },
    },
    RouteInfo {
        path: "/admin/v1/users/{name}/forgive",
        methods: "POST",
        what: "forget what the user has used of its limits per window; counters stay",
        handlers: || post(users::forgive),
    },
    RouteInfo {
        path: "/admin/v1/ownership",
        methods: "GET",
        what: "owned blocks per backend and in all",
        handlers: || get(ownership::counts),
    },
    RouteInfo {
        path: "/admin/v1/blocks/{hash}",
        methods: "GET",
        what: "owners of a prefix, by its 16 hex digits",
        handlers: || get(ownership::owners),
    },
    RouteInfo {
        path: "/admin/v1/explain",
        methods: "POST",
        what: "how a request would be routed: {\"path\",\"headers\",\"body\"}",
        handlers: || post(explain::explain),
    },
    RouteInfo {
        path: "/admin/v1/decisions",
        methods: "GET",
        what: "this replica's last decisions, newest first; ?user ?backend ?model ?limit ?cursor",
        handlers: || get(decisions::list),
    },
    RouteInfo {
        path: "/admin/v1/decisions/{request_id}",
        methods: "GET",
        what: "one request with every decision: candidates, scores, and what became of it",
        handlers: || get(decisions::show),
    },
    RouteInfo {
        path: "/admin/v1/policy",
        methods: "GET PUT DELETE",
        what: "the routing policy; ?model: that of one model",
        handlers: || {
            get(policy::show)
                .merge(put(policy::put))
                .merge(delete(policy::remove))
        },
    },
    RouteInfo {
        path: "/admin/v1/routing",
        methods: "GET PUT",
        what: "what routing follows beside the policy: models, learning, accuracy",
        handlers: || get(policy::show_routing).merge(put(policy::put_routing)),
    },
    RouteInfo {
        path: "/admin/v1/config",
        methods: "GET",
        what: "every setting: as configured here, in the cluster, in effect",
        handlers: || get(config::show),
    },
    RouteInfo {
        path: "/admin/v1/bins",
        methods: "GET",
        what: "output-length bins per model, queues here, limits per backend",
        handlers: || get(bins::show),
    },
    RouteInfo {
        path: "/admin/v1/admission",
        methods: "GET PUT",
        what: "how requests are admitted: order, limits, queue",
        handlers: || get(admission::show).merge(put(admission::put)),
    },
    RouteInfo {
        path: "/admin/v1/audit",
        methods: "GET",
        what: "the last administrative writes, newest first; ?limit",
        handlers: || get(cluster::audit),
    },
    RouteInfo {
        path: "/admin/v1/events",
        methods: "GET",
        what: "server-sent events: leader, members, backends, policy, snapshots",
        handlers: || get(stream::events),
    },
];

/// Builds the admin API over `admin`, to be served on the admin listener. From here on,
/// `admin.metrics` reads the replica at each scrape.
pub fn router(admin: Arc<Admin>) -> Router {
    admin.metrics.watch(ScrapedReplica {
        cluster: Arc::clone(&admin.cluster),
        view: Arc::clone(&admin.view),
        load: Arc::clone(&admin.load),
        backends: Arc::clone(&admin.backends),
        digests: Arc::clone(&admin.digests),
        kv_board: Arc::clone(&admin.kv_board),
    });
    let names = OwnNames::new(&admin.hosts);
    let shared = AdminState {
        admin,
        streams: Arc::new(Semaphore::new(STREAMS_MAX)),
        backups: Arc::new(Semaphore::new(1)),
    };
    let mut router = Router::new().route("/", get(index));
    for route in ROUTES {
        router = router.route(route.path, (route.handlers)());
    }
    router
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(names, own_site))
        .with_state(shared)
}

/// Lists the endpoints as a page for people.
async fn index() -> Html<String> {
    use std::fmt::Write;
    let mut page = String::from(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Quorate</title>\
         <style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}\
         td{padding:.15rem 1rem .15rem 0;vertical-align:top}code{font-size:.95em}</style>\
         <h1>Quorate</h1><p>Admin API of this replica.</p><table>",
    );
    for route in ROUTES {
        let (path, methods) = (route.path, route.methods);
        let linked = if methods.starts_with("GET") && !path.contains('{') {
            format!("<a href=\"{path}\">{path}</a>")
        } else {
            path.to_owned()
        };
        write!(
            page,
            "<tr><td>{methods}<td><code>{linked}</code><td>{}",
            route.what
        )
        .expect("writing to a string does not fail");
    }
    page.push_str("</table>");
    Html(page)
}

async fn unknown_path(request: Request) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "unknown-path", "no such path")
        .detail(format!("{} is not served here", request.uri().path()))
}

async fn wrong_method(request: Request) -> Problem {
    Problem::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "wrong-method",
        "the path does not take this method",
    )
    .detail(format!("{} {}", request.method(), request.uri().path()))
}

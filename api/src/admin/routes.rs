//! Every path of the admin listener, with who may call it. A path that is not in this table is not
//! served, and one method of a path cannot be had with less than what the table asks for.

use axum::response::Html;
use axum::routing::{MethodRouter, delete, get, post, put};
use http::Method;

use super::roles::{AdminRole, Permission};
use super::{
    AdminState, admission, audit, backends, backup, bins, caches, cluster, config, decisions,
    discovery, explain, keys, ownership, policy, probes, reload, restore, stream, user_defaults,
    users,
};

const OPEN: Permission = Permission::Open;
const SCRAPE: Permission = Permission::Scrape;
const VIEWER: Permission = Permission::Role(AdminRole::Viewer);
const OPERATOR: Permission = Permission::Role(AdminRole::Operator);
const ADMIN: Permission = Permission::Role(AdminRole::Admin);

/// One path of the API, as listed on the index page.
pub(super) struct RouteInfo {
    pub(super) path: &'static str,
    /// Its methods, and who may call them. What is not listed is for nobody but admins.
    pub(super) methods: &'static [(&'static str, Permission)],
    pub(super) what: &'static str,
    pub(super) handlers: fn() -> MethodRouter<AdminState>,
}

/// Every path of the listener.
pub(super) const ROUTES: &[RouteInfo] = &[
    RouteInfo {
        path: "/",
        methods: &[("GET", VIEWER)],
        what: "this page",
        handlers: || get(index),
    },
    RouteInfo {
        path: "/livez",
        methods: &[("GET", OPEN)],
        what: "the process answers",
        handlers: || get(probes::livez),
    },
    RouteInfo {
        path: "/readyz",
        methods: &[("GET", OPEN)],
        what: "the replica takes traffic; 503 with reasons otherwise",
        handlers: || get(probes::readyz),
    },
    RouteInfo {
        path: "/metrics",
        methods: &[("GET", SCRAPE)],
        what: "metrics, as Prometheus text or OpenMetrics",
        handlers: || get(probes::metrics),
    },
    RouteInfo {
        path: "/admin/v1/cluster",
        methods: &[("GET", VIEWER)],
        what: "role, leader, term, indexes, members",
        handlers: || get(cluster::show),
    },
    RouteInfo {
        path: "/admin/v1/cluster/members",
        methods: &[("POST", ADMIN)],
        what: "add a learner: {\"id\",\"address\"}",
        handlers: || post(cluster::add),
    },
    RouteInfo {
        path: "/admin/v1/cluster/members/{id}",
        methods: &[("DELETE", ADMIN)],
        what: "remove a member",
        handlers: || delete(cluster::remove),
    },
    RouteInfo {
        path: "/admin/v1/cluster/members/{id}/promote",
        methods: &[("POST", ADMIN)],
        what: "make a learner a voter",
        handlers: || post(cluster::promote),
    },
    RouteInfo {
        path: "/admin/v1/cluster/transfer-leader",
        methods: &[("POST", OPERATOR)],
        what: "hand leadership over: {\"to\"} or nothing",
        handlers: || post(cluster::transfer),
    },
    RouteInfo {
        path: "/admin/v1/cluster/snapshot",
        methods: &[("POST", OPERATOR)],
        what: "take a snapshot",
        handlers: || post(cluster::snapshot),
    },
    RouteInfo {
        path: "/admin/v1/cluster/backup",
        methods: &[("GET", ADMIN)],
        what: "the state as a file; ?read=local without a quorum",
        handlers: || get(backup::backup),
    },
    RouteInfo {
        path: "/admin/v1/cluster/restore",
        methods: &[("POST", ADMIN)],
        what: "put a backup in the state's place; ?force=true if the cluster has users or blocks",
        handlers: || post(restore::restore),
    },
    RouteInfo {
        path: "/admin/v1/digest",
        methods: &[("GET", VIEWER)],
        what: "128-bit digest of the state; ?index=N",
        handlers: || get(cluster::digest),
    },
    RouteInfo {
        path: "/admin/v1/backends",
        methods: &[("GET", VIEWER)],
        what: "registered backends; ?limit ?cursor",
        handlers: || get(backends::list),
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}",
        methods: &[("GET", VIEWER), ("PUT", OPERATOR), ("DELETE", OPERATOR)],
        what: "one backend",
        handlers: || {
            get(backends::show)
                .merge(put(backends::put))
                .merge(delete(backends::remove))
        },
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}/drain",
        methods: &[("POST", OPERATOR)],
        what: "give it no new requests",
        handlers: || post(backends::drain),
    },
    RouteInfo {
        path: "/admin/v1/backends/{id}/undrain",
        methods: &[("POST", OPERATOR)],
        what: "give it requests again",
        handlers: || post(backends::undrain),
    },
    RouteInfo {
        path: "/admin/v1/discovery",
        methods: &[("GET", VIEWER)],
        what: "what sources of engines told this replica: errors, refused engines, backends that are lost",
        handlers: || get(discovery::show),
    },
    RouteInfo {
        path: "/admin/v1/users",
        methods: &[("GET", VIEWER)],
        what: "users by key; ?limit ?cursor",
        handlers: || get(users::list),
    },
    RouteInfo {
        path: "/admin/v1/users/{name}",
        methods: &[("GET", VIEWER), ("PUT", OPERATOR), ("DELETE", OPERATOR)],
        what: "one user; PUT {\"weight_milli\", \"limits\", \"cache\", \"cache_group\"}, any; DELETE without requests only",
        handlers: || {
            get(users::show)
                .merge(put(users::put))
                .merge(delete(users::remove))
        },
    },
    RouteInfo {
        path: "/admin/v1/users/{name}/forgive",
        methods: &[("POST", OPERATOR)],
        what: "forget what the user has used of its limits per window; counters stay",
        handlers: || post(users::forgive),
    },
    RouteInfo {
        path: "/admin/v1/user-defaults",
        methods: &[("GET", VIEWER), ("PUT", OPERATOR)],
        what: "what users have who were not given their own: weight, limits, budget, cache",
        handlers: || get(user_defaults::show).merge(put(user_defaults::put)),
    },
    RouteInfo {
        path: "/admin/v1/cache",
        methods: &[("GET", VIEWER), ("PUT", OPERATOR)],
        what: "whether users without a setting of their own share cached blocks: {\"cache\", \"cache_group\"}",
        handlers: || get(caches::show).merge(put(caches::put)),
    },
    RouteInfo {
        path: "/admin/v1/keys",
        methods: &[("GET", VIEWER), ("POST", OPERATOR)],
        what: "API keys; ?user ?limit ?cursor; POST {\"user\", \"name\", \"expires_at\", \"models\", \"scopes\"} answers a new secret, once",
        handlers: || get(keys::list).merge(post(keys::create)),
    },
    RouteInfo {
        path: "/admin/v1/keys/{id}",
        methods: &[("GET", VIEWER), ("DELETE", OPERATOR)],
        what: "one API key; DELETE revokes it",
        handlers: || get(keys::show).merge(delete(keys::revoke)),
    },
    RouteInfo {
        path: "/admin/v1/keys/{id}/rotate",
        methods: &[("POST", OPERATOR)],
        what: "give it another secret, answered once; ?grace=1h: the present one is taken so long",
        handlers: || post(keys::rotate),
    },
    RouteInfo {
        path: "/admin/v1/ownership",
        methods: &[("GET", VIEWER)],
        what: "owned blocks per backend and in all",
        handlers: || get(ownership::counts),
    },
    RouteInfo {
        path: "/admin/v1/blocks/{hash}",
        methods: &[("GET", VIEWER)],
        what: "owners of a prefix, by its 16 hex digits",
        handlers: || get(ownership::owners),
    },
    RouteInfo {
        path: "/admin/v1/explain",
        methods: &[("POST", VIEWER)],
        what: "how a request would be routed: {\"path\",\"headers\",\"body\"}",
        handlers: || post(explain::explain),
    },
    RouteInfo {
        path: "/admin/v1/decisions",
        methods: &[("GET", VIEWER)],
        what: "this replica's last decisions, newest first; ?user ?backend ?model ?limit ?cursor",
        handlers: || get(decisions::list),
    },
    RouteInfo {
        path: "/admin/v1/decisions/{request_id}",
        methods: &[("GET", VIEWER)],
        what: "one request with every decision: candidates, scores, and what became of it",
        handlers: || get(decisions::show),
    },
    RouteInfo {
        path: "/admin/v1/policy",
        methods: &[("GET", VIEWER), ("PUT", OPERATOR), ("DELETE", OPERATOR)],
        what: "the routing policy; ?model: that of one model",
        handlers: || {
            get(policy::show)
                .merge(put(policy::put))
                .merge(delete(policy::remove))
        },
    },
    RouteInfo {
        path: "/admin/v1/routing",
        methods: &[("GET", VIEWER), ("PUT", OPERATOR)],
        what: "what routing follows beside the policy: models, learning, accuracy",
        handlers: || get(policy::show_routing).merge(put(policy::put_routing)),
    },
    RouteInfo {
        path: "/admin/v1/config",
        methods: &[("GET", VIEWER)],
        what: "every setting: as configured here, in the cluster, in effect",
        handlers: || get(config::show),
    },
    RouteInfo {
        path: "/admin/v1/config/reload",
        methods: &[("POST", OPERATOR)],
        what: "read this replica's config again, as SIGHUP does: what was taken, what needs a restart",
        handlers: || post(reload::reload),
    },
    RouteInfo {
        path: "/admin/v1/bins",
        methods: &[("GET", VIEWER)],
        what: "output-length bins per model, queues here, limits per backend",
        handlers: || get(bins::show),
    },
    RouteInfo {
        path: "/admin/v1/admission",
        methods: &[("GET", VIEWER), ("PUT", OPERATOR)],
        what: "how requests are admitted: order, limits, queue",
        handlers: || get(admission::show).merge(put(admission::put)),
    },
    RouteInfo {
        path: "/admin/v1/audit",
        methods: &[("GET", VIEWER)],
        what: "the last administrative writes, newest first, and by whom; ?limit",
        handlers: || get(audit::audit),
    },
    RouteInfo {
        path: "/admin/v1/events",
        methods: &[("GET", VIEWER)],
        what: "server-sent events: leader, members, backends, policy, snapshots",
        handlers: || get(stream::events),
    },
];

/// What a call needs. `path` is the path of the table that was matched; `None`: no path was.
pub(super) fn permission(path: Option<&str>, method: &Method) -> Permission {
    let Some(path) = path else {
        // Only who may read learns which paths there are.
        return VIEWER;
    };
    let Some(route) = ROUTES.iter().find(|route| route.path == path) else {
        return ADMIN;
    };
    let method = match *method {
        Method::HEAD => "GET",
        _ => method.as_str(),
    };
    let mut listed = route.methods.iter();
    let listed = listed.find(|(name, _)| *name == method);
    listed.map_or(ADMIN, |(_, permission)| *permission)
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
        let path = route.path;
        let methods: Vec<_> = route.methods.iter().map(|(method, _)| *method).collect();
        let linked = if methods.contains(&"GET") && !path.contains('{') {
            format!("<a href=\"{path}\">{path}</a>")
        } else {
            path.to_owned()
        };
        write!(
            page,
            "<tr><td>{}<td><code>{linked}</code><td>{}",
            methods.join(" "),
            route.what
        )
        .expect("writing to a string does not fail");
    }
    page.push_str("</table>");
    Html(page)
}

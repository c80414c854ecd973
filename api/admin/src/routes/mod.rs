//! All paths of the admin listener with their permissions. A path that is not in this table is not
//! served. If callers must authenticate, no method is served to a lower role than the table
//! requires. The OpenAPI document is generated from the same table (`document`), so the two cannot
//! differ.

mod call;
mod recordings;
mod table;

use axum::extract::State;
use axum::response::Html;
use http::Method;

pub(super) use self::table::ROUTES;
use super::AdminState;
use super::describe::DescribedRoute;
use super::describe::problems::ProblemKind;
use super::roles::{AdminRole, Permission};

/// A path of the admin listener.
pub(super) struct RouteInfo {
    pub(super) path: &'static str,
    /// Methods that the path supports. A call with another method requires the role `admin`.
    pub(super) calls: &'static [CallInfo],
}

/// A method of a path.
pub(super) struct CallInfo {
    pub(super) method: Method,
    /// Operation id for generated clients.
    pub(super) id: &'static str,
    /// Permission that a call requires.
    pub(super) permission: Permission,
    /// Description in sentences. The first one also serves as a title.
    pub(super) what: &'static str,
    /// Problems that its handler's signature does not show.
    pub(super) problems: &'static [ProblemKind],
    pub(super) handler: fn() -> DescribedRoute,
}

/// Returns the permission that a call requires. `path` is the matched path of the table, if any.
pub(super) fn permission(path: Option<&str>, method: &Method) -> Permission {
    let Some(path) = path else {
        // Only callers with read access learn which paths exist.
        return Permission::Role(AdminRole::Viewer);
    };
    let Some(route) = ROUTES.iter().find(|route| route.path == path) else {
        return Permission::Role(AdminRole::Admin);
    };
    let method = asked(method);
    let mut listed = route.calls.iter();
    let listed = listed.find(|call| call.method == method);
    listed.map_or(Permission::Role(AdminRole::Admin), |call| call.permission)
}

/// Returns the method under which the table lists `method`: `GET` for `HEAD`.
pub(super) fn asked(method: &Method) -> &Method {
    match *method {
        Method::HEAD => &Method::GET,
        _ => method,
    }
}

/// Handles `GET /admin/v1`: lists the endpoints as an HTML page.
async fn index(_: State<AdminState>) -> Html<String> {
    use std::fmt::Write;
    let mut page = String::from(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Quorate</title>\
         <style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}\
         td{padding:.15rem 1rem .15rem 0;vertical-align:top}code{font-size:.95em}</style>\
         <h1>Quorate</h1><p>Admin API of this replica.</p><table>",
    );
    for route in ROUTES {
        let path = route.path;
        let methods: Vec<_> = route
            .calls
            .iter()
            .map(|call| call.method.as_str())
            .collect();
        let linked = if methods.contains(&"GET") && !path.contains('{') {
            format!("<a href=\"{path}\">{path}</a>")
        } else {
            path.to_owned()
        };
        write!(
            page,
            "<tr><td>{}<td><code>{linked}</code><td>{}",
            methods.join(" "),
            route.calls.first().map_or("", |call| call.what)
        )
        .expect("writing to a string does not fail");
    }
    page.push_str("</table>");
    Html(page)
}

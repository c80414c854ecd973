//! Constructors for entries of the table of routes.

use http::Method;

use super::super::describe::DescribedRoute;
use super::super::describe::problems::ProblemKind;
use super::super::roles::{AdminRole, Permission};
use super::CallInfo;

pub(super) const OPEN: Permission = Permission::Open;
pub(super) const SCRAPE: Permission = Permission::Scrape;
pub(super) const VIEWER: Permission = Permission::Role(AdminRole::Viewer);
pub(super) const OPERATOR: Permission = Permission::Role(AdminRole::Operator);
pub(super) const ADMIN: Permission = Permission::Role(AdminRole::Admin);

macro_rules! method {
    ($name:ident, $method:ident) => {
        pub(super) const fn $name(
            id: &'static str,
            permission: Permission,
            what: &'static str,
            handler: fn() -> DescribedRoute,
        ) -> CallInfo {
            CallInfo {
                method: Method::$method,
                id,
                permission,
                what,
                problems: &[],
                handler,
            }
        }
    };
}

method!(get, GET);
method!(put, PUT);
method!(post, POST);
method!(delete, DELETE);

impl CallInfo {
    pub(super) const fn fails(mut self, problems: &'static [ProblemKind]) -> Self {
        self.problems = problems;
        self
    }
}

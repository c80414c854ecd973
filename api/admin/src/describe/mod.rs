//! Inputs and outputs of calls, derived from the signatures of their handlers. The OpenAPI document
//! and the check of query keys use these descriptions.
//!
//! Extractors implement [`DescribeRequest`] and responses [`DescribeResponse`]; functions over such
//! types implement [`DescribedHandler`]. The table of routes accepts no other handlers. It also
//! lists what no type shows: the problems that a handler itself returns.

mod answers;
mod forms;
pub(super) mod problems;
mod requests;
mod schemas;

use std::collections::BTreeSet;
use std::future::Future;

use axum::handler::Handler;
use axum::routing::{MethodFilter, MethodRouter, on};
use serde_json::Value;

use self::problems::ProblemKind;
pub(super) use self::schemas::Schemas;
use super::AdminState;

/// Inputs and outputs of a call.
#[derive(Debug, Default)]
pub(super) struct CallShape {
    /// Accepted query keys.
    pub(super) query: Vec<ParameterShape>,
    /// Request headers that the call evaluates.
    pub(super) headers: Vec<ParameterShape>,
    /// Schema of the variable part of the path; `None` if the path has none.
    pub(super) path: Option<Value>,
    pub(super) body: Option<BodyShape>,
    pub(super) answers: Vec<AnswerShape>,
    pub(super) problems: BTreeSet<ProblemKind>,
}

/// A query key or a request header.
#[derive(Debug)]
pub(super) struct ParameterShape {
    pub(super) name: String,
    pub(super) is_required: bool,
    pub(super) schema: Value,
}

/// The body of a request.
#[derive(Debug)]
pub(super) struct BodyShape {
    pub(super) media_type: &'static str,
    pub(super) is_required: bool,
    pub(super) schema: Value,
}

/// A response other than a problem.
#[derive(Debug)]
pub(super) struct AnswerShape {
    pub(super) status: u16,
    pub(super) what: &'static str,
    pub(super) media_type: &'static str,
    pub(super) schema: Value,
    /// Names of response headers, each with a description.
    pub(super) headers: Vec<(&'static str, &'static str)>,
}

impl CallShape {
    /// Adds problems that the call can return.
    pub(super) fn fails(&mut self, kinds: &[ProblemKind]) {
        self.problems.extend(kinds);
    }
}

/// An argument of a handler.
pub(super) trait DescribeRequest {
    /// Adds the inputs that the argument reads, and the problems of reading them, to `call`.
    fn describe(call: &mut CallShape, schemas: &mut Schemas);
}

/// A result of a handler.
pub(super) trait DescribeResponse {
    /// Adds the responses, and the problems that they imply, to `call`.
    fn describe(call: &mut CallShape, schemas: &mut Schemas);
}

/// A handler whose arguments and result have descriptions.
pub(super) trait DescribedHandler<Arguments>: Handler<Arguments, AdminState> {
    /// Adds the descriptions of the arguments and of the result to `call`.
    fn describe(call: &mut CallShape, schemas: &mut Schemas);
}

macro_rules! described {
    ($($argument:ident),*) => {
        impl<F, Fut, R, M, $($argument),*> DescribedHandler<(M, $($argument,)*)> for F
        where
            F: Handler<(M, $($argument,)*), AdminState> + Fn($($argument),*) -> Fut,
            Fut: Future<Output = R>,
            R: DescribeResponse,
            $($argument: DescribeRequest),*
        {
            fn describe(call: &mut CallShape, schemas: &mut Schemas) {
                $($argument::describe(call, schemas);)*
                R::describe(call, schemas);
            }
        }
    };
}

described!(A);
described!(A, B);
described!(A, B, C);
described!(A, B, C, D);
described!(A, B, C, D, E);

/// A handler with its description, for the table of routes.
pub(super) struct DescribedRoute {
    /// Returns a router that serves the handler under a method.
    pub(super) on: Box<dyn FnOnce(MethodFilter) -> MethodRouter<AdminState>>,
    /// Adds the inputs and outputs of the handler to a call's shape.
    pub(super) describe: fn(&mut CallShape, &mut Schemas),
}

/// Creates an entry for the table of routes from a handler.
pub(super) fn served<H, Arguments>(handler: H) -> DescribedRoute
where
    H: DescribedHandler<Arguments>,
    Arguments: 'static,
{
    DescribedRoute {
        on: Box::new(move |method| on(method, handler)),
        describe: H::describe,
    }
}

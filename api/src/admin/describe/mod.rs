//! The inputs and outputs of a call, derived from its handler's signature: the source of the
//! OpenAPI document, and of the query keys that a call accepts.
//!
//! Extractors and answers describe themselves ([`DescribeRequest`], [`DescribeResponse`]), and a
//! handler is described by its arguments and its result ([`DescribedHandler`]). A handler with
//! undescribed inputs or outputs does not fit into the table of routes. The table also lists what
//! no type shows: the problems that a handler itself returns.

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

/// One call: what it takes and gives.
#[derive(Debug, Default)]
pub(super) struct CallShape {
    /// Keys of the query.
    pub(super) query: Vec<ParameterShape>,
    /// Headers that it looks at.
    pub(super) headers: Vec<ParameterShape>,
    /// The variable part of its path.
    pub(super) path: Option<Value>,
    pub(super) body: Option<BodyShape>,
    pub(super) answers: Vec<AnswerShape>,
    pub(super) problems: BTreeSet<ProblemKind>,
}

/// A key of the query, or a header.
#[derive(Debug)]
pub(super) struct ParameterShape {
    pub(super) name: String,
    pub(super) is_required: bool,
    pub(super) schema: Value,
}

/// A body of a request.
#[derive(Debug)]
pub(super) struct BodyShape {
    pub(super) media_type: &'static str,
    pub(super) is_required: bool,
    pub(super) schema: Value,
}

/// An answer that is no problem.
#[derive(Debug)]
pub(super) struct AnswerShape {
    pub(super) status: u16,
    pub(super) what: &'static str,
    pub(super) media_type: &'static str,
    pub(super) schema: Value,
    /// Headers, with what they say.
    pub(super) headers: Vec<(&'static str, &'static str)>,
}

impl CallShape {
    /// Adds problems that the call may answer.
    pub(super) fn fails(&mut self, kinds: &[ProblemKind]) {
        self.problems.extend(kinds);
    }
}

/// What a handler can take.
pub(super) trait DescribeRequest {
    /// Adds it to `call`.
    fn describe(call: &mut CallShape, schemas: &mut Schemas);
}

/// What a handler can answer.
pub(super) trait DescribeResponse {
    /// Adds it to `call`.
    fn describe(call: &mut CallShape, schemas: &mut Schemas);
}

/// A handler whose signature says what it takes and gives.
pub(super) trait DescribedHandler<Arguments>: Handler<Arguments, AdminState> {
    /// Adds both to `call`.
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

/// A handler, ready to be served and described.
pub(super) struct DescribedRoute {
    /// Serves it under a method.
    pub(super) on: Box<dyn FnOnce(MethodFilter) -> MethodRouter<AdminState>>,
    /// Describes it.
    pub(super) describe: fn(&mut CallShape, &mut Schemas),
}

/// Makes an entry of the table of routes out of a handler.
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

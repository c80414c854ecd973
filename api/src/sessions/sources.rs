//! Sources of session names, in order: headers of known clients, headers from the config, fields of
//! the body.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::SessionNames;
use super::names::bounded;
use crate::base::label::Label;

/// Headers with which one kind of client names its sessions.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClientHeaders {
    /// Header with the name of the session.
    pub(super) session: &'static str,
    /// Headers with the name of the session that started it. The first one counts that names
    /// another session.
    pub(super) parents: &'static [&'static str],
    /// Header that is `true` on the last turn of the session.
    pub(super) last: Option<&'static str>,
}

const fn client(session: &'static str, parents: &'static [&'static str]) -> ClientHeaders {
    ClientHeaders {
        session,
        parents,
        last: None,
    }
}

/// Headers of known clients, in order.
///
/// Claude Code and Codex send the session of their whole tree with each request, and, from an agent
/// that another one started, also its own.
pub(super) const KNOWN_CLIENTS: [ClientHeaders; 7] = [
    // Quorate's own.
    client("x-quorate-session", &["x-quorate-parent-session"]),
    // Claude Code since 2.1.139: an agent, and the session without one.
    client(
        "x-claude-code-agent-id",
        &["x-claude-code-parent-agent-id", "x-claude-code-session-id"],
    ),
    client("x-claude-code-session-id", &[]),
    // Codex: a thread, and the session of versions without threads (openai/codex#19377).
    client("thread-id", &["x-codex-parent-thread-id", "session-id"]),
    client("session-id", &[]),
    // OpenCode.
    client("x-session-id", &["x-parent-session-id"]),
    // Dynamo's clients.
    ClientHeaders {
        session: "x-dynamo-session-id",
        parents: &["x-dynamo-parent-session-id"],
        last: Some("x-dynamo-session-final"),
    },
];

/// Headers from the config with the names of a session and its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionHeaders {
    /// Header with the name of the session.
    pub session: HeaderName,
    /// Header with the name of the session that started it; `None` if there is none.
    pub parent: Option<HeaderName>,
}

/// One source of names in headers.
#[derive(Debug, Clone)]
pub(super) struct HeaderSource {
    label: &'static str,
    session: HeaderName,
    parents: Box<[HeaderName]>,
    last: Option<HeaderName>,
}

/// Returns all sources in headers, in order.
pub(super) fn all(configured: &[SessionHeaders]) -> Box<[HeaderSource]> {
    let known = KNOWN_CLIENTS.iter().map(|client| HeaderSource {
        label: label(client.session),
        session: HeaderName::from_static(client.session),
        parents: client
            .parents
            .iter()
            .map(|it| HeaderName::from_static(it))
            .collect(),
        last: client.last.map(HeaderName::from_static),
    });
    let configured = configured.iter().map(|it| HeaderSource {
        label: label(it.session.as_str()),
        session: it.session.clone(),
        parents: it.parent.iter().cloned().collect(),
        last: None,
    });
    known.chain(configured).collect()
}

fn label(header: &str) -> &'static str {
    Label::named(&format!("header:{header}")).0
}

impl HeaderSource {
    pub(super) fn names<'a>(
        &self,
        headers: &'a HeaderMap,
        refused: &mut impl FnMut(&'static str),
    ) -> Option<SessionNames<'a>> {
        let value = |field: &HeaderName| headers.get(field).map(HeaderValue::as_bytes);
        let parents = self.parents.iter().filter_map(value);
        let named = of_source(self.label, value(&self.session)?, parents, refused)?;
        let last = self.last.as_ref().and_then(value);
        Some(SessionNames {
            is_final: last.is_some_and(|it| it.eq_ignore_ascii_case(b"true")),
            ..named
        })
    }
}

/// Returns the names that the source `label` gives; `None` if its `session` is no name.
fn of_source<'a>(
    label: &'static str,
    session: &'a [u8],
    parents: impl Iterator<Item = &'a [u8]>,
    refused: &mut impl FnMut(&'static str),
) -> Option<SessionNames<'a>> {
    let mut name = |text| bounded(text, || refused(label));
    let session = name(session)?;
    Some(SessionNames {
        session,
        parent: parents.filter_map(name).find(|parent| *parent != session),
        is_final: false,
        source: label,
    })
}

/// Names of sessions in the body, of at most [`NAME_BYTES_MAX`](super::NAME_BYTES_MAX) bytes and a
/// few more if they are longer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BodySessionNames {
    /// Names in `vllm_xargs.agentic_context`, the form of vLLM's router; `None` without it.
    pub program: Option<ProgramNames>,
    /// `prompt_cache_key`; `None` without it.
    pub cache_key: Option<String>,
}

/// Names in `vllm_xargs.agentic_context`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramNames {
    /// `program_id`: the session.
    pub program: String,
    /// `parent_program_id`: the session that started it.
    pub parent: Option<String>,
    /// `root_program_id`: the root of its tree.
    pub root: Option<String>,
}

const PROGRAM: &str = "body:vllm_xargs.agentic_context";
const CACHE_KEY: &str = "body:prompt_cache_key";

impl BodySessionNames {
    pub(super) fn names(&self, refused: &mut impl FnMut(&'static str)) -> Option<SessionNames<'_>> {
        if let Some(ProgramNames {
            program,
            parent,
            root,
        }) = &self.program
        {
            let parents = parent.iter().chain(root).map(String::as_bytes);
            let named = of_source(PROGRAM, program.as_bytes(), parents, refused);
            if named.is_some() {
                return named;
            }
        }
        let key = self.cache_key.as_ref()?;
        of_source(CACHE_KEY, key.as_bytes(), std::iter::empty(), refused)
    }
}

//! The only parser of requests: from method, path, headers, body and client address to the inputs
//! of admission and routing.
//!
//! The data plane forwards its result, and `explain` explains it. No other code can create a
//! [`ClientRequest`], so the two cannot diverge (I72).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Version};
use prometheus_client::metrics::counter::Counter;
use state::StateView;
use state::ids::Slot;

use super::bootstrap::BootstrapRooms;
use super::cluster_keys::ClusterKeys;
use super::deadline;
use super::encoding::BodyEncoding;
use super::headers::client_request_id;
use super::identify::{
    Client, IdentifiedUser, RequestOrigin, UserSource, check_key, client_address, identify,
    is_trusted,
};
use super::renamed::renamed;
use super::request_body::{check_head, priority, refuse_websocket};
use super::routes::{Route, route, takes_form, unrouted, without_slash};
use super::user_models::check_user_model;
use crate::admission::AdmissionRequest;
use crate::error::ProxyError;
use crate::files::text::without_mark;
use crate::model_names::{ModelHealth, ResolvedModel, SplitKeys};
use crate::prompt::{
    ParsedBody, ParsedRequest, PromptIdentity, PromptReader, ReadError, ReadRequest, read_form,
};
use crate::proxy::settings::ProxySettings;
use crate::proxy::settings::keys::Holder;
use crate::proxy::settings::reserved_fields::without_field;
use crate::routing::{
    Decider, OfferedEndpoints, PermitCell, RequestStages, Room, Router, RoutingPreferences,
    RoutingRequest, UserName,
};
use crate::sessions::{NamedSession, SessionNames};
use crate::traces::TracedQuestion;
use crate::users::isolation::{SaltedPath, SaltedWork, salt};

/// Reader of requests for the data plane and `explain`. One per replica.
pub struct RequestReader {
    reader: Arc<PromptReader>,
    pub(super) decider: Arc<Decider>,
    pub(super) view: Arc<StateView>,
    keys: ClusterKeys,
    settings: Arc<ProxySettings>,
    /// Number of sessions' names that were out of bounds.
    refused_names: Counter,
}

/// Head of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestHead<'a> {
    /// HTTP method.
    pub method: &'a Method,
    /// Path without the query.
    pub path: &'a str,
    /// HTTP version.
    pub version: Version,
    /// Headers of the request.
    pub headers: &'a HeaderMap,
    /// Origin of the request.
    pub origin: RequestOrigin<'a>,
    /// Id of the request; empty if it has none yet.
    pub request_id: &'a str,
    /// Whether the request goes on with a stream of another replica, which stays with its model.
    pub is_resumed: bool,
    /// Endpoints that the asking gateway can use; `None` if no gateway asks. Only for a gateway do
    /// the headers of the Gateway API Inference Extension count.
    pub endpoints: Option<&'a OfferedEndpoints>,
}

/// A parsed request.
#[derive(Debug)]
pub struct ClientRequest {
    /// Body without the prompt.
    pub parsed: ParsedBody,
    /// How the requested name became the model; `None` if it is the model's own.
    pub resolved: Option<Box<ResolvedModel>>,
    /// Blocks and token count of the prompt.
    pub identity: PromptIdentity,
    /// User to charge.
    pub user: UserName,
    /// Source of the user's name.
    pub user_source: UserSource,
    /// Session of which the request is a turn; `None` if it names none.
    pub session: Option<NamedSession>,
    /// Policy and labels that the request asks for.
    pub preferences: RoutingPreferences,
    /// Priority among waiting requests.
    pub priority: i16,
    /// Maximum time that the client waits, if the request states it.
    pub deadline: Option<Duration>,
    /// Stages of the request that can run on two backends.
    pub stages: RequestStages,
    /// Whether the request goes on with a stream of another replica.
    pub is_resumed: bool,
    /// Address of the client, or the addresses that a trusted proxy names; `None` if unknown.
    address: Option<HeaderValue>,
    _made_by: ReaderOnly,
}

/// A request that is explained and not sent, with its headers and its id.
#[derive(Debug)]
pub struct UnsentRequest {
    /// The parsed request.
    pub read: ClientRequest,
    /// Headers of the request.
    pub headers: HeaderMap,
    /// Id of the request; empty if it has none.
    pub id: String,
    /// Permit of the request: none, as it is not sent.
    pub permit: PermitCell,
}

impl AdmissionRequest for UnsentRequest {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        self.read.ask(&self.headers, &self.id, excluded)
    }

    fn permit(&self) -> &PermitCell {
        &self.permit
    }

    fn priority(&self) -> i16 {
        self.read.priority
    }

    fn tokens_max(&self) -> Option<u32> {
        self.read.parsed.max_tokens
    }

    fn is_selective(&self) -> bool {
        self.read.is_selective()
    }

    fn wait_max(&self, service: Duration) -> Option<Duration> {
        self.read.wait_max(service)
    }
}

/// Token that only the reader can create, so that only it can create a [`ClientRequest`].
#[derive(Debug)]
struct ReaderOnly;

impl ClientRequest {
    /// Returns the attributes of the request's span.
    pub(in crate::proxy) fn traced<'a>(&'a self, path: &'a str) -> TracedQuestion<'a> {
        TracedQuestion {
            path,
            model: &self.parsed.model,
            tokens_max: self.parsed.max_tokens,
            choices: self.parsed.choices,
            is_stream: self.parsed.stream,
            is_resumed: self.is_resumed,
            tokens: self.identity.tokens,
        }
    }

    /// Whether only some of the model's backends can take the request.
    pub(in crate::proxy) fn is_selective(&self) -> bool {
        !self.preferences.labels.is_empty() || self.identity.isolation.is_some()
    }

    /// Returns the longest wait after which the client still gets a response that takes `service`;
    /// `None` if the client sets no deadline.
    pub(in crate::proxy) fn wait_max(&self, service: Duration) -> Option<Duration> {
        let deadline = self.deadline?;
        Some(deadline::wait_max(deadline, service, self.parsed.stream))
    }

    /// Returns the request in the form that routing expects.
    pub fn ask<'a>(
        &'a self,
        headers: &'a HeaderMap,
        request_id: &'a str,
        excluded: &'a [Slot],
    ) -> RoutingRequest<'a> {
        RoutingRequest {
            model: &self.parsed.model,
            identity: &self.identity,
            request_id,
            user: &self.user,
            session: self.session,
            headers: Some(headers),
            client: self.address.as_ref().and_then(last_address),
            policy: self.preferences.policy.as_ref(),
            labels: &self.preferences.labels,
            excluded,
            waiting_here: 0,
            endpoints: None,
            stages: self.stages,
            room: Room::Cluster,
        }
    }
}

/// Returns the last address in a list such as that of `x-forwarded-for`.
fn last_address(list: &HeaderValue) -> Option<&str> {
    let last = list.to_str().ok()?.rsplit(',').next()?.trim();
    (!last.is_empty()).then_some(last)
}

/// Returns which stages of a request can run on two backends. Engines that transfer by the prefix
/// cache transfer one prompt with one answer. Engines that meet in rooms transfer each prompt and
/// answer in its own room.
fn stages(path: &str, parsed: &ParsedBody) -> RequestStages {
    let is_completion = matches!(path, "/v1/chat/completions" | "/v1/completions");
    if needs_no_compute(path) {
        RequestStages::Nothing
    } else if !is_completion || parsed.insert_at == 0 {
        RequestStages::Monolithic
    } else if parsed.choices == 1 && parsed.batch.prompts == 0 && !parsed.skips_cache {
        RequestStages::Disaggregatable
    } else if BootstrapRooms::count(path, parsed).is_some() {
        RequestStages::BootstrapRoom
    } else {
        RequestStages::Monolithic
    }
}

/// Whether requests to this path need no computation by an engine.
fn needs_no_compute(path: &str) -> bool {
    matches!(
        path,
        "/tokenize"
            | "/detokenize"
            | "/v1/tokenize"
            | "/v1/detokenize"
            | "/v1/messages/count_tokens"
            | "/v1/responses/input_tokens"
            | "/v1/chat/completions/render"
            | "/v1/completions/render"
    )
}

impl RequestReader {
    /// Creates a reader with these settings for requests that `router` routes.
    #[must_use]
    pub fn new(router: &Router, settings: Arc<ProxySettings>) -> Self {
        Self {
            reader: Arc::clone(router.reader()),
            decider: Arc::clone(router.decider()),
            view: Arc::clone(router.view()),
            keys: ClusterKeys::new(router.view(), router.clock()),
            settings,
            refused_names: router.metrics().refused_session_names.clone(),
        }
    }

    /// Returns the seed from which the keys of users are derived.
    pub fn hash_seed(&self) -> u64 {
        self.view.registry().hash_seed
    }

    /// Returns the decider, which chooses backends.
    pub(in crate::proxy) fn decider(&self) -> &Arc<Decider> {
        &self.decider
    }

    /// Returns the reader of bodies.
    #[must_use]
    pub fn prompts(&self) -> &Arc<PromptReader> {
        &self.reader
    }

    /// Checks a request's head and returns the holder of its key and its route.
    pub(in crate::proxy) fn accept<'a>(
        &self,
        head: &RequestHead<'a>,
    ) -> Result<(Holder, Route<'a>), ProxyError> {
        check_head(head.version, head.headers)?;
        refuse_websocket(head.path, head.headers)?;
        let holder = match head.origin {
            RequestOrigin::Address(_) | RequestOrigin::TrustedProxy => {
                let of_cluster = |key: &[u8]| self.keys.holder(&self.settings.keys, key);
                check_key(&self.settings, head.headers, of_cluster)?
            }
            RequestOrigin::User(_) => Holder::Unchecked,
        };
        let route = route(&self.settings, head.method, head.path)?;
        holder.check_path(head.path)?;
        Ok((holder, route))
    }

    /// Parses a request with its whole body, and removes the fields that must not reach engines.
    /// Also returns the prompt's token ids if they are known.
    pub(in crate::proxy) async fn read(
        &self,
        head: &RequestHead<'_>,
        holder: &Holder,
        body: &mut Bytes,
    ) -> Result<(ClientRequest, Vec<u32>), ProxyError> {
        let headers = head.headers;
        let mut request = self.parse(head, body).await?;
        let hashing = || self.view.registry().hashing();
        let client = Client {
            holder,
            origin: head.origin,
            is_of_gateway: head.endpoints.is_some(),
            headers,
        };
        let identified = identify(&self.settings, hashing, &client, &request.parsed);
        let IdentifiedUser { name, source } = identified?;
        let session = self.session(headers, &request.parsed, &name);
        let of_user = (&name, &source, session);
        let resolved = self.resolve(head, holder, of_user, &request.parsed.model)?;
        if let Some(resolved) = &resolved {
            *body = renamed((head.path, headers), body, &resolved.model)?;
            // Hashed, and so matched, as a request for the model.
            request = self.parse(head, body).await?;
        }
        let has_objective = head.endpoints.is_some() && is_trusted(&self.settings, head.origin);
        let priority = priority(headers, self.settings.priority_max, has_objective)?;
        let isolation = self.isolate(head.path, &name, &mut request, body).await?;
        // Tokenize once, from the body that the engine receives.
        let ReadRequest {
            parsed,
            mut identity,
            ids,
        } = self.reader.tokenize(head.path, body, request).await?;
        identity.isolation = isolation;
        let request = ClientRequest {
            preferences: self.decider.preferences(headers)?,
            deadline: deadline::client_deadline(headers, parsed.stream),
            stages: stages(head.path, &parsed),
            address: client_address(&self.settings, head.origin, headers),
            priority,
            user: name,
            user_source: source,
            session,
            parsed,
            resolved,
            identity,
            is_resumed: head.is_resumed,
            _made_by: ReaderOnly,
        };
        Ok((request, ids))
    }

    /// Returns the request that the data plane would parse, with the prompt's token ids if they are
    /// known. The whole body must be present.
    ///
    /// # Errors
    /// Returns the data plane's error, or that of an unknown route for model lists and stored
    /// responses.
    pub async fn would_read(
        &self,
        head: &RequestHead<'_>,
        mut body: Bytes,
    ) -> Result<(ClientRequest, Vec<u32>), ProxyError> {
        let head = RequestHead {
            path: without_slash(head.path),
            ..*head
        };
        let (holder, route) = self.accept(&head)?;
        match route {
            Route::Models | Route::Model(_) | Route::Stored(_) => {
                Err(unrouted(head.method, head.path))
            }
            Route::Engine => {
                // `explain` receives the body already decoded.
                BodyEncoding::of(head.headers)?;
                self.read(&head, &holder, &mut body).await
            }
        }
    }

    /// Returns the model that serves a request for `name`; `None` if that is `name` itself. Fails
    /// unless the key and the user may use it.
    fn resolve(
        &self,
        head: &RequestHead<'_>,
        holder: &Holder,
        (user, source, session): (&UserName, &UserSource, Option<NamedSession>),
        name: &str,
    ) -> Result<Option<Box<ResolvedModel>>, ProxyError> {
        let check = |model: &str| {
            holder.check_model(model)?;
            check_user_model(&self.view, user.as_str(), model)
        };
        let keys = || SplitKeys {
            user: (*source != UserSource::Nobody).then(|| user.key(self.hash_seed()).0),
            session: session.map(|session| session.key.0),
            request_id: head.request_id,
        };
        let health = |model: &str| match head.is_resumed {
            // A stream goes on with the model that began it.
            true => ModelHealth::Healthy,
            false => self.decider.model_health(model, head.endpoints),
        };
        let may_use = |model: &str| check(model).is_ok();
        let names = &self.settings.names;
        let resolved = names.resolve(name, keys, health, may_use);
        check(resolved.as_ref().map_or(name, |resolved| &resolved.meant))?;
        Ok(resolved.map(Box::new))
    }

    /// Returns a list of the request headers that have no effect under the config; `None` if empty.
    pub(in crate::proxy) fn ignored(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        self.decider.ignored(headers)
    }

    /// Returns the session that a request of `user` names, and counts names that are out of bounds.
    fn session(
        &self,
        headers: &HeaderMap,
        parsed: &ParsedBody,
        user: &UserName,
    ) -> Option<NamedSession> {
        let refused = |_| {
            self.refused_names.inc();
        };
        let rules = &self.settings.sessions;
        let names = rules.names(headers, parsed.session.as_deref(), refused)?;
        let hash_seed = self.hash_seed();
        Some(names.hashed(hash_seed, user.key(hash_seed)))
    }

    /// Returns the names from which the data plane would take a request's session, and the sources
    /// whose names are out of bounds.
    pub fn session_names<'a>(
        &self,
        headers: &'a HeaderMap,
        parsed: &'a ParsedBody,
    ) -> (Option<SessionNames<'a>>, Vec<&'static str>) {
        let mut refused = Vec::new();
        let rules = &self.settings.sessions;
        let names = rules.names(headers, parsed.session.as_deref(), |it| refused.push(it));
        (names, refused)
    }

    /// Returns the request id that the data plane would take from these headers; `None` if it would
    /// generate one.
    #[must_use]
    pub fn told_id<'a>(&self, headers: &'a HeaderMap) -> Option<&'a str> {
        client_request_id(headers)?.to_str().ok()
    }

    /// Hashes the prompt in the user's own cache scope, if the user has one. Returns the work for
    /// which engines must isolate it.
    async fn isolate(
        &self,
        path: &str,
        user: &UserName,
        request: &mut ParsedRequest,
        body: &mut Bytes,
    ) -> Result<Option<SaltedWork>, ProxyError> {
        let hashing = self.view.registry().hashing();
        let salt = {
            let users = self.view.users();
            let scope = users.scope(user.key(hashing.seed));
            let of_client = request.parsed.cache_salt.as_deref();
            salt(&hashing, scope, user.as_str(), of_client)
        };
        let Some(salt) = salt else {
            return Ok(None);
        };
        let work = match SaltedPath::of(path) {
            SaltedPath::Taken(work) => work,
            SaltedPath::NeedsNone => return Ok(None),
            SaltedPath::Ignored => return Err(ProxyError::PathNotIsolated),
        };
        if request.parsed.has_cache_salt {
            *body = without_field(body, "cache_salt")?;
            // The fields are at other positions now.
            *request = self.reader.parse(path, body).await?;
        }
        self.reader.salt(request, salt);
        Ok(Some(work))
    }

    /// Parses a body and removes the fields that must not reach engines. Fails on refused fields.
    async fn parse(
        &self,
        head: &RequestHead<'_>,
        body: &mut Bytes,
    ) -> Result<ParsedRequest, ProxyError> {
        let path = head.path;
        if takes_form(path) {
            let content_type = head.headers.get(CONTENT_TYPE);
            let content_type = content_type.and_then(|it| it.to_str().ok());
            let form = read_form(content_type.unwrap_or_default(), body);
            let form = form.map_err(ReadError::Bad)?;
            self.settings.fields.check_form(&form.names)?;
            return Ok(self.reader.of_form(form).map_err(ReadError::Bad)?);
        }
        // Engines' readers of JSON differ in whether they accept a byte order mark.
        *body = body.slice_ref(without_mark(body));
        let mut request = self.reader.parse(path, body).await?;
        if let Some(stripped) = self.settings.fields.apply(&request.parsed, body)? {
            *body = stripped;
            // The fields are at other positions now.
            request = self.reader.parse(path, body).await?;
        }
        Ok(request)
    }
}

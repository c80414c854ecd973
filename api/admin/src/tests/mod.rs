//! The admin API, called without a socket, on a cluster that applies its commands to a real state.

mod backups;
mod conventions;
mod events;
mod explained;
mod gate;
mod keys;
mod log_level;
mod openapi;
mod origins;
mod probes;
mod reads;
mod recordings;
mod replicas;
mod sessions;
mod settings;
mod usage;
mod users;
mod writes;

use std::collections::BTreeMap;
use std::sync::Mutex;

use axum::body::Body;
use http::{HeaderMap, Request};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use state::RouterState;
use state::command::{BackendSpec, Command, Committed, Envelope, Founding, Lane, Origin, Reply};
use state::ids::{AttemptId, BlockHash, LogIndex, ReplicaId, SessionId, Slot};
use state::policy::PolicyConfig;
use tower::ServiceExt;

use self::log_level::log_level;
use super::*;
use api::admission::Admission;
use api::base::clock::Clock;
use api::engines::backends::{Health, ProbeSettings};
use api::ports::{BoxFuture, ChangeError, ClusterStatus, MemberStatus, ProposeError};
use api::prices::{PriceTable, TokenPrices};
use api::prompt::ModelSettings;
use api::proxy::ProxySettings;
use api::readiness::Lifecycle;
use api::routing::{OutboxSettings, Router, RouterParts, SelectSettings};
use api::settings::{FileSettings, LocalSetting, SettingKey};
use api::users::api_keys::KeyRules;

/// Prescribed outcome of proposals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Commit,
    Unknown,
    Unavailable,
    Stopping,
}

/// A cluster of one replica that commits at once, unless a test sets another [`Fate`].
struct Fake {
    state: Mutex<RouterState>,
    view: Arc<StateView>,
    digests: Arc<Digests>,
    status: Mutex<ClusterStatus>,
    fate: Mutex<Fate>,
    changes: Mutex<Vec<String>>,
    barriers: Mutex<u64>,
}

impl Fake {
    fn apply(&self, lane: Lane, command: Command) -> Committed {
        let mut state = self.state.lock().unwrap();
        let index = LogIndex(self.view.applied().0 + 1);
        let reply = state.apply(
            index,
            Envelope {
                origin: Origin {
                    replica: ReplicaId(1),
                    session: SessionId(1),
                    lane,
                    seq: index.0,
                },
                proposed_at_ms: 1_000 * index.0,
                command,
            },
        );
        self.digests.applied(index.0, || state.digest());
        Committed { index, reply }
    }

    fn change(&self, what: String) -> Result<u64, ChangeError> {
        self.changes.lock().unwrap().push(what);
        match *self.fate.lock().unwrap() {
            Fate::Commit => Ok(77),
            Fate::Unknown => Err(ChangeError::Unknown("timed out".to_owned())),
            Fate::Unavailable | Fate::Stopping => Err(ChangeError::Refused("not now".to_owned())),
        }
    }
}

fn ready<'a, T: Send + 'a>(value: T) -> BoxFuture<'a, T> {
    Box::pin(std::future::ready(value))
}

impl Cluster for Fake {
    fn submit(&self, command: Command) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        ready(match *self.fate.lock().unwrap() {
            Fate::Commit => Ok(self.apply(Lane::Admin, command)),
            Fate::Unknown => Err(ProposeError::Unknown("timed out".to_owned())),
            Fate::Unavailable => Err(ProposeError::Unavailable("no leader".to_owned())),
            Fate::Stopping => Err(ProposeError::Stopping),
        })
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<LogIndex, ProposeError>> {
        *self.barriers.lock().unwrap() += 1;
        ready(match *self.fate.lock().unwrap() {
            Fate::Commit => Ok(self.view.applied()),
            _ => Err(ProposeError::Unavailable("no leader".to_owned())),
        })
    }

    fn with_state(&self, read: &mut dyn FnMut(&RouterState)) {
        read(&self.state.lock().unwrap());
    }

    fn status(&self) -> ClusterStatus {
        let mut status = self.status.lock().unwrap().clone();
        status.applied_index = self.view.applied().0;
        status
    }

    fn add_member(
        &self,
        id: ReplicaId,
        address: String,
    ) -> BoxFuture<'_, Result<u64, ChangeError>> {
        ready(self.change(format!("add {id} {address}")))
    }

    fn promote_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        ready(self.change(format!("promote {id}")))
    }

    fn remove_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        ready(self.change(format!("remove {id}")))
    }

    fn transfer_leader(
        &self,
        to: Option<ReplicaId>,
    ) -> BoxFuture<'_, Result<ReplicaId, ChangeError>> {
        let done = self.change(format!("transfer {to:?}"));
        ready(done.map(|_| to.unwrap_or(ReplicaId(2))))
    }

    fn snapshot(&self) -> BoxFuture<'_, Result<u64, ChangeError>> {
        ready(self.change("snapshot".to_owned()))
    }
}

fn status() -> ClusterStatus {
    let member = |peer: &str, lag| MemberStatus {
        peer: peer.to_owned(),
        labels: BTreeMap::new(),
        is_voter: true,
        is_connected: true,
        silent_ms: None,
        is_refusing: false,
        lag,
        clock_skew_ms: lag.map(|_| -500),
    };
    ClusterStatus {
        id: ReplicaId(1),
        session: SessionId(1),
        cluster_id: Some("0123456789abcdef0123456789abcdef".to_owned()),
        role: "leader",
        term: 3,
        leader: Some(ReplicaId(1)),
        has_quorum: true,
        committed_index: 9,
        applied_index: 0,
        snapshot_index: None,
        caught_up: true,
        is_removed: false,
        fault: None,
        unjoined: None,
        peers: Vec::new(),
        waiting: None,
        scaling: None,
        version: "0.0.0",
        members: BTreeMap::from([
            (ReplicaId(1), member("127.0.0.1:1", Some(0))),
            (ReplicaId(2), member("127.0.0.1:2", Some(4))),
        ]),
    }
}

/// Returns a clock that is slightly later than all commands.
fn clock() -> Clock {
    Clock::of(|| 1_000_000)
}

/// An admin API for tests, with its dependencies.
struct Bench {
    cluster: Arc<Fake>,
    admin: Arc<Admin>,
    api: axum::Router,
}

/// A complete response of the admin API.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no json: {}", self.body))
    }
}

impl Bench {
    /// Creates an admin API whose cluster is initialised and has no backends.
    fn new() -> Self {
        Self::guarded(None, false)
    }

    /// Creates an admin API that requires `tokens`, if given.
    fn guarded(tokens: Option<AdminTokens>, is_metrics_public: bool) -> Self {
        let state = RouterState::new();
        let view = state.view();
        let digests = Arc::new(Digests::default());
        let cluster = Arc::new(Fake {
            state: Mutex::new(state),
            view: Arc::clone(&view),
            digests: Arc::clone(&digests),
            status: Mutex::new(status()),
            fate: Mutex::new(Fate::Commit),
            changes: Mutex::default(),
            barriers: Mutex::default(),
        });
        let backends = Arc::new(Backends::new(ProbeSettings::default()));
        let router = Router::new(RouterParts {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models: vec![ModelSettings::characters("*", 16)],
            replica: ReplicaId(1),
            session: SessionId(1),
            outbox: OutboxSettings::default(),
            overrides: PolicyConfig::defaults(),
            select: SelectSettings::default(),
            clock: clock(),
        });
        let settings = Arc::new(ProxySettings::new(ReplicaId(1)));
        let requests = Arc::new(RequestReader::new(&router, settings));
        let readiness = Arc::new(ReadinessCheck {
            cluster: Arc::clone(&cluster) as Arc<dyn Cluster>,
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            digests: Arc::clone(&digests),
            outbox: Arc::clone(router.outbox()),
            lifecycle: Lifecycle::default(),
            keys: KeyRules::default(),
            is_insecure: false,
        });
        let admin = Arc::new(Admin {
            decisions: Arc::new(DecisionLog::new(ReplicaId(1), Clock::default(), 10)),
            requests,
            cluster: Arc::clone(&cluster) as Arc<dyn Cluster>,
            view,
            admission: Arc::new(Admission::new(&router)),
            decider: Arc::clone(router.decider()),
            load: Arc::clone(router.load()),
            outbox: Arc::clone(router.outbox()),
            clock: clock(),
            backends,
            metrics: Arc::new(Metrics::default()),
            digests,
            figures: Arc::default(),
            kv_board: Arc::default(),
            discovery: Arc::default(),
            events: EventBus::default(),
            readiness,
            file: SharedFileSettings::new(file()),
            reload: None,
            log_level: Some(log_level()),
            hosts: vec!["Quorate-1.example".to_owned()],
            tokens,
            certified: None,
            is_metrics_public,
        });
        admin.readiness.lifecycle.serve();
        let bench = Self {
            api: super::router(Arc::clone(&admin)),
            cluster,
            admin,
        };
        bench.found();
        bench
    }

    fn found(&self) {
        self.apply(Command::from(Founding::of_seed(
            1,
            PolicyConfig::LeastRequest,
        )));
    }

    /// Creates an admin API with the backends `gpu-1`, which is healthy, and `gpu-2`, which is not
    /// probed yet.
    fn with_backends() -> Self {
        let bench = Self::new();
        for id in ["gpu-1", "gpu-2"] {
            bench.apply(Command::PutBackend(spec(id)));
        }
        let healthy = Health {
            is_healthy: true,
            detail: None,
            waiting: 2,
            running: 5,
            kv_usage_permille: 250,
            adapters: None,
        };
        bench.admin.backends.assume(Slot(0), &healthy);
        bench
    }

    fn apply(&self, command: Command) -> LogIndex {
        let committed = self.cluster.apply(Lane::Admin, command);
        assert_eq!(committed.reply, Reply::Applied);
        committed.index
    }

    fn set_fate(&self, fate: Fate) {
        *self.cluster.fate.lock().unwrap() = fate;
    }

    async fn send(&self, request: Request<Body>) -> Answer {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let response = self.api.clone().oneshot(request).await.unwrap();
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let answer = Answer {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8(body.to_vec()).unwrap(),
        };
        openapi::check_documented(method.as_str(), &path, &answer);
        answer
    }

    async fn call(&self, method: &str, path: &str, body: &str) -> Answer {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("content-type", "application/json");
        self.send(request.body(Body::from(body.to_owned())).unwrap())
            .await
    }

    /// Sends a `PUT` that may replace only the given versions.
    async fn put_if(&self, path: &str, versions: &str, body: &str) -> Answer {
        let request = Request::builder().method("PUT").uri(path);
        let request = request.header("content-type", "application/json");
        let request = request.header("if-match", versions);
        self.send(request.body(Body::from(body.to_owned())).unwrap())
            .await
    }

    /// Sends a `GET` that must succeed with status 200, and returns the body.
    async fn get(&self, path: &str) -> Value {
        let answer = self.call("GET", path, "").await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        assert_eq!(answer.headers["content-type"], "application/json");
        answer.json()
    }

    /// Makes a call that must return a problem with this status and kind.
    async fn problem(
        &self,
        (method, path, body): (&str, &str, &str),
        status: u16,
        kind: &str,
    ) -> Value {
        let answer = self.call(method, path, body).await;
        let what = format!("{method} {path} {body}: {}", answer.body);
        assert_eq!(answer.status.as_u16(), status, "{what}");
        assert_eq!(answer.headers["content-type"], "application/problem+json");
        let problem = answer.json();
        assert_eq!(problem["status"], status, "{what}");
        assert_eq!(problem["type"], format!("/problems/{kind}"), "{what}");
        problem
    }
}

/// Returns the settings in the replica's config.
fn file() -> FileSettings {
    let cluster = [
        (SettingKey::Policy, json!("cost")),
        (SettingKey::Admission("max_queue".to_owned()), json!(4096)),
        (SettingKey::Admission("order".to_owned()), json!("fcfs")),
    ];
    let listen = LocalSetting {
        value: json!("127.0.0.1:8080"),
        is_set: false,
    };
    FileSettings {
        stated: cluster.into_iter().collect(),
        local: BTreeMap::from([("listen.data".to_owned(), listen)]),
        prices: prices(),
    }
}

/// Returns the prices in the replica's config.
fn prices() -> PriceTable {
    let prices = TokenPrices {
        prompt: 150_000,
        cached: 75_000,
        output: 600_000,
    };
    PriceTable::from([("llama".to_owned(), prices)])
}

fn spec(id: &str) -> BackendSpec {
    BackendSpec {
        id: id.to_owned(),
        url: format!("http://{id}:8000"),
        models: vec!["*".to_owned()],
        labels: BTreeMap::from([("zone".to_owned(), "a".to_owned())]),
        capacity_blocks: Some(100),
        kv_events: None,
        kv_replay: None,
        role: state::command::BackendRole::Both,
    }
}

//! Tests of a core alone: the same script produces the same commands, and all updates are in the
//! log when it has stopped.

use std::net::SocketAddr;
use std::sync::Mutex;

use api::admission::{AdmissionRequest, AdmissionTry, Admitted};
use api::engines::backends::{Fault, Occupancy, SlotTable};
use api::ports::BoxFuture;
use api::prompt::{PromptIdentity, parse};
use api::routing::{
    Attempt, AttemptEnd, PermitCell, RequestStages, RoutingRequest, Usage, UserName,
};
use lab::rng::Rng;
use raft::{ConnectError, MemoryDisk, PeerChannel, PeerService};
use state::admission::{AdmissionSettings, Concurrency};
use state::command::{BackendSpec, Command};
use state::ids::Slot;
use tokio::time::{Instant, sleep};
use tower::ServiceExt;

use super::*;
use crate::config::{self, Origin};

/// A transport that connects a replica only to itself.
#[derive(Default)]
struct Alone(Arc<Mutex<Option<PeerService>>>);

impl Transport for Alone {
    fn local_addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 7000))
    }

    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        let service = self.0.lock().unwrap().clone();
        let channel = service.map(|own| PeerChannel::new(own.map_err(|never| match never {})));
        Box::pin(async move { channel.ok_or(format!("nobody listens at {address} yet").into()) })
    }

    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, std::io::Result<()>> {
        *self.0.lock().unwrap() = Some(service);
        Box::pin(async move {
            stop.cancelled().await;
            Ok(())
        })
    }
}

/// Observer that records the entries that a core's log delivered.
#[derive(Default)]
struct Heard(Mutex<Vec<(u64, Option<Vec<u8>>)>>);

impl ApplyObserver for Heard {
    fn applied(&self, _state: &RouterState, index: u64, command: Option<&[u8]>) {
        let command = command.map(<[u8]>::to_vec);
        self.0.lock().unwrap().push((index, command));
    }

    fn restored(&self, _state: &RouterState) {}

    fn message_unreadable(&self, from: u8) {
        panic!("this build cannot read a message of {from}");
    }
}

/// A request of one of a few conversations.
struct Chat {
    identity: PromptIdentity,
    id: String,
    user: UserName,
    permit: PermitCell,
}

impl AdmissionRequest for Chat {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            model: "m",
            identity: &self.identity,
            request_id: &self.id,
            user: &self.user,
            session: None,
            headers: None,
            policy: None,
            labels: &[],
            excluded,
            waiting_here: 0,
            client: None,
            endpoints: None,
            stages: RequestStages::Monolithic,
            room: Default::default(),
        }
    }

    fn permit(&self) -> &PermitCell {
        &self.permit
    }

    fn priority(&self) -> i16 {
        0
    }

    fn tokens_max(&self) -> Option<u32> {
        None
    }

    fn is_selective(&self) -> bool {
        false
    }
}

fn config(folder: &std::path::Path) -> Config {
    let flags = vec![
        "node.id=1".to_owned(),
        format!("node.data_dir={}", folder.display()),
    ];
    let origin = Origin {
        flags,
        ..Origin::default()
    };
    let mut config = config::load(&origin)
        .expect("these settings are fit")
        .config;
    let backend = |id| BackendSpec {
        id: format!("gpu-{id}"),
        url: format!("http://127.0.0.1:{id}"),
        models: vec!["m".to_owned()],
        labels: Default::default(),
        capacity_blocks: Some(64),
        kv_events: None,
        kv_replay: None,
        role: state::command::BackendRole::Both,
    };
    config.cluster.snapshot_every = 20;
    config.backends = (1..=3).map(backend).collect();
    config
}

async fn core(folder: &std::path::Path, seed: u64, heard: Arc<Heard>) -> ReplicaCore {
    let began = tokio::time::Instant::now();
    let ports = CorePorts {
        transport: Arc::new(Alone::default()),
        storage: Storage::Memory(MemoryDisk::default()),
        session: SessionId(seed),
        hash_seed: seed,
        hash_secret: state::prefix::HashSecret::of_number(seed),
        clock: Clock::of(move || 1_000_000 + began.elapsed().as_millis() as u64),
        dialer: api::engines::backends::EngineDialer::default(),
        format: state::codec::FORMAT_VERSION,
        scale: None,
        observer: Some(heard),
    };
    let core = ReplicaCore::start(config(folder), ports).await.unwrap();
    let registered = async {
        while core.view().registry().backends.len() < 3 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let patience = Duration::from_secs(60);
    let registered = tokio::time::timeout(patience, registered).await;
    registered.expect("a cluster of one forms by itself");
    core
}

fn chat(core: &ReplicaCore, rng: &mut Rng, number: u64) -> Arc<Chat> {
    let (conversation, turns) = (rng.below(4), 1 + rng.below(6) as usize);
    let prompt = format!("conversation {conversation}; {}", "and so on ".repeat(40)).repeat(turns);
    let body = serde_json::json!({ "model": "m", "prompt": prompt }).to_string();
    let parsed = parse("/v1/completions", &body.into()).unwrap();
    Arc::new(Chat {
        identity: core.router().reader().identify(&parsed),
        id: format!("request-{number}"),
        user: UserName::bounded(format!("user-{}", rng.below(3))),
        permit: PermitCell::new(),
    })
}

/// Simulates an engine that responds to an attempt after `millis` milliseconds. `tokens` determines
/// the usage and the outcome.
async fn serve(mut attempt: Attempt, millis: u64, tokens: u64) {
    sleep(Duration::from_millis(millis)).await;
    attempt.output("some words of an answer ", Instant::now());
    attempt.usage(
        Usage {
            prompt_tokens: 10 * tokens,
            cached_tokens: Some(tokens),
            completion_tokens: tokens,
        },
        Instant::now(),
    );
    match tokens % 5 {
        0 => drop(attempt),
        1 => attempt.end(AttemptEnd::Broken, Instant::now()),
        _ => attempt.end(AttemptEnd::Finished, Instant::now()),
    }
}

/// Result of [`script`]: the final digest of the state, and every entry with its index.
type Ran = (u128, Vec<(u64, Option<Vec<u8>>)>);

async fn script(seed: u64) -> Ran {
    raft::random::seed(seed);
    let folder = tempfile::tempdir().unwrap();
    let heard = Arc::new(Heard::default());
    let core = core(folder.path(), seed, Arc::clone(&heard)).await;
    let limited = Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(2),
        ..AdmissionSettings::default()
    });
    core.cluster().submit(limited).await.unwrap();
    let mut roster: SlotTable<Occupancy> = SlotTable::new(Arc::clone(core.backends()));
    roster.follow(core.view().registry(), |stay, _| stay);
    let mut rng = Rng::new(seed, 1);
    let mut requests = Vec::new();
    for number in 0..200 {
        for (slot, stay) in roster.watchers() {
            match slot.0 == 1 && (number / 20) % 2 == 1 {
                true => stay.failed(Fault::Unreachable, "connection refused".to_owned()),
                false => stay.passed(),
            }
        }
        let chat = chat(&core, &mut rng, number);
        let admission = Arc::clone(core.admission());
        let (millis, tokens) = (5 + rng.below(60), 1 + rng.below(50));
        requests.push(tokio::spawn(async move {
            if let Ok(admitted) = admission.admit(&chat, (&[], AdmissionTry::First)).await {
                let (_, attempt) = Admitted::into_parts(admitted);
                serve(attempt, millis, tokens).await;
            }
        }));
        sleep(Duration::from_millis(rng.below(12))).await;
    }
    for request in requests {
        request.await.unwrap();
    }
    let shared = Arc::clone(&core.parts.shared);
    core.stop().await;
    let state = shared.state();
    assert_eq!(state.open_leases(), 0, "every lease is released");
    assert_eq!(state.check(), Ok(()));
    let heard = std::mem::take(&mut *heard.0.lock().unwrap());
    (state.digest(), heard)
}

fn run(seed: u64) -> Ran {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    runtime.unwrap().block_on(script(seed))
}

#[test]
fn commands_are_determined_by_script_and_seed() {
    let first = run(7);
    assert!(first.1.len() > 50, "{} entries", first.1.len());
    assert!(first == run(7), "the same seed");
    assert!(first != run(8), "another one");
}

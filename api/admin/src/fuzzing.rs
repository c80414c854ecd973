//! Fuzz target for operators' requests; see [`api::fuzzing`].

use serde::de::DeserializeOwned;
use state::RouterState;
use state::admission::AdmissionSettings;
use state::command::{BackendSpec, Command, Envelope, Founding, Lane, Origin};
use state::ids::{LogIndex, ReplicaId, SessionId};
use state::policy::{CostSettings, PolicyConfig, RoutingSettings};

use super::answer::decode;
use super::{admission, backends, cluster, explain, policy, user_defaults, users};

/// Decodes a body: one byte for its kind, then JSON. Applies the resulting command to a state,
/// which must reject it or stay consistent, and encodes and decodes it like any other command.
pub fn admin_body(bytes: &[u8]) {
    let Some((kind, body)) = bytes.split_first() else {
        return;
    };
    let command = match kind % 8 {
        0 => read::<BackendSpec>(body).map(Command::PutBackend),
        1 => {
            if read::<PolicyConfig>(body).is_none() {
                policy::setting_at_fault(body);
            }
            read(body).map(Command::PutPolicy)
        }
        2 => read::<RoutingSettings>(body).map(Command::PutRouting),
        3 => admission::read(body).ok().map(Command::PutAdmission),
        4 => users::read(body)
            .ok()
            .map(|settings| Command::configure_user("bob", settings)),
        5 => user_defaults::read(body)
            .ok()
            .map(|defaults| Command::PutUserDefaults(Box::new(defaults))),
        6 => {
            if let Some(would_be) = read::<explain::ExplainBody>(body) {
                drop(explain::headers(&would_be.headers));
                drop(explain::body_bytes(&would_be.body));
            }
            None
        }
        _ => {
            drop(read::<backends::PutBackendBody>(body));
            drop(read::<cluster::NewMember>(body));
            let _transfer = read::<cluster::TransferBody>(body);
            drop(users::key_of(&String::from_utf8_lossy(body)));
            None
        }
    };
    if let Some(command) = command {
        apply(command);
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Option<T> {
    decode(body).ok()
}

fn apply(command: Command) {
    let mut state = RouterState::new();
    let init = Command::from(Founding::of_seed(
        7,
        PolicyConfig::Cost(CostSettings::default()),
    ));
    for (command, seq) in [init, command].into_iter().zip(1..) {
        let origin = Origin {
            replica: ReplicaId(1),
            session: SessionId(1),
            lane: Lane::Admin,
            seq,
        };
        let envelope = Envelope {
            origin,
            proposed_at_ms: seq,
            command,
        };
        let bytes = state::codec::encode_envelope(&envelope);
        let again = state::codec::decode_envelope(&bytes);
        assert_eq!(again.as_ref().ok(), Some(&envelope), "{again:?}");
        state.apply(LogIndex(seq), envelope);
        assert_eq!(state.check(), Ok(()));
    }
}

/// Returns seed inputs with bodies of every kind.
#[must_use]
pub fn admin_body_seeds() -> Vec<Vec<u8>> {
    let spec = r#"{"id":"a","url":"http://10.0.0.1:8000","models":["m","*"],"labels":{"zone":"x"},"capacity_blocks":2048,"kv_events":"tcp://*:5557?ranks=2","kv_replay":"auto","role":"decode"}"#;
    let mut seeds = vec![kind(0, spec), kind(7, spec)];
    let json = |value: Result<String, serde_json::Error>| {
        value.expect("settings are written as JSON whatever they are")
    };
    for policy in PolicyConfig::defaults() {
        seeds.push(kind(1, &json(serde_json::to_string(&policy))));
    }
    seeds.extend([
        kind(1, r#"{"policy":"cost","no_such":1}"#),
        kind(2, r#"{"models":{"m":{"policy":"random"}},"learn":false,"prediction_off_permille":100}"#),
        kind(3, &json(serde_json::to_string(&AdmissionSettings::default()))),
        kind(3, &json(serde_json::to_string(&AdmissionSettings::default()))),
        kind(4, r#"{"weight_milli":2000,"models":["m*"],"cache":"isolated","budget":{"day":9}}"#),
        kind(5, r#"{"weight_milli":1500,"cache":"group:a","limits":{"requests":7,"tokens":1000000,"concurrent":2,"window":"1m"}}"#),
        kind(6, r#"{"path":"/v1/chat/completions","headers":{"x-quorate-user":"ann"},"body":{"model":"m","messages":[]},"token_ids":true}"#),
        kind(6, r#"{"path":"/v1/completions","user":"u","body":"{\"model\":\"m\"}"}"#),
        kind(7, r#"{"id":3,"address":"127.0.0.1:1"}"#),
        kind(7, "00ffee0011223344"),
    ]);
    seeds
}

fn kind(kind: u8, body: &str) -> Vec<u8> {
    [&[kind][..], body.as_bytes()].concat()
}

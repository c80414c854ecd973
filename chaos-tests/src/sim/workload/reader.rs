//! Clients that read registers behind a barrier, and so must see all earlier commits.

use lab::rng::Rng;
use state::ids::{ApiKeyId, LogIndex};

use super::discoverer::{DISCOVERED, name};
use super::{API_KEYS, BACKENDS, ReplicaHandles, USERS, think};
use crate::oracle::history::{Action, OperationResult};
use crate::oracle::register::RegisterKey;

/// Label of a reader's draws, which separates them from those of other kinds of clients.
const KIND: u64 = 4;
/// Mean pause between two reads, in milliseconds.
const THINK_MS: u64 = 400;

/// Reads random registers until the workload is over.
pub(super) async fn read(handles: ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0);
    let client = handles.context.next_client();
    while !handles.context.is_over() {
        think(&mut rng, THINK_MS).await;
        if handles.view.registry().initialised && !handles.context.is_over() {
            look(&handles, client, key(&mut rng)).await;
        }
    }
}

/// Reads every register once.
pub(super) async fn read_all(handles: &ReplicaHandles, client: u32) {
    for key in keys() {
        look(handles, client, key).await;
    }
}

async fn look(handles: &ReplicaHandles, client: u32, key: RegisterKey) {
    let (run, called_us) = (handles.run, handles.now_us());
    let ticket = handles.context.ledger.with(|record| {
        let action = Action::Read(key.clone());
        record.history.call(client, run, called_us, action)
    });
    let confirmed = handles.cluster.read_barrier().await;
    let outcome = match confirmed {
        Ok(_) => {
            let (mut index, mut value) = (LogIndex(0), None);
            handles.cluster.with_state(&mut |state| {
                index = state.applied();
                value = key.value_in(state);
            });
            handles.context.count("read", "ok");
            OperationResult::Read { index, value }
        }
        Err(_) => {
            handles.context.count("read", "refused");
            OperationResult::Refused
        }
    };
    let now_us = handles.now_us();
    handles.context.ledger.with(|record| {
        let told = record.outcome_if_trusted(run, outcome);
        record.history.answer(ticket, now_us, told);
    });
}

/// Returns the keys of all registers that can be read.
pub(in crate::sim) fn keys() -> Vec<RegisterKey> {
    let mut keys = drawn_keys();
    keys.dedup();
    keys.push(RegisterKey::UserDefaults);
    keys.extend((0..DISCOVERED).map(|number| RegisterKey::Backend(name(number))));
    keys
}

/// Returns the keys from which readers draw. Keys added later are missing, because another number
/// of keys would change the world of every seed.
fn drawn_keys() -> Vec<RegisterKey> {
    let backends = (0..BACKENDS).map(|number| RegisterKey::Backend(format!("b{number}")));
    let users = (0..USERS).map(|number| format!("u{number}"));
    // Users are read three times as often as the others.
    let users = users.flat_map(|name| [(); 3].map(|()| RegisterKey::User(name.clone())));
    let api_keys = (0..API_KEYS).map(|number| RegisterKey::ApiKey(ApiKeyId(number)));
    let settings = [
        RegisterKey::Policy,
        RegisterKey::Routing,
        RegisterKey::Admission,
    ];
    let settings = settings.into_iter().chain(api_keys);
    backends.chain(users).chain(settings).collect()
}

fn key(rng: &mut Rng) -> RegisterKey {
    let mut keys = drawn_keys();
    let at = rng.below(keys.len() as u64) as usize;
    keys.swap_remove(at)
}

//! Golden bytes of the routing policies, and commands and replies that must not be encoded or nested.

use expect_test::expect;

use super::tests::{envelope, hex};
use super::*;
use crate::capacity::{DemandReport, ModelDemand};
use crate::command::{Charge, Command, Lane, Reply};
use crate::ids::{
    AgentSessionKey, ApiKeyId, BackendRef, Incarnation, ModelKey, Slot, SourceKey, StreamCarrier,
    StreamId, UserKey,
};
use crate::policy::PolicyConfig;
use crate::streams::{CarriedStream, StreamCharge};
use crate::trees::{NewSession, SessionPlace, SessionRef, SessionTurn, TurnUsage};
use crate::usage::UsageSource;

/// Lists the bytes of each policy by name, to show whether the settings of a policy have changed or
/// an entry was inserted before another.
#[test]
fn policies_encode_to_golden_bytes() {
    let mut golden = String::new();
    for policy in PolicyConfig::defaults() {
        let bytes = to_bytes(&policy);
        let back = from_bytes::<PolicyConfig, DECODE_BYTES_MAX>(&bytes);
        assert_eq!(back.as_ref(), Ok(&policy));
        golden += &format!("{} {}\n", policy.name(), hex(&bytes));
        let envelope = envelope(Lane::Admin, Command::PutPolicy(policy));
        assert_eq!(
            decode_envelope(&encode_envelope(&envelope)).unwrap(),
            envelope
        );
    }
    expect![[r#"
        cost 00fca0860100fc40420f00fc80f0fa02
        least-request 01
        lmetric 02fb0001
        prefix-cache 0310fbd00702
        vllm-cache-aware 04fb2c01fbe2040000
        epp 0503020240
        chwbl 0601fb0001fbe204
        session 0711782d71756f726174652d73657373696f6e0000
        power-of-two 08
        round-robin 09
        random 0a
        least-kv 0b
        vtc-basic 0c0005fbe803fb401ffbe803fbd00764fbe803fbe803
        preble-e2 0dfbf401fbd007fbf401fca0860100fc40420f00
    "#]]
    .assert_eq(&golden);
}

#[test]
#[should_panic(expected = "above the limit")]
fn an_overlong_command_is_not_encoded() {
    let name = "x".repeat(ENVELOPE_BYTES_MAX);
    let _ = encode_envelope(&envelope(Lane::Admin, Command::DeleteBackend { name }));
}

#[test]
fn nested_repeats_cannot_exhaust_the_stack() {
    let forged = [&[FORMAT_VERSION][..], &[2; 1 << 20]].concat();
    assert!(decode_reply(&forged).is_err());
    let nested = Reply::Repeated(Box::new(Reply::Repeated(Box::new(Reply::Applied))));
    let flat = Reply::Repeated(Box::new(Reply::Applied));
    assert_eq!(decode_reply(&encode_reply(&nested)).unwrap(), flat);
}

fn stream_charge(output: u64, settled: u64) -> StreamCharge {
    let carried = CarriedStream {
        stream: StreamId(0xabc),
        carrier: StreamCarrier(0xdef),
    };
    let mut charge = StreamCharge::empty(UserKey(0xbeef), carried);
    (charge.charge.output, charge.charge.settled) = (output, settled);
    charge
}

/// Returns a report of demand.
pub(super) fn demand() -> Item {
    Item::ObserveDemand(Box::new(DemandReport {
        model: "m".to_owned(),
        demand: ModelDemand {
            waiting: 3,
            running: 300,
            waiting_tokens: 70_000,
        },
        started: 9,
    }))
}

/// Returns items of each kind about agents' sessions, and about resumable streams.
pub(super) fn session_items() -> Vec<Item> {
    let backend = |slot, incarnation| BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    };
    vec![
        Item::BeginSession(NewSession {
            key: AgentSessionKey(0xfeed),
            parent: Some(AgentSessionKey(0xf00d)),
            user: UserKey(0xbeef),
            model: ModelKey(0xabcd),
            home: backend(3, 2),
        }),
        Item::MoveSession {
            session: SessionRef::Place(SessionPlace(1_599_999)),
            home: backend(1, 1),
        },
        Item::EndTurn(SessionTurn {
            session: SessionRef::Place(SessionPlace(9)),
            usage: TurnUsage {
                input_uncached: 700,
                input_cached: 140_000,
                output: 444,
            },
        }),
        Item::EndSession(SessionRef::Key(AgentSessionKey(9))),
        Item::ChargeStream(Box::new(StreamCharge {
            takes_over: Some(300),
            is_closed: true,
            turn: Some(SessionTurn {
                session: SessionRef::Key(AgentSessionKey(9)),
                usage: TurnUsage::default(),
            }),
            ..stream_charge(444, 20)
        })),
        Item::ChargeStream(Box::new(stream_charge(32, 0))),
        Item::Charge(Charge {
            source: SourceKey(0x50ce),
            ..stream_charge(70, 0).charge
        }),
        Item::DefineSource(UsageSource {
            key: Some(ApiKeyId(0xabcd)),
            model: "m".to_owned(),
        }),
    ]
}

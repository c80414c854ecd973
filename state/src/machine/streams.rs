//! Application of charges of resumable streams.

use super::RouterState;
use crate::charge::Charge;
use crate::ids::ReplicaId;
use crate::streams::{StreamCharge, StreamVerdict};

impl RouterState {
    /// Charges a user for a stream, and notes it in the stream's record. Of a void charge, only the
    /// requests count that waited, started or ended. Returns whether the charge was in order.
    pub(super) fn charge_stream(&mut self, replica: ReplicaId, item: &StreamCharge) -> bool {
        let now_ms = self.time.now_ms;
        let verdict = self.streams.charge(item, now_ms);
        let charge = match verdict {
            StreamVerdict::Counts { .. } => item.charge,
            StreamVerdict::Void => Charge {
                user: item.charge.user,
                source: item.charge.source,
                queued: item.charge.queued,
                dequeued: item.charge.dequeued,
                started: item.charge.started,
                ended: item.charge.ended,
                ..Charge::default()
            },
        };
        if let (StreamVerdict::Counts { turn: before }, Some(turn)) = (verdict, &item.turn) {
            self.trees.turn(turn, before, now_ms);
        }
        let nothing = Charge {
            user: charge.user,
            source: charge.source,
            ..Charge::default()
        };
        charge == nothing || self.charge(replica, &charge)
    }

    /// Publishes the resumable streams if they changed.
    pub(super) fn publish_streams(&mut self) {
        if let Some(streams) = self.streams.publish() {
            self.view.publish_streams(streams);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{AgentSessionKey, StreamCarrier, StreamId, UserKey};
    use crate::streams::CarriedStream;
    use crate::trees::{SessionRef, SessionTurn, TurnUsage};

    const USER: UserKey = UserKey(7);

    fn charge(carrier: u64, output: u64) -> StreamCharge {
        let carried = CarriedStream {
            stream: StreamId(1),
            carrier: StreamCarrier(carrier),
        };
        let mut charge = StreamCharge::empty(USER, carried);
        charge.charge.output = output;
        charge
    }

    #[test]
    fn a_void_charge_counts_requests_and_no_tokens_and_ends_no_turn() {
        let mut state = RouterState::new();
        let turn = |output| {
            Some(SessionTurn {
                session: SessionRef::Key(AgentSessionKey(1)),
                usage: TurnUsage {
                    output,
                    ..TurnUsage::default()
                },
            })
        };
        let mut first = charge(1, 10);
        (first.charge.started, first.turn) = (1, turn(10));
        assert!(state.charge_stream(ReplicaId(1), &first));
        let mut next = charge(2, 5);
        (next.charge.started, next.turn) = (1, turn(15));
        next.takes_over = Some(1);
        assert!(state.charge_stream(ReplicaId(2), &next));
        let mut late = charge(1, 3);
        (late.charge.ended, late.turn) = (1, turn(13));
        late.charge.queued = 1;
        assert!(state.charge_stream(ReplicaId(1), &late));
        let user = state.users.get(USER, 0).unwrap();
        assert_eq!((user.total.output, user.total.requests), (15, 2));
        assert_eq!((user.in_flight, user.waiting), (1, 1));
        let streams = state.streams.published();
        let record = streams.record(first.key()).unwrap();
        assert_eq!(record.turn.unwrap().output, 15);
    }
}

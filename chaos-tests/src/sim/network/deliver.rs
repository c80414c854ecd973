//! Arrival of packets in the simulated network.

use raft::{ConnectError, ConnectFailure, PeerRequest};
use tower::ServiceExt;

use super::body::{BodyPiece, WholeBody, hash_of, stream};
use super::call::answer;
use super::packet::{BodyPart, CallAnswer, CallSide, Packet, is_answer_stream};
use super::{NetworkState, SimNetwork, broken};

impl NetworkState {
    fn note(&mut self, from: u8, to: u8, what: std::fmt::Arguments<'_>) {
        self.counts.delivered += 1;
        self.trace
            .event(self.now_us, format_args!("{from}>{to} {what}"));
    }

    /// Delivers a packet to the process or the kernel of its receiver.
    pub(super) fn deliver(&mut self, network: &SimNetwork, packet: Packet) {
        match packet {
            Packet::Open { connection } => self.open(connection),
            Packet::Opened {
                connection,
                refused,
            } => self.opened(connection, refused),
            Packet::Reset { connection, side } | Packet::Broken { connection, side } => {
                if let Some(it) = self.connections.get(&connection) {
                    let (from, to) = (it.from, it.to);
                    self.note(from, to, format_args!("break {connection} {side:?}"));
                }
                self.end_side(connection, side);
            }
            Packet::Break { connection } => self.break_off(network, connection),
            Packet::Request { .. } => self.request(network, packet),
            Packet::Response { call, answer } => self.response(call, *answer),
            Packet::Piece { call, side, piece } => self.piece(call, side, piece),
            Packet::Cancel { call } => {
                if let Some(call) = self.calls.get_mut(&call) {
                    call.end(CallSide::Server);
                }
                self.calls.retain(|_, call| !call.is_over());
            }
        }
    }

    fn open(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let (from, to) = (connection.from, connection.to);
        let host = self.hosts.get(&to).filter(|host| host.service.is_some());
        connection.to_run = host.map(|host| host.run);
        let refused = connection.to_run.is_none();
        self.note(from, to, format_args!("open {number} refused={refused}"));
        let opened = Packet::Opened {
            connection: number,
            refused,
        };
        self.send(to, from, opened);
    }

    fn opened(&mut self, number: u64, refused: bool) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let Some(opened) = connection.opened.take() else {
            return;
        };
        let answer = if refused {
            self.connections.remove(&number);
            Err(ConnectError {
                why: "connection refused".to_owned(),
                kind: ConnectFailure::Refused,
            })
        } else {
            Ok(())
        };
        // The client may have given up.
        let _gone = opened.send(answer);
    }

    fn request(&mut self, network: &SimNetwork, packet: Packet) {
        let Packet::Request {
            call,
            to,
            connection_run,
            head,
            body,
            is_repeat,
        } = packet
        else {
            return;
        };
        let from = self
            .calls
            .get(&call)
            .map(|call| (call.from, call.connection));
        let path = head.uri.path().rsplit('/').next().unwrap_or_default();
        let hash = body.as_ref().map_or(0, WholeBody::hash);
        let again = if is_repeat { " again" } else { "" };
        let sender = from.map_or(0, |(from, _)| from);
        self.note(sender, to, format_args!("{path} {call} {hash:016x}{again}"));
        let Some(host) = self.hosts.get(&to) else {
            return;
        };
        let listening = host.service.as_ref().zip(host.runtime.as_ref());
        let Some((service, runtime)) = listening.filter(|_| Some(host.run) == connection_run)
        else {
            if let Some((from, connection)) = from {
                let side = CallSide::Client;
                self.send(to, from, Packet::Reset { connection, side });
            }
            return;
        };
        let answers_in_pieces = is_answer_stream(head.uri.path());
        let (to_server, body) = match body {
            Some(whole) => (None, whole.into_body()),
            None => match self.calls.get(&call) {
                Some(it) => {
                    let (pieces, body) = stream(it.request_window.clone());
                    (Some(pieces), body)
                }
                None => return,
            },
        };
        let request = PeerRequest::from_parts(*head, body);
        let served = service.clone().oneshot(request);
        let task = runtime.spawn(answer(network.clone(), call, answers_in_pieces, served));
        if let Some(it) = self.calls.get_mut(&call) {
            it.served(to_server, task.abort_handle());
        }
    }

    fn response(&mut self, number: u64, answer: CallAnswer) {
        let Some(call) = self.calls.get_mut(&number) else {
            return;
        };
        let (from, to) = (call.from, call.to);
        let hash = match &answer {
            CallAnswer::Is(_, BodyPart::Whole(whole)) => whole.hash(),
            CallAnswer::Is(_, BodyPart::Pieces) => 1,
            CallAnswer::Broken(_) => 2,
        };
        call.answered(answer);
        self.note(to, from, format_args!("answer {number} {hash:016x}"));
        self.calls.retain(|_, call| !call.is_over());
    }

    fn piece(&mut self, number: u64, side: CallSide, piece: BodyPiece) {
        let Some(call) = self.calls.get_mut(&number) else {
            return;
        };
        let (from, to) = match side {
            CallSide::Server => (call.from, call.to),
            CallSide::Client => (call.to, call.from),
        };
        let hash = hash_of(&piece);
        call.piece(side, piece);
        self.note(from, to, format_args!("piece {number} {hash:016x}"));
        self.calls.retain(|_, call| !call.is_over());
    }

    /// Returns the error of a broken connection if the connection is known to be gone.
    pub(super) fn is_usable(&self, connection: u64) -> Result<(), tonic::Status> {
        match self.connections.get(&connection) {
            Some(it) if !it.is_broken => Ok(()),
            Some(_) | None => Err(broken()),
        }
    }
}

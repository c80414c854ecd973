//! Bytes of a decision record, so that the decision outlives its replica.
//!
//! The bytes contain every field, so a decoded record is shown like the original.

use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

use super::decision_record::DecisionRecord;
use crate::base::label::Label;

impl Encode for DecisionRecord {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let Self {
            index,
            name,
            policy,
            policy_source,
            request,
            choice,
            is_panic,
            filtered,
            candidates,
            seen,
            scores,
            prefill,
            prefilled,
            status,
            failure,
            detail,
            report,
        } = self;
        let label = |it: &OnceLock<&'static str>| it.get().map(|it| Label(it));
        (index, name, policy, policy_source, request, choice).encode(encoder)?;
        (is_panic, filtered, candidates, seen, scores, prefill).encode(encoder)?;
        (label(prefilled), status.load(Relaxed), label(failure)).encode(encoder)?;
        (detail.get(), report.get()).encode(encoder)
    }
}

impl<C> Decode<C> for DecisionRecord {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let (index, name, policy, policy_source, request, choice) = Decode::decode(decoder)?;
        let (is_panic, filtered, candidates, seen, scores, prefill) = Decode::decode(decoder)?;
        let name: String = name;
        let (prefilled, status, failure): (Option<Label>, u16, Option<Label>) =
            Decode::decode(decoder)?;
        let (detail, report) = Decode::decode(decoder)?;
        Ok(Self {
            index,
            name: name.into(),
            policy: Arc::new(policy),
            policy_source,
            request,
            choice,
            is_panic,
            filtered,
            candidates,
            seen,
            scores,
            prefill,
            prefilled: once(prefilled.map(|it| it.0)),
            status: AtomicU16::new(status),
            failure: once(failure.map(|it| it.0)),
            detail: once(detail),
            report: once(report),
        })
    }
}

bincode::impl_borrow_decode!(DecisionRecord);

fn once<T>(value: Option<T>) -> OnceLock<T> {
    value.map_or_else(OnceLock::new, OnceLock::from)
}

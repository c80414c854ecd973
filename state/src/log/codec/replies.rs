//! Hand-written encoding of replies. A repeated reply contains another reply, and a derived decoder
//! would recurse to any depth that forged bytes encode, until the stack overflows. This decoder
//! descends at most one level.

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

use crate::command::Reply;

const APPLIED: u8 = 0;
const BATCH: u8 = 1;
const REPEATED: u8 = 2;
const REJECTED: u8 = 3;

impl Encode for Reply {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        match self {
            Self::Repeated(reply) => {
                REPEATED.encode(encoder)?;
                encode_flat(innermost(reply), encoder)
            }
            Self::Applied | Self::Batch(_) | Self::Rejected(_) => encode_flat(self, encoder),
        }
    }
}

impl<C> Decode<C> for Reply {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        match u8::decode(decoder)? {
            REPEATED => {
                let tag = u8::decode(decoder)?;
                Ok(Self::Repeated(Box::new(decode_flat(tag, decoder)?)))
            }
            tag => decode_flat(tag, decoder),
        }
    }
}
bincode::impl_borrow_decode!(Reply);

/// Returns the reply inside nested repeats, which carry no information.
fn innermost(mut reply: &Reply) -> &Reply {
    while let Reply::Repeated(inner) = reply {
        reply = inner;
    }
    reply
}

fn encode_flat<E: Encoder>(reply: &Reply, encoder: &mut E) -> Result<(), EncodeError> {
    match reply {
        Reply::Applied => APPLIED.encode(encoder),
        Reply::Batch(batch) => {
            BATCH.encode(encoder)?;
            batch.encode(encoder)
        }
        Reply::Rejected(reject) => {
            REJECTED.encode(encoder)?;
            reject.encode(encoder)
        }
        Reply::Repeated(_) => Err(EncodeError::Other("a repeated reply within a repeated one")),
    }
}

fn decode_flat<D: Decoder>(tag: u8, decoder: &mut D) -> Result<Reply, DecodeError> {
    match tag {
        APPLIED => Ok(Reply::Applied),
        BATCH => Ok(Reply::Batch(Decode::decode(decoder)?)),
        REJECTED => Ok(Reply::Rejected(Decode::decode(decoder)?)),
        _ => Err(DecodeError::OtherString(format!(
            "no reply has the tag {tag}"
        ))),
    }
}

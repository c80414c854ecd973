//! What a client sends to go on with its stream at this replica: the id of the last event, and the text
//! up to it.

use std::borrow::Cow;

use bytes::Bytes;
use http::{HeaderMap, request};

use super::{EventId, EventIdKey, EventIdSignature, may_continue};
use crate::error::ProxyError;
use crate::files::text::without_mark;
use crate::prompt::ParsedBody;
use crate::proxy::request::headers::{LAST_EVENT_ID, RESUMABLE};
use crate::proxy::response::json_scan::{string, value_of};
use crate::proxy::settings::reserved_fields::without_field;
use crate::proxy::settings::{StreamResume, StreamSettings};

/// Field of a body with the text that the client has received. It is removed before anything else
/// reads the body.
const RECEIVED: &str = "quorate_received";

/// What a client has received of its stream.
#[derive(Debug)]
pub(in crate::proxy) struct ResumeClaim {
    pub(in crate::proxy) id: EventId,
    signature: EventIdSignature,
    pub(in crate::proxy) text: String,
}

impl ResumeClaim {
    /// Checks that this cluster has given the id to this user, for this request.
    ///
    /// # Errors
    /// Refuses the id of another user, request or cluster, and one that the client has made.
    pub(in crate::proxy) fn check(&self, key: &EventIdKey) -> Result<(), ProxyError> {
        let message = "last-event-id: is not of a stream of this cluster that began with the same \
                       path, body and user";
        let is_genuine = self.id.is_signed(key, &self.signature);
        is_genuine
            .then_some(())
            .ok_or_else(|| refused(message.into(), None))
    }
}

/// Whether the client asks for event ids, and the settings give them on this path.
fn is_asked(settings: &StreamSettings, path: &str, headers: &HeaderMap) -> bool {
    settings.resumable
        && settings.resume == StreamResume::Auto
        && matches!(path, "/v1/chat/completions" | "/v1/completions")
        && headers.get(RESUMABLE).is_some_and(|value| value == "1")
}

/// Takes what the client has received out of its request; `None` if its stream begins.
/// [`ResumeClaim::check`] remains to be called once the user is known.
///
/// # Errors
/// Refuses an id or a text that is missing, damaged, or does not belong to the other.
pub(in crate::proxy) fn take_claim(
    settings: &StreamSettings,
    head: &request::Parts,
    body: &mut Bytes,
) -> Result<Option<Box<ResumeClaim>>, ProxyError> {
    if !is_asked(settings, head.uri.path(), &head.headers) {
        return Ok(None);
    }
    let id = head.headers.get(LAST_EVENT_ID);
    let id = id.filter(|id| !id.is_empty());
    *body = body.slice_ref(without_mark(body));
    let received = value_of(body, RECEIVED);
    let (id, received) = match (id, received) {
        (None, None) => return Ok(None),
        (Some(id), Some(received)) => (id, received),
        (None, Some(_)) => {
            let message = format!("last-event-id: is missing, beside the field {RECEIVED}");
            return Err(refused(message, None));
        }
        (Some(_), None) => {
            let message = format!("{RECEIVED}: is missing, beside the header last-event-id");
            return Err(refused(message, Some(RECEIVED)));
        }
    };
    let id = EventId::read(id.as_bytes());
    let (id, signature) =
        id.ok_or_else(|| refused("last-event-id: is not an id of this router".into(), None))?;
    let text = string(received).map(Cow::into_owned);
    let text = text.ok_or_else(|| refused(format!("{RECEIVED}: must be text"), Some(RECEIVED)))?;
    if !id.is_of(&text) {
        let (bytes, expected, hash) = (text.len(), id.text_bytes, id.text_hash);
        let message = format!(
            "{RECEIVED}: {bytes} bytes are not the text up to the event in last-event-id, which has \
             {expected} bytes and the xxh3 {hash:016x}"
        );
        return Err(refused(message, Some(RECEIVED)));
    }
    *body = without_field(body, RECEIVED)?;
    Ok(Some(Box::new(ResumeClaim {
        id,
        signature,
        text,
    })))
}

/// Whether the client of a request that begins its stream gets event ids.
pub(in crate::proxy) fn is_resumable(
    settings: &StreamSettings,
    head: &request::Parts,
    (parsed, body): (&ParsedBody, &Bytes),
) -> bool {
    let path = head.uri.path();
    is_asked(settings, path, &head.headers)
        && parsed.stream
        && parsed.choices == 1
        && parsed.batch.prompts == 0
        && may_continue(path, body).is_ok()
}

fn refused(message: String, param: Option<&str>) -> ProxyError {
    ProxyError::BadRequest {
        message,
        param: param.map(ToOwned::to_owned),
    }
}

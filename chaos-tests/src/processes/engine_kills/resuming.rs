//! A client that goes on with its stream at another replica when its own dies, as the guide to streams
//! describes it.

use serde_json::Value;

/// What a client has received of a resumable stream, in all responses together.
#[derive(Debug, Default)]
pub(super) struct ResumedStream {
    /// Complete events, without their ids.
    pub(super) body: Vec<u8>,
    /// Text of these events.
    text: String,
    /// Id of the last event; empty without.
    last: String,
    /// Beginning of an incomplete event.
    open: Vec<u8>,
    /// Number of responses that broke off.
    pub(super) breaks: u32,
    /// Whether the client sent the request again, because it had received nothing to go on from.
    pub(super) has_begun_again: bool,
}

impl ResumedStream {
    /// Adds bytes of a response. Only complete events count.
    pub(super) fn push(&mut self, data: &[u8]) {
        self.open.extend_from_slice(data);
        while let Some(at) = self.open.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = self.open.drain(..at + 2).collect();
            self.add(&String::from_utf8_lossy(&event));
        }
    }

    fn add(&mut self, event: &str) {
        for line in event.lines() {
            if let Some(id) = line.strip_prefix("id:") {
                self.last = id.trim().to_owned();
                continue;
            }
            self.body.extend_from_slice(line.as_bytes());
            self.body.push(b'\n');
            let chunk = line.strip_prefix("data: ");
            let chunk = chunk.and_then(|data| serde_json::from_str::<Value>(data).ok());
            let choice = chunk.as_ref().and_then(|chunk| chunk.pointer("/choices/0"));
            let texts = choice.map(|it| [it.pointer("/delta/content"), it.get("text")]);
            for text in texts.into_iter().flatten().flatten() {
                self.text.push_str(text.as_str().unwrap_or_default());
            }
        }
    }

    /// Whether the stream has ended.
    pub(super) fn is_done(&self) -> bool {
        self.body.ends_with(b"data: [DONE]\n\n")
    }

    /// Notes that a response has broken off. The rest of an incomplete event comes again.
    pub(super) fn breaks(&mut self) {
        self.open.clear();
        self.breaks += 1;
        if self.last.is_empty() {
            self.has_begun_again = true;
            self.body.clear();
            self.text.clear();
        }
    }

    /// Returns the id and the text with which the client goes on; `None` if its stream begins.
    pub(super) fn claim(&self) -> Option<(&str, &str)> {
        (!self.last.is_empty()).then_some((&self.last, &self.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_goes_on_behind_its_last_complete_event() {
        let mut stream = ResumedStream::default();
        let event = |id: &str, text: &str| {
            format!("id: {id}\ndata: {{\"choices\":[{{\"text\":\"{text}\"}}]}}\n\n")
        };
        stream.push(event("1", "a").as_bytes());
        stream.push(&event("2", "b").as_bytes()[..20]);
        assert_eq!(stream.claim(), Some(("1", "a")));
        stream.breaks();
        stream.push(event("2", "b").as_bytes());
        assert_eq!(stream.claim(), Some(("2", "ab")));
        assert!(!stream.is_done() && !stream.has_begun_again);
        stream.push(b"data: [DONE]\n\n");
        assert!(stream.is_done());
        let body = String::from_utf8(stream.body).unwrap();
        assert_eq!(body.matches("text").count(), 2);
        assert!(!body.contains("id:"));
    }

    #[test]
    fn a_client_without_an_id_begins_again() {
        let mut stream = ResumedStream::default();
        stream.push(b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
        stream.breaks();
        assert_eq!((stream.claim(), stream.body.len()), (None, 0));
        assert!(stream.has_begun_again);
    }
}

//! Joins the events of the engine that goes on to those of the first one.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::{ContinueRejection, RelayedText};
use crate::proxy::response::answer_usage::read_usage;
use crate::proxy::response::edits::{Edit, edited};
use crate::proxy::response::event_scan::EventScan;
use crate::proxy::response::json_scan::{elements, members, string};

/// Maximum length of an event that is rewritten, in bytes.
const EVENT_BYTES_MAX: usize = 256 * 1024;
/// Number of tokens by which an engine's count of the prompt may exceed that of the prompt and the
/// answer so far. Another tokenization may need one more; the frame of a further message needs more.
const TOKENS_MORE_MAX: u64 = 1;
/// Number of generated tokens for each of which the count may fall below that by one, because the
/// text can be tokenized in fewer. A chat template that renders the prompt otherwise differs by more.
const TOKENS_LESS_SHARE: u64 = 256;

/// Rewrites the events of the next engine, so that they continue the stream of the first one.
#[derive(Debug, Clone)]
pub(in crate::proxy) struct Seam {
    id: Box<[u8]>,
    created: Box<[u8]>,
    /// Prompt tokens of the request; `None` until an engine reports them.
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    /// Number of output tokens in the next engine's prompt, as far as the router knows.
    generated: u64,
    is_chat: bool,
    /// Whether the next engine has generated something, or has ended the answer.
    has_begun: bool,
    has_error: bool,
    /// Number of tokens by which the next engine's count may fall below the router's for sure.
    less_max: u64,
    /// Whether the next engine has said anything.
    has_text: bool,
    /// Whether the next engine has reported the size of its prompt.
    is_checked: bool,
    /// White space that the client has received and the next engine generates again.
    owed: String,
    /// Beginning of an incomplete event.
    held: BytesMut,
    scan: EventScan,
}

impl Seam {
    /// Returns the seam behind `relayed`; `is_chat` tells which endpoint it is. The engine may have
    /// counted and held back `held_tokens_max` tokens.
    pub(in crate::proxy) fn behind(
        relayed: &RelayedText,
        is_chat: bool,
        held_tokens_max: u64,
    ) -> Self {
        let text = relayed.text().unwrap_or_default();
        let kept = RelayedText::kept(text, is_chat);
        Self {
            id: relayed.id.clone(),
            created: relayed.created.clone(),
            prompt_tokens: relayed.prompt_tokens(),
            cached_tokens: relayed.usage().and_then(|usage| usage.cached_tokens),
            generated: match kept.is_empty() {
                true => 0,
                false => relayed.kept_tokens(),
            },
            is_chat,
            has_begun: false,
            has_error: false,
            less_max: held_tokens_max + (text.len() - kept.len()) as u64,
            has_text: false,
            is_checked: false,
            owed: text[kept.len()..].to_owned(),
            held: BytesMut::new(),
            scan: EventScan::default(),
        }
    }

    /// Accepts bytes of the next engine and returns those that continue the stream.
    ///
    /// # Errors
    /// Fails if the engine does not continue the answer.
    pub(in crate::proxy) fn push(&mut self, frame: &Bytes) -> Result<Bytes, ContinueRejection> {
        self.held.extend_from_slice(frame);
        let mut passed = BytesMut::with_capacity(self.held.len() + 64);
        while let Some(length) = self.scan.event_end(&self.held) {
            let scan = std::mem::take(&mut self.scan);
            let event = self.held.split_to(length).freeze();
            match scan.payload() {
                Some(payload) => self.join(&event, payload, &mut passed)?,
                None => passed.extend_from_slice(&event),
            }
        }
        if self.held.len() > EVENT_BYTES_MAX {
            return Err(ContinueRejection::NotContinued);
        }
        Ok(passed.freeze())
    }

    /// Whether the next engine has gone on; `None` if it has reported an error instead.
    pub(in crate::proxy) fn has_begun(&self) -> Option<bool> {
        (!self.has_error || self.has_begun).then_some(self.has_begun)
    }

    /// Returns what is left of a stream that has ended within an event.
    pub(in crate::proxy) fn finish(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    /// Appends the `event` with this payload to `passed`, unless it only begins an answer.
    fn join(
        &mut self,
        event: &Bytes,
        payload: Range<usize>,
        passed: &mut BytesMut,
    ) -> Result<(), ContinueRejection> {
        let mut edits = Vec::new();
        let json = event.slice(payload.clone());
        let mut is_empty = false;
        for member in members(&json) {
            let value = member.value.clone();
            match &json[member.key] {
                b"id" => edits.extend(replaced(value, &self.id)),
                b"created" => edits.extend(replaced(value, &self.created)),
                b"choices" => is_empty = self.join_choices(&json, value, &mut edits)?,
                b"error" => self.has_error |= !is_nothing(&json[value]),
                b"usage" => self.join_usage(&json, value, &mut edits)?,
                _ => {}
            }
        }
        if self.is_chat && self.has_text && !self.is_checked && self.generated > 0 {
            // Nothing shows that this is not the beginning of another message.
            return Err(ContinueRejection::NotContinued);
        }
        if is_empty {
            return Ok(());
        }
        // Members that stand twice are edited once.
        edits.sort_by_key(|edit| edit.range.start);
        let mut end = 0;
        edits.retain(|edit| {
            let is_behind = edit.range.start >= end;
            end = end.max(edit.range.end);
            is_behind
        });
        let joined = edited(&json, &edits).unwrap_or_default();
        passed.extend_from_slice(&event[..payload.start]);
        passed.extend_from_slice(&joined);
        passed.extend_from_slice(&event[payload.end..]);
        Ok(())
    }

    /// Edits the only choice of an event. Returns whether the event has nothing for the client: it
    /// has the role of the message, or white space that the client has received.
    fn join_choices(
        &mut self,
        json: &[u8],
        choices: Range<usize>,
        edits: &mut Vec<Edit>,
    ) -> Result<bool, ContinueRejection> {
        let Some(choice) = elements(&json[choices.clone()]).next() else {
            return Ok(false);
        };
        let choice = range_in(json, choice);
        let (mut text, mut is_ended, mut has_more) = (None, false, false);
        for member in members(&json[choice.clone()]) {
            let value = shifted(&member.value, choice.start);
            match &json[choice.clone()][member.key] {
                b"text" => text = Some(value),
                b"finish_reason" => is_ended = &json[value] != b"null",
                b"delta" => {
                    let mut previous_end = None;
                    for part in members(&json[value.clone()]) {
                        let part_value = shifted(&part.value, value.start);
                        let key = shifted(&part.key, value.start);
                        match &json[key.clone()] {
                            b"content" => text = Some(part_value.clone()),
                            b"role" => edits.push(Edit::cut(without_role(
                                json,
                                previous_end,
                                &(key.start - 1..part_value.end),
                            ))),
                            _ => has_more |= !is_nothing(&json[part_value.clone()]),
                        }
                        previous_end = Some(part_value.end);
                    }
                }
                _ => {}
            }
        }
        let said = text.as_ref().and_then(|text| string(&json[text.clone()]));
        let mut said = said.unwrap_or_default();
        if let Some(rest) = self.pay(&said, is_ended)? {
            let by = serde_json::Value::from(rest.as_str()).to_string();
            edits.extend(text.map(|range| Edit {
                range,
                by: by.into(),
            }));
            said = rest.into();
        }
        self.has_text |= !said.is_empty();
        self.has_begun |= !said.is_empty() || has_more || is_ended;
        Ok(said.is_empty() && !is_ended && !has_more)
    }

    /// Returns `said` without the white space that the client has received; `None` if that changes
    /// nothing. An answer that ends instead owes none.
    fn pay(&mut self, said: &str, is_ended: bool) -> Result<Option<String>, ContinueRejection> {
        if self.owed.is_empty() {
            return Ok(None);
        }
        if let Some(rest) = said.strip_prefix(self.owed.as_str()) {
            self.owed.clear();
            return Ok(Some(rest.to_owned()));
        }
        let still_owed = self.owed.strip_prefix(said);
        let still_owed = still_owed.ok_or(ContinueRejection::NotContinued)?;
        self.owed = match is_ended {
            true => String::new(),
            false => still_owed.to_owned(),
        };
        Ok((!said.is_empty()).then(String::new))
    }

    /// Edits a usage report: the answer so far is output, not prompt.
    fn join_usage(
        &mut self,
        json: &[u8],
        usage: Range<usize>,
        edits: &mut Vec<Edit>,
    ) -> Result<(), ContinueRejection> {
        let Some(reported) = read_usage(&json[usage.clone()]) else {
            return Ok(());
        };
        let sent = reported.prompt_tokens;
        let prompt_tokens = *self
            .prompt_tokens
            .get_or_insert(sent.saturating_sub(self.generated));
        let generated = sent.saturating_sub(prompt_tokens);
        let less_max = 1 + self.less_max + self.generated / TOKENS_LESS_SHARE;
        let is_odd = sent < prompt_tokens
            || generated > self.generated + TOKENS_MORE_MAX
            || generated + less_max < self.generated;
        // The text of a completion follows its prompt in any case.
        if self.is_chat && is_odd && sent > 0 {
            return Err(ContinueRejection::NotContinued);
        }
        self.is_checked |= sent > 0;
        // The text may be tokenized in another number of tokens than it was generated in. What the
        // first engine held back is generated again.
        let least = self.generated.saturating_sub(self.less_max);
        let completion_tokens = reported.completion_tokens + generated.clamp(least, self.generated);
        let set = |range: Range<usize>, count: u64| Edit {
            range,
            by: count.to_string().into(),
        };
        for member in members(&json[usage.clone()]) {
            let value = shifted(&member.value, usage.start);
            match &json[usage.clone()][member.key] {
                b"prompt_tokens" => edits.push(set(value, prompt_tokens)),
                b"completion_tokens" => edits.push(set(value, completion_tokens)),
                b"total_tokens" => edits.push(set(value, prompt_tokens + completion_tokens)),
                b"prompt_tokens_details" => {
                    for detail in members(&json[value.clone()]) {
                        let count = shifted(&detail.value, value.start);
                        if &json[shifted(&detail.key, value.start)] == b"cached_tokens" {
                            let cached = reported.cached_tokens.unwrap_or(0).min(prompt_tokens);
                            let cached = self.cached_tokens.unwrap_or(cached);
                            edits.push(set(count, cached));
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn shifted(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Returns the position of `part` in `whole`, of which it is a slice.
fn range_in(whole: &[u8], part: &[u8]) -> Range<usize> {
    let start = part.as_ptr().addr() - whole.as_ptr().addr();
    start..start + part.len()
}

/// Returns the edit that puts `by` in place of a value, unless it is empty.
fn replaced(range: Range<usize>, by: &[u8]) -> Option<Edit> {
    (!by.is_empty()).then(|| Edit {
        range,
        by: Bytes::copy_from_slice(by),
    })
}

fn is_nothing(value: &[u8]) -> bool {
    matches!(value, b"null" | b"\"\"" | b"[]" | b"{}")
}

/// Returns the bytes of the member at `member`, with the comma that joins it to its neighbours.
fn without_role(json: &[u8], previous_end: Option<usize>, member: &Range<usize>) -> Range<usize> {
    if let Some(end) = previous_end {
        return end..member.end;
    }
    let behind = &json[member.end..];
    let space = behind.iter().take_while(|byte| byte.is_ascii_whitespace());
    let comma = member.end + space.count();
    match json.get(comma) {
        Some(b',') => member.start..comma + 1,
        _ => member.clone(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proxy::response::answer_usage::inspect;

    const FIRST: &str = r#"{"id":"one","created":7,"choices":[{"index":0,"delta":{"content":"ab"},"finish_reason":null}],"usage":{"prompt_tokens":10,"completion_tokens":2}}"#;

    fn relayed(events: &[&str]) -> RelayedText {
        let mut relayed = RelayedText::new(1000);
        for event in events {
            relayed.note(&inspect(event.as_bytes()));
        }
        relayed
    }

    fn event(json: &str) -> String {
        format!("data: {json}\n\n")
    }

    /// Passes `stream` through `seam` in pieces.
    fn joined(
        mut seam: Seam,
        stream: &str,
        piece_bytes: usize,
    ) -> Result<String, ContinueRejection> {
        let mut passed = Vec::new();
        for piece in stream.as_bytes().chunks(piece_bytes) {
            passed.extend_from_slice(&seam.push(&Bytes::copy_from_slice(piece))?);
        }
        passed.extend_from_slice(&seam.finish());
        Ok(String::from_utf8(passed).unwrap())
    }

    #[test]
    fn the_next_engines_events_become_those_of_the_first_stream() {
        let stream = [
            ": comment\n\n".to_owned(),
            event(r#"{"id":"two","created":9,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":{"prompt_tokens":12,"completion_tokens":0}}"#),
            event(r#"{"id":"two","created":9,"model":"m","choices":[{"index":0,"delta":{"role":"assistant", "content":"c\u00e9"},"finish_reason":null}],"usage":{"prompt_tokens":12,"total_tokens":13,"completion_tokens":1}}"#),
            event(r#"{"id":"two","created":9,"choices":[],"usage":{"prompt_tokens":12,"total_tokens":13,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":12}}}"#),
            event("[DONE]"),
        ]
        .concat();
        let expected = [
            ": comment\n\n".to_owned(),
            event(r#"{"id":"one","created":7,"model":"m","choices":[{"index":0,"delta":{ "content":"c\u00e9"},"finish_reason":null}],"usage":{"prompt_tokens":10,"total_tokens":13,"completion_tokens":3}}"#),
            event(r#"{"id":"one","created":7,"choices":[],"usage":{"prompt_tokens":10,"total_tokens":13,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":10}}}"#),
            event("[DONE]"),
        ]
        .concat();
        for piece_bytes in [1, 7, stream.len()] {
            let seam = Seam::behind(&relayed(&[FIRST]), true, 0);
            assert_eq!(joined(seam, &stream, piece_bytes).unwrap(), expected);
        }
    }

    #[test]
    fn white_space_that_was_sent_is_not_sent_again() {
        let space = r#"{"choices":[{"index":0,"delta":{"content":" \n"}}],"usage":{"prompt_tokens":10,"completion_tokens":3}}"#;
        let say = |text: &str, tokens: [u64; 2]| {
            let [prompt, output] = tokens;
            event(&format!(
                r#"{{"choices":[{{"delta":{{"content":{text:?}}}}}],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output}}}}}"#
            ))
        };
        for (texts, expected) in [
            (&[" \nc"][..], Some("c")),
            (&[" ", "\n", "c"], Some("c")),
            (&[" ", "\n\nc"], Some("\nc")),
            (&["c"], None),
            (&[" ", "c"], None),
        ] {
            let stream: String = texts.iter().map(|text| say(text, [12, 1])).collect();
            let seam = Seam::behind(&relayed(&[FIRST, space]), true, 0);
            let found = joined(seam, &stream, 5);
            let expected = expected.map(|text| say(text, [10, 3]));
            assert_eq!(
                found,
                expected.ok_or(ContinueRejection::NotContinued),
                "{texts:?}"
            );
        }
        let ended = r#"{"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}"#;
        let seam = Seam::behind(&relayed(&[FIRST, space]), true, 0);
        assert_eq!(joined(seam, &event(ended), 9).unwrap(), event(ended));
    }

    #[test]
    fn a_chat_that_goes_on_without_usage_is_not_known_to_go_on() {
        let stream = event(r#"{"choices":[{"delta":{"content":"c"}}]}"#);
        let seam = Seam::behind(&relayed(&[FIRST]), true, 0);
        assert_eq!(
            joined(seam, &stream, 9),
            Err(ContinueRejection::NotContinued)
        );
        let seam = Seam::behind(&relayed(&[FIRST]), false, 0);
        assert_eq!(joined(seam, &stream, 9).unwrap(), stream);
    }

    #[test]
    fn members_that_stand_twice_are_edited_once() {
        let usage = r#""usage":{"prompt_tokens":12,"completion_tokens":1}"#;
        let stream = event(&format!(
            r#"{{"choices":[{{"delta":{{"role":"a","role":"b","content":"c","content":"d"}}}}],{usage},{usage}}}"#
        ));
        let seam = Seam::behind(&relayed(&[FIRST]), true, 0);
        let found = joined(seam, &stream, 9).unwrap();
        assert!(found.contains(r#""content":"d""#), "{found}");
    }

    #[test]
    fn usage_counts_tokens_as_they_were_generated() {
        // The first engine generated two tokens, and may have held back `held` of them.
        for (is_chat, sent, held, expected) in [
            (true, 11, 0, 3),
            (true, 13, 0, 3),
            (false, 17, 0, 3),
            (false, 10, 0, 3),
            (false, 11, 1, 2),
            (false, 10, 1, 2),
            (false, 12, 1, 3),
        ] {
            let stream = event(&format!(
                r#"{{"choices":[{{"text":"c"}}],"usage":{{"prompt_tokens":{sent},"total_tokens":{},"completion_tokens":1}}}}"#,
                sent + 1
            ));
            let seam = Seam::behind(&relayed(&[FIRST]), is_chat, held);
            let usage = format!(
                r#""usage":{{"prompt_tokens":10,"total_tokens":{},"completion_tokens":{expected}}}"#,
                10 + expected
            );
            let found = joined(seam, &stream, 9).unwrap();
            assert!(found.contains(&usage), "{sent}, {held}: {found}");
        }
    }

    #[test]
    fn an_engine_that_begins_a_new_message_does_not_continue() {
        let usage = |tokens: u64| {
            event(&format!(
                r#"{{"choices":[{{"delta":{{"content":"c"}}}}],"usage":{{"prompt_tokens":{tokens},"completion_tokens":1}}}}"#
            ))
        };
        for (tokens, is_fine) in [
            (9, false),
            (10, false),
            (11, true),
            (12, true),
            (13, true),
            (15, false),
        ] {
            let seam = Seam::behind(&relayed(&[FIRST]), true, 0);
            assert_eq!(
                joined(seam, &usage(tokens), 20).is_ok(),
                is_fine,
                "{tokens}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_pass_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            cut in 1_usize..50,
        ) {
            let mut seam = Seam::behind(&relayed(&[FIRST]), true, 0);
            for piece in [b"data: {".as_slice(), &bytes, b"\n\n"].concat().chunks(cut) {
                if seam.push(&Bytes::copy_from_slice(piece)).is_err() {
                    break;
                }
            }
            let _ = seam.finish();
        }
    }
}

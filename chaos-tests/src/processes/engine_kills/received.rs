//! What a client received in a stream of completions, and how that differs from another stream.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::kinds::kinds;

kinds! {
    /// A way in which a response differs from the undisturbed one.
    pub enum StreamDifference;

    Refused "refused" "a request that was refused, or got no response";
    Broken "broken off" "a stream that broke off, or did not end in time";
    Failed "error event" "a stream with an error event";
    Text "text" "a stream with other text";
    Head "head" "a stream whose chunks have several ids, models or times, or another object";
    Role "role" "a stream with another number of role chunks, or one that comes late";
    Finish "finish" "a stream with another finish reason, or another number of them";
    Usage "usage" "a stream with other usage, or with usage where none was requested";
    Done "done" "a stream that does not end with exactly one `[DONE]`";
    Charge "charge" "a cut off request whose attempts charge other tokens than one answer";
    Shape "shape" "a stream with lines that the undisturbed one does not have";
}

/// Usage that a chunk of a stream reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReportedUsage {
    pub(super) prompt_tokens: u64,
    pub(super) completion_tokens: u64,
    total_tokens: u64,
}

/// Which chunks of a stream report usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestedUsage {
    None,
    Last,
    All,
}

/// The content of a stream of completions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ReceivedStream {
    text: String,
    ids: BTreeSet<String>,
    /// Members of the chunks besides id, choices and usage.
    heads: BTreeSet<String>,
    objects: BTreeSet<String>,
    /// Positions of the chunks with a role.
    roles: Vec<usize>,
    finishes: Vec<String>,
    /// Usage of chunks with a choice.
    running: Vec<Option<ReportedUsage>>,
    /// Usage of chunks without choices.
    last: Vec<Option<ReportedUsage>>,
    errors: Vec<String>,
    dones: usize,
    is_done_last: bool,
    other_lines: Vec<String>,
}

impl ReportedUsage {
    fn read(chunk: &Value) -> Option<Self> {
        let usage = chunk.get("usage")?;
        let count = |name: &str| usage[name].as_u64();
        Some(Self {
            prompt_tokens: count("prompt_tokens")?,
            completion_tokens: count("completion_tokens")?,
            total_tokens: count("total_tokens")?,
        })
    }
}

impl ReceivedStream {
    /// Reads the body of a response.
    pub(super) fn read(body: &[u8]) -> Self {
        let mut stream = Self::default();
        let body = String::from_utf8_lossy(body);
        for line in body.lines().filter(|line| !line.is_empty()) {
            stream.is_done_last = false;
            match line.strip_prefix("data: ").map(|data| (data, parse(data))) {
                Some(("[DONE]", _)) => {
                    stream.dones += 1;
                    stream.is_done_last = true;
                }
                Some((data, Some(chunk))) => stream.add(data, &chunk),
                Some((_, None)) | None => stream.other_lines.push(line.to_owned()),
            }
        }
        stream
    }

    fn add(&mut self, data: &str, chunk: &Value) {
        if chunk.get("error").is_some() {
            self.errors.push(data.to_owned());
            return;
        }
        let word = |name: &str| chunk[name].as_str().unwrap_or_default().to_owned();
        self.ids.insert(word("id"));
        self.objects.insert(word("object"));
        let head = format!("{} {}", chunk["model"], chunk["created"]);
        self.heads.insert(head);
        let usage = ReportedUsage::read(chunk);
        let Some(choice) = chunk.pointer("/choices/0") else {
            self.last.push(usage);
            return;
        };
        if choice.pointer("/delta/role").is_some() {
            self.roles.push(self.running.len());
        }
        self.running.push(usage);
        let texts = [choice.pointer("/delta/content"), choice.get("text")];
        for text in texts.into_iter().flatten() {
            self.text.push_str(text.as_str().unwrap_or_default());
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finishes.push(reason.to_owned());
        }
    }

    /// Returns the usage in the last chunk; `None` without one.
    pub(super) fn usage(&self) -> Option<ReportedUsage> {
        self.last.last().copied().flatten()
    }

    /// Returns how this stream differs from the undisturbed one, which reports its usage in the
    /// last chunk. An error hides the other differences, which follow from it.
    pub(super) fn differences(
        &self,
        undisturbed: &Self,
        requested: RequestedUsage,
    ) -> Vec<(StreamDifference, String)> {
        if let Some(error) = self.errors.first() {
            return vec![(StreamDifference::Failed, error.clone())];
        }
        let of_text = || {
            let common = self.text.bytes().zip(undisturbed.text.bytes());
            let common = common.take_while(|(one, other)| one == other).count();
            let end = |text: &str| {
                let from = text.floor_char_boundary(common.saturating_sub(20));
                text[from..].chars().take(60).collect::<String>()
            };
            let (one, other) = (end(&self.text), end(&undisturbed.text));
            format!("at byte {common}: {one:?}, not {other:?}")
        };
        let is_one_head =
            self.ids.len() == 1 && self.heads.len() == 1 && self.objects == undisturbed.objects;
        let of_heads = || format!("{:?} {:?} {:?}", self.ids, self.heads, self.objects);
        let pair = |one: &dyn std::fmt::Debug, other: &dyn std::fmt::Debug| {
            format!("{one:?}, not {other:?}")
        };
        let (usage, whole) = (self.usage(), undisturbed.usage());
        let checks = [
            (
                StreamDifference::Text,
                self.text == undisturbed.text,
                of_text(),
            ),
            (StreamDifference::Head, is_one_head, of_heads()),
            (
                StreamDifference::Role,
                self.roles == undisturbed.roles,
                pair(&self.roles, &undisturbed.roles),
            ),
            (
                StreamDifference::Finish,
                self.finishes == undisturbed.finishes,
                pair(&self.finishes, &undisturbed.finishes),
            ),
            (
                StreamDifference::Usage,
                self.has_usage_of(undisturbed, requested),
                format!(
                    "{requested:?}: {}, running {:?}",
                    pair(&usage, &whole),
                    self.running
                ),
            ),
            (
                StreamDifference::Done,
                self.dones == 1 && self.is_done_last,
                format!("{} of them", self.dones),
            ),
            (
                StreamDifference::Shape,
                self.other_lines.is_empty(),
                pair(&self.other_lines, &undisturbed.other_lines),
            ),
        ];
        let differs = checks.into_iter().filter(|(_, is_equal, _)| !is_equal);
        differs.map(|(what, _, how)| (what, how)).collect()
    }

    fn has_usage_of(&self, undisturbed: &Self, requested: RequestedUsage) -> bool {
        let is_last_right = match requested {
            RequestedUsage::None => self.last.is_empty(),
            RequestedUsage::Last | RequestedUsage::All => self.last == undisturbed.last,
        };
        let Some(whole) = undisturbed.usage() else {
            return false;
        };
        let is_of_stream = |usage: &Option<ReportedUsage>| {
            usage.is_some_and(|usage| {
                usage.prompt_tokens == whole.prompt_tokens
                    && usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            })
        };
        let are_running_right = match requested {
            RequestedUsage::None | RequestedUsage::Last => self.running.iter().all(Option::is_none),
            RequestedUsage::All => {
                let counts = self.running.iter().flatten();
                let mut counts = counts.map(|usage| usage.completion_tokens);
                self.running.iter().all(is_of_stream)
                    && counts.clone().is_sorted()
                    && counts.next_back() == Some(whole.completion_tokens)
            }
        };
        is_last_right && are_running_right
    }
}

fn parse(data: &str) -> Option<Value> {
    serde_json::from_str(data).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNKS: &str = r#"data: {"id":"a","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}}

data: {"id":"a","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"one "},"finish_reason":null}],"usage":{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1}}

data: {"id":"a","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"two "},"finish_reason":"length"}],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}}

data: {"id":"a","object":"o","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}}

data: [DONE]

"#;

    fn found(body: &str, requested: RequestedUsage) -> Vec<StreamDifference> {
        let undisturbed = ReceivedStream::read(CHUNKS.as_bytes());
        let stream = ReceivedStream::read(body.as_bytes());
        let differences = stream.differences(&undisturbed, requested);
        differences.into_iter().map(|(what, _)| what).collect()
    }

    #[test]
    fn an_equal_stream_does_not_differ() {
        assert_eq!(found(CHUNKS, RequestedUsage::All), []);
        assert_eq!(
            found(CHUNKS, RequestedUsage::None),
            [StreamDifference::Usage]
        );
    }

    #[test]
    fn every_seam_is_found() {
        let twice = r#"{"delta":{"role":"assistant","content":"one "},"index":0,"#;
        for (from, to, expected) in [
            ("two ", "two", StreamDifference::Text),
            ("one ", "one one ", StreamDifference::Text),
            (
                r#"{"id":"a","object":"o","created":1,"model":"m","choices":[]"#,
                r#"{"id":"b","object":"o","created":1,"model":"m","choices":[]"#,
                StreamDifference::Head,
            ),
            (
                r#"created":1,"model":"m","choices":[]"#,
                r#"created":2,"model":"m","choices":[]"#,
                StreamDifference::Head,
            ),
            (
                r#"{"index":0,"delta":{"content":"one "},"#,
                twice,
                StreamDifference::Role,
            ),
            (r#""role":"assistant","#, "", StreamDifference::Role),
            ("\"length\"", "\"stop\"", StreamDifference::Finish),
            (
                r#""one "},"finish_reason":null"#,
                r#""one "},"finish_reason":"length""#,
                StreamDifference::Finish,
            ),
            (
                r#""prompt_tokens":5,"total_tokens":6"#,
                r#""prompt_tokens":6,"total_tokens":7"#,
                StreamDifference::Usage,
            ),
            (
                r#""total_tokens":6,"completion_tokens":1"#,
                r#""total_tokens":8,"completion_tokens":3"#,
                StreamDifference::Usage,
            ),
            (
                "data: [DONE]",
                "data: [DONE]\n\ndata: [DONE]",
                StreamDifference::Done,
            ),
            ("data: [DONE]", "", StreamDifference::Done),
            (
                "data: [DONE]",
                "event: x\ndata: [DONE]",
                StreamDifference::Shape,
            ),
            (
                "data: [DONE]",
                "data: {\"error\":{}}\n\ndata: [DONE]",
                StreamDifference::Failed,
            ),
        ] {
            assert!(CHUNKS.contains(from), "{from}");
            let body = CHUNKS.replacen(from, to, 1);
            assert_eq!(
                found(&body, RequestedUsage::All),
                [expected],
                "{from} as {to}"
            );
        }
    }
}

//! Traces of the VTC artifact (Ying1123/VTC-artifact, from Chatbot Arena): comma-separated arrival
//! in seconds, user, prompt tokens and output tokens, without prefixes.

use std::time::Duration;

use super::{TraceFormat, TraceRecord, fields, shown, token_field};

pub(super) struct Vtc;

const HEADING: &str = "req_time_s,user,prompt_len,output_len";

impl TraceFormat for Vtc {
    fn begins_with(&self, first_line: &str) -> bool {
        first_line.trim_end() == HEADING
    }

    fn heading_lines(&self) -> usize {
        1
    }

    fn read(&self, line: &str) -> Result<TraceRecord, String> {
        let [at, user, input, output] = fields(line, HEADING)?;
        let at = at
            .parse::<f64>()
            .ok()
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .ok_or_else(|| format!("expected req_time_s in seconds, found {}", shown(at)))?;
        let is_name = !user.is_empty() && user.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_name {
            return Err(format!(
                "expected a user's name without blanks, found {}",
                shown(user)
            ));
        }
        Ok(TraceRecord {
            at,
            user: Some(user.to_owned()),
            input_tokens: token_field("prompt_len", input)?,
            output_tokens: token_field("output_len", output)?,
            session: [None, None],
            model: None,
            blocks: None,
        })
    }
}

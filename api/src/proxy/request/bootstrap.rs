//! Body members that connect two engines: the address of the prefill engine's bootstrap server and
//! room numbers there, in the format of SGLang's gateway.

use bytes::Bytes;

use crate::prompt::ParsedBody;

/// Maximum number of rooms of a request.
const ROOMS_MAX: u32 = 1024;

/// Number of rooms in which two engines exchange a request's KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy) enum BootstrapRooms {
    /// One room, sent as a number.
    One,
    /// Several rooms, sent as a list.
    List(u32),
}

/// Data-parallel rank of a prefill backend, with the number of ranks of its engine.
#[derive(Debug, Clone, Copy)]
pub(in crate::proxy) struct RankOf {
    pub(in crate::proxy) rank: u64,
    pub(in crate::proxy) ranks: u64,
}

impl BootstrapRooms {
    /// Returns the rooms that a request needs; `None` if they exceed [`ROOMS_MAX`].
    pub(in crate::proxy) fn count(path: &str, parsed: &ParsedBody) -> Option<Self> {
        let several = match path {
            "/v1/chat/completions" => parsed.choices,
            _ => parsed.batch.prompts.saturating_add(1),
        };
        if parsed.choices > ROOMS_MAX || several > ROOMS_MAX {
            return None;
        }
        Some(match several {
            0 | 1 => Self::One,
            several => Self::List(several),
        })
    }

    /// Returns the body members for both engines, with a trailing comma. `draw` returns room
    /// numbers.
    pub(in crate::proxy) fn members(self, host: &str, port: u16, draw: impl Fn() -> u64) -> Bytes {
        // A URL's host has no character that JSON would escape.
        let (host, port) = (format!("\"{host}\""), port.to_string());
        let list = |each: &dyn Fn() -> String| match self {
            Self::One => each(),
            Self::List(rooms) => {
                let all: Vec<String> = (0..rooms).map(|_| each()).collect();
                format!("[{}]", all.join(","))
            }
        };
        let members = format!(
            "\"bootstrap_host\":{},\"bootstrap_port\":{},\"bootstrap_room\":{},",
            list(&|| host.clone()),
            list(&|| port.clone()),
            list(&|| draw().to_string()),
        );
        members.into()
    }
}

impl RankOf {
    /// Returns a room number close to `drawn` that leads to this rank. Engines take the number
    /// modulo their ranks.
    pub(in crate::proxy) fn room(self, drawn: u64) -> u64 {
        drawn - drawn % self.ranks + self.rank
    }
}

/// Draws a room number of 62 bits, so that engines can increment it without overflow.
pub(in crate::proxy) fn draw() -> u64 {
    rand::random::<u64>() >> 2
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn told(path: &str, body: &str) -> Option<Value> {
        let parsed = crate::prompt::parse(path, &Bytes::copy_from_slice(body.as_bytes())).unwrap();
        let members = BootstrapRooms::count(path, &parsed)?.members("10.0.0.1", 8998, || 7);
        let members = std::str::from_utf8(&members).unwrap();
        Some(serde_json::from_str(&format!("{{{members}\"end\":0}}")).unwrap())
    }

    fn each(host: &Value, port: &Value, room: &Value) -> Option<Value> {
        Some(json!({
            "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room, "end": 0,
        }))
    }

    #[test]
    fn each_prompt_and_choice_has_its_own_room() {
        let (chat, text) = ("/v1/chat/completions", "/v1/completions");
        let one = each(&json!("10.0.0.1"), &json!(8998), &json!(7));
        let two = json!(["10.0.0.1", "10.0.0.1"]);
        let two = each(&two, &json!([8998, 8998]), &json!([7, 7]));
        assert_eq!(told(chat, r#"{"model":"m","messages":[]}"#), one);
        assert_eq!(told(chat, r#"{"model":"m","messages":[],"n":2}"#), two);
        assert_eq!(told(text, r#"{"model":"m","prompt":"a"}"#), one);
        assert_eq!(told(text, r#"{"model":"m","prompt":[1,2,3]}"#), one);
        // SGLang's gateway counts prompts there; engines increment the number for choices.
        assert_eq!(told(text, r#"{"model":"m","prompt":"a","n":2}"#), one);
        assert_eq!(told(text, r#"{"model":"m","prompt":["a","b"]}"#), two);
        assert_eq!(told(chat, r#"{"model":"m","messages":[],"n":1025}"#), None);
    }

    #[test]
    fn a_room_number_maps_to_the_chosen_rank() {
        for rank in 0..3 {
            let rank = RankOf { rank, ranks: 3 };
            for drawn in [0, 5, u64::MAX >> 2] {
                let room = rank.room(drawn);
                assert_eq!((room % 3, room >> 63), (rank.rank, 0));
            }
        }
    }
}

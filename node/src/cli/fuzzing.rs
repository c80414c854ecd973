//! Fuzz target for input of the command line; see [`crate::fuzzing`].

use serde_json::Value;

use super::client::admin_url;
use super::decisions;
use super::explain::prompt_line;
use super::read::{limits, members, thousandths};
use super::table::{millis, percent};

/// Formats a response of the admin API, and parses an admin URL.
pub fn admin_answer(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(url) = admin_url(text)
    {
        assert_eq!(url.path(), "/");
    }
    let Ok(answer) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let mut shown = members(&answer).to_string();
    shown.push_str(&prompt_line(&answer));
    shown.push_str(&decisions::shown(&answer));
    let elements = answer.as_array().map_or(&[][..], Vec::as_slice);
    for value in elements.iter().chain([&answer]) {
        for text in [
            limits(value),
            percent(value),
            millis(value),
            thousandths(value),
        ] {
            shown.push_str(&text);
        }
    }
    assert!(!shown.is_empty());
}

/// Returns sample responses of the admin API, and an admin URL.
#[must_use]
pub fn admin_answer_seeds() -> Vec<Vec<u8>> {
    let answers = [
        r#"{"leader":1,"members":{"1":{"is_voter":true,"is_connected":true,"lag":0,"peer":"127.0.0.1:1","labels":{"data":"127.0.0.1:2","version":"0.1.0"}},"2":{"lag":null}}}"#,
        r#"[{"left":{"requests":7,"tokens":null,"concurrent":2},"weight_milli":1050},1500,-3,1e300]"#,
        r#"{"unit":{"characters":"template"},"tokens":30,"tokenizer":"character"}"#,
        r#"{"request_id":"r","at_ms":1,"end":{"outcome":"finished"},"decisions":[{"choice":"a","backends":[{"id":"a","score":1}]}]}"#,
        "http://127.0.0.1:8081/",
    ];
    answers.map(|answer| answer.as_bytes().to_vec()).to_vec()
}

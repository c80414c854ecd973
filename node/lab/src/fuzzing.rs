//! The trace reader as a function that must not panic on any input, for the fuzz targets of
//! `chaos-tests`.

use std::time::Duration;

use crate::replay::trace::{LengthScale, TraceOptions, parse};

/// Parses `bytes` as a trace, unscaled and scaled.
///
/// # Panics
/// If parsed requests are not in order of time, or an error names a line that does not exist.
pub fn trace(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let scale = "1/16".parse::<LengthScale>();
    for (scale, first) in [
        (LengthScale::ONE, None),
        (
            scale.unwrap_or(LengthScale::ONE),
            Some(Duration::from_secs(60)),
        ),
    ] {
        let options = TraceOptions {
            scale,
            first,
            users: 3,
            seed: 7,
            takes_recordings: true,
        };
        match parse(text, &options) {
            Ok(arrivals) => {
                assert!(arrivals.is_sorted_by_key(|arrival| arrival.at));
                assert!(arrivals.len() <= text.lines().count());
            }
            Err((line, _)) => assert!((1..=text.lines().count().max(1)).contains(&line)),
        }
    }
    drop(text.parse::<LengthScale>());
}

/// Returns sample traces of every format.
#[must_use]
pub fn trace_seeds() -> Vec<Vec<u8>> {
    let traces = [
        "{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 52, \"hash_ids\": [0, 1, 2]}\n{\"timestamp\": 3000, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [0, 7]}\n{\"timestamp\": 3000, \"input_length\": 500, \"output_length\": 9, \"hash_ids\": [0]}\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2024-02-29 23:59:59.9,1,0\n",
        "req_time_s,user,prompt_len,output_len\n0.5,a,10,20\n1.25,b,7,3\n",
    ];
    traces.map(|trace| trace.as_bytes().to_vec()).to_vec()
}

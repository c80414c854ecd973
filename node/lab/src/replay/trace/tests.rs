//! Tests of the trace formats, and of the errors for invalid lines.

use std::time::Duration;

use super::{LengthScale, TraceOptions, parse};

const OPTIONS: TraceOptions = TraceOptions {
    scale: LengthScale::ONE,
    first: None,
    users: 2,
    seed: 1,
};

fn line(timestamp: u64, input: u64, ids: &[u64]) -> String {
    format!(
        "{{\"timestamp\": {timestamp}, \"input_length\": {input}, \"output_length\": 40, \
         \"hash_ids\": {ids:?}}}\n"
    )
}

#[test]
fn equal_block_ids_become_equal_text_at_every_scale() {
    let trace = line(0, 1100, &[0, 1, 2]) + &line(0, 1500, &[0, 1, 3]);
    for scale in ["1", "1/16", "1/512", "2"] {
        let scale: LengthScale = scale.parse().unwrap();
        let arrivals = parse(&trace, &TraceOptions { scale, ..OPTIONS }).unwrap();
        let texts: Vec<String> = arrivals
            .iter()
            .map(|arrival| arrival.prompt.text())
            .collect();
        let block = scale.apply(512) as usize * 4;
        assert_eq!(texts[0].len(), scale.apply(1100) as usize * 4);
        assert_eq!(texts[0][..2 * block], texts[1][..2 * block]);
        assert_ne!(texts[0][2 * block..], texts[1][2 * block..texts[0].len()]);
        assert_eq!(arrivals[0].output_tokens, scale.apply(40));
    }
}

#[test]
fn a_burst_is_spread_until_the_next_timestamp() {
    let trace: String = [0, 0, 0, 3000, 3000, 4000]
        .map(|at| line(at, 1, &[1]))
        .concat();
    let arrivals = parse(&trace, &OPTIONS).unwrap();
    let at: Vec<u128> = arrivals
        .iter()
        .map(|arrival| arrival.at.as_millis())
        .collect();
    assert_eq!(at, [0, 1000, 2000, 3000, 3500, 4000]);
}

#[test]
fn only_the_first_part_of_a_trace_is_read() {
    let trace: String = [6000, 9000, 12_000].map(|at| line(at, 1, &[1])).concat();
    let first = Some(Duration::from_secs(6));
    assert_eq!(
        parse(&trace, &TraceOptions { first, ..OPTIONS })
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn a_conversation_stays_with_its_user() {
    let trace = line(0, 1024, &[0, 1])
        + &line(0, 1024, &[0, 2])
        + &line(0, 1536, &[0, 2, 3])
        + &line(0, 1536, &[0, 1, 4])
        + &line(0, 2048, &[0, 1, 4, 5]);
    let users: Vec<String> = parse(&trace, &OPTIONS)
        .unwrap()
        .iter()
        .map(|arrival| arrival.user.to_string())
        .collect();
    assert_eq!(users, ["user-1", "user-2", "user-2", "user-1", "user-1"]);
}

#[test]
fn trace_formats_are_recognised_by_their_heading() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                 2023-11-16 18:15:46.5,374,44\r\n2023-11-16 18:15:47.0,10,1\r\n";
    let arrivals = parse(azure, &OPTIONS).unwrap();
    assert_eq!(arrivals[1].at, Duration::from_millis(500));
    assert_eq!(arrivals[0].prompt.text().len(), 374 * 4);
    assert_ne!(arrivals[0].prompt.text()[..40], arrivals[1].prompt.text());
    let vtc = "req_time_s,user,prompt_len,output_len\n1.5,u13,13,199\n2.0,u07,5,1\n";
    let arrivals = parse(vtc, &OPTIONS).unwrap();
    assert_eq!(
        (&*arrivals[0].user, arrivals[0].output_tokens),
        ("u13", 199)
    );
    assert_eq!(arrivals[1].at, Duration::from_millis(500));
}

#[test]
fn a_bad_line_is_reported_with_number_and_expectation() {
    let good = line(0, 1, &[1]);
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    let vtc = "req_time_s,user,prompt_len,output_len\n";
    for (trace, at, says) in [
        (String::new(), 1, "expected a Mooncake record"),
        ("hello\n".to_owned(), 1, "found \"hello\""),
        (
            good.clone() + "{\"timestamp\": 1}\n",
            2,
            "missing field `input_length`",
        ),
        (good.clone() + "\n{]\n", 3, "expected {\"timestamp\": ms"),
        (
            line(0, 513, &[1]),
            1,
            "expected 2 hash_ids for input_length 513, found 1",
        ),
        (
            line(0, 1 << 40, &[1]),
            1,
            "expected input_length of at most 16777216",
        ),
        (
            azure.to_owned() + "2023-11-16 18:15:46,1\n",
            2,
            "expected 3 fields",
        ),
        (
            azure.to_owned() + "yesterday,1,2\n",
            2,
            "expected TIMESTAMP as YYYY-MM-DD",
        ),
        (
            vtc.to_owned() + "1,u,x,2\n",
            2,
            "expected prompt_len as a whole number, found \"x\"",
        ),
        (
            vtc.to_owned() + "-1,u,1,2\n",
            2,
            "expected req_time_s in seconds",
        ),
        (vtc.to_owned() + "1,a b,1,2\n", 2, "expected a user's name"),
    ] {
        let (line, message) = parse(&trace, &OPTIONS).unwrap_err();
        assert_eq!(line, at, "{message}");
        assert!(message.contains(says), "{message:?} does not say {says:?}");
    }
}

#[test]
fn scales_must_keep_blocks_whole() {
    for (text, is_good) in [
        ("1/16", true),
        ("1", true),
        ("2/4", true),
        ("0", false),
        ("1/3", false),
        ("x", false),
    ] {
        assert_eq!(text.parse::<LengthScale>().is_ok(), is_good, "{text}");
    }
}

//! Tests of the trace formats, and of the errors for invalid lines.

use std::time::Duration;

use super::{LengthScale, TraceOptions, parse};

const OPTIONS: TraceOptions = TraceOptions {
    scale: LengthScale::ONE,
    first: None,
    users: 2,
    seed: 1,
    takes_recordings: true,
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
        (String::new(), 1, "expected a recording of"),
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

/// Returns a recording of two requests that share their first block of 16 tokens.
fn recording(user: &str) -> String {
    let head = r#"{"quorate_recording":1,"replicas":[1],"salt":"s","from_ms":5,"until_ms":9,"ended_by":"seconds","backends":[]}"#;
    let line = |at: u64, model: &str, chain: &str, report: &str| {
        format!(
            r#"{{"at_ms":{at},"replica":1,"user":"{user}","session":"s1","model":"{model}","unit":"tokens","tokens":35,"block_tokens":16,"matchable":2,"stream":true,{chain},"attempts":[{{"after_ms":1,"waited_ms":1,"index":1,"policy":"cost","candidates":2,"backend":"a","matched":0,"reason":"jitter"{report}}}]}}"#
        )
    };
    let report = r#","report":{"end":"finished","prompt_tokens":35,"cached_tokens":10,"output_tokens":7,"ttft_ms":2.5,"duration_ms":9}"#;
    let first = line(
        100,
        "m",
        r#""blocks":["00000000000000a1","00000000000000a2"]"#,
        report,
    );
    let second = line(
        350,
        "n",
        r#""after":"00000000000000a1","blocks":["00000000000000a3"]"#,
        "",
    );
    format!("{head}\n{first}\n{second}\n")
}

#[test]
fn a_recording_keeps_users_sessions_models_and_shared_prefixes() {
    let arrivals = parse(&recording("u1"), &OPTIONS).unwrap();
    let [first, second] = &arrivals[..] else {
        panic!("{arrivals:?}");
    };
    assert_eq!(second.at, Duration::from_millis(250));
    assert_eq!(
        (&*first.user, first.session[0].as_deref()),
        ("u1", Some("s1"))
    );
    let models = [&first.model, &second.model].map(Option::as_deref);
    assert_eq!(models, [Some("m"), Some("n")]);
    // Without a report, a request gets the usual output.
    assert_eq!((first.output_tokens, second.output_tokens), (7, 7));
    let texts = [first, second].map(|it| it.prompt.text());
    assert_eq!(texts.each_ref().map(String::len), [35 * 4; 2]);
    assert_eq!(texts[0][..64], texts[1][..64]);
    assert_ne!(texts[0][64..128], texts[1][64..128]);
    assert_ne!(texts[0][128..], texts[1][128..]);
}

#[test]
fn a_bad_recording_is_refused_with_its_line() {
    for (recording, scale, expected) in [
        (recording("a b"), "1", (2, "expected an id without blanks")),
        (recording("u"), "1/32", (2, "keeps 16-token blocks whole")),
        (recording("u") + "{]\n", "1", (4, "expected")),
    ] {
        let options = TraceOptions {
            scale: scale.parse().unwrap(),
            ..OPTIONS
        };
        let (line, message) = parse(&recording, &options).unwrap_err();
        assert_eq!(line, expected.0, "{message}");
        assert!(message.contains(expected.1), "{message}");
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

//! Conversion of OpenMetrics text into Prometheus' text format 0.0.4 for `/metrics`.
//!
//! Samples are the same in both; only the descriptions of families differ. In the older format, a
//! counter has the name of its samples (`_total`), an info is a gauge, and units and the end marker
//! are missing.

/// Content type of OpenMetrics text.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of Prometheus' text format.
pub const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Converts OpenMetrics text into Prometheus' text format.
pub(super) fn prometheus_text(open: &str) -> String {
    let mut out = String::with_capacity(open.len() + open.len() / 8);
    let mut help = None;
    for line in open.lines() {
        let Some(described) = line.strip_prefix("# ") else {
            push_line(&mut out, &[line]);
            continue;
        };
        match described.split_once(' ') {
            Some(("HELP", rest)) => help = rest.split_once(' ').map(|(_, text)| text),
            Some(("TYPE", rest)) => {
                let (name, kind) = rest.split_once(' ').unwrap_or((rest, "unknown"));
                let (ending, kind) = former(kind);
                if let Some(text) = help.take() {
                    push_line(&mut out, &["# HELP ", name, ending, " ", text]);
                }
                push_line(&mut out, &["# TYPE ", name, ending, " ", kind]);
            }
            _ => {}
        }
    }
    out
}

/// Returns the suffix of a family's samples, and the type's name in the older format.
fn former(kind: &str) -> (&'static str, &str) {
    match kind {
        "counter" => ("_total", "counter"),
        "info" => ("_info", "gauge"),
        "unknown" => ("", "untyped"),
        other => ("", other),
    }
}

fn push_line(out: &mut String, parts: &[&str]) {
    parts.iter().for_each(|part| out.push_str(part));
    out.push('\n');
}

/// Whether the values of `accept` headers prefer OpenMetrics to plain text. A wildcard counts as
/// plain text; equal weights count as a preference for OpenMetrics.
#[must_use]
pub fn prefers_openmetrics<'a>(accept: impl Iterator<Item = &'a str>) -> bool {
    let (mut open, mut text) = (0, 0);
    for range in accept.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default().to_ascii_lowercase();
        let (mut quality, mut version) = (1000, "");
        for (key, value) in parts.filter_map(|part| part.split_once('=')) {
            match key.trim().to_ascii_lowercase().as_str() {
                "q" => quality = thousandths(value.trim()),
                "version" => version = value.trim().trim_matches('"'),
                _ => {}
            }
        }
        match (&*name, version) {
            ("application/openmetrics-text", "" | "1.0.0" | "0.0.1") => open = open.max(quality),
            ("text/plain", "" | "0.0.4") | ("text/*" | "*/*", _) => text = text.max(quality),
            _ => {}
        }
    }
    open > 0 && open >= text
}

/// Parses a quality value (`q`) from 0 to 1 into thousandths; 0 if the text is not one.
fn thousandths(text: &str) -> u32 {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = format!("{whole}{fraction:0<3}");
    let is_weight = fraction.len() <= 3 && digits.len() == 4;
    digits
        .parse()
        .ok()
        .filter(|_| is_weight)
        .map_or(0, |weight: u32| weight.min(1000))
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn metric_families_are_converted_to_the_older_text_format() {
        let open = "# HELP a_things Things.\n# TYPE a_things counter\n# UNIT a_things things\n\
                    a_things_total{b=\"c\"} 3\n# HELP a_build Build.\n# TYPE a_build info\n\
                    a_build_info{version=\"1\"} 1\n# HELP a_s S.\n# TYPE a_s histogram\n\
                    a_s_sum 1.5\na_s_count 1\na_s_bucket{le=\"+Inf\"} 1\n# HELP a_g G.\n\
                    # TYPE a_g gauge\na_g 1\n# EOF\n";
        expect![[r#"
            # HELP a_things_total Things.
            # TYPE a_things_total counter
            a_things_total{b="c"} 3
            # HELP a_build_info Build.
            # TYPE a_build_info gauge
            a_build_info{version="1"} 1
            # HELP a_s S.
            # TYPE a_s histogram
            a_s_sum 1.5
            a_s_count 1
            a_s_bucket{le="+Inf"} 1
            # HELP a_g G.
            # TYPE a_g gauge
            a_g 1
        "#]]
        .assert_eq(&prometheus_text(open));
    }

    #[test]
    fn openmetrics_is_sent_only_if_accepted() {
        let prefers = |accept: &[&str]| prefers_openmetrics(accept.iter().copied());
        // `accept` header of Prometheus 3.
        assert!(prefers(&[
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
        ]));
        assert!(prefers(&["application/openmetrics-text"]));
        assert!(prefers(&[
            "text/plain;q=0.5",
            "Application/OpenMetrics-Text; version=\"1.0.0\""
        ]));
        for accept in [
            "",
            "*/*",
            "text/html,application/xhtml+xml,*/*;q=0.8",
            "text/plain;version=0.0.4;q=1,*/*;q=0.1",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=0.3,text/plain;q=0.5",
            "application/openmetrics-text;version=2.0.0",
            "application/openmetrics-text;q=many",
        ] {
            assert!(!prefers(&[accept]), "{accept}");
        }
    }
}

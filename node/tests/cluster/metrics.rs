//! docs/reference/metrics.md, made from what a replica shows when it is scraped. Write it with
//! `UPDATE_EXPECT=1 cargo test -p node reference`.

use std::collections::BTreeMap;
use std::fmt::Write;

use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use expect_test::expect_file;
use lab::engine::LoraOptions;

use super::*;

const INTRODUCTION: &str = "# Metrics

`GET /metrics` on the admin listener answers in Prometheus' text format 0.0.4, or in OpenMetrics if `accept` asks for it, as Prometheus does.
With `admin.tokens_file` it needs a token, unless `admin.metrics_public` is set.
Labels are bounded by configuration (backend, replica, policy, outcome); users, prompts, keys and blocks are never labels.
The label `model` has the first 100 models that are requested and served, and `other` for the rest.
The label `code` has the usual statuses, 0 for a client that disconnected before it got one, and the class of any other: `4xx`, or `other` if there is none.
Series with the label `backend` appear when the backend is registered and disappear when it is removed.
A replica has at most 64 series for each backend, 64 for each model and 512 others: at most 36,480 for 512 backends and 50 models.

This page is generated from the metrics of a running replica; the [runbook](../guide/runbook.md) says which to alert on.
";

/// Metrics that a replica exposes only in case of trouble, in the form of `/metrics`.
const IN_TROUBLE: &str = "# HELP quorate_admin_refused_total Calls of the admin API refused for their token: none or a wrong one, too weak a role, or too many wrong ones before
# TYPE quorate_admin_refused_total counter
quorate_admin_refused_total{reason=\"token\"} 1
# HELP quorate_proxy_model_fallbacks_total Requests for a model that none of its engines could serve, sent to a fallback, by the model that was meant
# TYPE quorate_proxy_model_fallbacks_total counter
quorate_proxy_model_fallbacks_total{model=\"m\"} 1
# HELP quorate_route_panic 1 while the model's probes are ignored, because most fail while requests succeed
# TYPE quorate_route_panic gauge
quorate_route_panic{model=\"m\"} 1
";

/// Maximum number of series per backend, per model, and others, as in the introduction.
const SERIES_MAX: [usize; 3] = [64, 64, 512];

/// Number of backends in the introduction of the page, and of models.
const BACKENDS: usize = 512;
const MODELS: usize = 50;

/// Header of a metric, and the labels of its samples.
#[derive(Default)]
struct Family {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

/// Returns the metric of a sample, without the suffix of its type.
fn family_of<'a>(families: &BTreeMap<String, Family>, sample: &'a str) -> &'a str {
    let endings = ["_bucket", "_sum", "_count"];
    let mut names = endings.iter().filter_map(|it| sample.strip_suffix(it));
    names
        .find(|name| families.contains_key(*name))
        .unwrap_or(sample)
}

fn families(page: &str) -> BTreeMap<String, Family> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    for line in page.lines() {
        let described = line.strip_prefix("# ").and_then(|it| {
            let (what, rest) = it.split_once(' ')?;
            let (name, text) = rest.split_once(' ')?;
            Some((what, name, text))
        });
        if let Some((what, name, text)) = described {
            let family = families.entry(name.to_owned()).or_default();
            match what {
                "HELP" => family.help = text.to_owned(),
                "TYPE" => family.kind = text.to_owned(),
                _ => {}
            }
            continue;
        }
        let (sample, labels) = line.split_once('{').unwrap_or((line, ""));
        let sample = sample.split(' ').next().unwrap_or(sample);
        let name = family_of(&families, sample).to_owned();
        let family = families.get_mut(&name).expect("described before");
        let labels = labels
            .split("\",")
            .filter_map(|label| label.split_once("=\""));
        let own = labels
            .map(|(label, _)| label)
            .filter(|label| *label != "le");
        family.labels.extend(own.map(str::to_owned));
    }
    families
}

fn reference(page: &str) -> String {
    let mut out = INTRODUCTION.to_owned();
    let mut last_area = String::new();
    for (name, mut family) in families(page) {
        let own = name.strip_prefix("quorate_").unwrap_or(&name);
        let area = own.split('_').next().unwrap_or_default().to_owned();
        if area != last_area {
            let head = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |";
            write!(out, "\n## {area}\n\n{head}\n").unwrap();
            last_area = area;
        }
        // No sample here, but otherwise one per backend or member.
        if name.starts_with("quorate_backend_") {
            family.labels.insert("backend".to_owned());
        }
        if name.starts_with("quorate_raft_member_") || name == "quorate_raft_clock_skew_seconds" {
            family.labels.insert("replica".to_owned());
        }
        let labels: Vec<_> = family.labels.iter().map(|it| format!("`{it}`")).collect();
        let kind = &family.kind;
        writeln!(
            out,
            "| `{name}` | {kind} | {} | {} |",
            labels.join(", "),
            family.help.trim_end_matches('.')
        )
        .unwrap();
    }
    out
}

/// Returns what `promtool check metrics` reports about names, types and helps (client_golang's
/// promlint), and duplicate samples.
fn lint(page: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let abbreviations = [
        "s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d",
    ];
    let kinds = ["counter", "gauge", "summary", "histogram"];
    let prefixes = [
        "nano", "micro", "milli", "centi", "kilo", "kibi", "mega", "mibi", "giga",
    ];
    let units = ["minutes", "hours", "days", "weeks", "bits"];
    for (name, family) in families(page) {
        let (has, kind) = (
            |part: &str| name.split('_').any(|it| it == part),
            &family.kind,
        );
        let is_scaled = |part: &str| {
            units.contains(&part)
                || prefixes.iter().any(|prefix| {
                    let unit = part.strip_prefix(prefix);
                    unit.is_some_and(|it| ["seconds", "bytes"].contains(&it))
                })
        };
        for (is_wrong, why) in [
            (family.help.is_empty(), "no help"),
            (!kinds.contains(&kind.as_str()), "no type"),
            (
                (kind == "counter") != name.ends_with("_total"),
                "_total is for counters",
            ),
            (abbreviations.into_iter().any(has), "abbreviated unit"),
            (kinds.into_iter().any(has), "type in the name"),
            (name.split('_').any(is_scaled), "no base unit"),
            (
                name.contains(':') || name.contains(|c: char| c.is_uppercase()),
                "letters",
            ),
            (
                ["_count", "_sum", "_bucket"]
                    .iter()
                    .any(|it| name.ends_with(it)),
                "reserved for histograms",
            ),
        ] {
            if is_wrong {
                faults.push(format!("{name}: {why}"));
            }
        }
    }
    let mut seen = BTreeSet::new();
    for line in page.lines() {
        let what = line.rsplit_once(' ').map_or(line, |(sample, _)| sample);
        let described = line.split(' ').take(3).collect::<Vec<_>>().join(" ");
        let what = if line.starts_with('#') {
            described
        } else {
            what.to_owned()
        };
        if !seen.insert(what) {
            faults.push(format!("twice: {line}"));
        }
    }
    faults
}

/// Number of series on a page.
#[derive(Default)]
struct SeriesCount<'a> {
    backends: BTreeMap<&'a str, usize>,
    models: BTreeMap<&'a str, usize>,
    others: usize,
}

impl SeriesCount<'_> {
    /// Returns the maximum per backend and per model, and the number of others.
    fn most(&self) -> [usize; 3] {
        let most = |counts: &BTreeMap<&str, usize>| counts.values().copied().max().unwrap_or(0);
        [most(&self.backends), most(&self.models), self.others]
    }

    fn assert_bounded(&self) {
        let found = self.most();
        let mut bounds = found.iter().zip(SERIES_MAX);
        let is_bounded = bounds.all(|(found, most)| (1..=most).contains(found));
        assert!(is_bounded, "{found:?} series of {SERIES_MAX:?}");
    }
}

fn series(page: &str) -> SeriesCount<'_> {
    let mut count = SeriesCount::default();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let label = |name: &str| {
            let mut parts = line.split(['{', ',']);
            let value = parts.find_map(|part| part.strip_prefix(&format!("{name}=\"")));
            value.and_then(|value| value.split('"').next())
        };
        match (label("backend"), label("model")) {
            (Some(_), Some(_)) => panic!("backends times models: {line}"),
            (Some(backend), None) => *count.backends.entry(backend).or_default() += 1,
            (None, Some(model)) => *count.models.entry(model).or_default() += 1,
            (None, None) => count.others += 1,
        }
    }
    count
}

/// Returns every metric named in the code, including those without a series.
fn named_metrics() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut folders = vec![
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/src"),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/admin/src"),
    ];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("tests") {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let literals = text.split('"').filter(|it| it.starts_with("quorate_"));
                // The one name that is a field of request bodies.
                let is_name = |it: &&str| {
                    *it != "quorate_received"
                        && it.chars().all(|c| c.is_ascii_lowercase() || c == '_')
                };
                names.extend(literals.filter(is_name).map(str::to_owned));
            }
        }
    }
    assert!(names.len() > 40, "found only {names:?}");
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_metrics_reference_matches_a_replica() {
    let sources = TempDir::new().unwrap();
    let (_dir, _engines, replica, http, at) = started_alone(1, |config| {
        config.discovery = vec![discovery::file_source(&sources.path().join("none.json"))];
        config.models = vec![ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load(TokenizerSpec::Engine, None).unwrap(),
            block_size: None,
            pairs: Default::default(),
        }];
    })
    .await;
    http.chat(&at, "ada", "Is the lamp lit?").await;

    // One rejected request, for the reasons.
    let user = format!("http://{}/admin/v1/users/body:bo", at.admin);
    let limits = json!({ "limits": { "requests": 1, "window": "1h" } });
    let (status, _, answer) = http.send(Method::PUT, &user, &limits).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    http.chat(&at, "bo", "Is the lamp lit?").await;
    let body = json!({ "model": "emulated", "prompt": SYSTEM, "user": "bo" });
    let url = format!("http://{}/v1/completions", at.data);
    let (status, _, answer) = http.send(Method::POST, &url, &body).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{answer}");

    for family in ["process_cpu_seconds_total", "process_resident_memory_bytes"] {
        let page = http.metrics(at.admin).await;
        assert!(page.contains(&format!("\n{family} ")), "{page}");
    }
    let page = http.metrics(at.admin).await;
    let page = [&page, IN_TROUBLE].concat();
    assert_eq!(lint(&page), Vec::<String>::new());
    series(&page).assert_bounded();
    let reference = reference(&page);
    for name in named_metrics() {
        assert!(reference.contains(&name), "{name} is not in the reference");
    }
    expect_file!["../../../docs/reference/metrics.md"].assert_eq(&reference);
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn series_counts_match_the_reference_at_512_backends() {
    let dir = TempDir::new().unwrap();
    let model = |nth: usize| format!("model-{}", nth % MODELS);
    let options = EngineOptions {
        speed: 1000.0,
        lora: LoraOptions {
            names: (0..MODELS).map(model).collect(),
            max_loras: 64,
            load: Duration::ZERO,
        },
        ..EngineOptions::default()
    };
    let engines = [EmulatedEngine::start(options).await.unwrap()];
    let replica = lone_replica(&engines, &dir, |config| {
        let of_all = config.backends.remove(0);
        let of = |nth: usize| state::command::BackendSpec {
            id: format!("engine-{nth}"),
            models: vec![model(nth)],
            ..of_all.clone()
        };
        config.backends = (0..BACKENDS).map(of).collect();
        // One probe is enough, unless a busy machine answers it too late.
        config.probes.interval = Duration::from_secs(5);
    });
    let (http, at) = (Http::new(), replica.addresses);
    let scrape = async || http.metrics(at.admin).await;
    let are_healthy = async || {
        let page = scrape().await;
        let healthy = page
            .lines()
            .filter(|line| line.starts_with("quorate_backend_healthy{") && line.ends_with(" 1"));
        healthy.count() == BACKENDS
    };
    until("all are healthy", are_healthy).await;
    let url = format!("http://{}/v1/completions", at.data);
    for nth in 0..2 * MODELS {
        let body = json!({ "model": model(nth), "prompt": format!("{nth} {SYSTEM}") });
        let (status, _, answer) = http.send(Method::POST, &url, &body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
    }
    let page = scrape().await;
    let count = series(&page);
    assert_eq!(count.backends.len(), BACKENDS);
    assert_eq!(count.models.len(), MODELS);
    count.assert_bounded();
    let [backend, model, others] = SERIES_MAX;
    let told = format!(
        "at most {},{:03} for {BACKENDS} backends and {MODELS} models.",
        (backend * BACKENDS + model * MODELS + others) / 1000,
        (backend * BACKENDS + model * MODELS + others) % 1000
    );
    assert!(INTRODUCTION.contains(&told), "{told}");
    replica.leave().await;
}

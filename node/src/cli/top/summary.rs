//! Summary of a sample of a cluster, and of the changes since the previous sample.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::observer::ClusterSample;

/// Summary of the cluster's activity.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(super) struct Summary {
    /// Id of the replica that reported the state; `None` before the first sample.
    pub(super) asked: Option<u64>,
    pub(super) leader: Option<u64>,
    pub(super) term: Option<u64>,
    pub(super) has_quorum: bool,
    /// Whether all compared replicas have equal states; `None` if none were compared.
    pub(super) is_agreed: Option<bool>,
    pub(super) total: TotalRow,
    pub(super) replicas: Vec<ReplicaRow>,
    pub(super) backends: Vec<BackendRow>,
    pub(super) users: Vec<UserRow>,
    /// Number of sessions.
    pub(super) sessions_total: u64,
    /// Number of trees of sessions.
    pub(super) trees_total: u64,
    /// The busiest of the trees that were used last.
    pub(super) trees: Vec<TreeRow>,
}

/// Totals over all replicas.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(super) struct TotalRow {
    pub(super) requests_per_s: f64,
    pub(super) failed_per_s: f64,
    /// Share of the prompt tokens that engines found in their caches, in per cent; `None` if no
    /// engine reported prompt tokens.
    pub(super) cached_percent: Option<f64>,
    pub(super) in_flight: u64,
    pub(super) waiting: u64,
    /// User who has waited longest for a backend; `None` if none waits.
    pub(super) longest: Option<LongestWait>,
}

/// A waiting user, and for how long.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct LongestWait {
    pub(super) user: String,
    pub(super) waited_ms: u64,
}

/// Figures of one replica. Rates and times cover its last seconds, as it reports them to the
/// others.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(super) struct ReplicaRow {
    pub(super) id: u64,
    pub(super) role: String,
    pub(super) state: String,
    pub(super) is_well: bool,
    pub(super) applied: Option<u64>,
    /// Number of entries known to be committed that the replica has not applied; `None` if it does
    /// not report its figures.
    pub(super) lag: Option<u64>,
    pub(super) requests_per_s: Option<f64>,
    pub(super) failed_per_s: Option<f64>,
    pub(super) ttft_p50_ms: Option<f64>,
    pub(super) ttft_p99_ms: Option<f64>,
    /// 99th percentile of the time that routing adds to a request, in milliseconds; `None` if there
    /// were no requests, or the replica does not report its figures.
    pub(super) routing_p99_ms: Option<f64>,
    pub(super) cached_percent: Option<f64>,
    pub(super) in_flight: Option<u64>,
    pub(super) waiting: Option<u64>,
    pub(super) disk_free_percent: Option<f64>,
}

/// Figures of one backend. Rates need two samples, and are `None` for the first.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(super) struct BackendRow {
    pub(super) id: String,
    pub(super) state: String,
    pub(super) is_well: bool,
    pub(super) in_flight: u64,
    pub(super) limit: Option<u64>,
    /// Number of requests in the engine's own queue; `None` if the engine does not report it.
    pub(super) queued: Option<u64>,
    /// Prompt tokens per second, as counted by the engine; `None` if it does not report them.
    pub(super) prompt_tokens_per_s: Option<f64>,
    /// Share of the prompt tokens that the engine found in its cache, in per cent; `None` if it
    /// looked up none, or does not report them.
    pub(super) hit_percent: Option<f64>,
    pub(super) kv_usage_percent: Option<f64>,
    pub(super) owned_blocks: u64,
    pub(super) capacity_blocks: Option<u64>,
    /// Predicted minus reported cached tokens, in per cent of the prompt tokens; `None` before
    /// the first report.
    pub(super) error_percent: Option<f64>,
    /// Mode of ownership: `exact`, `degraded` or `lease`.
    pub(super) ownership: String,
}

/// Figures of one user. Rates need two samples, and are `None` for the first.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(super) struct UserRow {
    /// Name of the user, or the key if the name is unknown.
    pub(super) user: String,
    pub(super) weight_milli: u64,
    pub(super) in_flight: u64,
    pub(super) waiting: u64,
    pub(super) requests_per_s: Option<f64>,
    /// Number of uncached prompt tokens and output tokens per second; `None` for the first sample.
    pub(super) tokens_per_s: Option<f64>,
    /// Share of the tokens of all users, in per cent; `None` if the user is inactive or no
    /// tokens were counted.
    pub(super) share_percent: Option<f64>,
    /// Share that the user would have if active users shared by weight, in per cent; `None` if
    /// the user is inactive.
    pub(super) fair_percent: Option<f64>,
    pub(super) counter_milli_tokens: u64,
}

/// Figures of one tree of sessions. Rates need two samples, and are `None` for the first.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(super) struct TreeRow {
    /// Id of its root.
    pub(super) root: String,
    /// Name of the user, or the key if the name is unknown.
    pub(super) user: String,
    /// Backends of its sessions' last turns, those with the most sessions first.
    pub(super) homes: Vec<String>,
    pub(super) sessions: u64,
    pub(super) turns: u64,
    /// Number of uncached prompt tokens and output tokens per second; `None` if the tree was not
    /// among those that the previous sample shows.
    pub(super) tokens_per_s: Option<f64>,
    /// Share of the prompt tokens that engines found in their caches, in per cent; `None` if there
    /// were none.
    pub(super) hit_percent: Option<f64>,
    /// Number of all tokens.
    pub(super) tokens: u64,
    pub(super) idle_ms: u64,
}

impl Summary {
    /// Summarises a sample, and the changes since the previous one; `before` is `None` for the
    /// first.
    pub(super) fn of(before: Option<&ClusterSample>, now: &ClusterSample) -> Self {
        let seen = &now.replicas;
        let told = seen["replicas"].as_array().map_or(&[][..], Vec::as_slice);
        let compared = told
            .iter()
            .filter_map(|it| it["digest"]["is_equal"].as_bool());
        Self {
            asked: seen["asked"].as_u64(),
            leader: seen["leader"].as_u64(),
            term: seen["term"].as_u64(),
            has_quorum: seen["has_quorum"] == true,
            is_agreed: compared.reduce(|all, one| all && one),
            total: TotalRow::of(told),
            replicas: replicas(told),
            backends: backends(before, now),
            users: users(before, now),
            sessions_total: now.trees["sessions_total"].as_u64().unwrap_or(0),
            trees_total: now.trees["trees_total"].as_u64().unwrap_or(0),
            trees: trees(before, now),
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns `part` as a share of `whole`, in per cent; `None` if `whole` is zero.
fn percent(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole * 100.0)
}

impl TotalRow {
    fn of(replicas: &[Value]) -> Self {
        let each = |field: &'static str| replicas.iter().map(move |it| &it["figures"][field]);
        let rate = |field| each(field).filter_map(Value::as_f64).sum::<f64>();
        let count = |field| each(field).filter_map(Value::as_u64).sum::<u64>();
        let longest = each("longest").filter(|it| !it.is_null());
        let longest = longest.max_by_key(|it| it["waited_ms"].as_u64());
        Self {
            requests_per_s: rate("requests_per_s"),
            failed_per_s: rate("failed_per_s"),
            cached_percent: percent(rate("cached_tokens"), rate("prompt_tokens")),
            in_flight: count("in_flight"),
            waiting: count("waiting"),
            longest: longest.map(|it| LongestWait {
                user: text(match it["user"].is_null() {
                    true => &it["user_key"],
                    false => &it["user"],
                }),
                waited_ms: it["waited_ms"].as_u64().unwrap_or(0),
            }),
        }
    }
}

fn replicas(told: &[Value]) -> Vec<ReplicaRow> {
    let committed = told
        .iter()
        .filter_map(|it| it["figures"]["committed_index"].as_u64());
    let committed = committed.max();
    told.iter().map(|it| replica(it, committed)).collect()
}

fn replica(told: &Value, committed: Option<u64>) -> ReplicaRow {
    let figures = &told["figures"];
    let number = |field: &str| figures[field].as_f64();
    let count = |field: &str| figures[field].as_u64();
    let is = |field: &str| figures[field] == true;
    let state = match () {
        () if told["is_refusing"] == true => "gone",
        () if told["is_connected"] != true => "not connected",
        () if figures.is_null() => "no report",
        () if is("has_fault") => "storage fault",
        () if is("is_minority") || told["digest"]["is_equal"] == false => "state differs",
        () if is("is_log_waiting") => "log waits",
        () if !is("is_ready") => "not ready",
        () => "ready",
    };
    let role = match (&told["is_leader"], figures["role"].as_str()) {
        (Value::Bool(true), _) => "leader",
        (_, Some(role)) => role,
        (_, None) => "-",
    };
    let applied = count("applied_index");
    let prompts = number("prompt_tokens").unwrap_or(0.0);
    let disk = number("disk_free_bytes").zip(number("disk_size_bytes"));
    ReplicaRow {
        id: told["id"].as_u64().unwrap_or(0),
        role: role.to_owned(),
        is_well: state == "ready",
        state: state.to_owned(),
        applied,
        lag: committed
            .zip(applied)
            .map(|(all, own)| all.saturating_sub(own)),
        requests_per_s: number("requests_per_s"),
        failed_per_s: number("failed_per_s"),
        ttft_p50_ms: number("ttft_p50_ms"),
        ttft_p99_ms: number("ttft_p99_ms"),
        routing_p99_ms: number("routing_p99_ms"),
        cached_percent: number("cached_tokens").and_then(|cached| percent(cached, prompts)),
        in_flight: count("in_flight"),
        waiting: count("waiting"),
        disk_free_percent: disk.and_then(|(free, size)| percent(free, size)),
    }
}

/// Returns a counter's increase per second between two samples; `None` if the counter has
/// restarted.
fn per_second(before: Option<u64>, now: Option<u64>, seconds: Option<f64>) -> Option<f64> {
    let gained = now?.checked_sub(before?)?;
    Some(gained as f64 / seconds.filter(|seconds| *seconds > 0.0)?)
}

fn seconds(before: Option<&ClusterSample>, now: &ClusterSample) -> Option<f64> {
    before.map(|before| (now.at - before.at).as_secs_f64())
}

/// Indexes the entries of the previous sample by their value of `field`; `None`: there is no
/// previous sample.
fn by<'a>(entries: Option<&'a Vec<Value>>, field: &str) -> BTreeMap<&'a str, &'a Value> {
    let entries = entries.into_iter().flatten();
    entries
        .filter_map(|entry| Some((entry[field].as_str()?, entry)))
        .collect()
}

fn backends(before: Option<&ClusterSample>, now: &ClusterSample) -> Vec<BackendRow> {
    let seconds = seconds(before, now);
    let earlier = by(before.map(|before| &before.backends), "id");
    let row = |backend: &Value| {
        let id = text(&backend["id"]);
        let gained = |counter: &str| {
            let of = |backend: &Value| backend["engine"][counter].as_u64();
            let before = earlier.get(&*id).and_then(|before| of(before));
            per_second(before, of(backend), seconds)
        };
        let hits = gained("prefix_hit_tokens").zip(gained("prefix_queried_tokens"));
        let is_open = backend["circuit"]["is_open"] == true;
        let state = text(&backend["state"]["name"]);
        BackendRow {
            is_well: state == "healthy" && !is_open,
            state: match is_open {
                true => "circuit open".to_owned(),
                false => state,
            },
            in_flight: backend["in_flight"]["cluster"].as_u64().unwrap_or(0),
            limit: backend["service"]["limit"].as_u64(),
            queued: backend["engine"]["waiting"].as_u64(),
            prompt_tokens_per_s: gained("prompt_tokens"),
            hit_percent: hits.and_then(|(hits, queried)| percent(hits, queried)),
            kv_usage_percent: backend["engine"]["kv_usage_percent"].as_f64(),
            owned_blocks: backend["owned_blocks"].as_u64().unwrap_or(0),
            capacity_blocks: backend["capacity"]["blocks"].as_u64(),
            error_percent: backend["service"]["accuracy"]["error_percent"].as_f64(),
            ownership: text(&backend["ownership"]["mode"]),
            id,
        }
    };
    let mut rows: Vec<BackendRow> = now.backends.iter().map(row).collect();
    rows.sort_by_key(|row| (row.is_well, Reverse(row.in_flight), row.id.clone()));
    rows
}

fn users(before: Option<&ClusterSample>, now: &ClusterSample) -> Vec<UserRow> {
    let seconds = seconds(before, now);
    let earlier = by(before.map(|before| &before.users), "key");
    let row = |user: &Value| {
        let before = user["key"].as_str().and_then(|key| earlier.get(key));
        let gained = |fields: &[&str]| {
            let count = |user: &Value| {
                let each = fields.iter().filter_map(|it| user["total"][*it].as_u64());
                each.sum::<u64>()
            };
            // A new user starts at zero.
            let before = before.map_or(0, |before| count(before));
            per_second(Some(before), Some(count(user)), seconds)
        };
        let name = match user["name"].as_str() {
            Some(name) if !name.is_empty() => &user["name"],
            _ => &user["key"],
        };
        UserRow {
            user: text(name),
            weight_milli: user["weight_milli"].as_u64().unwrap_or(1000),
            in_flight: user["in_flight"].as_u64().unwrap_or(0),
            waiting: user["waiting"]["cluster"].as_u64().unwrap_or(0),
            requests_per_s: gained(&["requests"]),
            tokens_per_s: gained(&["input_uncached", "output"]),
            share_percent: None,
            fair_percent: None,
            counter_milli_tokens: user["counter_milli_tokens"].as_u64().unwrap_or(0),
        }
    };
    let mut rows: Vec<UserRow> = now.users.iter().map(row).collect();
    share(&mut rows);
    rows.sort_by(|a, b| {
        let busy = |row: &UserRow| (row.waiting, row.in_flight);
        let tokens = b.tokens_per_s.unwrap_or(0.0);
        let order = busy(b).cmp(&busy(a));
        let order = order.then(tokens.total_cmp(&a.tokens_per_s.unwrap_or(0.0)));
        let order = order.then(b.counter_milli_tokens.cmp(&a.counter_milli_tokens));
        order.then_with(|| a.user.cmp(&b.user))
    });
    rows
}

fn trees(before: Option<&ClusterSample>, now: &ClusterSample) -> Vec<TreeRow> {
    let seconds = seconds(before, now);
    let earlier = by(before.and_then(|it| it.trees["trees"].as_array()), "root");
    let row = |tree: &Value| {
        let count = |tree: &Value, fields: &[&str]| -> u64 {
            let each = fields.iter().filter_map(|it| tree["usage"][*it].as_u64());
            each.sum()
        };
        let paid = |tree: &Value| count(tree, &["input_uncached", "output"]);
        let root = text(&tree["root"]);
        let before = earlier.get(&*root).map(|before| paid(before));
        let homes = tree["homes"].as_array().into_iter().flatten();
        TreeRow {
            user: text(match tree["user"].is_null() {
                true => &tree["user_key"],
                false => &tree["user"],
            }),
            homes: homes
                .filter_map(|it| it["backend"].as_str().map(str::to_owned))
                .collect(),
            sessions: tree["sessions"].as_u64().unwrap_or(0),
            turns: tree["turns"].as_u64().unwrap_or(0),
            tokens_per_s: per_second(before, Some(paid(tree)), seconds),
            hit_percent: tree["usage"]["hit_percent"].as_f64(),
            tokens: count(tree, &["input_uncached", "input_cached", "output"]),
            idle_ms: tree["idle_ms"].as_u64().unwrap_or(0),
            root,
        }
    };
    let listed = now.trees["trees"].as_array().into_iter().flatten();
    let mut rows: Vec<TreeRow> = listed.map(row).collect();
    rows.sort_by(|a, b| {
        let rate = |row: &TreeRow| row.tokens_per_s.unwrap_or(0.0);
        let order = rate(b).total_cmp(&rate(a));
        order.then_with(|| (a.idle_ms, &a.root).cmp(&(b.idle_ms, &b.root)))
    });
    rows
}

/// Computes the actual and the fair share of each active user.
fn share(rows: &mut [UserRow]) {
    let is_active = |row: &UserRow| {
        row.waiting > 0 || row.in_flight > 0 || row.tokens_per_s.is_some_and(|it| it > 0.0)
    };
    let all: f64 = rows.iter().filter_map(|row| row.tokens_per_s).sum();
    let active = rows.iter().filter(|row| is_active(row));
    let weights: u64 = active.map(|row| row.weight_milli).sum();
    for row in rows.iter_mut().filter(|row| is_active(row)) {
        row.share_percent = row.tokens_per_s.and_then(|tokens| percent(tokens, all));
        row.fair_percent = percent(row.weight_milli as f64, weights as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use tokio::time::Instant;

    use super::*;

    fn sample(at: Instant, tokens: u64) -> ClusterSample {
        let figures = |ready: bool| {
            json!({"committed_index": 9, "applied_index": 7, "role": "follower", "is_ready": ready, "requests_per_s": 1.5, "prompt_tokens": 100, "cached_tokens": 40,
            "longest": {"user": "ada", "user_key": "k", "waited_ms": 1200}})
        };
        let replica = |id: u64, figures: Value| {
            json!({"id": id, "is_connected": true, "is_leader": id == 2, "figures": figures,
                "digest": {"is_equal": true}})
        };
        let replicas = json!({"asked": 1, "leader": 2, "term": 3, "has_quorum": true,
            "replicas": [replica(1, figures(false)), replica(2, figures(true)), replica(3, Value::Null)]});
        let user = |key: &str, weight: u64, output: u64| {
            json!({"key": key, "name": key, "weight_milli": weight, "in_flight": 0,
                "total": {"output": output, "requests": 1}})
        };
        let tree = |root: &str, output: u64| {
            json!({"root": root, "user": null, "user_key": "0f", "sessions": 2, "turns": 4,
                "usage": {"input_uncached": 0, "input_cached": 7, "output": output},
                "homes": [{"backend": "gpu-1", "sessions": 1}, {"backend": null, "sessions": 1}],
                "idle_ms": 20})
        };
        ClusterSample {
            at,
            replicas,
            backends: vec![
                json!({"id": "well", "state": {"name": "healthy"}, "engine": {"prompt_tokens": tokens}}),
                json!({"id": "bad", "state": {"name": "unreachable"}, "engine": null}),
            ],
            users: vec![user("ada", 3000, 3 * tokens), user("bob", 1000, tokens)],
            trees: json!({"sessions_total": 5, "trees_total": 3, "trees": [
                tree("idle", 0), tree("slow", tokens), tree("busy", 3 * tokens),
            ]}),
        }
    }

    #[test]
    fn rates_cover_the_time_between_two_samples() {
        let at = Instant::now();
        let (before, now) = (sample(at, 100), sample(at + Duration::from_secs(2), 300));
        let first = Summary::of(None, &now);
        assert_eq!(first.users[0].tokens_per_s, None);
        let summary = Summary::of(Some(&before), &now);
        let users: Vec<_> = summary.users.iter().collect();
        assert_eq!(users[0].user, "ada");
        assert_eq!(users[0].tokens_per_s, Some(300.0));
        assert_eq!(users[0].share_percent, Some(75.0));
        assert_eq!(users[0].fair_percent, Some(75.0));
        assert_eq!(
            summary.backends[0].id, "bad",
            "what is not well comes first"
        );
        assert_eq!(summary.backends[1].prompt_tokens_per_s, Some(100.0));
        let trees = summary.trees.iter().map(|it| (&*it.root, it.tokens_per_s));
        let rates = [("busy", 300.0), ("slow", 100.0), ("idle", 0.0)];
        assert!(trees.eq(rates.map(|(root, rate)| (root, Some(rate)))));
        assert_eq!((summary.sessions_total, summary.trees_total), (5, 3));
        assert_eq!(
            (&*summary.trees[0].user, summary.trees[0].tokens),
            ("0f", 907)
        );
        let fallen = Summary::of(Some(&now), &sample(at + Duration::from_secs(4), 5));
        assert_eq!(fallen.users[0].tokens_per_s, None);
    }

    #[test]
    fn replica_states_show_what_is_wrong() {
        let summary = Summary::of(None, &sample(Instant::now(), 0));
        let states: Vec<_> = summary.replicas.iter().map(|it| &*it.state).collect();
        assert_eq!(states, ["not ready", "ready", "no report"]);
        assert_eq!(summary.replicas[1].role, "leader");
        assert_eq!(summary.replicas[0].lag, Some(2));
        assert_eq!(summary.is_agreed, Some(true));
        assert_eq!(summary.total.requests_per_s, 3.0);
        assert_eq!(summary.total.cached_percent, Some(40.0));
        assert_eq!(summary.total.longest.unwrap().waited_ms, 1200);
    }
}

//! Attacks on a cluster of real processes, one after another, in the clear or with TLS and API
//! keys.
//!
//! Beside each attack, except those that inspect what engines saw, an honest client sends requests
//! to every replica and must be served. Afterwards memory, descriptors, tasks and connections must
//! return to about their earlier values. Each attack also checks its own result: the statuses, the
//! closed connections, and what engines saw.
//!
//! | module | contents |
//! | --- | --- |
//! | `frames`, `floods` | HTTP/2 by hand, and floods of it |
//! | `slow` | slow heads, handshakes, bodies and readers; connections beyond the limit |
//! | `shapes` | smuggled requests, injected headers |
//! | `names` | a million users |
//! | `engines` | hostile engines |

mod context;
mod engines;
mod floods;
mod frames;
mod honest;
mod names;
mod shapes;
mod slow;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::time::Instant;

use crate::hostile::engine::{EngineSpeed, HostileEngine, MODEL};
use crate::hostile::record::EngineRecord;
use crate::kinds::kinds;
use crate::processes::figures::ProcessFigures;
use crate::processes::{ClusterOptions, ProcessCluster, until};
use context::AbuseContext;
use honest::{HonestClient, HonestCounts};

/// Maximum number of file descriptors of a replica.
const DESCRIPTORS: u32 = 1024;
/// Maximum number of connections of a replica, which is less than a crowd opens.
const CONNECTIONS_MAX: usize = 250;
/// Maximum time for which a response may wait for its client to read it.
const UNTAKEN: Duration = Duration::from_secs(3);
/// Maximum growth of the largest replica's memory in one attack, in bytes, including what
/// allocators retain.
const GROWN_BYTES_MAX: u64 = 96 << 20;
/// Maximum growth of the number of descriptors and of tasks, which connections to engines and
/// probes may cause.
const GROWN_MAX: u64 = 16;

kinds! {
    /// Kind of attack.
    #[derive(serde::Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum AttackKind;
    RapidReset "rapid-reset" "HTTP/2 streams with whole requests, each reset at once";
    Continuations "continuations" "HTTP/2 heads that never end, of full and of empty frames";
    Unpacked "unpacked" "an HTTP/2 head that unpacks to 24 MB";
    UnreadAnswers "unread-answers" "SETTINGS and PING while nothing of the answers is read";
    ControlFrames "control-frames" "SETTINGS, PING, PRIORITY and WINDOW_UPDATE without end";
    EmptyData "empty-data" "an HTTP/2 body of empty frames";
    ForbiddenFields "forbidden-fields" "HTTP/2 heads with CR, LF, NUL, lengths that lie, two paths";
    SlowHeads "slow-heads" "heads that come a byte at a time";
    SlowBodies "slow-bodies" "bodies that come a byte at a time";
    SlowHellos "slow-hellos" "TLS handshakes that never end";
    SlowReaders "slow-readers" "long answers of which nothing is read";
    Handshakes "handshakes" "TLS handshakes one after the other, some left in the middle";
    Crowd "crowd" "more connections than limits.max_connections, from one address and from many";
    Smuggling "smuggling" "lengths and chunks that two servers read differently";
    Injection "injection" "CR, LF and escapes in names, models and keys of caches";
    Names "names" "another user name with every request";
    Engines "engines" "engines without end, with absurd usage, redirects and early answers";
}

/// Options of a run of attacks.
#[derive(Debug, Clone)]
pub struct AbuseOptions {
    /// Whether the cluster uses TLS everywhere, a token and API keys.
    pub is_secure: bool,
    /// Attacks to run; all if empty.
    pub only: Vec<AttackKind>,
    /// Factor for the size of the attacks, relative to their size in tests.
    pub scale: usize,
}

/// Outcome of one attack.
#[derive(Debug, Clone, serde::Serialize)]
pub struct AttackReport {
    /// Kind of the attack.
    pub kind: AttackKind,
    /// Duration of the attack.
    pub took: Duration,
    /// Number of the attack's connections and requests by how they ended.
    pub ends: BTreeMap<String, u64>,
    /// Number of requests of the honest client that were answered during the attack.
    pub honest: u64,
    /// Longest response time of the honest client's requests during the attack.
    pub honest_longest: Duration,
    /// Growth of the largest replica's memory, in bytes.
    pub grown_bytes: u64,
    /// Description of the first check that failed; `None` if all held.
    pub violation: Option<String>,
}

/// Runs attacks against a new cluster, each after the cluster has recovered from the one before.
///
/// # Errors
/// If the cluster cannot be started. Failed checks are in the reports.
pub async fn run(
    options: &AbuseOptions,
    say: impl Fn(&AttackReport),
) -> anyhow::Result<Vec<AttackReport>> {
    node::descriptors::raise();
    let seen = Arc::new(EngineRecord::of_heads());
    let engine = HostileEngine::start(EngineSpeed::INSTANT, seen.clone()).await;
    let engine = engine.context("start an engine")?;
    let cluster = ProcessCluster::start(cluster_options(&engine, options.is_secure)).await?;
    let mut reports = Vec::new();
    for kind in AttackKind::ALL {
        if !options.only.is_empty() && !options.only.contains(kind) {
            continue;
        }
        let context = Arc::new(AbuseContext {
            data: (0..cluster.replicas())
                .map(|it| cluster.data_addr(it))
                .collect(),
            access: cluster.access(),
            seen: Arc::clone(&seen),
            scale: options.scale.max(1),
            ends: Mutex::default(),
        });
        let report = one(&cluster, &context, *kind).await?;
        say(&report);
        reports.push(report);
    }
    if reports.iter().all(|report| report.violation.is_none()) {
        cluster.stop();
    }
    Ok(reports)
}

async fn one(
    cluster: &ProcessCluster,
    context: &Arc<AbuseContext>,
    kind: AttackKind,
) -> anyhow::Result<AttackReport> {
    let before = ProcessFigures::of(cluster).await?;
    context.seen.take_heads();
    let began = Instant::now();
    // These attacks inspect what engines saw, so no honest client runs beside them.
    let is_alone = matches!(
        kind,
        AttackKind::Smuggling
            | AttackKind::Injection
            | AttackKind::ForbiddenFields
            | AttackKind::Unpacked
    );
    let honest = |access| HonestClient::start(context.data.clone(), access);
    let beside = (!is_alone).then(|| honest(context.access.clone()));
    let attacked = attack(context, kind).await;
    let took = began.elapsed();
    let counts = match beside {
        Some(client) => client.stop().await?,
        None => HonestCounts::default(),
    };
    let judged = judge(cluster, (before, &counts), is_alone).await;
    let after = ProcessFigures::of(cluster).await?;
    let violation = attacked.and(judged).err().map(|error| format!("{error:#}"));
    let ends = context.ends.lock().expect("nobody panics with it").clone();
    Ok(AttackReport {
        kind,
        took,
        ends,
        honest: counts.answered,
        honest_longest: counts.longest,
        grown_bytes: after.rss_bytes.saturating_sub(before.rss_bytes),
        violation,
    })
}

async fn attack(context: &Arc<AbuseContext>, kind: AttackKind) -> anyhow::Result<()> {
    match kind {
        AttackKind::RapidReset => floods::rapid_reset(context).await,
        AttackKind::Continuations => floods::continuations(context).await,
        AttackKind::Unpacked => floods::unpacked(context).await,
        AttackKind::UnreadAnswers => floods::unread_answers(context).await,
        AttackKind::ControlFrames => floods::control_frames(context).await,
        AttackKind::EmptyData => floods::empty_data(context).await,
        AttackKind::ForbiddenFields => floods::forbidden_fields(context).await,
        AttackKind::SlowHeads => slow::heads(context).await,
        AttackKind::SlowBodies => slow::bodies(context).await,
        AttackKind::SlowHellos => slow::hellos(context).await,
        AttackKind::SlowReaders => slow::readers(context).await,
        AttackKind::Handshakes => slow::handshakes(context).await,
        AttackKind::Crowd => slow::crowd(context).await,
        AttackKind::Smuggling => shapes::smuggling(context).await,
        AttackKind::Injection => shapes::injection(context).await,
        AttackKind::Names => names::made_up(context).await,
        AttackKind::Engines => engines::hostile(context).await,
    }
}

/// Checks that the honest client was served and that the replicas' resources are free again.
async fn judge(
    cluster: &ProcessCluster,
    (before, honest): (ProcessFigures, &HonestCounts),
    is_alone: bool,
) -> anyhow::Result<()> {
    if let Some(failure) = &honest.failure {
        anyhow::bail!("the honest client was not served: {failure}");
    }
    ensure!(
        is_alone || honest.answered > 0,
        "the honest client had no turn"
    );
    let last = std::cell::RefCell::new(before);
    let back = until(
        "memory, descriptors, tasks and connections are back",
        async || {
            let now = ProcessFigures::of(cluster).await?;
            last.replace(now);
            Ok(now.rss_bytes <= before.rss_bytes + GROWN_BYTES_MAX
                && now.descriptors <= before.descriptors + GROWN_MAX
                && now.tasks <= before.tasks + GROWN_MAX
                && now.connections <= before.connections
                && now.in_flight == 0)
        },
    );
    let back = back.await;
    back.with_context(|| format!("before {before:?}, then {:?}", last.borrow()))?;
    for number in cluster.up() {
        cluster.wait_ready(number).await?;
    }
    Ok(())
}

/// Builds the options of the attacked cluster. They are leaked, which is fine because a program
/// starts few clusters.
fn cluster_options(engine: &HostileEngine, is_secure: bool) -> ClusterOptions {
    let config = format!(
        "[limits]\nmax_connections = {CONNECTIONS_MAX}\n\n\
         [timeouts]\nbody_idle = \"500ms\"\nclient_idle = \"{}s\"\n\
         first_byte = \"8s\"\n\n\
         [drain]\ndns_ttl = \"500ms\"\n",
        UNTAKEN.as_secs()
    );
    ClusterOptions {
        engines: 0,
        outside_engines: vec![engine.at].leak(),
        is_secure,
        backend_config: format!("models = [{MODEL:?}]\ncapacity_blocks = 1000").leak(),
        // Limits per client address also apply to loopback clients.
        users_config: "trusted_proxies = [\"::1\"]",
        config: config.leak(),
        descriptors: Some(DESCRIPTORS),
        ..ClusterOptions::default()
    }
}

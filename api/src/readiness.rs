//! Whether this replica should get traffic, with the reasons for `/readyz` of the admin listener,
//! and in one word for load balancers on the data listener.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use schemars::JsonSchema;
use serde::Serialize;
use state::StateView;
use tokio_util::sync::CancellationToken;

use crate::cluster::divergence::Digests;
use crate::engines::backends::Backends;
use crate::ports::{Cluster, ClusterStatus};
use crate::routing::SharedOutbox;
use crate::users::api_keys::{KeyListAge, KeyRules};

/// Clock difference of a member above which a warning is shown, in milliseconds.
const CLOCK_SKEW_MS_MAX: u64 = 1000;

/// Phase of a replica's life. Cheap to clone. No transition can be reversed.
#[derive(Clone, Default)]
pub struct Lifecycle {
    serving: Arc<AtomicBool>,
    draining: Arc<AtomicBool>,
    ended: CancellationToken,
}

impl Lifecycle {
    /// Marks the data plane as accepting requests. Before that, `/readyz` responds with 503.
    pub fn serve(&self) {
        self.serving.store(true, Ordering::Release);
    }

    /// Marks the replica as leaving. From then on, `/readyz` responds with 503.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Ends open event streams, so that the admin listener can close.
    pub fn end_streams(&self) {
        self.ended.cancel();
    }

    /// Whether the data plane accepts requests.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Acquire)
    }

    /// Whether the replica is leaving.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Returns the token that [`Lifecycle::end_streams`] cancels.
    pub fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }
}

/// Inputs of the readiness check.
pub struct ReadinessCheck {
    /// The log and the membership.
    pub cluster: Arc<dyn Cluster>,
    /// The published part of the state.
    pub view: Arc<StateView>,
    /// Health of the backends.
    pub backends: Arc<Backends>,
    /// Digests of the state, compared with those of peers.
    pub digests: Arc<Digests>,
    /// Updates that the log does not have yet.
    pub outbox: Arc<SharedOutbox>,
    /// Whether the replica accepts requests.
    pub lifecycle: Lifecycle,
    /// Rules for validating the cluster's keys.
    pub keys: KeyRules,
    /// Whether the replica was allowed to start with unprotected listeners.
    pub is_insecure: bool,
}

/// Whether a replica accepts traffic, and the reasons if not.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Readiness {
    /// `ready`, `degraded` (routes requests, but has no quorum, uncommitted updates, or state or keys
    /// that may be out of date) or `not-ready`.
    pub status: &'static str,
    /// Why the status is not `ready`.
    reasons: Vec<String>,
    /// What the reasons mean for requests and changes; absent if all are served.
    #[serde(skip_serializing_if = "Option::is_none")]
    consequence: Option<&'static str>,
    /// Conditions that need attention but do not prevent `ready`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    /// Applied index.
    applied_index: u64,
}

impl Readiness {
    /// Whether the replica should get traffic.
    pub fn is_fit(&self) -> bool {
        self.status != "not-ready"
    }
}

impl ReadinessCheck {
    /// Whether this replica should get traffic.
    #[must_use]
    pub fn is_fit(&self) -> bool {
        self.readiness().is_fit()
    }

    /// Determines readiness. docs/guide/runbook.md gives the remedy for each reason.
    pub fn readiness(&self) -> Readiness {
        let status = self.cluster.status();
        let (mut against, mut lacking) = (Vec::new(), Vec::new());
        self.judge_process(&status, &mut against);
        if !self.has_healthy_backend() {
            against.push("no healthy backend".to_owned());
        }
        if !status.has_quorum {
            lacking.push("no quorum".to_owned());
        }
        self.judge_state(&status, &mut against, &mut lacking);
        self.judge_keys(&mut against, &mut lacking);
        if self.outbox.status().is_degraded {
            lacking.push("local updates have not been committed for over a second".to_owned());
        }
        let name = match (against.is_empty(), lacking.is_empty()) {
            (true, true) => "ready",
            (true, false) => "degraded",
            (false, _) => "not-ready",
        };
        against.append(&mut lacking);
        Readiness {
            status: name,
            consequence: self.consequence(&status),
            reasons: against,
            warnings: self.warnings(&status),
            applied_index: status.applied_index,
        }
    }

    /// Returns what becomes of requests and changes here, if not all are served.
    fn consequence(&self, status: &ClusterStatus) -> Option<&'static str> {
        let is_founded = self.view.registry().initialised;
        match (is_founded, self.has_healthy_backend(), status.has_quorum) {
            (false, _, _) => Some("this replica answers every request with 503"),
            (true, false, true) => Some("requests get 503 until a backend is healthy"),
            (true, false, false) => Some("requests get 503, and changes are refused"),
            (true, true, false) => {
                Some("requests go on, and changes are refused until a quorum answers")
            }
            (true, true, true) => None,
        }
    }

    /// Whether everything committed at this replica's start is applied. Once true, it stays true.
    pub fn has_caught_up(&self) -> bool {
        self.cluster.status().caught_up
    }

    /// Adds the reasons why the process cannot serve.
    fn judge_process(&self, status: &ClusterStatus, against: &mut Vec<String>) {
        if self.lifecycle.is_draining() {
            against.push("draining".to_owned());
        } else if !self.lifecycle.is_serving() {
            against.push("warming up".to_owned());
        }
        if status.is_removed {
            against.push("removed from the cluster".to_owned());
        }
        if let Some(fault) = &status.fault {
            against.push(format!("storage fault: {fault}"));
        }
        if let Some(why) = &status.waiting {
            against.push(format!("storage: waiting for disk space: {why}"));
        }
        if let Some(minority) = self.digests.minority() {
            against.push(format!(
                "state differs from that of {} other replicas at log index {} and is being replaced",
                minority.holders.len(),
                minority.index
            ));
        }
    }

    /// Adds the reasons why the state here may not be the cluster's.
    fn judge_state(
        &self,
        status: &ClusterStatus,
        against: &mut Vec<String>,
        lacking: &mut Vec<String>,
    ) {
        let peers = status.peers.iter().filter(|peer| peer.is_hindrance);
        let peers = peers.map(|peer| format!("peer {}: {}", peer.address, peer.detail));
        match (status.caught_up, status.has_quorum) {
            (true, true) => {}
            // The replica routes on with the state that it has.
            (true, false) => lacking.extend(peers),
            // After a restart without a quorum, nobody knows how far the cluster was. Serving the
            // state from disk is better than not serving, and no other replica may have more.
            (false, false) if self.view.registry().initialised => {
                let why = "not known to be caught up: serving the state it was stopped with";
                lacking.push(why.to_owned());
                lacking.extend(peers);
            }
            (false, _) => {
                against.push(match &status.unjoined {
                    Some(why) => format!("not in a cluster: {why}"),
                    None => "not caught up with the cluster".to_owned(),
                });
                against.extend(peers);
            }
        }
    }

    /// Adds a reason if revoked API keys may still be accepted here.
    fn judge_keys(&self, against: &mut Vec<String>, lacking: &mut Vec<String>) {
        let age = match self.keys.list.age() {
            KeyListAge::Current => return,
            KeyListAge::Known(age) => format!("{} s old", age.as_secs()),
            KeyListAge::Unknown => "the one it was stopped with".to_owned(),
        };
        if self.view.keys().is_empty() {
            return;
        }
        if self.keys.refuses() {
            against.push(format!(
                "API keys: the list here is {age}, and requests with one are refused (users.refuse_stale_keys_after)"
            ));
        } else {
            lacking.push(format!(
                "API keys: the list here is {age}, and keys revoked since are still served"
            ));
        }
    }

    fn has_healthy_backend(&self) -> bool {
        let registry = self.view.registry();
        let mut serving = registry.backends.iter().filter(|it| !it.draining);
        serving.any(|backend| self.backends.is_up(&registry, backend))
    }

    fn warnings(&self, status: &ClusterStatus) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.is_insecure {
            let why = "insecure: started with `insecure = true`, listeners may be unprotected";
            warnings.push(why.to_owned());
        }
        if let Some(why) = &status.scaling {
            warnings.push(format!("members: {why}"));
        }
        warnings.extend(status.silent_members());
        if status.failures_survived() == Some(0) && status.silent_members().next().is_some() {
            warnings.push("the failure of one more voter loses the quorum".to_owned());
        }
        for (id, member) in &status.members {
            let skew_ms = member.clock_skew_ms.unwrap_or(0);
            if skew_ms.unsigned_abs() > CLOCK_SKEW_MS_MAX {
                warnings.push(format!(
                    "the clock of replica {id} differs from this one's by {skew_ms} ms"
                ));
            }
        }
        for model in self.backends.panicking(&self.view.registry()) {
            warnings.push(format!(
                "panic mode for model {model}: probes fail while requests succeed"
            ));
        }
        warnings
    }
}

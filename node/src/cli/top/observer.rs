//! Observes a cluster through any of its replicas, even while some are down.

use serde_json::Value;
use tokio::time::Instant;

use crate::cli::client::AdminTarget;

/// State of the cluster at one time, as reported by one replica.
#[derive(Debug, Clone)]
pub(super) struct ClusterSample {
    pub(super) at: Instant,
    pub(super) replicas: Value,
    pub(super) backends: Vec<Value>,
    pub(super) users: Vec<Value>,
    /// Number of sessions and trees, and the trees used last.
    pub(super) trees: Value,
}

/// Fetches the state of a cluster from any of its replicas.
#[derive(Debug)]
pub(super) struct Observer {
    target: AdminTarget,
}

impl Observer {
    /// Creates an observer that uses the replicas of `target`, and those that members announce
    /// later.
    pub(super) fn new(target: AdminTarget) -> Self {
        Self { target }
    }

    /// Fetches the current state of the cluster.
    ///
    /// # Errors
    /// Fails if no replica responds with the expected data.
    pub(super) async fn sample(&mut self) -> anyhow::Result<ClusterSample> {
        let replicas = self.target.get("/admin/v1/replicas").await?;
        let told = replicas["replicas"].as_array().into_iter().flatten();
        let announced = told.filter_map(|replica| replica["admin"].as_str());
        self.target.also_at(announced);
        let at = Instant::now();
        let (backends, users, trees) = tokio::try_join!(
            self.target.list("/admin/v1/backends", "backends"),
            self.target.list("/admin/v1/users", "users"),
            self.target.find("/admin/v1/session-trees"),
        )?;
        Ok(ClusterSample {
            at,
            replicas,
            backends,
            users,
            // A replica of an older version knows none.
            trees: trees.unwrap_or_default(),
        })
    }
}

//! Looks at a cluster through any of its replicas, also while some of them are down.

use serde_json::Value;
use tokio::time::Instant;

use crate::cli::client::AdminTarget;

/// The cluster at one time, as the replica knows it that answered.
#[derive(Debug, Clone)]
pub(super) struct ClusterLook {
    pub(super) at: Instant,
    pub(super) replicas: Value,
    pub(super) backends: Vec<Value>,
    pub(super) users: Vec<Value>,
}

/// Knows where the replicas of a cluster are.
#[derive(Debug)]
pub(super) struct Observer {
    target: AdminTarget,
}

impl Observer {
    /// Asks at the addresses given, and from then on also at those that members announce.
    pub(super) fn new(target: AdminTarget) -> Self {
        Self { target }
    }

    /// Looks once.
    ///
    /// # Errors
    /// No replica answers, or not with what was asked for.
    pub(super) async fn look(&mut self) -> anyhow::Result<ClusterLook> {
        let replicas = self.target.get("/admin/v1/replicas").await?;
        let told = replicas["replicas"].as_array().into_iter().flatten();
        let announced = told.filter_map(|replica| replica["admin"].as_str());
        self.target.also_at(announced);
        let at = Instant::now();
        let (backends, users) = tokio::try_join!(
            self.target.list("/admin/v1/backends", "backends"),
            self.target.list("/admin/v1/users", "users"),
        )?;
        Ok(ClusterLook {
            at,
            replicas,
            backends,
            users,
        })
    }
}

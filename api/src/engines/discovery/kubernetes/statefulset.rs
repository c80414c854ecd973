//! The desired number of pods of a StatefulSet, which determines the replicas that a cluster wants.

use serde_json::Value;

use super::client::{ApiClient, ApiError};
use super::namespace;
use crate::engines::discovery::KubernetesAccess;

/// Desired scale of a StatefulSet, whose pods have numbers in their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatefulSetScale {
    /// Number of the first pod.
    pub first: u64,
    /// Desired number of pods.
    pub replicas: u64,
}

impl StatefulSetScale {
    /// Reads the scale of the StatefulSet `name` from the API server.
    ///
    /// # Errors
    /// Fails if the server does not respond, or the StatefulSet does not exist or is being deleted.
    pub async fn read(access: &KubernetesAccess, name: &str) -> Result<Self, String> {
        let read = async {
            let client = ApiClient::new(access)?;
            let namespace = namespace(access)?;
            let path = format!("/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}");
            let object = client.get(&path).await?;
            Self::of(&object).map_err(|what| ApiError::Unexpected(format!("{path}: {what}")))
        };
        read.await.map_err(|error: ApiError| error.to_string())
    }

    /// Parses a StatefulSet. The error states why it is unusable.
    fn of(object: &Value) -> Result<Self, &'static str> {
        if !object["metadata"]["deletionTimestamp"].is_null() {
            return Err("it is being deleted");
        }
        let spec = &object["spec"];
        let first = match &spec["ordinals"]["start"] {
            Value::Null => Some(0),
            start => start.as_u64(),
        };
        Ok(Self {
            first: first.ok_or("spec.ordinals.start is not a number")?,
            replicas: spec["replicas"].as_u64().ok_or("no spec.replicas")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_statefulset_scale_is_parsed() {
        let scale = |first, replicas| Ok(StatefulSetScale { first, replicas });
        let plain = json!({"metadata": {"name": "quorate"}, "spec": {"replicas": 5}});
        assert_eq!(StatefulSetScale::of(&plain), scale(0, 5));
        let shifted = json!({"spec": {"replicas": 3, "ordinals": {"start": 1}}});
        assert_eq!(StatefulSetScale::of(&shifted), scale(1, 3));
        for (object, why) in [
            (json!({}), "no spec.replicas"),
            (json!({"spec": {"replicas": "3"}}), "no spec.replicas"),
            (
                json!({"spec": {"replicas": 3, "ordinals": {"start": -1}}}),
                "spec.ordinals.start is not a number",
            ),
            (
                json!({"metadata": {"deletionTimestamp": "2026-11-23T18:00:00Z"}, "spec": {"replicas": 3}}),
                "it is being deleted",
            ),
        ] {
            assert_eq!(StatefulSetScale::of(&object), Err(why));
        }
    }
}

//! The members of a cluster, to ask each of them.

use super::client::AdminTarget;
use super::table::cell;

/// A member of the cluster.
pub(super) struct Member {
    pub(super) id: String,
    /// The member's admin listener, or why it is not known.
    pub(super) target: Result<AdminTarget, String>,
}

/// Returns all members of the cluster of `target`, that replica first.
pub(super) async fn members(target: &AdminTarget) -> anyhow::Result<Vec<Member>> {
    let cluster = target.get("/admin/v1/cluster").await?;
    let own = cell(&cluster["id"]);
    let mut members = vec![Member {
        id: own.clone(),
        target: Ok(target.clone()),
    }];
    for (id, member) in cluster["members"].as_object().into_iter().flatten() {
        if *id != own {
            let url = member["labels"]["admin"].as_str();
            let url = url.ok_or_else(|| "it has not announced an admin listener".to_owned());
            members.push(Member {
                id: id.clone(),
                target: url.and_then(|url| target.at(url)),
            });
        }
    }
    Ok(members)
}

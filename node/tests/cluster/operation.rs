//! What an operator sees of other replicas, and of one that cannot join.

#[path = "keys.rs"]
mod api_keys;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_replica_knows_the_others_applied_index() {
    let (_dir, _engines, replicas, http, at) = started(3, 1).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;
    http.quiet(&at[0]).await;
    for replica in &at {
        let url = format!("http://{}/admin/v1/cluster", replica.admin);
        let is_told = async || {
            let (_, told) = http.get(&url).await;
            let mut members = told["members"].as_object().unwrap().values();
            members.all(|member| member["lag"] == 0)
        };
        until("all members are seen to have caught up", is_told).await;
    }
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_lost_its_store_prints_a_remedy() {
    let (dir, _engines, mut replicas, http, at) = started(3, 1).await;
    let wiped = replicas.remove(2).leave().await;
    std::fs::remove_dir_all(dir.path().join("n3")).unwrap();
    replicas.push(Replica::again(wiped));
    let url = format!("http://{}/readyz", at[2].admin);
    let says = async || {
        let (status, told) = http.get(&url).await;
        let reasons = told["reasons"].to_string();
        status == StatusCode::SERVICE_UNAVAILABLE
            && ["another store", "node.id", "member replace 3"]
                .iter()
                .all(|it| reasons.contains(it))
    };
    until("the wiped replica says what to do", says).await;
    leave(replicas).await;
}

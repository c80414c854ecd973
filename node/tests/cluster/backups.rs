//! All replicas lose their disks, and a new cluster continues from a backup.

use std::process::Output;

use super::*;

/// Runs the binary against a replica.
pub(super) async fn quorate(at: &Addresses, args: &[&str]) -> Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_quorate"));
    command
        .args(args)
        .env("QUORATE_ADMIN", format!("http://{}", at.admin));
    let ran = tokio::task::spawn_blocking(move || command.output());
    ran.await.unwrap().unwrap()
}

/// Runs the binary and expects it to succeed; returns its output.
pub(super) async fn done(at: &Addresses, args: &[&str]) -> String {
    let output = quorate(at, args).await;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the binary and expects it to fail; returns its error.
pub(super) async fn failed(at: &Addresses, args: &[&str]) -> String {
    let output = quorate(at, args).await;
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Returns names, weights and counters of all users.
async fn users(http: &Http, at: &Addresses) -> Vec<Value> {
    let url = format!("http://{}/admin/v1/users", at.admin);
    let (_, answer) = http.get(&url).await;
    let users = answer["users"].as_array().unwrap().iter();
    let figures = ["key", "name", "weight_milli", "counter_milli_tokens"];
    users
        .map(|user| figures.iter().map(|it| user[*it].clone()).collect())
        .collect()
}

/// Waits until the state has charged a user for a finished request.
async fn charged(http: &Http, at: &Addresses, user: &str) {
    let url = format!("http://{}/admin/v1/users", at.admin);
    let name = format!("body:{user}");
    let is_charged = async || {
        let (_, answer) = http.get(&url).await;
        let users = answer["users"].as_array().unwrap();
        let is_done = |it: &&Value| it["in_flight"] == 0 && it["last_charge_ms"] != 0;
        users.iter().filter(is_done).any(|it| it["name"] == *name)
    };
    until("a user is charged", is_charged).await;
}

async fn owned(http: &Http, at: &Addresses) -> Value {
    let url = format!("http://{}/admin/v1/ownership", at.admin);
    let (_, mut answer) = http.get(&url).await;
    answer.as_object_mut().unwrap().remove("index");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_cluster_continues_from_a_backup() {
    let (dir, engines) = (TempDir::new().unwrap(), engines(2).await);
    let file = dir.path().join("cluster.backup");
    let file = file.to_str().unwrap();
    let replicas = cluster(3, &engines, &dir);
    let (http, at) = (Http::new(), addresses(&replicas));
    http.ready(&at).await;
    let put = format!("http://{}/admin/v1/users/body:ada", at[0].admin);
    let weight = json!({ "weight_milli": 3000 });
    http.send(Method::PUT, &put, &weight).await;
    let mut backends = Vec::new();
    for user in ["ada", "bo", "cy"] {
        let headers = http.chat(&at[0], user, "Is the lamp lit?").await;
        backends.push(headers["x-quorate-backend"].clone());
        // While a request runs, the next could go to the other engine: both would own blocks.
        charged(&http, &at[0], user).await;
    }
    http.agree(&at).await;

    let told = done(&at[1], &["backup", file]).await;
    assert!(told.contains("2 backends, 3 users"), "{told}");
    let refusal = failed(&at[1], &["backup", file]).await;
    assert!(refusal.contains("already exists"), "{refusal}");
    done(&at[2], &["backup", file, "--force"]).await;
    let (users_before, owned_before) = (users(&http, &at[0]).await, owned(&http, &at[0]).await);
    leave(replicas).await;

    let lost = TempDir::new().unwrap();
    let replicas = cluster(3, &engines, &lost);
    let at = addresses(&replicas);
    http.ready(&at).await;
    let told = done(&at[2], &["restore", file]).await;
    assert!(told.contains("2 backends, 3 users"), "{told}");
    for at in &at {
        let is_there = async || users(&http, at).await == users_before;
        until("users are back", is_there).await;
        assert_eq!(owned(&http, at).await, owned_before);
    }
    http.agree(&at).await;
    http.ready(&at).await;
    for (user, backend) in ["ada", "bo", "cy"].into_iter().zip(&backends) {
        let headers = http.chat(&at[1], user, "What is the time?").await;
        assert_eq!(&headers["x-quorate-backend"], backend, "{user}");
        assert!(matched(&headers) >= 2, "{user}: {headers:?}");
    }
    http.quiet(&at[0]).await;
    http.agree(&at).await;

    // Now the cluster has state to lose.
    let refusal = failed(&at[0], &["restore", file]).await;
    assert!(refusal.contains("the cluster is not empty"), "{refusal}");
    done(&at[0], &["restore", file, "--force"]).await;
    http.agree(&at).await;
    assert_eq!(users(&http, &at[0]).await, users_before);
    let mut damaged = std::fs::read(file).unwrap();
    let place = damaged.len() / 2;
    damaged[place] ^= 1;
    std::fs::write(file, damaged).unwrap();
    let refusal = failed(&at[0], &["restore", file, "--force"]).await;
    assert!(refusal.contains("backup damaged at byte"), "{refusal}");
    leave(replicas).await;
}

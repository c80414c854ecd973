//! Whence predicted prefixes are known, as each replica counts them.

use super::*;

/// Returns the predicted tokens that a replica counted: from its own requests, from peers, and from
/// before its restart.
async fn counted(http: &Http, at: &Addresses) -> [u64; 3] {
    let page = http.metrics(at.admin).await;
    ["here", "peer", "before-restart"].map(|learnt| {
        let name = "quorate_prefix_predicted_tokens_total{";
        let label = format!("learnt=\"{learnt}\"}} ");
        let samples = page.lines().filter(|line| line.starts_with(name));
        let of = samples.filter_map(|line| line.split_once(&label)?.1.parse::<u64>().ok());
        of.sum()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn predicted_tokens_are_counted_by_whence_they_are_known() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;
    for nth in [0, 1, 1] {
        http.chat(&at[nth], "ada", "Is the lamp lit?").await;
        http.quiet(&at[nth]).await;
        http.agree(&at).await;
    }
    assert_eq!(counted(&http, &at[0]).await, [0, 0, 0]);
    let [here, peer, before] = counted(&http, &at[1]).await;
    assert!(
        here > 0 && here == peer && before == 0,
        "{here} {peer} {before}"
    );

    let gone = replicas.remove(1).leave().await;
    replicas.insert(1, Replica::again(gone));
    http.ready(&at).await;
    http.chat(&at[1], "ada", "Is the lamp lit?").await;
    http.quiet(&at[1]).await;
    assert_eq!(counted(&http, &at[1]).await, [0, 0, peer]);
    leave(replicas).await;
}

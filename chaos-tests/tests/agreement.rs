//! Explanations, decisions and their records agree: a bounded run of the `agreement` program.

use anyhow::ensure;
use chaos_tests::processes::access::is_secure_by_default;
use chaos_tests::processes::agreement;

/// Number of requests: about twenty per policy.
const REQUESTS: u64 = 300;

#[tokio::test(flavor = "multi_thread")]
async fn explanations_match_decisions_and_records() -> anyhow::Result<()> {
    let tallies = agreement::run(REQUESTS, 7, is_secure_by_default()).await?;
    for policy in state::policy::POLICY_NAMES {
        let tally = tallies.get(policy).copied().unwrap_or_default();
        ensure!(
            tally.agreed > 0,
            "no decision of {policy} was the explained one: {tally:?}"
        );
    }
    Ok(())
}

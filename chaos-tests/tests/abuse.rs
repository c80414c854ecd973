//! A bounded run of the program `abuse`: all attacks on three replicas with TLS and API keys, and
//! the attacks in `IN_THE_CLEAR` also without.

use anyhow::ensure;
use chaos_tests::hostile::abuse::{self, AbuseOptions, AttackKind};

/// Attacks on code that runs before or without TLS.
const IN_THE_CLEAR: &[AttackKind] = &[
    AttackKind::RapidReset,
    AttackKind::Continuations,
    AttackKind::UnreadAnswers,
    AttackKind::ForbiddenFields,
    AttackKind::SlowHellos,
    AttackKind::Crowd,
    AttackKind::Smuggling,
    AttackKind::Injection,
];

/// Runs the attacks one after the other: the honest client must be served during each.
async fn attacked(is_secure: bool, only: &[AttackKind]) -> anyhow::Result<()> {
    let options = AbuseOptions {
        is_secure,
        only: only.to_vec(),
        scale: 1,
    };
    let reports = abuse::run(&options, |report| println!("{report:?}")).await?;
    let violated: Vec<_> = reports
        .iter()
        .filter_map(|report| Some((report.kind.name(), report.violation.as_ref()?)))
        .collect();
    ensure!(violated.is_empty(), "{violated:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn attacks_leave_no_lasting_effect() -> anyhow::Result<()> {
    attacked(true, &[]).await?;
    attacked(false, IN_THE_CLEAR).await
}

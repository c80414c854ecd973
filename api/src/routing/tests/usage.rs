//! Tests which sources requests have in the usage.

use super::*;

#[test]
fn models_that_no_backend_names_are_one_source() {
    let bench = Bench::new(1);
    let mut spec = super::super::fixture::spec(1, None);
    spec.models = vec!["*".to_owned()];
    bench.admin(Command::PutBackend(spec));
    bench.router.decider().backends.assume(Slot(1), &HEALTHY);
    let identity = bench.identify("hello");
    for model in ["made-up", "m", "invented", "", "made-up"] {
        let ask = RoutingRequest {
            model,
            ..ask(&identity, &[])
        };
        let decision = bench.decide_on(&ask).unwrap();
        let attempt = bench.dispatch(&decision, &ask);
        attempt.end(AttemptEnd::Finished, Instant::now());
        bench.flush();
    }
    let view = bench.router.view.usage();
    let row = |row: state::usage::UsageRow<'_>| {
        let source = row.source.unwrap();
        (source.model.clone(), row.usage.requests)
    };
    let mut rows: Vec<_> = view.rows().map(row).collect();
    rows.sort();
    assert_eq!(rows, [("m".to_owned(), 1), ("other".to_owned(), 4)]);
}

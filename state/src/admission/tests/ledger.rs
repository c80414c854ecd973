//! Tests of the ledger: examples, and that every user pays exactly for what was used.

use proptest::prelude::*;

use super::*;
use crate::charge::Charge;
use crate::quotas::PendingUse;

const ALICE: UserKey = UserKey(7);

fn used(input_uncached: u64, input_cached: u64, output: u64) -> TokenDelta {
    TokenDelta {
        input_uncached,
        input_cached,
        output,
    }
}

fn pricing(charge: ChargeInput) -> Pricing {
    Pricing {
        charge,
        ..Pricing::default()
    }
}

#[test]
fn unused_advance_becomes_credit_for_the_next_request() {
    let mut ledger = CreditLedger::default();
    let pricing = Pricing::default();
    // The estimate is 100. The usage is 70 uncached, 30 cached and 10 output tokens.
    let (mut advance, ahead) = ledger.open(ALICE, &used(100, 0, 0), &pricing);
    assert_eq!((pricing.due(&ahead), advance.left()), (100, 100));
    let input = ledger.settle(ALICE, &mut advance, &used(70, 30, 0), &pricing);
    assert_eq!((pricing.due(&input), input.settled), (0, 70));
    let output = ledger.settle(ALICE, &mut advance, &used(0, 0, 10), &pricing);
    assert_eq!(pricing.due(&output), 20, "input's advance is not output's");
    ledger.close(ALICE, advance);
    assert_eq!(ledger.credit_of(ALICE), 30);
    let (advance, ahead) = ledger.open(ALICE, &used(50, 0, 0), &pricing);
    assert_eq!((pricing.due(&ahead), advance.left()), (20, 50));
    assert_eq!(ledger.credit_of(ALICE), 0);
}

#[test]
fn low_predictions_are_charged_later_and_high_ones_refunded() {
    let mut ledger = CreditLedger::default();
    let pricing = Pricing::default();
    let (mut advance, ahead) = ledger.open(ALICE, &used(10, 0, 5), &pricing);
    assert_eq!(pricing.due(&ahead), 20);
    let more = ledger.settle(ALICE, &mut advance, &used(10, 0, 8), &pricing);
    assert_eq!(pricing.due(&more), 6);
    ledger.close(ALICE, advance);
    assert_eq!(ledger.credit_of(ALICE), 0);
    let (mut advance, _) = ledger.open(ALICE, &used(10, 0, 50), &pricing);
    ledger.settle(ALICE, &mut advance, &used(10, 0, 8), &pricing);
    ledger.close(ALICE, advance);
    assert_eq!(ledger.credit_of(ALICE), 84);
}

#[test]
fn a_prediction_can_be_raised() {
    let mut ledger = CreditLedger::default();
    let pricing = Pricing::default();
    let (mut advance, _) = ledger.open(ALICE, &used(10, 0, 5), &pricing);
    ledger.settle(ALICE, &mut advance, &used(10, 0, 5), &pricing);
    let (unused, _) = ledger.open(ALICE, &used(3, 0, 0), &pricing);
    ledger.close(ALICE, unused);
    let more = ledger.raise(ALICE, &mut advance, 4, &pricing);
    assert_eq!(
        (pricing.due(&more), advance.left()),
        (5, 8),
        "credit pays first"
    );
    let output = ledger.settle(ALICE, &mut advance, &used(0, 0, 3), &pricing);
    assert_eq!(pricing.due(&output), 0);
    ledger.close(ALICE, advance);
    assert_eq!(ledger.credit_of(ALICE), 2);
}

#[test]
fn ledger_charges_the_prompt_tokens_that_settings_name() {
    let table = [
        (ChargeInput::Uncached, 30),
        (ChargeInput::Full, 130),
        (ChargeInput::Discounted, 40),
    ];
    for (charge, price) in table {
        assert_eq!(pricing(charge).input(30, 100), price, "{charge:?}");
    }
    let forged = Charge {
        input_uncached: u64::MAX,
        input_cached: u64::MAX,
        output: u64::MAX,
        advance: u64::MAX,
        settled: u64::MAX,
        ..Charge::default()
    };
    let costly = Pricing {
        prices: crate::users::FairnessSettings {
            input_price: 1000,
            output_price: 1000,
        },
        charge: ChargeInput::Full,
    };
    assert_eq!(costly.due(&forged), crate::users::CHARGE_TOKENS_MAX);
}

#[test]
fn pending_charges_count_until_they_are_applied() {
    let pricing = Pricing::default();
    let mut pending = PendingCharges::default();
    let first = Charge {
        user: ALICE,
        started: 2,
        queued: 3,
        dequeued: 1,
        advance: 50,
        ..Charge::default()
    };
    let second = Charge {
        user: ALICE,
        output: 10,
        ended: 1,
        ..Charge::default()
    };
    pending.add(&first, &pricing);
    pending.add(&second, &pricing);
    let published = UserFigures {
        counter_milli: 5000,
        weight_milli: 2000,
        in_flight: 1,
        ..UserFigures::default()
    };
    let figures = pending.on_top(ALICE, published);
    assert_eq!(figures.counter_milli, 5000 + 35_000);
    assert_eq!((figures.in_flight, figures.waiting), (2, 2));
    assert_eq!(
        pending.used(ALICE),
        PendingUse {
            requests: 5,
            dequeued: 1,
            ended: 1,
            tokens: 10,
            billed_tokens: 10,
        }
    );
    let mut both = first;
    both.add(&second);
    pending.settle(&both, &pricing);
    assert!(pending.is_empty());
    assert_eq!(pending.on_top(ALICE, published), published);
}

proptest! {
    /// For any estimates and usage, the charges equal the usage plus open advances and credit.
    #[test]
    fn each_user_is_charged_exactly_its_usage(
        requests in prop::collection::vec(
            (0_u64..200, 0_u64..200, 0_u64..200, prop::collection::vec((0_u64..80, 0_u64..80, 0_u64..80), 0..4), any::<bool>()),
            1..40,
        ),
        is_full: bool,
    ) {
        let pricing = pricing(if is_full { ChargeInput::Full } else { ChargeInput::Uncached });
        let mut ledger = CreditLedger::default();
        let (mut charged, mut real, mut open) = (0, 0, 0);
        let mut all = Charge::default();
        let mut last = 0;
        for (uncached, cached, output, comes, is_closed) in requests {
            let (mut advance, charge) = ledger.open(ALICE, &used(uncached, cached, output), &pricing);
            all.add(&charge);
            charged += pricing.due(&charge);
            for (uncached, cached, output) in comes {
                let used = used(uncached, cached, output);
                let charge = ledger.settle(ALICE, &mut advance, &used, &pricing);
                real += pricing.input(uncached, cached) + pricing.output(output);
                charged += pricing.due(&charge);
                all.add(&charge);
            }
            if is_closed {
                ledger.close(ALICE, advance);
            } else {
                open += advance.left();
            }
            prop_assert!(charged >= last, "a counter fell");
            last = charged;
        }
        prop_assert_eq!(charged, real + open + ledger.credit_of(ALICE));
        // The sum of the charges over a flush interval costs the same.
        prop_assert_eq!(pricing.due(&all), charged);
    }
}

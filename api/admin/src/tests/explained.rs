//! What `explain` tells of admission: limits, the queue, and the refusal.

use state::admission::{AdmissionSettings, Concurrency};
use state::budgets::Budget;
use state::command::{Charge, Item, UserSettings};
use state::quotas::UserLimits;

use super::*;

/// Sets a user's settings and charges the user with one request of 20 tokens, in flight.
fn charged(bench: &Bench, name: &str, settings: UserSettings) {
    let key = state::prefix::user_key(1, name);
    bench.apply(Command::ConfigureUser {
        name: name.to_owned(),
        settings: Box::new(settings),
    });
    let charge = Item::Charge(Charge {
        user: key,
        input_uncached: 20,
        started: 1,
        ..Charge::default()
    });
    super::reads::batch(bench, vec![charge]);
}

async fn explained(bench: &Bench, user: &str) -> Value {
    let asked = json!({
        "path": "/v1/completions",
        "user": user,
        "body": {"model": "m", "prompt": "the quick brown fox jumps over the lazy dog"},
    });
    let asked = asked.to_string();
    bench.call("POST", "/admin/v1/explain", &asked).await.json()
}

#[tokio::test]
async fn a_user_over_a_limit_is_refused_as_by_the_data_plane() {
    let bench = Bench::with_backends();
    let limits = UserLimits {
        requests: Some(1),
        window_ms: Some(86_400_000),
        ..UserLimits::default()
    };
    let budget = Budget {
        day: Some(20),
        month: None,
    };
    let limited = UserSettings {
        limits: Some(limits),
        ..UserSettings::default()
    };
    let on_budget = UserSettings {
        budget: Some(budget),
        ..UserSettings::default()
    };
    charged(&bench, "ada", limited);
    charged(&bench, "bo", on_budget);
    for (user, code, kind, of) in [
        ("ada", "rate_limit_exceeded", "requests", 1),
        ("bo", "insufficient_quota", "day-budget", 20),
    ] {
        let explained = explained(&bench, user).await;
        assert_eq!(explained["refusal"]["status"], 429, "{explained}");
        assert_eq!(explained["refusal"]["code"], code);
        assert!(explained["refusal"]["retry_after_s"].as_u64() > Some(0));
        assert_eq!(explained["choice"], Value::Null);
        let limit = &explained["admission"]["limits"][0];
        assert_eq!(
            (&limit["limit"], &limit["of"], &limit["left"]),
            (&json!(kind), &json!(of), &json!(0)),
            "{explained}"
        );
        assert_eq!(explained["admission"]["would_wait"], false);
    }
    let other = explained(&bench, "cy").await;
    assert_eq!(
        (&other["choice"], &other["refusal"]),
        (&json!("gpu-1"), &Value::Null)
    );
    assert_eq!(other["admission"]["limits"], json!([]));
}

#[tokio::test]
async fn a_request_without_room_would_wait_in_its_place() {
    let bench = Bench::with_backends();
    bench.apply(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(1),
        ..AdmissionSettings::default()
    }));
    let backend = bench.admin.view.registry().backends[0].handle;
    let running = bench.admin.load.begin(backend, 0);
    let waits = explained(&bench, "ada").await;
    assert_eq!(waits["refusal"], Value::Null, "{waits}");
    assert_eq!(waits["no_choice"], "at-limit");
    assert_eq!(waits["admission"]["would_wait"], true);
    assert_eq!(waits["admission"]["place"], 1);
    drop(running);
    let goes = explained(&bench, "ada").await;
    assert_eq!(goes["choice"], "gpu-1", "{goes}");
    assert_eq!(goes["admission"]["would_wait"], false);
    assert_eq!(goes["admission"]["place"], Value::Null);
}

#[tokio::test]
async fn a_model_without_backends_is_refused_as_by_the_data_plane() {
    let bench = Bench::new();
    let explained = explained(&bench, "ada").await;
    assert_eq!(explained["refusal"]["status"], 404, "{explained}");
    assert_eq!(explained["refusal"]["code"], "model_not_found");
    assert_eq!(explained["no_choice"], "unknown-model");
}

#[tokio::test]
async fn explain_tells_which_session_a_request_names() {
    let bench = Bench::with_backends();
    let asked = async |headers: Value, user: &str| {
        let asked = json!({
            "path": "/v1/completions",
            "headers": headers,
            "user": user,
            "body": {"model": "m", "prompt": "p", "prompt_cache_key": "k"},
        });
        let asked = asked.to_string();
        bench.call("POST", "/admin/v1/explain", &asked).await.json()
    };
    let child = json!({"x-quorate-session": "c", "x-quorate-parent-session": "s"});
    let (child, root) = (
        asked(child, "ada").await,
        asked(json!({"session-id": "s"}), "ada").await,
    );
    let id = |answer: &Value| answer["session"]["id"].as_str().unwrap().to_owned();
    assert_eq!(child["session"]["parent"], id(&root));
    assert_eq!(child["session"]["parent_name"], "s");
    let expected = json!({
        "id": id(&root), "name": "s", "parent": null, "parent_name": null, "final": false,
        "source": "header:session-id",
    });
    assert_eq!(root["session"], expected);
    assert!(id(&root).len() == 16 && id(&root).bytes().all(|it| it.is_ascii_hexdigit()));
    let other = asked(json!({"session-id": "s"}), "bo").await;
    assert_ne!(id(&other), id(&root), "another user's");
    let long = asked(json!({"session-id": "s".repeat(257)}), "ada").await;
    assert_eq!(long["session"]["source"], "body:prompt_cache_key");
    assert_eq!(long["session_names_refused"], json!(["header:session-id"]));
}

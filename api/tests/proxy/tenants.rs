//! Users whose cached blocks are kept apart: what engines receive, and which engines receive
//! requests (I111).

use api::proxy::ProxySettings;
use serde_json::{Value, json};
use state::caches::CacheScope;
use state::command::{BackendSpec, Command, UserSettings};

use super::client::{Answer, chat, post};
use super::engine::{Engine, json as answer_json};
use super::fleet::{Fleet, PATIENT};

async fn engine() -> Engine {
    Engine::always(vec![answer_json("200 OK", "{}")]).await
}

/// Starts a fleet of these engines, of which the numbered ones support salts.
async fn fleet(
    engines: &[&Engine],
    salted: &[usize],
    change: impl FnOnce(&mut ProxySettings),
) -> Fleet {
    let fleet = Fleet::start_with(engines, PATIENT, change).await;
    for (number, engine) in engines.iter().enumerate() {
        let knows = salted.contains(&number).to_string();
        fleet.apply(Command::PutBackend(BackendSpec {
            labels: [("cache-salt".to_owned(), knows)].into(),
            ..engine.spec(number)
        }));
    }
    for (user, scope) in [
        ("ada", CacheScope::Own),
        ("bob", CacheScope::Group("team".to_owned())),
        ("carl", CacheScope::Group("team".to_owned())),
    ] {
        let settings = UserSettings {
            cache: Some(scope),
            ..UserSettings::default()
        };
        fleet.apply(Command::configure_user(user, settings));
    }
    fleet
}

fn of(user: &str, request: &str) -> String {
    let header = format!("x-quorate-user: {user}\r\nhost: ");
    request.replacen("host: ", &header, 1)
}

async fn ask(fleet: &Fleet, user: &str, fields: &str) -> Answer {
    fleet.client().await.ask(of(user, &chat(fields))).await
}

/// Returns the body of the last request that the engine received.
fn body(engine: &Engine) -> String {
    let request = engine.requests().pop().unwrap();
    request.split_once("\r\n\r\n").unwrap().1.to_owned()
}

fn salt(engine: &Engine) -> Option<String> {
    let body: Value = serde_json::from_str(&body(engine)).unwrap();
    body["cache_salt"].as_str().map(str::to_owned)
}

#[tokio::test]
async fn engines_get_only_the_salt_of_the_users_scope() {
    let engine = engine().await;
    let fleet = fleet(&[&engine], &[0], |_| {}).await;
    let mut salts = Vec::new();
    for (user, fields) in [
        ("ada", ""),
        ("bob", ""),
        ("ada", r#","cache_salt":"x""#),
        ("ada", r#","stream":true"#),
        ("carl", ""),
        ("ada", r#","cache_salt":null"#),
        ("ada", r#","cache_salt":"y","cache\u005fsalt":"x""#),
        (
            "ada",
            r#","cache_salt":"x","stream":true,"stream_options":{}"#,
        ),
    ] {
        let answer = ask(&fleet, user, fields).await;
        assert_eq!(answer.status, 200, "{user}{fields}: {}", answer.body);
        assert_eq!(body(&engine).matches("salt").count(), 1, "{user}{fields}");
        salts.push(salt(&engine).unwrap());
    }
    let [own, team, with_x, streamed, same_team, null, twice, options] = &salts[..] else {
        panic!("{salts:?}");
    };
    assert_eq!(
        [own, own],
        [streamed, null],
        "the client's own says nothing"
    );
    assert_eq!([with_x, with_x], [twice, options], "the last one counts");
    assert_eq!(team, same_team);
    assert!(own != team && own != with_x && team != with_x, "{salts:?}");
    // Requests of users who share are unchanged, with and without a client's salt.
    ask(&fleet, "eve", "").await;
    assert_eq!(salt(&engine), None);
    ask(&fleet, "eve", &format!(r#","cache_salt":"{own}""#)).await;
    assert_eq!(salt(&engine).as_ref(), Some(own), "as the client wrote it");
    fleet.is_idle().await;
}

#[tokio::test]
async fn prompts_are_hashed_in_the_users_scope() {
    let engine = engine().await;
    let fleet = fleet(&[&engine], &[0], |_| {}).await;
    let text = "x".repeat(1000);
    let explained = async |user: &str| {
        let body = json!({"model": "m", "prompt": text});
        let asked = json!({"path": "/v1/completions", "user": user, "body": body});
        let (status, answer) = fleet.call("POST", "/admin/v1/explain", &asked).await;
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let request = |user| {
        let body = json!({"model": "m", "prompt": text}).to_string();
        of(
            user,
            &post(
                "/v1/completions",
                "content-type: application/json\r\n",
                &body,
            ),
        )
    };
    let client = async |user| fleet.client().await.ask(request(user)).await;
    assert_eq!(client("bob").await.header("x-quorate-prefix"), Some("0/62"));
    fleet.is_idle().await;
    fleet.flush().await;
    for (user, matched) in [("bob", 62), ("carl", 62), ("ada", 0), ("eve", 0)] {
        let answer = explained(user).await;
        let found = &answer["backends"][0]["matched"];
        assert_eq!(found, &json!(matched), "{user}: {answer}");
        assert!(!answer.to_string().contains("xxxx"), "{answer}");
    }
    let (_, decisions) = fleet.call("GET", "/admin/v1/decisions", &json!({})).await;
    let decisions = decisions.to_string();
    assert!(decisions.contains("bob") && !decisions.contains("xxxx"));
    assert!(!decisions.contains(&salt(&engine).unwrap()), "{decisions}");
}

#[tokio::test]
async fn an_isolated_user_is_not_routed_to_unsalted_engines() {
    let (mixing, keeping) = (engine().await, engine().await);
    let both = fleet(&[&mixing, &keeping], &[1], |_| {}).await;
    for _ in 0..4 {
        assert_eq!(ask(&both, "ada", "").await.status, 200);
    }
    assert_eq!((mixing.requests().len(), keeping.requests().len()), (0, 4));
    let (_, shown) = both
        .call("GET", "/admin/v1/users/defaults", &json!({}))
        .await;
    assert_eq!(shown["unsalted_backends"], json!(["e0"]), "{shown}");

    let alone = fleet(&[&mixing], &[], |_| {}).await;
    let answer = ask(&alone, "ada", "").await;
    answer.refuses(503, "no_isolating_backend");
    assert!(answer.header("retry-after").is_some());
    assert_eq!(ask(&alone, "eve", "").await.status, 200);
    // Nor does a path on which engines ignore salts.
    let messages = r#"{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]}"#;
    let messages = post(
        "/v1/messages",
        "content-type: application/json\r\n",
        messages,
    );
    for (fleet, user, status) in [(&both, "ada", 403), (&both, "eve", 200)] {
        let answer = fleet.client().await.ask(of(user, &messages)).await;
        assert_eq!(answer.status, status, "{user}: {}", answer.body);
    }
    // Requests that compute nothing need no salt.
    let count = post("/tokenize", "", r#"{"model":"m","prompt":"x"}"#);
    assert_eq!(
        alone.client().await.ask(of("ada", &count)).await.status,
        200
    );
}

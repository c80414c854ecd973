//! The commands of docs/guide/security.md, run from scratch on a terminal of 80 columns (I112).

use std::process::Command;

use tempfile::TempDir;

use super::process::{Engine, free, program};
use super::terminal::on_terminal;

/// Returns the commands of the section, as in the guide.
fn commands() -> String {
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/security.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let (_, section) = guide.split_once("## In ten commands\n").unwrap();
    let (_, block) = section.split_once("```sh\n").unwrap();
    block.split_once("```").unwrap().0.to_owned()
}

/// Counts the commands in a script. Loops and here-documents count as one.
fn count(script: &str) -> usize {
    let (mut commands, mut depth, mut goes_on, mut in_file) = (0, 0_usize, false, false);
    for line in script.lines() {
        if in_file {
            in_file = line != "END";
            continue;
        }
        commands += usize::from(depth == 0 && !goes_on);
        goes_on = line.ends_with('\\');
        in_file = line.contains("<<END");
        let words = || line.split([' ', ';']);
        depth += words().filter(|word| *word == "do").count();
        depth -= words().filter(|word| *word == "done").count();
    }
    commands
}

/// Commands that run after those of the guide, and check what the guide promises.
const CHECKS: &str = r#"
echo; echo checks
quorate user delete globex --token-file grafana.token || echo "viewer: $?"
ask() {
  curl -s --retry 9 --cacert certs/ca.crt https://127.0.0.1:8083/v1/completions \
    -H "$1" -H 'content-type: application/json' -d "{\"model\": \"emulated\",
    \"prompt\": \"$PROMPT\", \"max_tokens\": 1}" |
    grep -o 'cached_tokens":[0-9]*\|invalid_api_key' | sed "s/^/$2: /"
}
PROMPT=$(printf 'Tell me about quorums. %.0s' $(seq 40))
ask "x: y" nobody
ask "authorization: Bearer $(cat acme.key)" first
ask "authorization: Bearer $(cat globex.key)" other
ask "authorization: Bearer $(cat acme.key)" again
curl -s http://127.0.0.1:8182/admin/v1/cluster | grep -o 'this port requires TLS'
echo end
"#;

#[test]
fn the_guides_ten_commands_set_up_roles_and_tenants() {
    let (commands, engine) = (commands(), Engine::start());
    assert_eq!(count(&commands), 10, "{commands}");
    let dir = TempDir::new().unwrap();
    let program_dir = std::path::Path::new(env!("CARGO_BIN_EXE_quorate")).parent();
    let mut script = format!("set -e\ntrap 'kill $(jobs -p)' EXIT\n{commands}{CHECKS}");
    // The user who runs the tests may use the guide's ports, and tests run concurrently.
    let ports = free::<9>().map(|address| address.port().to_string());
    for (nth, port) in ports.iter().enumerate() {
        let (listener, replica) = (nth / 3, nth % 3 + 1);
        script = script.replace(&format!(":8{listener}8{replica}"), &format!(":{port}"));
    }
    // The config has the ports of its replica as a variable.
    for (listener, name) in ["data", "admin", "peer"].iter().enumerate() {
        let of_replica = &ports[listener * 3..][..3];
        let from = format!("{name} = \"127.0.0.1:8{listener}8$i\"");
        let to = format!(
            "{name} = \"127.0.0.1:$(echo {} | cut -d ' ' -f $i)\"",
            of_replica.join(" ")
        );
        assert!(script.contains(&from), "{from}");
        script = script.replace(&from, &to);
    }
    script = script.replace("http://127.0.0.1:9001", &engine.url);
    let file = dir.path().join("commands.sh");
    std::fs::write(&file, &script).unwrap();
    let mut bash = program("timeout", &["90", "bash", "commands.sh"]);
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", program_dir.unwrap().display());
    let bash: &mut Command = bash.env("PATH", path).current_dir(dir.path());
    let told = on_terminal(std::mem::replace(bash, Command::new("true")), 80);
    let logs = |nth: usize| std::fs::read_to_string(dir.path().join(format!("n{nth}.log")));
    let context = || format!("{told}\n{:?}", [1, 2, 3].map(logs));
    let Some((typed, checks)) = told.split_once("\nchecks\n") else {
        panic!("{}", context());
    };
    assert!(typed.contains("state    ready"), "{}", context());
    assert!(typed.contains("user acme: set") && typed.contains("user globex: set"));
    assert!(typed.contains("\"object\":\"text_completion\""), "{typed}");
    assert!(
        checks.contains("expected the role operator, found viewer"),
        "{checks}"
    );
    let told: Vec<&str> = checks.lines().filter(|line| line.contains(": ")).collect();
    let is_told = |text: &str| told.iter().any(|line| line.contains(text));
    assert!(
        is_told("viewer: 1") && is_told("nobody: invalid_api_key"),
        "{checks}"
    );
    for fresh in ["first: cached_tokens\":0", "other: cached_tokens\":0"] {
        assert!(is_told(fresh), "{checks}");
    }
    assert!(
        is_told("again: cached_tokens\":") && !is_told("again: cached_tokens\":0"),
        "{checks}"
    );
    assert!(
        checks.contains("this port requires TLS") && checks.contains("\nend"),
        "{checks}"
    );
}

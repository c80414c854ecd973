//! Tokens, roles and `insecure` through the program.

use std::path::Path;

use super::process::{Process, Replica, free, get, program, send};
use super::{quorate, text};

/// Creates a token. Returns its secret and its line for the tokens file.
pub(super) fn token(name: &str, role: &str) -> (String, String) {
    let output = quorate(&["token", "create", "--role", role, name]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stdout);
    let part = |what: &str| {
        let line = told.lines().find_map(|line| line.strip_prefix(what));
        line.unwrap().trim().to_owned()
    };
    (part("token"), part("line"))
}

/// Starts a replica with these lines in its tokens file.
fn guarded(lines: &[&str], more: &str) -> Replica {
    let [peer] = free();
    let dir = tempfile::TempDir::new().unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, lines.join("\n")).unwrap();
    let config = format!("[admin]\ntokens_file = {tokens:?}\n{more}");
    let replica = Replica::start_in(dir, 1, peer, &config, |command| command);
    replica.process.says(&["accepting requests"]);
    replica
}

fn status(replica: &Replica, (method, path): (&str, &str), secret: Option<&str>) -> u16 {
    let header = secret.map(|it| format!("authorization: Bearer {it}\r\n"));
    let header = header.unwrap_or_default();
    let answer = send(replica.admin, method, path, &header, None);
    answer.unwrap().status
}

/// Runs a command for this replica with a token of this file.
fn command(replica: &Replica, args: &[&str], token_file: &str) -> (bool, String) {
    let url = format!("http://{}", replica.admin);
    let mut command = program(env!("CARGO_BIN_EXE_quorate"), args);
    command
        .args(["--admin", &url])
        .env("QUORATE_TOKEN_FILE", token_file);
    let output = command.output().unwrap();
    let told = format!("{}{}", text(&output.stdout), text(&output.stderr));
    (output.status.success(), told)
}

#[test]
fn tokens_grant_the_operations_of_their_role() {
    let (viewer, viewer_line) = token("ada", "viewer");
    let (admin, admin_line) = token("root@ops", "admin");
    let replica = guarded(&["# who may", &viewer_line, &admin_line], "");
    assert_eq!(status(&replica, ("GET", "/livez"), None), 200);
    assert_eq!(
        status(&replica, ("GET", "/"), None),
        200,
        "the console is open"
    );
    for path in ["/admin/v1/cluster", "/metrics", "/admin/v1", "/none"] {
        assert_eq!(status(&replica, ("GET", path), None), 401, "{path}");
    }
    assert_eq!(status(&replica, ("GET", "/metrics"), Some(&viewer)), 200);
    let snapshot = ("POST", "/admin/v1/cluster/snapshot");
    assert_eq!(status(&replica, snapshot, Some(&viewer)), 403);
    assert_eq!(status(&replica, snapshot, Some(&admin)), 200);
    replica.process.says(&[
        "admin call",
        "root@ops",
        "/admin/v1/cluster/snapshot",
        "127.0.0.1",
    ]);

    let file = replica.file("ada.token");
    std::fs::write(&file, format!("{viewer}\n")).unwrap();
    let (is_fine, told) = command(&replica, &["user"], &file);
    assert!(is_fine, "{told}");
    let backup = replica.file("backup");
    let (is_fine, told) = command(&replica, &["backup", "--local", &backup], &file);
    assert!(
        !is_fine && told.contains("expected the role admin"),
        "{told}"
    );
    std::fs::write(&file, &admin).unwrap();
    let (is_fine, told) = command(&replica, &["backup", "--local", &backup], &file);
    assert!(is_fine, "{told}");
    std::fs::write(&file, "wrong").unwrap();
    let (is_fine, told) = command(&replica, &["user"], &file);
    assert!(!is_fine && told.contains("--token-file"), "{told}");

    // Neither secrets nor their hashes are in any file.
    let bytes = std::fs::read(&backup).unwrap();
    let hash = admin_line.rsplit(':').next().unwrap();
    let config = replica.file("config.toml");
    let printed = quorate(&["config", "print", "--config", &config]);
    let printed = text(&printed.stdout).to_owned();
    assert!(printed.contains("tokens_file"), "{printed}");
    for told in [
        String::from_utf8_lossy(&bytes).as_ref(),
        &printed,
        &replica.process.log(),
    ] {
        for secret in [&admin[..], &viewer, hash] {
            assert!(!told.contains(secret), "{told}");
        }
    }
}

#[test]
fn tokens_are_reloaded_on_sighup_and_periodically() {
    let (first, first_line) = token("a", "viewer");
    let (second, second_line) = token("b", "viewer");
    let (third, third_line) = token("c", "viewer");
    let replica = guarded(&[&first_line], "");
    let asked = ("GET", "/admin/v1/cluster");
    assert_eq!(status(&replica, asked, Some(&first)), 200);
    let tokens = replica.file("tokens");
    std::fs::write(&tokens, second_line).unwrap();
    replica.process.signal("HUP");
    replica.process.says(&["reloaded the config"]);
    assert_eq!(status(&replica, asked, Some(&second)), 200);
    assert_eq!(status(&replica, asked, Some(&first)), 401);
    std::fs::write(&tokens, "nonsense").unwrap();
    replica.process.says(&["keeping the old ones", "line 1"]);
    assert_eq!(status(&replica, asked, Some(&second)), 200);
    std::fs::write(&tokens, third_line).unwrap();
    super::process::until("the file is followed", || {
        status(&replica, asked, Some(&third)) == 200
    });
}

#[test]
fn a_token_can_be_written_to_a_file() {
    let dir = tempfile::TempDir::new().unwrap();
    let out = dir.path().join("t");
    let args = ["token", "create", "--role", "operator", "bot", "--out"];
    let args = [&args[..], &[out.to_str().unwrap()]].concat();
    let output = quorate(&args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let line = text(&output.stdout);
    assert!(
        line.starts_with("bot:operator:") && line.lines().count() == 1,
        "{line}"
    );
    let secret = std::fs::read_to_string(&out).unwrap();
    assert!(
        secret.starts_with("qat-") && !line.contains(secret.trim()),
        "{secret}"
    );
    assert_eq!(mode(&out), 0o600);
    assert_eq!(
        quorate(&args).status.code(),
        Some(1),
        "the file is there already"
    );
    let wrong = quorate(&["token", "create", "--role", "root", "bot"]);
    assert_eq!(wrong.status.code(), Some(2), "{}", text(&wrong.stderr));
}

fn mode(file: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(file).unwrap().permissions().mode() & 0o777
}

/// Returns a config whose admin listener is not on loopback.
fn reached(dir: &Path, insecure: &str) -> (String, std::net::SocketAddr) {
    let [data, admin, peer] = free();
    let data_dir = dir.join("data");
    let text = format!(
        "{insecure}\n[node]\nid = 1\ndata_dir = {data_dir:?}\n[listen]\ndata = \"{data}\"\n\
         admin = \"0.0.0.0:{}\"\npeer = \"{peer}\"\n",
        admin.port()
    );
    (text, admin)
}

#[test]
fn a_reachable_listener_requires_tokens_or_insecure() {
    let dir = tempfile::TempDir::new().unwrap();
    let (text_of, _) = reached(dir.path(), "");
    let file = dir.path().join("n.toml");
    std::fs::write(&file, text_of).unwrap();
    let path = file.to_str().unwrap();
    for args in [
        &["serve", "--config", path][..],
        &["config", "check", "--config", path],
    ] {
        let output = quorate(args);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        let words: Vec<_> = told.split_whitespace().collect();
        let told = words.join(" ");
        assert!(told.contains("admin.tokens_file is not set"), "{told}");
        assert!(told.contains("insecure = true"), "{told}");
    }
}

#[test]
fn insecure_mode_is_reported_in_log_status_and_metrics() {
    for (line, flag) in [("insecure = true", None), ("", Some("--insecure"))] {
        let dir = tempfile::TempDir::new().unwrap();
        let (text_of, admin) = reached(dir.path(), line);
        let file = dir.path().join("n.toml");
        std::fs::write(&file, text_of).unwrap();
        let mut command = program(env!("CARGO_BIN_EXE_quorate"), &["serve", "--config"]);
        command.arg(&file).args(flag);
        let process = Process::start(command, dir.path().join("log"));
        process.says(&["WARN", "insecure"]);
        process.says(&["accepting requests"]);
        let ready = get(admin, "/readyz").unwrap().json();
        let warning = ready["warnings"][0].as_str().unwrap();
        assert!(warning.starts_with("insecure: "), "{ready}");
        let url = format!("http://{admin}");
        let status = quorate(&["status", "--admin", &url]);
        assert!(text(&status.stdout).contains("insecure: "), "{status:?}");
        let metrics = get(admin, "/metrics").unwrap().body;
        assert!(metrics.contains("\nquorate_insecure 1\n"), "{metrics}");
    }
    let [peer] = free();
    let secure = Replica::start(1, peer, "");
    secure.process.says(&["accepting requests"]);
    let metrics = get(secure.admin, "/metrics").unwrap().body;
    assert!(metrics.contains("\nquorate_insecure 0\n"), "{metrics}");
    assert!(!secure.process.log().contains("insecure"));
}

//! Output for people: on a terminal of 80 columns, without colours, in a pipe.

use std::fs::File;
use std::io::{Read, Write as _};
use std::process::{Child, Command, Output};
use std::sync::mpsc::{Receiver, channel};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;
use tempfile::TempDir;

use super::process::{Engine, Replica, free, program, until};

/// Starts a command on a terminal with 24 lines and this many columns; returns the other end.
fn start_on_terminal(mut command: Command, columns: u16) -> (Child, File) {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let mut options = File::options();
    let terminal = options.read(true).write(true);
    let terminal = terminal.open(name.to_str().unwrap()).unwrap();
    let size = Winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&terminal, size).unwrap();
    command.env_remove("COLUMNS").env_remove("NO_COLOR");
    command.stdin(terminal.try_clone().unwrap());
    command.stdout(terminal.try_clone().unwrap());
    // The terminal's end is read only when no process has it open, so drop the command here.
    let child = command.stderr(terminal).spawn().unwrap();
    (child, File::from(controller))
}

/// Returns the output of a command on a terminal with this many columns.
pub(super) fn on_terminal(command: Command, columns: u16) -> String {
    let (mut child, mut controller) = start_on_terminal(command, columns);
    let mut written = Vec::new();
    let mut bytes = [0; 4096];
    while let Ok(read @ 1..) = controller.read(&mut bytes) {
        written.extend_from_slice(&bytes[..read]);
    }
    child.wait().unwrap();
    String::from_utf8_lossy(&written).replace('\r', "")
}

fn quorate(args: &[&str]) -> Command {
    program(env!("CARGO_BIN_EXE_quorate"), args)
}

/// Starts a replica with a working and an unreachable engine, and some traffic.
fn busy_replica() -> (Engine, Replica, String) {
    let engine = Engine::start();
    let [peer, nobody] = free();
    let url = &engine.url;
    let config = format!(
        "[[backends]]\nid = \"engine-that-answers\"\nurl = \"{url}\"\n\
         [[backends]]\nid = \"engine-that-refuses\"\nurl = \"http://{nobody}\"\n"
    );
    let replica = Replica::start(1, peer, &config);
    replica.ready();
    for _ in 0..3 {
        assert_eq!(replica.chat("emulated", "").status, 200);
    }
    let is_found = || {
        let backend = replica.admin("/admin/v1/backends/engine-that-refuses");
        !backend["state"]["detail"].is_null()
    };
    until("the engine that refuses is found to", is_found);
    let admin = format!("http://{}", replica.admin);
    (engine, replica, admin)
}

#[test]
fn output_fits_80_columns_in_whole_words() {
    let (_engine, _replica, admin) = busy_replica();
    let prompt = ["explain", "--model", "emulated", "--prompt", "hi"];
    let commands: [&[&str]; 12] = [
        &["audit"],
        &["audit", "--calls"],
        &["status"],
        &["backend"],
        &["backend", "show", "engine-that-answers"],
        &["user"],
        &["key"],
        &["decisions"],
        &["settings", "get", "policy"],
        &["settings", "get", "routing"],
        &["settings", "get", "admission"],
        &prompt,
    ];
    for args in commands {
        let asked = |more: &[&str]| quorate(&[args, &["--admin", &admin], more].concat());
        let shown = on_terminal(asked(&[]), 80);
        for line in shown.lines() {
            assert!(line.chars().count() <= 80, "{args:?}: {line:?} in\n{shown}");
        }
        let whole = on_terminal(asked(&["--wide"]), 80);
        assert!(!whole.contains("not shown"), "{args:?}:\n{whole}");
        let piped = asked(&[]).output().unwrap();
        let piped = String::from_utf8(piped.stdout).unwrap();
        assert!(!piped.contains("not shown"), "{args:?}:\n{piped}");
        assert!(!shown.contains('\u{1b}') && !piped.contains('\u{1b}'));
    }
    let args = ["backend", "--admin", &admin];
    let shown = on_terminal(quorate(&args), 80);
    for word in ["engine-that-answers", "healthy", "unhealthy", "refused"] {
        assert!(shown.contains(word), "{word} in\n{shown}");
    }
    assert!(shown.contains("not shown:"), "{shown}");
    let wide = on_terminal(quorate(&args), 340);
    assert!(
        wide.contains("prefill/token") && !wide.contains("not shown"),
        "{wide}"
    );
}

#[test]
fn no_color_is_respected() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("faulty.toml");
    std::fs::write(&file, "[node]\nid = 0\n").unwrap();
    let check = || quorate(&["config", "check", "--config", file.to_str().unwrap()]);
    let coloured = on_terminal(check(), 80);
    assert!(coloured.contains('\u{1b}'), "{coloured}");
    // The helper removes this variable from the environment, so `env` sets it.
    let mut shell = Command::new("env");
    shell.arg("NO_COLOR=1").arg(env!("CARGO_BIN_EXE_quorate"));
    shell.args(["config", "check", "--config", file.to_str().unwrap()]);
    let plain = on_terminal(shell, 80);
    assert!(plain.contains("node.id is 0"), "{plain}");
    assert!(!plain.contains('\u{1b}'), "{plain}");
}

fn json(output: &Output, what: &[&str]) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let parsed = serde_json::from_str(&text);
    parsed.unwrap_or_else(|_| panic!("{what:?} printed {text}{output:?}"))
}

#[test]
fn output_to_a_pipe_is_json() {
    let (_engine, replica, admin) = busy_replica();
    let commands: [&[&str]; 12] = [
        &["status"],
        &["backend"],
        &["backend", "show", "engine-that-answers"],
        &["user"],
        &["user", "show", "anonymous"],
        &["decisions"],
        &["settings", "get", "policy"],
        &["settings", "get", "routing"],
        &["settings", "get", "admission"],
        &["snapshot"],
        &["backend", "drain", "engine-that-refuses"],
        &["user", "set", "ada", "--weight", "2"],
    ];
    for args in commands {
        let all = [args, &["--admin", &admin, "--json"]].concat();
        let output = quorate(&all).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        json(&output, &all);
        // Without `--json`, the output is text.
        let output = quorate(&all[..all.len() - 1]).output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && !told.contains('{'), "{told}");
    }
    let missing = ["backend", "show", "none", "--admin", &admin, "--json"];
    let output = quorate(&missing).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(error["status"], 404);
    assert_eq!(error["problem"]["detail"], "no backend has the id \"none\"");
    let config = replica.dir.path().join("config.toml");
    let config = config.to_str().unwrap();
    let print = ["config", "print", "--json", "--config", config];
    let printed = json(&quorate(&print).output().unwrap(), &print);
    assert_eq!(printed["values"]["node"]["id"], 1);
    let check = ["config", "check", "--json", "--config", config];
    let checked = json(&quorate(&check).output().unwrap(), &check);
    assert_eq!(checked["faults"], serde_json::json!([]));
    let faulty = [&check[..], &["--set", "node.id=0"]].concat();
    let output = quorate(&faulty).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let fault = &json(&output, &faulty)["faults"][0];
    assert_eq!(fault["place"], "--set node.id=0");
}

#[test]
fn an_error_is_printed_once() {
    let serve = quorate(&[
        "serve",
        "--set",
        "node.id=1",
        "--set",
        "node.data_dir=/proc/nowhere",
        "--set",
        "listen.data=127.0.0.1:0",
        "--set",
        "listen.admin=127.0.0.1:0",
        "--set",
        "listen.peer=127.0.0.1:0",
    ])
    .output()
    .unwrap();
    let told = String::from_utf8_lossy(&serve.stderr);
    let errors: Vec<&str> = told.lines().filter(|it| it.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{told}");
    assert_eq!(errors[0].matches("No such file").count(), 1, "{told}");
}

/// A command on a terminal whose screen is read continuously.
pub(super) struct OnTerminal {
    child: Child,
    controller: File,
    written: Receiver<Vec<u8>>,
    seen: String,
}

impl OnTerminal {
    pub(super) fn start(command: Command, columns: u16) -> Self {
        let (child, controller) = start_on_terminal(command, columns);
        let mut reader = controller.try_clone().unwrap();
        let (queue, written) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = reader.read(&mut bytes) {
                if queue.send(bytes[..read].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            controller,
            written,
            seen: String::new(),
        }
    }

    /// Waits until one of these texts appears.
    pub(super) fn shows(&mut self, texts: &[&str]) {
        until(&format!("{texts:?} on the screen"), || {
            for bytes in self.written.try_iter() {
                self.seen += &String::from_utf8_lossy(&bytes);
            }
            let found = texts.iter().filter_map(|text| self.seen.find(text)).next();
            found.map(|at| self.seen.drain(..at)).is_some()
        });
    }

    pub(super) fn press(&mut self, keys: &str) {
        self.controller.write_all(keys.as_bytes()).unwrap();
    }

    pub(super) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(sent.unwrap().success());
    }

    /// Waits for the end of the command, and returns its exit code.
    pub(super) fn ended(mut self) -> Option<i32> {
        let mut code = None;
        until("it ends", || {
            let status = self.child.try_wait().unwrap();
            code = status.and_then(|status| status.code());
            status.is_some()
        });
        code
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        // The process may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

//! Helpers that run commands of the system to completion.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

/// Runs a command without input.
///
/// # Errors
/// If the command cannot be started or fails, with what it wrote to standard error.
pub(crate) fn run(words: &[&str]) -> anyhow::Result<()> {
    run_with_input(words, "")
}

/// Runs a command with `input` on its standard input.
///
/// # Errors
/// If the command cannot be started or fails, with what it wrote to standard error.
pub(crate) fn run_with_input(words: &[&str], input: &str) -> anyhow::Result<()> {
    let what = || format!("run {}", words.join(" "));
    let (program, args) = words.split_first().context("no command")?;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(what)?;
    let mut stdin = child.stdin.take().expect("it is piped");
    // A command that ended without reading its input reports the reason in its status.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().with_context(what)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}: {}", what(), output.status, said.trim());
    }
    Ok(())
}

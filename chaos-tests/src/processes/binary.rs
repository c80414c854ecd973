//! Locates the program to run as replicas and engines: the one that cargo built for the tests, or
//! the shipped one, which is built first.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, ensure};

/// Environment variable with the path of a program to test in place of the workspace's.
const OVERRIDE: &str = "QUORATE_BIN";
/// Environment variable in which cargo passes the path of the program that it built for integration
/// tests. The shipped program has other features and would compile most of the workspace again.
const FOR_TESTS: &str = "CARGO_BIN_EXE_quorate-under-test";

/// Returns the path of the program. Builds the shipped program at most once per process, in the
/// caller's profile.
pub(super) fn quorate() -> anyhow::Result<PathBuf> {
    static BINARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BINARY.get_or_init(|| find().map_err(|error| format!("{error:#}")));
    built.clone().map_err(anyhow::Error::msg)
}

fn find() -> anyhow::Result<PathBuf> {
    if let Some(path) = env::var_os(OVERRIDE) {
        let path = PathBuf::from(path);
        ensure!(
            path.is_file(),
            "{OVERRIDE}: no program at {}",
            path.display()
        );
        return Ok(path);
    }
    if let Some(path) = env::var_os(FOR_TESTS) {
        return Ok(path.into());
    }
    let own = env::current_exe().context("find this program")?;
    let profile_dir = own.parent().context("find the target folder")?;
    build(profile_dir)?;
    let path = profile_dir.join(format!("quorate{}", env::consts::EXE_SUFFIX));
    ensure!(path.is_file(), "no program at {}", path.display());
    Ok(path)
}

fn build(profile_dir: &Path) -> anyhow::Result<()> {
    let target = profile_dir.parent().context("find the target folder")?;
    let profile = match profile_dir.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => "dev",
        Some(profile) => profile,
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // Build scripts that read these variables of cargo (ring's) would run again, and everything
    // that depends on them would be recompiled.
    let is_told = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    for name in env::vars_os().map(|(name, _)| name).filter(is_told) {
        command.env_remove(name);
    }
    let status = command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args([
            "build",
            "--quiet",
            "--locked",
            "--package",
            "node",
            "--bin",
            "quorate",
        ])
        .args(["--profile", profile, "--target-dir"])
        .arg(target)
        .status()
        .context("run cargo build")?;
    ensure!(status.success(), "cargo build ended with {status}");
    Ok(())
}

//! Finds the `quorate` binary in the target folder of the cargo that runs the tests, and builds it
//! if needed.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, ensure};

/// Names a program to be tested in place of the one in the workspace.
const OVERRIDE: &str = "QUORATE_BIN";

/// The program, built once per process in the profile of the tests.
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
    // Programs lie in `<target>/<profile>`, tests in `deps` below it.
    let own = env::current_exe().context("find this program")?;
    let mut profile_dir = own.parent().context("find the target folder")?;
    if profile_dir.ends_with("deps") {
        profile_dir = profile_dir.parent().context("find the target folder")?;
    }
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
    let status = Command::new(cargo)
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

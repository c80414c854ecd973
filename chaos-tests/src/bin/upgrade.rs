//! Checks that clients do not notice a rolling upgrade from another build: `cargo run --release -p
//! chaos-tests --bin upgrade -- --from-rev REV`. See docs/guide/upgrades.md.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, ensure};
use chaos_tests::processes::upgrade::{self, UpgradeOptions, UpgradeStep};
use chaos_tests::terminal::{self, say, table};
use clap::Parser;

/// Upgrade three replicas under load, one after the other
#[derive(Debug, Parser)]
struct UpgradeArgs {
    /// Program of the earlier build
    #[arg(long, value_name = "FILE", required_unless_present = "from_rev")]
    from: Option<PathBuf>,
    /// Revision of this repository to build the earlier program from, in target/upgrade
    #[arg(long, value_name = "REV", conflicts_with = "from")]
    from_rev: Option<String>,
    /// Program of the later build; default: that of this workspace
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Then downgrade again, one after the other
    #[arg(long)]
    back: bool,
    /// Number of requests served between two steps
    #[arg(long, value_name = "N", default_value_t = 600)]
    requests: u64,
    /// Use TLS everywhere, an operator's token and API keys
    #[arg(long)]
    secure: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = UpgradeArgs::parse();
    terminal::run(run(args))
}

async fn run(args: UpgradeArgs) -> anyhow::Result<ExitCode> {
    let from = match (args.from, &args.from_rev) {
        (Some(file), _) => file,
        (None, Some(revision)) => build(revision)?,
        (None, None) => anyhow::bail!("--from or --from-rev is needed"),
    };
    let options = UpgradeOptions {
        from: from
            .canonicalize()
            .with_context(|| format!("find {}", from.display()))?,
        to: args.to,
        is_there_and_back: args.back,
        requests: args.requests,
        is_secure: args.secure,
    };
    let steps = upgrade::run(&options).await?;
    if args.json {
        say(serde_json::to_string_pretty(&steps)?)?;
    } else {
        print(&steps)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(steps: &[UpgradeStep]) -> anyhow::Result<()> {
    let mut rows = table(&[
        "",
        "earlier",
        "later",
        "answered",
        "failed",
        "cached",
        "longest stall",
    ]);
    for step in steps {
        rows.add_row([
            step.what.clone(),
            step.replicas[0].to_string(),
            step.replicas[1].to_string(),
            step.answered.to_string(),
            step.failed.to_string(),
            format!("{:.1} %", step.hit_percent),
            format!("{} ms", step.stall_ms),
        ]);
    }
    say(rows)?;
    say(
        "After each step: one digest, counters as the engines reported, every replica knows the caches.",
    )
}

/// Builds a revision of this repository in a folder separate from the working tree's build. Returns
/// the program's path.
fn build(revision: &str) -> anyhow::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = root.join("target/upgrade");
    let source = folder.join("source");
    if source.exists() {
        git(&root, &["worktree", "remove", "--force", text(&source)?])?;
    }
    git(
        &root,
        &[
            "worktree",
            "add",
            "--force",
            "--detach",
            text(&source)?,
            revision,
        ],
    )?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build
        .current_dir(&source)
        .args(["build", "--locked", "--release"]);
    build.args(["--package", "node", "--bin", "quorate", "--target-dir"]);
    let built = build.arg(folder.join("target")).status();
    let built = built.context("run cargo build");
    git(&root, &["worktree", "remove", "--force", text(&source)?])?;
    let status = built?;
    ensure!(
        status.success(),
        "cargo build of {revision} ended with {status}"
    );
    Ok(folder.join("target/release/quorate"))
}

fn git(root: &Path, words: &[&str]) -> anyhow::Result<()> {
    let status = Command::new("git")
        .current_dir(root)
        .args(words)
        .stdout(Stdio::null())
        .status()
        .context("run git")?;
    ensure!(
        status.success(),
        "git {} ended with {status}",
        words.join(" ")
    );
    Ok(())
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is no text", path.display()))
}

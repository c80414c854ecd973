//! `quorate man`: prints or writes the manual pages, in roff.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Command;
use clap_mangen::Man;
use lab::terminal;

/// Sections at the end of every page.
const COMMON: &str = r#".SH ENVIRONMENT
.TP
\fBQUORATE_ADMIN\fR
Admin URLs of replicas, as \fB\-\-admin\fR has them.
.TP
\fBQUORATE_\fISECTION\fB__\fIKEY\fR
A value of the config, for commands that read one. Flags have precedence over it, and it has over the file.
.TP
\fBQUORATE_LOG__LEVEL\fR, \fBQUORATE_LOG__FORMAT\fR
Filter and format of the log on stderr.
.TP
\fBNO_COLOR\fR
No colours, if it is set to anything.
.TP
\fBCOLUMNS\fR
Width of tables on a terminal, in place of the terminal's own.
.SH EXIT STATUS
.TP
\fB0\fR
Done.
.TP
\fB1\fR
Failed.
.TP
\fB2\fR
Bad usage or config; nothing was done.
.TP
\fB130\fR
Ended early by a signal.
"#;

/// Arguments of `quorate man`.
#[derive(Debug, clap::Args)]
pub(super) struct ManArgs {
    /// Command to describe, such as `config check` [default: quorate itself]
    command: Vec<String>,
    /// Write the pages of all commands to this directory, each as `quorate-COMMAND.1`
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    out: Option<PathBuf>,
}

/// Prints one page, or writes all pages.
pub(super) fn run(args: ManArgs, cli: Command) -> anyhow::Result<ExitCode> {
    let mut cli = cli.disable_help_subcommand(true);
    cli.build();
    if let Some(folder) = args.out {
        std::fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let written = write_all(&cli, &folder)?;
        terminal::print(format_args!("{written} pages in {}", folder.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut described = &cli;
    for name in &args.command {
        let Some(found) = described.find_subcommand(name) else {
            bail!("{} has no command {name:?}", described.get_name());
        };
        described = found;
    }
    terminal::print(String::from_utf8_lossy(&page(described)?).trim_end())?;
    Ok(ExitCode::SUCCESS)
}

fn write_all(command: &Command, folder: &Path) -> anyhow::Result<usize> {
    let file = folder.join(Man::new(command.clone()).get_filename());
    std::fs::write(&file, page(command)?).with_context(|| format!("write {}", file.display()))?;
    let mut written = 1;
    for command in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        written += write_all(command, folder)?;
    }
    Ok(written)
}

fn page(command: &Command) -> anyhow::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    page.extend_from_slice(COMMON.as_bytes());
    Ok(page)
}

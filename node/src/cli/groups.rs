//! `quorate --help`: the commands by what they are for.

use std::fmt::Write as _;

use clap::Command;

/// Groups of commands. Each command is in one of them.
pub(super) const GROUPS: [(&str, &[&str]); 6] = [
    ("Run", &["serve", "dev"]),
    (
        "Look",
        &[
            "status",
            "top",
            "backend",
            "user",
            "usage",
            "session",
            "explain",
            "decisions",
            "events",
        ],
    ),
    ("Change", &["settings", "key", "config", "log-level"]),
    (
        "Operate the cluster",
        &[
            "member",
            "transfer-leader",
            "snapshot",
            "backup",
            "restore",
            "recover",
            "inspect",
            "audit",
        ],
    ),
    (
        "Try and measure",
        &["engine", "engine-check", "replay", "record", "simulate"],
    ),
    ("Make", &["cert", "token", "completions", "man"]),
];

/// Makes the help of `command` list its commands by group.
pub(super) fn grouped(command: Command) -> Command {
    let (header, literal) = {
        let styles = command.get_styles();
        (*styles.get_header(), *styles.get_literal())
    };
    let names = GROUPS.iter().flat_map(|(_, names)| *names);
    let width = names.map(|name| name.len()).max().unwrap_or(0);
    let mut help = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (title, names) in GROUPS {
        let _ = writeln!(help, "\n{header}{title}:{header:#}");
        for name in names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(help, "  {literal}{name:width$}{literal:#}  {about}");
        }
    }
    let _ = write!(help, "\n{header}Options:{header:#}\n{{options}}");
    command.help_template(help)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn help_lists_every_command_once_and_fits_80_columns() {
        let help = super::super::command().render_help().to_string();
        let mut listed = BTreeMap::new();
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{line}");
            if let Some(name) = line.strip_prefix("  ").and_then(|it| it.split(' ').next()) {
                *listed.entry(name.to_owned()).or_insert(0) += 1;
            }
        }
        // `clap` adds a command `help` when it renders; it is not listed.
        let command = super::super::command();
        for name in command.get_subcommands().map(Command::get_name) {
            assert_eq!(listed.get(name), Some(&1), "{name} in\n{help}");
        }
        let grouped: usize = GROUPS.iter().map(|(_, names)| names.len()).sum();
        assert_eq!(command.get_subcommands().count(), grouped, "{help}");
    }

    #[test]
    fn reference_lists_every_leaf_command() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/cli.md");
        let page = std::fs::read_to_string(page).unwrap();
        let rows: Vec<_> = page
            .lines()
            .filter(|line| line.starts_with("| `"))
            .collect();
        for command in super::super::command().get_subcommands() {
            let first = command.get_name();
            let row = rows.iter().filter(|row| {
                let named = row.trim_start_matches("| `");
                named.split(['`', ' ']).next() == Some(first)
            });
            let cells: String = row.filter_map(|row| row.split('|').nth(1)).collect();
            assert!(!cells.is_empty(), "{first}");
            for leaf in command.get_subcommands().map(Command::get_name) {
                let is_named = cells.split(['`', ' ', ',']).any(|word| word == leaf);
                assert!(is_named, "{first} {leaf} is not in {cells}");
            }
        }
    }
}

//! Settings in command lines and in environments: shell scripts, files of arguments, env files, and
//! the containers of Kubernetes and Docker Compose.

use super::source::{Fault, Setting};
use super::yaml::{self, Node, NodeKind};

/// Words that end a command in a shell.
const ENDS: [&str; 5] = ["&&", "||", "|", ";", "&"];

/// Settings of one file, and what in it was left unread.
#[derive(Default)]
pub(super) struct Found {
    pub(super) settings: Vec<Setting>,
    /// Lines of other programs that have flags, each with what it is.
    pub(super) unread: Vec<(usize, String)>,
}

/// Reads the flags of `programs` from a shell script, or from a file of flags alone.
pub(super) fn script(text: &str, programs: &[&str]) -> Result<Found, Fault> {
    let mut found = Found::default();
    shell(text, 1, programs, &mut found)?;
    Ok(found)
}

/// Reads the flags of `programs` from containers, or from a list of words alone.
pub(super) fn containers(text: &str, programs: &[&str]) -> Result<Found, Fault> {
    let mut found = Found::default();
    for document in yaml::documents(text, 1)? {
        if matches!(document.kind, NodeKind::List(_)) {
            let words = document.elements().iter();
            let words = words.filter_map(|it| Some((it.text()?.to_owned(), it.line)));
            flags(&words.collect::<Vec<_>>(), &mut found);
        }
        let mut result = Ok(());
        document.walk(&mut |node| {
            aliases(node, &mut found);
            if result.is_ok() && (node.get("command").is_some() || node.get("args").is_some()) {
                result = container(node, programs, &mut found);
            }
        });
        result?;
    }
    Ok(found)
}

/// Reads the environment of containers, of ConfigMaps and of charts' values, and flags.
pub(super) fn environments(text: &str, programs: &[&str]) -> Result<Found, Fault> {
    let mut found = containers(text, programs)?;
    for document in yaml::documents(text, 1)? {
        document.walk(&mut |node| {
            let is_secret = node.get("kind").and_then(Node::text) == Some("Secret");
            for (name, is_left) in [
                ("envFrom", true),
                ("stringData", true),
                ("binaryData", true),
                ("data", is_secret),
            ] {
                if let Some(variables) = node.get(name).filter(|_| is_left) {
                    let told = format!("`{name}`, variables that are not followed");
                    found.unread.push((variables.line, told));
                }
            }
            for name in ["env", "envs", "environment", "data"] {
                if name == "data" && is_secret {
                    continue;
                }
                if let Some(variables) = node.get(name) {
                    environment(variables, &mut found);
                }
            }
        });
    }
    Ok(found)
}

/// Reports what a node takes from another one.
pub(super) fn aliases(node: &Node, found: &mut Found) {
    if matches!(node.kind, NodeKind::Alias) {
        found
            .unread
            .push((node.line, "an alias of YAML".to_owned()));
    }
}

/// Reads an env file: lines `NAME=VALUE`, perhaps with `export` and quotes.
pub(super) fn env_file(text: &str) -> Result<Found, Fault> {
    let mut found = Found::default();
    for (nth, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let expected = "NAME=VALUE, a comment, or Kubernetes YAML in a file named *.yaml";
        let Some((name, value)) = line.split_once('=') else {
            return Err(Fault::new(nth + 1, "a line without `=`", expected));
        };
        let name = name.trim().trim_start_matches("export ").trim();
        if !is_variable(name) {
            return Err(Fault::new(nth + 1, "no name of a variable", expected));
        }
        let value = shlex::split(value).unwrap_or_else(|| vec![value.to_owned()]);
        let setting = Setting::new(name, vec![value.join(" ")], nth + 1);
        // A shell keeps the last value.
        if let Some(earlier) = found.settings.iter_mut().find(|it| it.name == name) {
            let told = format!("{name}, which line {} sets again", nth + 1);
            found.unread.push((earlier.line, told));
            *earlier = setting;
        } else {
            found.settings.push(setting);
        }
    }
    Ok(found)
}

/// Reads the variables below `env`, `data` and the like: a map, or a list with `name` and `value` or
/// with `NAME=VALUE`.
fn environment(variables: &Node, found: &mut Found) {
    for (name, value) in variables
        .entries()
        .iter()
        .filter(|(name, _)| is_variable(name))
    {
        let values = value.text().map(str::to_owned).into_iter().collect();
        found.settings.push(Setting::new(name, values, value.line));
    }
    for variable in variables.elements() {
        let pair = match variable.text() {
            // A name alone takes its value from elsewhere.
            Some(text) => text.split_once('=').or(Some((text, "$"))),
            None => variable.get("name").and_then(Node::text).map(|name| {
                // A value from elsewhere is filled in, as `$NAME` is.
                (
                    name,
                    variable.get("value").and_then(Node::text).unwrap_or("$"),
                )
            }),
        };
        if let Some((name, value)) = pair {
            let values = vec![value.to_owned()];
            found
                .settings
                .push(Setting::new(name, values, variable.line));
        }
    }
}

fn is_variable(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && name.chars().all(is_part)
}

/// Reads the command and arguments of one container, if it runs one of `programs`.
fn container(node: &Node, programs: &[&str], found: &mut Found) -> Result<(), Fault> {
    let parts = ["command", "args"]
        .into_iter()
        .filter_map(|name| node.get(name));
    let mut words = Vec::new();
    for part in parts {
        match part.text() {
            Some(text) => words.extend(split(text, part.line)?),
            None => {
                let elements = part.elements().iter();
                words.extend(elements.filter_map(|it| Some((it.text()?.to_owned(), it.line))));
            }
        }
    }
    if let Some(at) = words.iter().position(|(word, _)| word == "-c")
        && let Some((text, line)) = words.get(at + 1)
    {
        return shell(text, *line, programs, found);
    }
    let image = node.get("image").and_then(Node::text).unwrap_or_default();
    let is_image = programs.iter().any(|program| image.contains(program));
    let has_flags_only = words
        .first()
        .is_some_and(|(word, _)| word.starts_with("--"));
    match words
        .iter()
        .position(|(word, _)| is_program(word, programs))
    {
        Some(at) => flags(&words[at + 1..], found),
        None if has_flags_only && is_image => flags(&words, found),
        None if words.iter().any(|(word, _)| word.starts_with("--")) => {
            let told = "a container of another program".to_owned();
            found.unread.push((node.line, told));
        }
        None => {}
    }
    Ok(())
}

/// Reads the commands of a shell script that begins at line `first` of its file.
fn shell(text: &str, first: usize, programs: &[&str], found: &mut Found) -> Result<(), Fault> {
    let mut lines = text.lines().enumerate();
    // Whether the text is flags alone, which its first word tells.
    let mut is_flags = None;
    while let Some((nth, line)) = lines.next() {
        let mut words = Vec::new();
        let (mut rest, mut at) = (line, first + nth);
        while let Some(line) = rest.strip_suffix('\\') {
            words.extend(split(line, at)?);
            let Some((nth, next)) = lines.next() else {
                break;
            };
            (rest, at) = (next, first + nth);
        }
        words.extend(split(rest, at)?);
        for command in words.split(|(word, _)| ENDS.contains(&word.as_str())) {
            let command = without_redirections(command);
            let Some((word, line)) = command.first() else {
                continue;
            };
            let has_flags = command.iter().any(|(word, _)| word.starts_with("--"));
            is_flags = is_flags.or(Some(word.starts_with("--")));
            match command
                .iter()
                .position(|(word, _)| is_program(word, programs))
            {
                Some(at) => flags(&command[at + 1..], found),
                None if is_flags == Some(true) => flags(&command, found),
                // What follows `=` may be a secret.
                None if has_flags => {
                    let name = word.split('=').next().unwrap_or_default();
                    found
                        .unread
                        .push((*line, format!("`{name}`, another command")));
                }
                None => {}
            }
        }
    }
    Ok(())
}

/// Returns the words of a command without redirections.
fn without_redirections(command: &[(String, usize)]) -> Vec<(String, usize)> {
    let mut words = command.iter();
    let mut kept = Vec::new();
    while let Some((word, line)) = words.next() {
        let bare = word.trim_start_matches(|c: char| c.is_ascii_digit());
        if !bare.starts_with(['>', '<']) {
            kept.push((word.clone(), *line));
        } else if bare.trim_start_matches(['>', '<', '&', '|']).is_empty() {
            // The file is the next word.
            words.next();
        }
    }
    kept
}

/// Splits a line into its words, as a shell does.
fn split(text: &str, line: usize) -> Result<Vec<(String, usize)>, Fault> {
    let words = shlex::split(text).ok_or_else(|| {
        let expected = "a closing quote on the same line";
        Fault::new(line, "a quote that is not closed", expected)
    })?;
    let ended = |word: String| match word.strip_suffix(';') {
        Some(rest) if !rest.is_empty() => vec![(rest.to_owned(), line), (";".to_owned(), line)],
        _ => vec![(word, line)],
    };
    Ok(words.into_iter().flat_map(ended).collect())
}

/// Whether a word of a command is one of these programs, perhaps with its path.
fn is_program(word: &str, programs: &[&str]) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    programs.contains(&name)
}

/// Reads flags with their values: `--name=value`, or `--name` and all words up to the next flag.
fn flags(words: &[(String, usize)], found: &mut Found) {
    let settings = &mut found.settings;
    let mut is_open = false;
    for (word, line) in words {
        match word.strip_prefix("--") {
            Some(_) => {
                let (name, value) = match word.split_once('=') {
                    Some((name, value)) => (name, Some(value.to_owned())),
                    None => (word.as_str(), None),
                };
                settings.push(Setting::new(name, value.into_iter().collect(), *line));
                is_open = true;
            }
            None if is_open => {
                if let Some(last) = settings.last_mut() {
                    last.values.push(word.clone());
                }
            }
            None if word.contains('$') || word.contains("{{") => {
                found
                    .unread
                    .push((*line, "words filled in elsewhere".to_owned()));
            }
            // A subcommand.
            None => {}
        }
    }
}

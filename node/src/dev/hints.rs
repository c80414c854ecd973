//! Messages of `quorate dev` about its cluster: its addresses, and what to try.

use lab::terminal::indented;
use state::command::BackendSpec;

use super::DevLoad;
use super::fleet::Fleet;

/// Admin URL that commands use by default.
const DEFAULT_ADMIN: &str = "http://127.0.0.1:8081";

/// Facts about a running cluster, from which messages are made.
pub(super) struct DevHints<'a> {
    pub(super) fleet: &'a Fleet,
    pub(super) engines: &'a [BackendSpec],
    /// Model that the example request uses.
    pub(super) model: String,
}

impl DevHints<'_> {
    /// Returns the listening addresses and a description of the load that is about to be sent.
    pub(super) fn started(&self, load: &DevLoad, is_real: bool) -> String {
        let mut lines = Vec::new();
        if let Some(taken) = &self.fleet.moved {
            lines.push(format!(
                "Not at the usual ports, 8080 to 8102, but at free ones. {taken}."
            ));
        }
        let replicas = self.fleet.data_urls().join(", ");
        lines.push(format!("Replicas: {replicas}"));
        let engines: Vec<&str> = self.engines.iter().map(|it| it.url.as_str()).collect();
        lines.push(format!("Engines: {}", engines.join(", ")));
        if is_real && load.requests > 0 {
            let size = if load.is_small { "small " } else { "" };
            lines.push(format!(
                "Sending {} {size}requests to your engines. --requests N sends a load of N, \
                 --requests 0 nothing.",
                load.requests,
            ));
        }
        let fitted: Vec<String> = lines.iter().map(|line| indented(line, 0)).collect();
        fitted.join("\n")
    }

    /// Returns suggestions for using the cluster.
    pub(super) fn look_around(&self) -> String {
        let mut text = String::from(
            "The cluster is up. Type `k 2` to kill replica 2, `s 2` to start it again;\n\
             ctrl-c ends all.\n\n",
        );
        let (data, admin) = (self.fleet.data_urls(), self.fleet.admin_urls());
        for ((id, data), admin) in (1..).zip(&data).zip(&admin) {
            text += &format!("  replica {id}   clients {data}/v1   admin {admin}\n");
        }
        text += "\nIn another terminal, send a prompt to two replicas. The second answer finds all\n\
                 of it cached, as x-quorate-prefix says:\n\n";
        text += &request(&self.model, &data);
        text += &format!("\n\nLook around in a browser at {}, or by\n\n", admin[0]);
        if admin[0] != DEFAULT_ADMIN {
            text += &format!("export QUORATE_ADMIN={}\n", admin.join(","));
        }
        let program = program();
        let model = quoted(&self.model);
        let commands = [
            "status".to_owned(),
            "top".to_owned(),
            "backend".to_owned(),
            format!("explain --model {model} --prompt \"$PROMPT\""),
        ];
        let commands = commands.map(|command| format!("{program} {command}"));
        text + &commands.join("\n")
    }
}

/// Returns shell commands that send the same prompt to the first two replicas.
fn request(model: &str, data: &[String]) -> String {
    let model = serde_json::Value::from(model).to_string();
    // A line break between two fields keeps the lines short.
    let body = format!(
        "{{\"model\":{model},\"max_tokens\":16,\n         \
         \"messages\":[{{\"role\":\"user\",\"content\":\""
    );
    format!(
        "PROMPT=$(printf 'Tell me about quorums. %.0s' $(seq 40))\n\
         for URL in {} {}; do\n  \
           curl -sD- -o /dev/null $URL/v1/chat/completions \\\n    \
             -H 'content-type: application/json' \\\n    \
             -d {}\"$PROMPT\"{} |\n    \
             grep x-quorate-prefix\n\
         done",
        data[0],
        data[1],
        quoted(&body),
        quoted(r#""}]}"#),
    )
}

/// Returns the shell command by which this program was started.
fn program() -> String {
    let program = std::env::args().next();
    quoted(&program.unwrap_or_else(|| "quorate".to_owned()))
}

/// Quotes text as one word for a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_syntax_is_quoted() {
        assert_eq!(quoted("target/release/quorate"), "target/release/quorate");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}

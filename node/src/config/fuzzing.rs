//! Fuzz target for configs; see [`crate::fuzzing`].

use super::read::Layers;
use super::{ConfigErrors, Loaded, print, read};

/// Loads a config from its layers (file, environment variables and flags), which are separated by
/// zero bytes. Variables and flags are one per line. If the config is valid, the printed config
/// must load as an equal one.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    match read_layers(text) {
        Ok(loaded) => {
            let printed = print(&loaded);
            let layers = Layers {
                file: &printed,
                ..Layers::default()
            };
            let again = read("printed.toml", &layers);
            let mut again = again.unwrap_or_else(|errors| panic!("{errors}\n{printed}"));
            // A printed config sets every key, so this part differs.
            again.config.file.clone_from(&loaded.config.file);
            assert_eq!(again.config, loaded.config, "{printed}");
        }
        Err(errors) => {
            assert!(!errors.errors.is_empty(), "refused without an error");
            assert!(!errors.render(true, Some(80)).is_empty());
        }
    }
}

/// Reads the layers that zero bytes separate.
fn read_layers(text: &str) -> Result<Loaded, ConfigErrors> {
    let mut layers = text.split('\0');
    let file = layers.next().unwrap_or_default();
    let variables = layers.next().unwrap_or_default().lines();
    let variables: Vec<_> = variables
        .filter_map(|line| line.split_once('='))
        .map(|(name, text)| (name.to_owned(), text.to_owned()))
        .collect();
    let flags = layers.next().unwrap_or_default().lines();
    let flags: Vec<_> = flags.map(str::to_owned).collect();
    let layers = Layers {
        file,
        variables: &variables,
        flags: &flags,
        backends: &[],
    };
    read("fuzzing.toml", &layers)
}

/// Returns inputs for [`config`], the last one with all keys set.
#[must_use]
pub fn config_seeds() -> Vec<Vec<u8>> {
    let alone = "[node]\nid = 1\n";
    let member = r#"
[node]
id = 2
data_dir = "/tmp/x"
[listen]
peer = "127.0.0.1:7070"
[cluster]
peers = ["127.0.0.1:7071", "10.0.0.2:7070"]
bootstrap_expect = 2
[[backends]]
id = "a"
url = "http://10.0.0.1:8000"
models = ["m"]
labels = { zone = "a" }
[[models]]
name = "m"
block_size = 32
tokenizer = "character"
"#;
    let variables = "QUORATE_NODE__ID=3\nQUORATE_LIMITS__MAX_BODY=1MiB\n";
    let flags = "routing.policy=random\nlog.level=debug\n";
    let with_sources = r#"
node.id = 1
[users]
identify_by = ["header:x-user", "body:user"]
[drain]
dns_ttl = "5s"
[admission]
order = "vtc-max-fair"
concurrency = 8
[[discovery]]
kind = "dns"
name = "engines.prod.svc:8000"
[[discovery]]
kind = "file"
path = "/etc/quorate/engines.json"
[[discovery]]
kind = "kubernetes"
selector = "app=vllm"
port = 8000
"#;
    let configs = [
        alone.to_owned(),
        format!("{member}\0{variables}\0{flags}"),
        with_sources.to_owned(),
    ];
    let mut seeds = configs.map(String::into_bytes).to_vec();
    let layers = Layers {
        file: with_sources,
        ..Layers::default()
    };
    // A printed config, which sets all keys.
    seeds.extend(
        read("", &layers)
            .ok()
            .map(|loaded| print(&loaded).into_bytes()),
    );
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_valid_configs() {
        for seed in config_seeds() {
            let text = String::from_utf8(seed).unwrap();
            if let Err(errors) = read_layers(&text) {
                panic!("{errors}\n{text}");
            }
        }
    }
}

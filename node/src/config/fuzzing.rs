//! Fuzz target for configs; see [`crate::fuzzing`].

use super::read::Layers;
use super::{print, read};

/// Loads a config from its layers (file, environment variables and flags), which are separated by
/// zero bytes. Variables and flags are one per line. If the config is valid, the printed config
/// must load as an equal one.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let mut layers = text.split('\0');
    let file = layers.next().unwrap_or_default();
    let variables = layers.next().unwrap_or_default().lines();
    let variables: Vec<_> = variables
        .filter_map(|line| line.split_once('='))
        .map(|(name, text)| (name.to_owned(), text.to_owned()))
        .collect();
    let flags = layers.next().unwrap_or_default().lines();
    let flags: Vec<_> = flags.map(str::to_owned).collect();
    let taken = read(
        "fuzzing.toml",
        &Layers {
            file,
            variables: &variables,
            flags: &flags,
            backends: &[],
        },
    );
    match taken {
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

/// Returns inputs for [`config`], the last one with all keys set.
#[must_use]
pub fn config_seeds() -> Vec<Vec<u8>> {
    let configs = [
        "[node]\nid = 1\n",
        "[node]\nid = 2\ndata_dir = \"/tmp/x\"\nlabels = { zone = \"a\" }\n[listen]\ndata = \"127.0.0.1:8080\"\npeer = \"127.0.0.1:7070\"\n[cluster]\npeers = [\"127.0.0.1:7071\", \"10.0.0.2:7070\"]\nbootstrap_expect = 3\n[[backends]]\nid = \"a\"\nurl = \"http://10.0.0.1:8000\"\nmodels = [\"m\"]\n[[models]]\nname = \"m\"\nblock_size = 32\ntokenizer = \"character\"\n\0QUORATE_NODE__ID=3\nQUORATE_LIMITS__BODY_BYTES=1MiB\0policy.name=random\nlog.level=debug\n",
        "node.id = 1\n[policy]\nname = \"cost\"\n[users]\nidentify_by = [\"header:x-user\", \"body:user\"]\n[drain]\ndns_ttl = \"5s\"\n[admission]\nbins = 4\n",
    ];
    let mut seeds = configs.map(|config| config.as_bytes().to_vec()).to_vec();
    let layers = Layers {
        file: configs[0],
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

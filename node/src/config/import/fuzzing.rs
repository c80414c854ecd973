//! Fuzz target for configs of other routers; see [`crate::fuzzing`].

use clap::ValueEnum;

use super::super::read;
use super::super::read::Layers;
use super::super::schema::join;
use super::{ImportKind, Imported, import_texts};

/// Imports a config: a line with the kind and the file's name, then its text. The result must load,
/// unless it says what is missing, and have the keys that the import sets and no others.
pub fn import(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let (head, text) = text.split_once('\n').unwrap_or((text, ""));
    let (kind, name) = head.split_once(' ').unwrap_or((head, ""));
    let Ok(kind) = ImportKind::from_str(kind, false) else {
        return;
    };
    match import_texts(kind, &[(name.to_owned(), text.to_owned())]) {
        Ok(imported) => {
            has_keys(&imported);
            has_engines_or_tells(&imported);
            let layers = Layers {
                file: &imported.config,
                ..Layers::default()
            };
            if let Err(errors) = read("import.toml", &layers) {
                assert!(
                    !imported.incomplete.is_empty(),
                    "{errors}\n{}",
                    imported.config
                );
            }
        }
        Err(errors) => assert!(!errors.render(true, Some(80)).is_empty()),
    }
}

/// Asserts that the config has the keys that the import sets and no others.
pub(super) fn has_keys(imported: &Imported) {
    let Imported { config, keys, .. } = imported;
    let table = toml::from_str(config);
    let table: toml::Table = table.unwrap_or_else(|error| panic!("{error}\n{config}"));
    let mut found = Vec::new();
    paths(&toml::Value::Table(table), "", &mut found);
    // Entries of lists lose the numbers of those that are comments.
    let bare = |path: &String| path.replace(|c: char| c.is_ascii_digit(), "");
    let mut keys: Vec<_> = keys.iter().map(bare).collect();
    keys.sort_unstable();
    found.sort_unstable();
    assert_eq!(keys, found, "{config}");
}

/// Asserts that the import tells that no engine is named.
pub(super) fn has_engines_or_tells(imported: &Imported) {
    let is_engine = |path: &String| path.starts_with("backends[") || path.starts_with("discovery[");
    let mut told = imported.incomplete.iter();
    assert!(
        imported.keys.iter().any(is_engine) || told.any(|it| it.ends_with("no engine is named")),
        "{}",
        imported.config
    );
    // A refused value is told of, and does not count as carried over: an address has two settings.
    assert!(imported.carried <= imported.keys.len() * 2);
    assert!(imported.left >= imported.refused.len());
}

/// Adds the paths of all keys at or below a value, without the numbers of entries.
fn paths(value: &toml::Value, path: &str, found: &mut Vec<String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                paths(value, &join(path, key), found);
            }
        }
        toml::Value::Array(entries) if entries.iter().any(toml::Value::is_table) => {
            for entry in entries {
                paths(entry, &format!("{path}[]"), found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

/// Returns inputs for [`import`], one for each form of file.
#[must_use]
pub fn import_seeds() -> Vec<Vec<u8>> {
    let seeds = [
        "aibrix gateway.env\nexport ROUTING_ALGORITHM=prefix-cache\nAIBRIX_X='1'\n",
        "aibrix gateway.yaml\nkind: Deployment\nenv:\n- name: AIBRIX_PREFIX_CACHE_BLOCK_SIZE\n  \
         value: \"128\"\n- name: POD_NAME\n  valueFrom: {}\n",
        "smg run.sh\nA=1 smg launch --policy cache_aware --port 1 \\\n --worker-urls http://a:1 \
         'http://b' >log & sleep 1 --x\n",
        "smg args.yaml\n- --health-check-endpoint\n- \"x\\n[admin]\\ninsecure = true\\n#\"\n",
        "vllm-router run.sh\nvllm-router --worker-urls grpc://a:50051 --retry-max-retries 99\n",
        "vllm-router args.yaml\n- image: vllm-router\n  args: [\"--selector\", \"a=b\", \
         \"--service-discovery\", *c]\n- command: [sh, -c, \"vllm-router --port=$P\"]\n",
        "epp epp.yaml\ndata:\n  config: |\n    kind: EndpointPickerConfig\n    plugins:\n    - type: \
         queue-scorer\n      parameters: {a: [b]}\n    schedulingProfiles:\n    - plugins:\n      - \
         pluginRef: queue-scorer\n        weight: 0.5\n    featureGates: [flowControl=false]\n    \
         flowControl:\n      maxRequests: 5k\n",
    ];
    seeds.map(|seed| seed.as_bytes().to_vec()).to_vec()
}

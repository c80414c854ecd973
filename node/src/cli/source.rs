//! The config source of commands: a file and overrides.

use std::path::PathBuf;

use crate::config::{Loaded, Origin, load};

/// Config file and overrides, as options of all commands that need a config.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ConfigSource {
    /// Config file in TOML [default: none, only flags and environment apply]
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Override a value of the file or environment: `--set drain.deadline=10s`
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub(super) set: Vec<String>,
}

impl ConfigSource {
    /// Sets `node.id` to 1 if neither a file nor a flag can set it.
    pub(super) fn set_placeholder_id(&mut self) {
        let is_named = self.set.iter().any(|it| it.starts_with("node.id="));
        if self.config.is_none() && !is_named {
            self.set.insert(0, "node.id=1".to_owned());
        }
    }

    /// Reads and checks the config.
    pub(super) fn load(self) -> anyhow::Result<Loaded> {
        self.load_with(Vec::new())
    }

    /// Reads and checks the config, with the URLs of additional backends.
    pub(super) fn load_with(self, backends: Vec<String>) -> anyhow::Result<Loaded> {
        let origin = Origin::of_process(self.config, self.set);
        Ok(load(&Origin { backends, ..origin })?)
    }
}

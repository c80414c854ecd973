//! Flags of `quorate simulate` for recordings of a cluster's requests.

use std::fs;
use std::path::Path;

use api::files::recording::{self, Recording};

use super::argument_error::SimulateArgsError;
use super::recorded::RecordedDemand;

/// A recording in place of a workload.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Recordings")]
pub(super) struct RecordedArgs {
    /// Recording to simulate: a file of `quorate record`, or admin URLs of replicas, separated by
    /// commas, whose last decisions are used. Backends, replicas, blocks and limits are as
    /// recorded, unless given
    #[arg(
        long,
        value_name = "FILE|URL",
        conflicts_with_all = ["trace", "workload", "experiment"]
    )]
    pub(super) from_decisions: Option<String>,
    /// Model to simulate [default: the one with the most requests]
    #[arg(long, value_name = "NAME", requires = "from_decisions")]
    model: Option<String>,
}

impl RecordedArgs {
    /// Returns the admin URLs of the replicas to query, separated by commas; `None` if the
    /// recording is a file, or there is none.
    pub(super) fn urls(&self) -> Option<&str> {
        let source = self.from_decisions.as_deref()?;
        let is_url = source.starts_with("http://") || source.starts_with("https://");
        is_url.then_some(source)
    }

    /// Returns the requests of `fetched` or, without it, of the file; `None` without a recording.
    ///
    /// # Errors
    /// If the file cannot be read, or the recording has no requests for the model.
    pub(super) fn demand(
        &self,
        fetched: Option<Recording>,
    ) -> Result<Option<RecordedDemand>, SimulateArgsError> {
        let Some(source) = &self.from_decisions else {
            return Ok(None);
        };
        let recording = match fetched {
            Some(fetched) => fetched,
            None => read(Path::new(source))?,
        };
        RecordedDemand::of(&recording, self.model.as_deref()).map(Some)
    }
}

fn read(path: &Path) -> Result<Recording, SimulateArgsError> {
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|error| SimulateArgsError::new(format!("read {shown}: {error}")))?;
    recording::read(&text).map_err(|error| {
        SimulateArgsError::new(format!("{shown}:{}: {}", error.line, error.message))
    })
}

//! Progress bar of a load.

use indicatif::ProgressBar;

use super::load::LoadProgress;

/// Updates `bar` with the progress of a load.
pub fn show(bar: &ProgressBar, progress: LoadProgress) {
    bar.set_position(progress.ended);
    let hits = 100.0 * progress.cached_tokens as f64 / progress.prompt_tokens.max(1) as f64;
    bar.set_message(format!(
        "{} running, {} failed, {hits:.1} % cached",
        progress.in_flight, progress.failed
    ));
}

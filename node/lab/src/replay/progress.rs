//! The progress bar of a load: on a terminal only.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::load::Progress;

/// A bar over `planned` requests.
///
/// # Errors
/// Never: the template is a constant.
pub fn bar(planned: u64) -> anyhow::Result<ProgressBar> {
    let target = if stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = "{prefix}{elapsed_precise} {wide_bar} {pos}/{len} {msg}";
    Ok(ProgressBar::with_draw_target(Some(planned), target)
        .with_style(ProgressStyle::with_template(style)?))
}

/// Shows how far the load has got.
pub fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_position(progress.ended);
    let hits = 100.0 * progress.cached_tokens as f64 / progress.prompt_tokens.max(1) as f64;
    bar.set_message(format!(
        "{} running, {} failed, {hits:.1} % cached",
        progress.in_flight, progress.failed
    ));
}

//! Formats a comparison as one self-contained page.

use super::report::SimComparison;

/// Returns an HTML page with data and drawing code, which needs no network.
///
/// # Errors
/// If the data cannot be serialised.
pub fn html(comparison: &SimComparison) -> serde_json::Result<String> {
    // `</` would end the script element; the escaped form is the same text in JSON.
    let data = serde_json::to_string(comparison)?.replace("</", "<\\/");
    Ok(include_str!("page.html")
        .replace("/*STYLE*/", include_str!("page.css"))
        .replace("/*SCRIPT*/", include_str!("page.js"))
        .replace("/*DATA*/", &data))
}

//! A comparison as one self-contained page.

use super::report::SimComparison;

/// The page: data and drawing code in one file, nothing from the network.
///
/// # Errors
/// When the data cannot be made into JSON.
pub fn html(comparison: &SimComparison) -> serde_json::Result<String> {
    // `</` would end the script element; the escape is the same text to JSON.
    let data = serde_json::to_string(comparison)?.replace("</", "<\\/");
    Ok(include_str!("page.html")
        .replace("/*STYLE*/", include_str!("page.css"))
        .replace("/*SCRIPT*/", include_str!("page.js"))
        .replace("/*DATA*/", &data))
}

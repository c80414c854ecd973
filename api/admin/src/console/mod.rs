//! The operators' console: a page, its style and its scripts, embedded in the binary.
//!
//! The files hold no data and are open to everyone; they read what they show from the API, with the
//! token that the operator enters. The content security policy below allows no inline scripts,
//! nothing from other origins, and no markup parsed from strings (`innerHTML`). See docs/adr/0043.

use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderName, HeaderValue, StatusCode};
use xxhash_rust::xxh3::xxh3_64;

use super::answer::PathParam;
use super::problem::not_found;
use api::error::Problem;

/// Content security policy of the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'; trusted-types 'none'";

const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

/// Maximum total size of all files, in bytes.
#[cfg(test)]
const BYTES_MAX: usize = 150 * 1024;

/// An embedded file of the console.
struct ConsoleFile {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
}

/// Embeds files of this folder with their content types.
macro_rules! files {
    ($($name:literal: $content_type:expr),+ $(,)?) => {
        [$(ConsoleFile {
            name: $name,
            content_type: $content_type,
            text: include_str!($name),
        }),+]
    };
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The page, which loads all other files.
const PAGE: ConsoleFile = ConsoleFile {
    name: "index.html",
    content_type: "text/html; charset=utf-8",
    text: include_str!("index.html"),
};
static FILES: [ConsoleFile; 21] = files! {
    "console.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "app.js": SCRIPT,
    "actions.js": SCRIPT,
    "api.js": SCRIPT,
    "charts.js": SCRIPT,
    "dom.js": SCRIPT,
    "format.js": SCRIPT,
    "live.js": SCRIPT,
    "table.js": SCRIPT,
    "what-if.js": SCRIPT,
    "words.js": SCRIPT,
    "page-overview.js": SCRIPT,
    "page-backends.js": SCRIPT,
    "page-ownership.js": SCRIPT,
    "page-users.js": SCRIPT,
    "page-sessions.js": SCRIPT,
    "page-decisions.js": SCRIPT,
    "page-policy.js": SCRIPT,
    "page-log.js": SCRIPT,
    "page-config.js": SCRIPT,
};

/// Response with a file, or `304` if the browser already has it.
pub(super) struct ConsoleAnswer(Response);

impl IntoResponse for ConsoleAnswer {
    fn into_response(self) -> Response {
        self.0
    }
}

/// Handles `GET /`.
pub(super) async fn page(headers: HeaderMap) -> ConsoleAnswer {
    PAGE.answer(&headers)
}

/// Handles `GET /console/{file}`.
pub(super) async fn file(
    PathParam(name): PathParam<String>,
    headers: HeaderMap,
) -> Result<ConsoleAnswer, Problem> {
    let found = FILES.iter().find(|file| file.name == name);
    let found = found.ok_or_else(|| not_found(format!("the console has no file {name:?}")))?;
    Ok(found.answer(&headers))
}

impl ConsoleFile {
    /// Returns the file, or `304` if `asked` names its current version. The browser revalidates the
    /// file on each use, so that a new build takes effect at once.
    fn answer(&self, asked: &HeaderMap) -> ConsoleAnswer {
        let tag = format!("\"{:016x}\"", xxh3_64(self.text.as_bytes()));
        let is_known = asked.get(IF_NONE_MATCH).is_some_and(|it| *it == tag);
        let tag = HeaderValue::try_from(tag).expect("hex digits in quotes are visible ascii");
        let headers = [
            (ETAG, tag),
            (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
            (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
            (OPENER_POLICY, HeaderValue::from_static("same-origin")),
            (RESOURCE_POLICY, HeaderValue::from_static("same-origin")),
        ];
        let content_type = HeaderValue::from_static(self.content_type);
        ConsoleAnswer(match is_known {
            true => (StatusCode::NOT_MODIFIED, headers).into_response(),
            false => (headers, [(CONTENT_TYPE, content_type)], self.text).into_response(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_is_small_and_self_contained() {
        let all = || FILES.iter().chain([&PAGE]);
        let bytes: usize = all().map(|file| file.text.len()).sum();
        assert!(bytes <= BYTES_MAX, "{bytes} bytes");
        for file in all() {
            for foreign in [
                "http://",
                "https://",
                "eval(",
                "innerHTML",
                "style=",
                "onclick=",
            ] {
                let text = file.text.replace("http://www.w3.org/2000/svg", "");
                assert!(!text.contains(foreign), "{}: {foreign}", file.name);
            }
        }
    }

    #[test]
    fn console_scripts_import_only_served_files() {
        for file in FILES.iter().filter(|file| file.content_type == SCRIPT) {
            let imports = file
                .text
                .lines()
                .filter_map(|line| line.split_once(" from './"));
            for (_, rest) in imports {
                let name = rest.trim_end_matches("';");
                assert!(
                    FILES.iter().any(|it| it.name == name),
                    "{}: {name}",
                    file.name
                );
            }
        }
    }
}

//! Checks of `[requests]` and `[sessions]`: fields and headers of requests that are refused or
//! removed, and headers that name sessions.

use api::prompt::is_read;
use api::proxy::HeaderRules;
use api::sessions::CONFIGURED_MAX;

use super::read::Settings;
use super::traffic::{RequestsConfig, SessionsConfig};

/// Rejects fields that the router reads itself, and names that no header can have.
pub(super) fn check(requests: &RequestsConfig, found: &mut Settings) {
    for (path, fields) in [
        ("requests.refuse_fields", &requests.refuse_fields),
        ("requests.strip_fields", &requests.strip_fields),
    ] {
        if let Some(field) = fields.iter().find(|field| is_read(field)) {
            let message = format!("{path} names {field:?}, which the router reads itself");
            found.refuse(path, message, "fields that only engines read");
        }
    }
    let headers = &requests.strip_headers;
    if HeaderRules::new(headers).is_none() {
        let path = "requests.strip_headers";
        let expected = "names of headers, each optionally ending in \"*\"";
        found.refuse(path, format!("{path} is {headers:?}"), expected);
    }
}

/// Rejects more headers than sessions may be named by, and repeated ones.
pub(super) fn check_sessions(sessions: &SessionsConfig, found: &mut Settings) {
    let path = "sessions.headers";
    let count = sessions.headers.len();
    if count > CONFIGURED_MAX {
        let expected = format!("at most {CONFIGURED_MAX} entries");
        found.refuse(path, format!("{path} has {count} entries"), &expected);
    }
    let names = sessions.headers.iter().map(|it| it.session.as_str());
    found.unique(path, "session", names);
}

#[cfg(test)]
mod tests {
    use api::proxy::FieldRules;

    use super::super::{Config, Origin, load};
    use super::*;

    fn config(flags: &[&str]) -> Result<Config, String> {
        let flags = ["node.id=1"].iter().chain(flags);
        let origin = Origin {
            flags: flags.map(ToString::to_string).collect(),
            ..Origin::default()
        };
        match load(&origin) {
            Ok(loaded) => Ok(loaded.config),
            Err(errors) => Err(errors.errors[0].message.clone()),
        }
    }

    #[test]
    fn unset_request_rules_equal_the_data_planes_defaults() {
        let config = config(&[]).unwrap();
        let requests = &config.requests;
        let fields = FieldRules::new(
            requests.refuse_fields.clone(),
            requests.strip_fields.clone(),
        );
        assert_eq!(fields, FieldRules::default());
        let headers = HeaderRules::new(&requests.strip_headers);
        assert_eq!(headers, Some(HeaderRules::default()));
        assert!(requests.extra_paths.is_empty());
    }

    #[test]
    fn field_lists_may_be_empty() {
        let empty = ["requests.strip_fields=", "requests.refuse_fields="];
        let config = config(&empty).unwrap();
        assert!(config.requests.strip_fields.is_empty());
        assert!(config.requests.refuse_fields.is_empty());
    }

    #[test]
    fn nonsensical_request_rules_are_refused() {
        for (flag, fault) in [
            (
                "requests.strip_fields=model",
                "requests.strip_fields names \"model\", which the router reads itself",
            ),
            (
                "requests.strip_headers=a/b",
                "requests.strip_headers is [\"a/b\"]",
            ),
            (
                "requests.extra_paths=/flush_cache",
                "requests.extra_paths is \"/flush_cache\"",
            ),
            (
                "requests.extra_paths=/a?b",
                "requests.extra_paths is \"/a?b\"",
            ),
            ("admin.hosts=a:1", "admin.hosts is \"a:1\""),
        ] {
            assert_eq!(config(&[flag]).unwrap_err(), fault);
        }
    }
}

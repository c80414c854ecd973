//! Checks of `[requests]`: fields and headers of requests that are refused or removed.

use api::prompt::is_read;
use api::proxy::{FieldRules, HeaderRules};

use super::file::ConfigFile;
use super::form::{Parsed, PlainName, values};
use super::read::Settings;

/// Header and body field with which clients of vLLM set a priority.
const PRIORITY: [&str; 2] = ["x-vllm-priority", "priority"];

/// Rules for fields and headers that are refused or removed.
pub(super) struct Rules {
    pub(super) fields: FieldRules,
    pub(super) strip_headers: HeaderRules,
}

pub(super) fn rules(file: &ConfigFile, found: &mut Settings) -> Rules {
    let requests = &file.requests;
    let names = |names: &[Parsed<PlainName>]| {
        let mut names = values(names);
        let passes = |name: &str| file.users.forward_priority && PRIORITY.contains(&name);
        names.retain(|name| !passes(name));
        names
    };
    let refused = names(&requests.refuse_fields);
    let stripped = names(&requests.strip_fields);
    for (path, fields) in [
        ("requests.refuse_fields", &refused),
        ("requests.strip_fields", &stripped),
    ] {
        if let Some(field) = fields.iter().find(|field| is_read(field)) {
            let message = format!("{path} names {field:?}, which the router reads itself");
            found.refuse(path, message, "fields that only engines read");
        }
    }
    let headers = names(&requests.strip_headers);
    let strip_headers = HeaderRules::new(&headers).unwrap_or_else(|| {
        let path = "requests.strip_headers";
        let expected = "names of headers, each optionally ending in \"*\"";
        found.refuse(path, format!("{path} is {headers:?}"), expected);
        HeaderRules::default()
    });
    Rules {
        fields: FieldRules::new(refused, stripped),
        strip_headers,
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(config.fields, FieldRules::default());
        assert_eq!(config.strip_headers, HeaderRules::default());
        assert!(config.extra_paths.is_empty());
    }

    #[test]
    fn field_lists_may_be_empty_and_priority_may_be_forwarded() {
        let empty = ["requests.strip_fields=", "requests.refuse_fields="];
        let none = FieldRules::new(Vec::new(), Vec::new());
        assert_eq!(config(&empty).unwrap().fields, none);
        let flags = [
            "users.forward_priority=true",
            "requests.strip_fields=priority,x",
        ];
        let rules = config(&flags).unwrap();
        let refused = api::proxy::REFUSED_FIELDS.map(ToOwned::to_owned).to_vec();
        assert_eq!(rules.fields, FieldRules::new(refused, vec!["x".to_owned()]));
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

//! `[requests]`: what of a request reaches engines.

use api::prompt::is_read;
use api::proxy::{FieldRules, HeaderRules};

use super::Requests;
use super::fault::Fault;
use super::layers::Values;
use super::read::{flag, refuse, texts};

/// The header and the field by which a client of vLLM asks to go past others.
const PRIORITY: [&str; 2] = ["x-vllm-priority", "priority"];

pub(super) fn requests(values: &Values, faults: &mut Vec<Fault>) -> Option<Requests> {
    let before = faults.len();
    let forward_priority = flag(values, "users.forward_priority")?;
    let names = |path: &str| -> Option<Vec<String>> {
        let mut names = texts(values, path)?;
        names.retain(|name| !forward_priority || !PRIORITY.contains(&name.as_str()));
        Some(names)
    };
    let refused = names("requests.refuse_fields")?;
    let stripped = names("requests.strip_fields")?;
    for (path, fields) in [
        ("requests.refuse_fields", &refused),
        ("requests.strip_fields", &stripped),
    ] {
        if let Some(field) = fields.iter().find(|field| is_read(field)) {
            let message = format!("{path} names {field:?}, which the router reads itself");
            refuse(
                values,
                path,
                message,
                "fields that only engines read",
                faults,
            );
        }
    }
    let headers = names("requests.strip_headers")?;
    let strip_headers = HeaderRules::new(&headers);
    if strip_headers.is_none() {
        let path = "requests.strip_headers";
        let message = format!("{path} is {headers:?}");
        refuse(
            values,
            path,
            message,
            "names of headers, each with a last \"*\" if wanted",
            faults,
        );
    }
    if faults.len() > before {
        return None;
    }
    Some(Requests {
        extra_paths: texts(values, "requests.extra_paths").unwrap_or_default(),
        fields: FieldRules::new(refused, stripped),
        strip_headers: strip_headers?,
    })
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
            Err(faults) => Err(faults.faults[0].message.clone()),
        }
    }

    #[test]
    fn unset_is_what_the_data_plane_does_by_itself() {
        let requests = config(&[]).unwrap().requests;
        assert_eq!(requests.fields, FieldRules::default());
        assert_eq!(requests.strip_headers, HeaderRules::default());
        assert!(requests.extra_paths.is_empty());
    }

    #[test]
    fn lists_may_be_empty_and_priority_may_pass() {
        let empty = ["requests.strip_fields=", "requests.refuse_fields="];
        let none = FieldRules::new(Vec::new(), Vec::new());
        assert_eq!(config(&empty).unwrap().requests.fields, none);
        let flags = [
            "users.forward_priority=true",
            "requests.strip_fields=priority,x",
        ];
        let rules = config(&flags).unwrap().requests;
        let refused = api::proxy::REFUSED_FIELDS.map(ToOwned::to_owned).to_vec();
        assert_eq!(rules.fields, FieldRules::new(refused, vec!["x".to_owned()]));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
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

//! String formats of types that several sections of a config use and TOML lacks, such as sizes.
//! `state` defines those of replicated settings, and `node` those of its own sections.

use state::form::NamedForm;

use crate::files::ring::{RING_BYTES_MAX, RING_BYTES_MIN};

/// Returns the format named `name` of this crate or of `state`, if there is one.
#[must_use]
pub fn named(name: &str) -> Option<&'static NamedForm> {
    let own = FORMS.iter().find(|form| form.name == name);
    own.or_else(|| state::form::named(name))
}

state::forms! {
    /// A number of bytes above zero.
    Size: u64 = "size" {
        pattern: r"^\d+ *(B|kB|MB|GB|KiB|MiB|GiB)?$",
        expected: "a size in bytes above zero, such as \"32MiB\"",
        integers: (1, None),
        read: |text| size(text).filter(|bytes| *bytes > 0),
        show: show_size,
    }
    /// Disk space for a ring of files; 0 for none.
    DiskSpace: u64 = "disk-space" {
        pattern: r"^\d+ *(B|kB|MB|GB|KiB|MiB|GiB)?$",
        expected: "0, or a size from 16MiB to 32GiB, such as \"256MiB\"",
        integers: (0, None),
        read: |text| size(text).filter(|bytes| {
            *bytes == 0 || (RING_BYTES_MIN..=RING_BYTES_MAX).contains(bytes)
        }),
        show: |bytes| match bytes {
            0 => "0".to_owned(),
            bytes => show_size(bytes),
        },
    }
    /// An HTTP error status, from 400 to 599.
    Status: u16 = "http-status" {
        pattern: r"^[45]\d\d$",
        expected: "an HTTP status from 400 to 599",
        integers: (400, Some(599)),
        read: |text| text.parse().ok().filter(|status| (400..=599).contains(status)),
        show: u16::to_string,
    }
    /// Path of a request to an engine, such as a probe.
    UrlPath: String = "url-path" {
        pattern: "^/",
        expected: "a path, such as \"/health\"",
        read: |text| is_url_path(text).then(|| text.to_owned()),
        show: String::clone,
    }
}

fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let unit = match unit.trim_start() {
        "" | "B" => 1,
        "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

fn show_size(bytes: &u64) -> String {
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let unit = units
        .into_iter()
        .find(|(unit, _)| bytes.is_multiple_of(*unit));
    unit.map_or_else(
        || bytes.to_string(),
        |(unit, name)| format!("{}{name}", bytes / unit),
    )
}

fn is_url_path(text: &str) -> bool {
    text.starts_with('/') && text.parse::<http::uri::PathAndQuery>().is_ok()
}

#[cfg(test)]
mod tests {
    use state::form::Form as _;

    use super::*;

    #[test]
    fn sizes_have_binary_and_decimal_units() {
        assert_eq!(Size::read("32MiB"), Some(32 << 20));
        assert_eq!(Size::read("5 kB"), Some(5_000));
        assert_eq!(Size::read("7"), Some(7));
        for wrong in ["", "MiB", "-1", "1.5MiB", "99999999999GiB", "1mib", "0"] {
            assert_eq!(Size::read(wrong), None, "{wrong}");
        }
        for written in ["3MiB", "12345"] {
            let size = Size::read(written).unwrap();
            assert_eq!(Size::read(&Size::show(&size)), Some(size), "{written}");
        }
    }

    #[test]
    fn url_paths_begin_with_a_slash() {
        for right in ["/", "/health", "/v1/models?limit=1"] {
            assert!(is_url_path(right), "{right}");
        }
        for wrong in ["", "health", "http://a/health", "/a b", "/\n"] {
            assert!(!is_url_path(wrong), "{wrong:?}");
        }
    }
}

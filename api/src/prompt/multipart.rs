//! Reads `multipart/form-data` bodies, such as audio uploads: the few fields that routing needs.
//!
//! Forms are not parsed further: the engine receives them byte for byte. Ambiguous forms are
//! rejected, so that no engine reads another model than the router did.

use bytes::Bytes;
use memchr::memmem;

use super::BodyRejection;

/// Maximum number of parts of a form.
const PARTS_MAX: usize = 64;
/// Maximum length of a part's header, in bytes.
const PART_HEAD_BYTES_MAX: usize = 4096;
/// Maximum length of a field's text, in bytes.
const TEXT_BYTES_MAX: usize = 1024;
/// Maximum length of a boundary, in bytes (RFC 2046, 5.1.1).
const BOUNDARY_BYTES_MAX: usize = 70;

/// Fields of a form that routing needs, and the names of all fields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FormFields {
    /// The `model` field; `None` if absent.
    pub model: Option<String>,
    /// Byte range of that field's text in the body.
    pub model_span: (usize, usize),
    /// The `user` field; `None` if absent.
    pub user: Option<String>,
    /// The `stream` field.
    pub is_stream: bool,
    /// Names of all fields, in order.
    pub names: Vec<String>,
}

/// Reads a form whose `Content-Type` is `content_type`.
///
/// # Errors
/// Returns a [`BodyRejection`] if the body is not a form, or if engines may read it differently.
pub fn read_form(content_type: &str, body: &Bytes) -> Result<FormFields, BodyRejection> {
    let boundary = boundary(content_type)?;
    let delimiter = [b"\r\n--", boundary.as_bytes()].concat();
    let find = memmem::Finder::new(&delimiter);
    // The first delimiter has no line break before it.
    let mut rest = body
        .strip_prefix(&delimiter[2..])
        .ok_or_else(|| malformed("it does not begin with its boundary"))?;
    let mut fields = FormFields::default();
    loop {
        if let Some(end) = rest.strip_prefix(b"--") {
            let is_end = end.is_empty() || end.starts_with(b"\r\n");
            return is_end
                .then_some(fields)
                .ok_or_else(|| malformed("its end is not clear"));
        }
        rest = rest
            .strip_prefix(b"\r\n")
            .ok_or_else(|| malformed("a boundary has no end"))?;
        if fields.names.len() == PARTS_MAX {
            return Err(malformed(&format!("it has more than {PARTS_MAX} parts")));
        }
        let head_max = rest.len().min(PART_HEAD_BYTES_MAX);
        let head_end = memmem::find(&rest[..head_max], b"\r\n\r\n")
            .ok_or_else(|| malformed("the head of a part has no end"))?;
        let (head, content) = (&rest[..head_end], &rest[head_end + 4..]);
        let end = find
            .find(content)
            .ok_or_else(|| malformed("its last boundary is missing"))?;
        fields.add(head, &content[..end])?;
        if fields.names.last().is_some_and(|name| name == "model") {
            let start = content.as_ptr().addr() - body.as_ptr().addr();
            fields.model_span = (start, start + end);
        }
        rest = &content[end + delimiter.len()..];
    }
}

impl FormFields {
    fn add(&mut self, head: &[u8], content: &[u8]) -> Result<(), BodyRejection> {
        let name = name(head)?;
        if self.names.contains(&name) && matches!(&*name, "model" | "user" | "stream") {
            return Err(field_rejection(&name, "stands there twice"));
        }
        match &*name {
            "model" => {
                let model = text(&name, content)?;
                if model.is_empty() {
                    return Err(field_rejection(&name, "is empty, expected a model id"));
                }
                self.model = Some(model);
            }
            "user" => self.user = Some(text(&name, content)?),
            "stream" => {
                let text = text(&name, content)?.to_ascii_lowercase();
                self.is_stream = matches!(&*text, "true" | "1" | "on" | "yes" | "t" | "y");
            }
            _ => {}
        }
        self.names.push(name);
        Ok(())
    }
}

fn malformed(why: &str) -> BodyRejection {
    BodyRejection {
        message: format!("body is not valid multipart/form-data: {why}"),
        param: None,
    }
}

fn field_rejection(name: &str, what: &str) -> BodyRejection {
    BodyRejection {
        message: format!("{name}: {what}"),
        param: Some(name.to_owned()),
    }
}

fn text(name: &str, content: &[u8]) -> Result<String, BodyRejection> {
    if content.len() > TEXT_BYTES_MAX {
        return Err(field_rejection(name, "is longer than 1024 bytes"));
    }
    let text = std::str::from_utf8(content);
    let text = text.map_err(|_| field_rejection(name, "is not UTF-8"))?;
    Ok(text.to_owned())
}

/// Returns the boundary that `content_type` names.
fn boundary(content_type: &str) -> Result<String, BodyRejection> {
    let wrong = || BodyRejection {
        message: "expected a body of multipart/form-data, with its boundary in content-type"
            .to_owned(),
        param: None,
    };
    let (media, parameters) = content_type.split_once(';').ok_or_else(wrong)?;
    if !media.trim().eq_ignore_ascii_case("multipart/form-data") {
        return Err(wrong());
    }
    let parameters = parameters
        .split(';')
        .filter_map(|it| it.trim().split_once('='));
    let mut boundaries = parameters.filter(|(name, _)| name.eq_ignore_ascii_case("boundary"));
    let (Some((_, value)), None) = (boundaries.next(), boundaries.next()) else {
        return Err(wrong());
    };
    let quoted = value
        .strip_prefix('"')
        .and_then(|value| value.strip_suffix('"'));
    let boundary = quoted.unwrap_or(value);
    let is_boundary = (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len())
        && boundary
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && !b"\";\\".contains(&byte));
    is_boundary.then(|| boundary.to_owned()).ok_or_else(wrong)
}

/// Returns the name in the header of a part. Rejects escapes and encodings, because parsers read
/// them differently.
fn name(head: &[u8]) -> Result<String, BodyRejection> {
    let unclear = || malformed("a part has no clear name");
    let head = std::str::from_utf8(head).map_err(|_| unclear())?;
    let lines = head.split("\r\n").filter_map(|line| line.split_once(':'));
    let mut dispositions =
        lines.filter(|(name, _)| name.trim().eq_ignore_ascii_case("content-disposition"));
    let (Some((_, disposition)), None) = (dispositions.next(), dispositions.next()) else {
        return Err(unclear());
    };
    let mut name = None;
    let mut rest = disposition.trim();
    rest = rest
        .strip_prefix("form-data")
        .ok_or_else(unclear)?
        .trim_start();
    while let Some(parameter) = rest.strip_prefix(';') {
        let (key, value) = parameter.split_once('=').ok_or_else(unclear)?;
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').ok_or_else(unclear)?,
            None => value.split_at(value.find(';').unwrap_or(value.len())),
        };
        let key = key.trim().to_ascii_lowercase();
        if key.starts_with("name") {
            let is_clear = key == "name" && !value.contains(['\\', '%']) && !value.is_empty();
            if !is_clear || name.replace(value.trim().to_owned()).is_some() {
                return Err(unclear());
            }
        }
        rest = after.trim_start();
    }
    name.filter(|_| rest.is_empty()).ok_or_else(unclear)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=b-1";

    fn part(name: &str, content: &str) -> String {
        format!("--b-1\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{content}\r\n")
    }

    fn read(body: &str) -> Result<FormFields, String> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        read_form(TYPE, &body).map_err(|why| why.message)
    }

    #[test]
    fn the_model_part_is_found_at_any_position() {
        let file = "--b-1\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a;name=\\b.wav\"\r\ncontent-type: audio/wav\r\n\r\n\0\x01\r\n-- \r\n--b-\r\n\r\n";
        let body = format!(
            "{file}{}{}--b-1--\r\n",
            part("model", "org/whisper"),
            part("stream", "true")
        );
        let fields = read(&body).unwrap();
        assert_eq!(fields.model.as_deref(), Some("org/whisper"));
        assert!(fields.is_stream);
        assert_eq!(fields.names, ["file", "model", "stream"]);
        let quoted = "multipart/form-data; charset=utf-8; BOUNDARY=\"b-1\"";
        let body = Bytes::from(part("model", "m") + "--b-1--");
        assert_eq!(
            read_form(quoted, &body).unwrap().model.as_deref(),
            Some("m")
        );
    }

    #[test]
    fn ambiguous_multipart_bodies_are_refused() {
        let model = part("model", "m");
        let twice = format!("{model}{}--b-1--", part("model", "n"));
        let escaped = format!("{}--b-1--", part("mo\\del", "m"));
        let two_names = model.replace("name=\"model\"", "name=\"x\"; name=\"model\"");
        let encoded = model.replace("name=\"model\"", "name*=utf-8''model");
        let many = part("x", "").repeat(PARTS_MAX + 1);
        for (body, why) in [
            (String::new(), "does not begin with its boundary"),
            (
                format!("preamble\r\n{model}--b-1--"),
                "does not begin with its boundary",
            ),
            (model.clone(), "its last boundary is missing"),
            (twice, "model: stands there twice"),
            (format!("{escaped}--b-1--"), "no clear name"),
            (format!("{two_names}--b-1--"), "no clear name"),
            (format!("{encoded}--b-1--"), "no clear name"),
            (format!("{}--b-1--", part("model", "")), "model: is empty"),
            (format!("{many}--b-1--"), "more than 64 parts"),
        ] {
            let told = read(&body).unwrap_err();
            assert!(told.contains(why), "{told}");
        }
        for content_type in [
            "application/json",
            "multipart/form-data",
            "multipart/form-data; boundary=",
        ] {
            assert!(
                read_form(content_type, &Bytes::from(model.clone())).is_err(),
                "{content_type}"
            );
        }
    }
}

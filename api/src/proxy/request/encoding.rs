//! Encodings of request bodies: which ones are supported, and how a compressed body is decoded
//! within limits.
//!
//! Engines receive the decoded body. A body can grow a thousandfold, so it is decoded as it
//! arrives, in small parts that let other requests run in between. Decoding stops once the result
//! exceeds the limit. Codex compresses with zstd, most other clients that do with gzip.

use std::io::Write;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http::header::CONTENT_ENCODING;
use http::{HeaderMap, HeaderValue};

use super::bounded_bytes::BoundedBytes;
use super::zstd::ZstdBody;
use crate::error::ProxyError;

/// Number of compressed bytes given to a decoder at a time. With gzip, they expand to at most 4 MiB.
pub(super) const PART_BYTES: usize = 4096;
/// Maximum length of an encoding's name in an error, in bytes.
const SHOWN_ENCODING_BYTES_MAX: usize = 64;

/// Encoding of a request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyEncoding {
    Identity,
    Gzip,
    Zstd,
}

impl BodyEncoding {
    /// Returns the encoding that the headers declare. Fails if it is not supported.
    pub(in crate::proxy) fn of(headers: &HeaderMap) -> Result<Self, ProxyError> {
        let mut all = headers.get_all(CONTENT_ENCODING).iter();
        let only = match (all.next(), all.next()) {
            (None, _) => return Ok(Self::Identity),
            (Some(only), None) => only.as_bytes().trim_ascii(),
            (Some(_), Some(_)) => return Err(unsupported(headers)),
        };
        match only.to_ascii_lowercase().as_slice() {
            b"" | b"identity" => Ok(Self::Identity),
            // RFC 9110, 8.4.1.3.
            b"gzip" | b"x-gzip" => Ok(Self::Gzip),
            b"zstd" => Ok(Self::Zstd),
            _ => Err(unsupported(headers)),
        }
    }
}

fn unsupported(headers: &HeaderMap) -> ProxyError {
    let all = headers.get_all(CONTENT_ENCODING).iter();
    let all: Vec<_> = all
        .filter_map(|value: &HeaderValue| value.to_str().ok())
        .collect();
    let mut encoding = all.join(", ");
    encoding.truncate(encoding.floor_char_boundary(SHOWN_ENCODING_BYTES_MAX));
    ProxyError::UnsupportedEncoding { encoding }
}

/// Decoder of a compressed body.
pub(super) enum BodyDecoder {
    Gzip(Box<GzipBody>),
    Zstd(Box<ZstdBody>),
}

impl BodyDecoder {
    /// Returns the decoder of a body with this encoding; `None` if it is not compressed.
    pub(super) fn of(encoding: BodyEncoding, bytes_max: u64) -> Option<Self> {
        match encoding {
            BodyEncoding::Identity => None,
            BodyEncoding::Gzip => Some(Self::Gzip(Box::new(GzipBody::new(bytes_max)))),
            BodyEncoding::Zstd => Some(Self::Zstd(Box::new(ZstdBody::new(bytes_max)))),
        }
    }

    /// Decodes the beginning of a part of at most [`PART_BYTES`], and returns the number of decoded
    /// bytes. [`Self::advance`] decodes the rest. Fails if the body is invalid or too long.
    pub(super) fn push(&mut self, part: &[u8]) -> Result<Option<usize>, ProxyError> {
        match self {
            Self::Gzip(gzip) => gzip.push(part).map(Some),
            Self::Zstd(zstd) => {
                zstd.add(part);
                zstd.advance()
            }
        }
    }

    /// Decodes more of the last part, and returns the number of decoded bytes; `None` at its end.
    pub(super) fn advance(&mut self) -> Result<Option<usize>, ProxyError> {
        match self {
            Self::Gzip(_) => Ok(None),
            Self::Zstd(zstd) => zstd.advance(),
        }
    }

    /// Returns how many bytes the decoder keeps beside the decoded ones, as far as that matters.
    pub(super) fn window(&self) -> u64 {
        match self {
            Self::Gzip(_) => 0,
            Self::Zstd(zstd) => zstd.window(),
        }
    }

    /// Returns the whole decoded body, or an error if it is incomplete or too long.
    pub(super) fn end(self) -> Result<Bytes, ProxyError> {
        match self {
            Self::Gzip(gzip) => gzip.end(),
            Self::Zstd(zstd) => zstd.end(),
        }
    }
}

/// Decoder of a gzip body that arrives in parts.
pub(super) struct GzipBody(MultiGzDecoder<BoundedBytes>);

impl GzipBody {
    pub(in crate::proxy) fn new(bytes_max: u64) -> Self {
        Self(MultiGzDecoder::new(BoundedBytes::new(bytes_max)))
    }

    /// Decodes a part and returns the number of decoded bytes. Fails if the body is invalid or too
    /// long.
    pub(in crate::proxy) fn push(&mut self, part: &[u8]) -> Result<usize, ProxyError> {
        let before = self.0.get_ref().bytes.len();
        let written = self.0.write_all(part);
        written.map_err(|_| self.fault())?;
        Ok(self.0.get_ref().bytes.len() - before)
    }

    /// Returns the whole decoded body, or an error if it is incomplete or too long.
    pub(in crate::proxy) fn end(mut self) -> Result<Bytes, ProxyError> {
        match self.0.try_finish() {
            Ok(()) => Ok(std::mem::take(&mut self.0.get_mut().bytes).into()),
            Err(_) => Err(self.fault()),
        }
    }

    fn fault(&self) -> ProxyError {
        self.0.get_ref().fault("gzip")
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn decode(bytes: &[u8], part: usize, bytes_max: u64) -> Result<Bytes, ProxyError> {
        let mut body = GzipBody::new(bytes_max);
        let mut told = 0;
        for part in bytes.chunks(part) {
            told += body.push(part)?;
        }
        let whole = body.end()?;
        assert!(told <= whole.len());
        Ok(whole)
    }

    #[test]
    fn gzip_decodes_from_any_chunks() {
        let text: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let packed = gzip(&text);
        for part in [1, 7, 4096, packed.len()] {
            assert_eq!(decode(&packed, part, 400_000).unwrap(), text, "{part}");
        }
        let two = [gzip(b"a"), gzip(b"b")].concat();
        assert_eq!(decode(&two, 3, 2).unwrap(), b"ab"[..]);
        assert_eq!(decode(&gzip(b""), 3, 2).unwrap(), b""[..]);
    }

    #[test]
    fn decompressed_bodies_are_bounded() {
        let bomb = gzip(&vec![0; 10_000_000]);
        let mut body = GzipBody::new(1000);
        assert_eq!(
            body.push(&bomb),
            Err(ProxyError::BodyTooLarge { bytes_max: 1000 })
        );
        assert!(body.0.get_ref().bytes.len() <= 1000);
        assert!(decode(&gzip(&[0; 1000]), 9, 1000).is_ok());
        assert!(decode(&gzip(&[0; 1001]), 9, 1000).is_err());
    }

    #[test]
    fn invalid_and_truncated_gzip_is_reported() {
        let packed = gzip(b"some text that is worth to be packed");
        let mut wrong = packed.clone();
        *wrong.last_mut().unwrap() ^= 1;
        for bytes in [
            b"{}",
            &packed[..packed.len() - 1],
            &packed[..5],
            &wrong[..],
            b"",
        ] {
            let fault = decode(bytes, 9, 1000);
            assert!(
                matches!(fault, Err(ProxyError::BadRequest { .. })),
                "{fault:?}"
            );
        }
    }

    #[test]
    fn content_encodings_are_recognised() {
        let of = |values: &[&'static str]| {
            let values = values
                .iter()
                .map(|it| (CONTENT_ENCODING, HeaderValue::from_static(it)));
            let mut headers = HeaderMap::new();
            for (name, value) in values {
                headers.append(name, value);
            }
            BodyEncoding::of(&headers)
        };
        assert_eq!(of(&[]), Ok(BodyEncoding::Identity));
        assert_eq!(of(&["Identity"]), Ok(BodyEncoding::Identity));
        assert_eq!(of(&["GZIP"]), Ok(BodyEncoding::Gzip));
        assert_eq!(of(&["x-gzip"]), Ok(BodyEncoding::Gzip));
        assert_eq!(of(&["zstd"]), Ok(BodyEncoding::Zstd));
        for wrong in [
            &["br"][..],
            &["gzip, gzip"],
            &["gzip", "gzip"],
            &["deflate"],
        ] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
    }
}

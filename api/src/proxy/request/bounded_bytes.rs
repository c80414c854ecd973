//! Buffer for decoded bodies, which refuses to grow beyond a limit.

use std::io::{self, Write};

use crate::error::ProxyError;

/// Decoded bytes. Writing beyond `bytes_max` fails.
pub(super) struct BoundedBytes {
    pub(super) bytes: Vec<u8>,
    bytes_max: u64,
    is_over: bool,
}

impl BoundedBytes {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self {
            bytes: Vec::new(),
            bytes_max,
            is_over: false,
        }
    }

    /// Returns the error of a body that could not be decoded.
    pub(super) fn fault(&self, encoding: &str) -> ProxyError {
        match self.is_over {
            true => ProxyError::BodyTooLarge {
                bytes_max: self.bytes_max,
            },
            false => ProxyError::BadRequest {
                message: format!(
                    "the body is not valid {encoding}, although content-encoding is {encoding}"
                ),
                param: None,
            },
        }
    }
}

impl Write for BoundedBytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + bytes.len()) as u64 > self.bytes_max {
            self.is_over = true;
            return Err(io::Error::other("longer than allowed"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

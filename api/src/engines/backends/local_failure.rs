//! Distinguishes local failures (no descriptors, ports or memory) from failures of an engine.

use std::io;

use rustix::io::Errno;

/// OS errors that report a lack of local resources for a connection.
const LOCAL: [Errno; 5] = [
    Errno::MFILE,
    Errno::NFILE,
    Errno::ADDRNOTAVAIL,
    Errno::NOBUFS,
    Errno::NOMEM,
];

/// Whether an error means that this process or its host lacks descriptors, ports or memory. The
/// other end was not contacted.
pub(crate) fn is_local(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| LOCAL.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_host_shortages_are_local_failures() {
        for errno in LOCAL {
            assert!(is_local(&errno.into()), "{errno}");
        }
        for errno in [Errno::CONNREFUSED, Errno::HOSTUNREACH, Errno::TIMEDOUT] {
            assert!(!is_local(&errno.into()), "{errno}");
        }
        assert!(!is_local(&io::ErrorKind::TimedOut.into()));
    }
}

//! IP address prefixes, as in `users.trusted_proxies` and `admin.backends_allow`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An IP network, such as `10.0.0.0/8` or `2001:db8::/32`, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpPrefix {
    network: IpAddr,
    bits: u8,
}

/// Error for text that is not a prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected an IP address or a prefix such as 10.0.0.0/8")]
pub struct IpPrefixError;

impl IpPrefix {
    /// Prefixes of the loopback addresses.
    pub const LOOPBACK: [Self; 2] = [
        Self {
            network: IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)),
            bits: 8,
        },
        Self {
            network: IpAddr::V6(Ipv6Addr::LOCALHOST),
            bits: 128,
        },
    ];

    /// Creates the prefix of the first `bits` bits of `network`.
    pub(crate) const fn new(network: IpAddr, bits: u8) -> Self {
        Self { network, bits }
    }

    /// Whether the prefix contains `address`, which may be an IPv4 address in its IPv6 form.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.network, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let shift = 32 - u32::from(self.bits);
                (u32::from(network) ^ u32::from(address))
                    .checked_shr(shift)
                    .unwrap_or(0)
                    == 0
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let shift = 128 - u32::from(self.bits);
                (u128::from(network) ^ u128::from(address))
                    .checked_shr(shift)
                    .unwrap_or(0)
                    == 0
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => false,
        }
    }
}

impl FromStr for IpPrefix {
    type Err = IpPrefixError;

    fn from_str(text: &str) -> Result<Self, IpPrefixError> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().map_err(|_| IpPrefixError)?)),
            None => (text, None),
        };
        let network: IpAddr = address.parse().map_err(|_| IpPrefixError)?;
        let bits_max = if network.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(bits_max);
        if bits > bits_max {
            return Err(IpPrefixError);
        }
        Ok(Self { network, bits })
    }
}

impl fmt::Display for IpPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ip_prefix_contains_addresses_that_begin_with_it() {
        for (prefix, inside, outside) in [
            ("127.0.0.0/8", "127.9.9.9", "128.0.0.1"),
            ("127.0.0.0/8", "::ffff:127.0.0.1", "::1"),
            ("10.1.0.0/15", "10.0.0.1", "10.2.0.1"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.8"),
            ("::1/128", "::1", "::2"),
            ("2001:db8::/33", "2001:db8:7fff::1", "2001:db8:8000::1"),
            ("0.0.0.0/0", "255.255.255.255", "::1"),
        ] {
            let prefix: IpPrefix = prefix.parse().unwrap();
            assert!(
                prefix.contains(inside.parse().unwrap()),
                "{prefix} {inside}"
            );
            assert!(
                !prefix.contains(outside.parse().unwrap()),
                "{prefix} {outside}"
            );
        }
        let all: IpPrefix = "::/0".parse().unwrap();
        assert!(all.contains("2001:db8::1".parse().unwrap()));
    }

    #[test]
    fn invalid_ip_prefixes_are_refused() {
        for text in [
            "",
            "10.0.0.0/33",
            "::1/129",
            "10.0.0/8",
            "10.0.0.0/",
            "lo",
            "10.0.0.0/-1",
        ] {
            assert_eq!(text.parse::<IpPrefix>(), Err(IpPrefixError), "{text}");
        }
    }

    #[test]
    fn loopback_prefixes_match_config_syntax() {
        let [v4, v6] = IpPrefix::LOOPBACK.map(|prefix| prefix.to_string());
        assert_eq!((v4.as_str(), v6.as_str()), ("127.0.0.0/8", "::1/128"));
    }
}

//! Golden bytes of what format version 7 introduced.

use expect_test::expect;

use super::tests::{envelope, hex};
use super::*;
use crate::caches::CacheScope;
use crate::command::Lane;

#[test]
fn version_7_commands_encode_to_golden_bytes() {
    let written = |user: Option<&str>, scope| {
        let user = user.map(str::to_owned);
        let envelope = envelope(Lane::Admin, Command::SetCacheScope { user, scope });
        let bytes = encode_envelope(&envelope);
        assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
        hex(&bytes)
    };
    let group = CacheScope::Group("team".to_owned());
    expect!["0703fdefcdab896745230101fb2c01fd0068e5cf8b0100001c01036164610102047465616d"]
        .assert_eq(&written(Some("ada"), Some(group)));
    expect!["0703fdefcdab896745230101fb2c01fd0068e5cf8b0100001c010361646100"]
        .assert_eq(&written(Some("ada"), None));
    expect!["0703fdefcdab896745230101fb2c01fd0068e5cf8b0100001c000101"]
        .assert_eq(&written(None, Some(CacheScope::Own)));
}

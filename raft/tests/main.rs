//! Whole replicas over memory disks and loopback: forming, failing over, membership, snapshots,
//! broken disks, and the generated code of their protocol.

#![allow(
    clippy::unwrap_used,
    reason = "these are tests, their helpers included"
)]

mod cluster;
mod common;
mod elections;
mod faults;
mod generated;
mod membership;
mod rebuild;
mod repeatable;
mod replay;
mod scaling;
mod snapshots;

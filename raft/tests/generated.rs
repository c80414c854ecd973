//! Checks that `proto/peer.rs` is the code generated from `proto/peer.proto`.
//!
//! It is committed because its compiler takes longer to build than the rest of the crate.
//! `UPDATE_GENERATED=1 cargo test -p raft generated` regenerates it.

use std::path::Path;

#[test]
fn generated_peer_protocol_code_is_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let files = protox::compile(["peer.proto"], [&folder]).unwrap();
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .bytes(".")
        // Equal messages must have equal bytes.
        .btree_map(".")
        .out_dir(&out)
        .emit_rerun_if_changed(false)
        .compile_fds(files)
        .unwrap();
    let fresh = std::fs::read_to_string(out.path().join("quorate.peer.v1.rs")).unwrap();
    let committed = folder.join("peer.rs");
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        std::fs::write(&committed, &fresh).unwrap();
    }
    assert!(
        fresh == std::fs::read_to_string(&committed).unwrap(),
        "proto/peer.rs is not what proto/peer.proto gives: \
         UPDATE_GENERATED=1 cargo test -p raft generated"
    );
}

//! Checks that the picker's protocol code, `proto/ext_proc.rs`, matches `proto/ext_proc.proto`.
//!
//! The code is committed because its compiler takes long to build. `UPDATE_GENERATED=1 cargo test
//! -p api --test generated` regenerates it.

use std::path::Path;

#[test]
fn generated_ext_proc_code_is_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let files = protox::compile(["ext_proc.proto"], [&folder]);
    let out = tempfile::tempdir().expect("there is a folder for temporary files");
    tonic_prost_build::configure()
        .bytes(".")
        // Makes the bytes of equal messages equal.
        .btree_map(".")
        .out_dir(&out)
        .emit_rerun_if_changed(false)
        .compile_fds(files.expect("the definition is sound"))
        .expect("the definition can be compiled");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let fresh = read(&out.path().join("envoy.service.ext_proc.v3.rs"));
    let committed = folder.join("ext_proc.rs");
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        std::fs::write(&committed, &fresh).expect("it can be written");
    }
    assert!(
        !fresh.is_empty() && fresh == read(&committed),
        "proto/ext_proc.rs is not what proto/ext_proc.proto gives: \
         UPDATE_GENERATED=1 cargo test -p api --test generated"
    );
}

//! Checks that the code in `proto/` matches the definitions beside it.
//!
//! The code is committed because its compiler takes long to build. `UPDATE_GENERATED=1 cargo test
//! -p api --test generated` regenerates it.

use std::path::Path;

/// Compares `proto/NAME.rs` with the code that `proto/NAME.proto` gives, which is in `package`.
fn check(name: &str, package: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let files = protox::compile([format!("{name}.proto")], [&folder]);
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
    let fresh = read(&out.path().join(format!("{package}.rs")));
    let committed = folder.join(format!("{name}.rs"));
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        std::fs::write(&committed, &fresh).expect("it can be written");
    }
    assert!(
        !fresh.is_empty() && fresh == read(&committed),
        "proto/{name}.rs is not what proto/{name}.proto gives: \
         UPDATE_GENERATED=1 cargo test -p api --test generated"
    );
}

#[test]
fn generated_ext_proc_code_is_current() {
    check("ext_proc", "envoy.service.ext_proc.v3");
}

#[test]
fn generated_scaler_code_is_current() {
    check("externalscaler", "externalscaler");
}

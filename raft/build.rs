//! Generates the peer protocol from `proto/peer.proto` with a compiler written in Rust, so that
//! building needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/peer.proto");
    let files = protox::compile(["proto/peer.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        // Of equal messages the bytes are equal.
        .btree_map(".")
        .compile_fds(files)?;
    Ok(())
}

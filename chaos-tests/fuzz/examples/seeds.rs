//! Writes the seeds of all targets to `corpus/TARGET/`, where `cargo fuzz run TARGET` finds them.

use std::fs;
use std::io;
use std::path::Path;

#[allow(dead_code, reason = "only the seeds are taken")]
#[path = "../../src/fuzzing/mod.rs"]
mod fuzzing;

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for target in fuzzing::TARGETS {
        let folder = corpus.join(target.name);
        fs::create_dir_all(&folder)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
        println!("{}", folder.display());
    }
    Ok(())
}

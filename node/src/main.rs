//! The `quorate` program.

fn main() -> std::process::ExitCode {
    node::cli::main()
}

# Shortcuts, `just --list`; each is a command you can also type. https://just.systems

# The loop while you work: seconds when little has changed
default: fast

# Type-check everything, then the quick tests
fast: check
    cargo test --locked -p state --lib
    cargo test --locked -p node --test tidy

# Type-check every crate and test
check:
    cargo check --locked --workspace --all-targets

# Formatting, lints, spelling, licences, unused dependencies
lint:
    cargo fmt --all --check
    cargo clippy --locked --workspace --all-targets -- -D warnings
    PATH="$(bash .ci/tools):$PATH" && typos && cargo deny check licenses bans sources && cargo shear

# All that must pass on every commit
ci:
    bash .ci/run

# Write the generated references and golden files
golden:
    UPDATE_EXPECT=1 cargo test --locked -p node reference

# Three replicas, four emulated engines, a load
dev *ARGS:
    cargo run --locked --release -- dev {{ARGS}}

# So many simulated clusters
seeds COUNT="1000":
    cargo run --locked --profile sim -p chaos-tests --bin seeds -- --seeds {{COUNT}}

# So many faults against real processes
faults COUNT="60":
    cargo run --locked --release -p chaos-tests --bin faults -- --faults {{COUNT}}

# What a release ships, into target/artifacts: static binary, tarball, package, image, checksums
dist *PARTS:
    deploy/dist {{PARTS}}

# A binary with line numbers for perf and debuggers: target/profiling/quorate
profiling:
    cargo build --locked --profile profiling

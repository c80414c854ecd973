//! Traces of a replica process. The collector uses TLS; only `SSL_CERT_FILE` names its authority.

use std::process::Command;

use tempfile::TempDir;
use tonic::transport::Identity;

use super::otlp::Collector;
use super::process::{Replica, free, get, until};
use super::{quorate, text};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Creates an authority and a collector's certificate in a folder; returns the latter with its key.
fn identity(dir: &TempDir) -> Identity {
    let folder = dir.path().join("certs");
    let out = folder.display().to_string();
    for args in [&["ca"][..], &["node", "--replica", "1=localhost"]] {
        let args = [&["cert"], args, &["--out", &out]].concat();
        let output = quorate(&args);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    Identity::from_pem(read("replica-1.crt"), read("replica-1.key"))
}

/// Starts a replica that traces everything to `endpoint`, and sends it a request.
fn traced(dir: TempDir, endpoint: &str, by: impl FnOnce(Command) -> Command) -> Replica {
    let [peer] = free();
    let config = format!("[tracing]\notlp_endpoint = \"{endpoint}\"\n");
    let replica = Replica::start_in(dir, 1, peer, &config, by);
    replica.process.says(&["accepting requests"]);
    let parent = format!("traceparent: 00-{TRACE}-00f067aa0ba902b7-01\r\n");
    assert_eq!(replica.chat("m", &parent).status, 404);
    replica
}

#[test]
fn a_tls_trace_collector_is_verified_by_ssl_cert_file() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (dir, collector) = (TempDir::new().unwrap(), Collector::default());
    let ca = dir.path().join("certs/ca.crt");
    let identity = identity(&dir);
    let address = runtime.block_on(collector.serve(Some(identity)));
    let endpoint = format!("https://localhost:{}", address.port());
    // The system does not trust the authority: nothing is exported, but requests are served.
    let stranger = traced(TempDir::new().unwrap(), &endpoint, |mut command| {
        command
            .env_remove("SSL_CERT_FILE")
            .env_remove("SSL_CERT_DIR");
        command
    });
    let metrics = || get(stranger.admin, "/metrics").unwrap().body;
    let lost = "quorate_tracing_spans_dropped_total{reason=\"export-failed\"} ";
    until("the span is given up", || {
        let page = metrics();
        let found = page.lines().find_map(|line| line.strip_prefix(lost));
        found.is_some_and(|count| count != "0")
    });
    stranger.process.says(&["could not export spans"]);
    assert!(collector.spans(TRACE).is_empty());
    drop(stranger);

    let known = traced(dir, &endpoint, |mut command| {
        command.env("SSL_CERT_FILE", &ca);
        command
    });
    until("the collector is told", || {
        !collector.spans(TRACE).is_empty()
    });
    let told = collector.spans(TRACE);
    assert_eq!(told[0].replica, "1");
    assert_eq!(told[0].attribute("http.response.status_code"), "404");
    drop(known);
}

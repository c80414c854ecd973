//! KEDA's external scaler, asked over gRPC by the client that its definition gives.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::scaler::externalscaler::external_scaler_client::ExternalScalerClient;
use api::scaler::externalscaler::{GetMetricsRequest, ScaledObjectRef};
use api::scaler::{self, Scaler, WANTED_METRIC};
use state::capacity::{DemandReport, ModelDemand};
use state::command::{Command, Item};
use state::ids::AttemptId;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

use super::fleet::{Fleet, HELD};

struct Asked {
    fleet: Fleet,
    client: ExternalScalerClient<Channel>,
    address: SocketAddr,
    has_caught_up: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl Asked {
    async fn start() -> Self {
        let fleet = Fleet::start(&[]).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let has_caught_up = Arc::new(AtomicBool::new(true));
        let stop = CancellationToken::new();
        let known = Arc::clone(&has_caught_up);
        let scaler = Scaler {
            view: Arc::clone(fleet.router.view()),
            admission: Arc::clone(&fleet.admission),
            has_caught_up: Arc::new(move || known.load(Ordering::SeqCst)),
        };
        tokio::spawn(scaler::serve(listener, scaler, None, stop.clone()));
        let client = ExternalScalerClient::connect(format!("http://{address}"));
        Self {
            client: client.await.unwrap(),
            fleet,
            address,
            has_caught_up,
            stop,
        }
    }

    /// Applies a report of this many running requests for [`HELD`], at this time.
    fn report(&self, at_ms: u64, running: u32) {
        let report = DemandReport {
            model: HELD.to_owned(),
            demand: ModelDemand {
                running,
                ..ModelDemand::default()
            },
            started: 0,
        };
        self.fleet.apply_at(
            at_ms,
            Command::Batch {
                base_attempt: AttemptId(1),
                items: vec![Item::ObserveDemand(Box::new(report))],
            },
        );
    }

    async fn wanted(&mut self, model: &str) -> Result<(i64, f64, bool), Code> {
        let asked = GetMetricsRequest {
            scaled_object_ref: Some(object(model)),
            metric_name: WANTED_METRIC.to_owned(),
        };
        let code = |status: tonic::Status| status.code();
        let got = self.client.get_metrics(asked).await.map_err(code)?;
        let values = got.into_inner().metric_values;
        assert_eq!(values.len(), 1);
        assert_eq!(values[0].metric_name, WANTED_METRIC);
        let active = self.client.is_active(object(model)).await.map_err(code)?;
        let value = &values[0];
        Ok((
            value.metric_value,
            value.metric_value_float,
            active.into_inner().result,
        ))
    }
}

fn object(model: &str) -> ScaledObjectRef {
    let metadata = [("scalerAddress", "quorate:9090"), ("model", model)];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned()));
    ScaledObjectRef {
        name: "engines".to_owned(),
        namespace: "prod".to_owned(),
        scaler_metadata: BTreeMap::from(metadata),
    }
}

#[tokio::test]
async fn a_scaler_tells_the_wanted_engines_of_a_model() {
    let mut asked = Asked::start().await;
    assert_eq!(asked.wanted(HELD).await, Ok((0, 0.0, false)));
    asked.report(1_000, 1);
    assert_eq!(asked.wanted(HELD).await, Ok((1, 1.0, true)));
    asked.report(2_000, 1000);
    // Time passes with the log.
    for seconds in 0..300 {
        asked.report(2_000 + seconds * 1000, 1000);
    }
    let wanted = asked.fleet.router.view().capacity().wanted(HELD);
    assert!(wanted > 10, "{wanted}");
    assert_eq!(
        asked.wanted(HELD).await,
        Ok((wanted.into(), wanted.into(), true))
    );
    let spec = asked.client.get_metric_spec(object(HELD)).await.unwrap();
    let spec = &spec.into_inner().metric_specs;
    assert_eq!(spec.len(), 1);
    assert_eq!(
        (&*spec[0].metric_name, spec[0].target_size),
        (WANTED_METRIC, 1)
    );
}

#[tokio::test]
async fn a_scaler_pushes_that_a_model_becomes_active() {
    let mut asked = Asked::start().await;
    let stream = asked.client.stream_is_active(object(HELD)).await.unwrap();
    let mut stream = stream.into_inner();
    assert!(!stream.message().await.unwrap().unwrap().result);
    asked.report(1_000, 1);
    assert!(stream.message().await.unwrap().unwrap().result);
    asked.stop.cancel();
    assert_eq!(stream.message().await.unwrap(), None, "it ends in order");
}

#[tokio::test]
async fn a_scaler_says_what_it_cannot_answer() {
    let mut asked = Asked::start().await;
    assert_eq!(asked.wanted("typo").await, Err(Code::NotFound));
    assert_eq!(asked.wanted("").await, Err(Code::InvalidArgument));
    let other = GetMetricsRequest {
        scaled_object_ref: Some(object(HELD)),
        metric_name: "other".to_owned(),
    };
    let refused = asked.client.get_metrics(other).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    // A replica that knows nothing yet must not let KEDA remove engines.
    asked.has_caught_up.store(false, Ordering::SeqCst);
    assert_eq!(asked.wanted(HELD).await, Err(Code::Unavailable));
    let stream = asked.client.stream_is_active(object(HELD)).await;
    assert_eq!(stream.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn a_scaler_closes_connections_that_are_not_of_grpc() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let asked = Asked::start().await;
    let mut stream = tokio::net::TcpStream::connect(asked.address).await.unwrap();
    let get = b"GET /metrics HTTP/1.1\r\nhost: scaler\r\n\r\n";
    stream.write_all(get).await.unwrap();
    let mut rest = Vec::new();
    // Unread bytes make the system reset the connection.
    let _reset: std::io::Result<usize> = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
}

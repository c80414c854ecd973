//! Traces of a cluster: a request that waits, is rejected by one engine and served by another is
//! one trace, on any replica.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Response;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use state::admission::Concurrency;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::otlp::{Collector, hex};
use super::*;

const CLIENTS_SPAN: &str = "00f067aa0ba902b7";

/// State shared by the engines of a test.
#[derive(Default)]
struct EngineRules {
    /// The `traceparent` of each chat, with its engine.
    parents: Mutex<Vec<(usize, String)>>,
    /// Number of chats that are still to be rejected.
    refusals: AtomicUsize,
    /// Permits for chats to be answered.
    gate: Option<Semaphore>,
}

impl EngineRules {
    fn gate(&self) -> &Semaphore {
        self.gate.as_ref().unwrap()
    }

    fn chats(&self) -> usize {
        self.parents.lock().unwrap().len()
    }

    async fn answer(&self, engine: usize, request: Request<Incoming>) -> (u16, String) {
        match request.uri().path() {
            "/health" | "/metrics" => return (200, String::new()),
            "/v1/models" => return (200, json!({ "data": [{ "id": "emulated" }] }).to_string()),
            "/v1/chat/completions" => {}
            _ => return (404, String::new()),
        }
        let parent = request.headers().get("traceparent");
        let parent = parent.map(|it| it.to_str().unwrap().to_owned());
        let parent = (engine, parent.unwrap_or_default());
        request.into_body().collect().await.unwrap();
        let order = Ordering::SeqCst;
        let one_less = |left: usize| left.checked_sub(1);
        let is_refused = self.refusals.fetch_update(order, order, one_less).is_ok();
        // Last, so that its observers know that the decision is made.
        self.parents.lock().unwrap().push(parent);
        if is_refused {
            return (503, "{}".to_owned());
        }
        self.gate().acquire().await.unwrap().forget();
        let message = json!({ "role": "assistant", "content": "yes" });
        let usage = json!({ "prompt_tokens": 7, "completion_tokens": 2 });
        let choices = json!([{ "index": 0, "message": message, "finish_reason": "stop" }]);
        let answer = json!({ "model": "emulated", "choices": choices, "usage": usage });
        (200, answer.to_string())
    }

    /// Starts an engine; returns its URL.
    async fn serve(self: Arc<Self>, engine: usize) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let rules = Arc::clone(&self);
                let service = service_fn(move |request| {
                    let rules = Arc::clone(&rules);
                    async move {
                        let (status, body) = rules.answer(engine, request).await;
                        let answer = Response::builder().status(status);
                        let answer = answer.header("content-type", "application/json");
                        let body = Full::new(Bytes::from(body));
                        Ok::<_, Infallible>(answer.body(body).unwrap())
                    }
                });
                let connection = hyper::server::conn::http1::Builder::new();
                tokio::spawn(connection.serve_connection(TokioIo::new(stream), service));
            }
        });
        url
    }
}

/// Sends a chat as part of a client's trace; returns the status of the response.
async fn chat(at: Addresses, trace: String) -> StatusCode {
    let messages = json!([{ "role": "user", "content": format!("{trace}: is the lamp lit?") }]);
    let body = json!({ "model": "emulated", "messages": messages, "max_tokens": 4 });
    let request = Request::post(format!("http://{}/v1/chat/completions", at.data))
        .header("content-type", "application/json")
        .header("traceparent", format!("00-{trace}-{CLIENTS_SPAN}-01"))
        .body(Full::new(Bytes::from(body.to_string())));
    let client = Client::builder(TokioExecutor::new()).build_http();
    client.request(request.unwrap()).await.unwrap().status()
}

fn trace_of(replica: usize, request: usize) -> String {
    format!("{:032x}", 0x1000 + 16 * replica + request)
}

async fn waiting(http: &Http, at: Addresses) -> u64 {
    let url = format!("http://{}/admin/v1/waiting", at.admin);
    http.get(&url).await.1["requests"].as_u64().unwrap()
}

/// Checks that the collector has all spans of a request that waited and was rejected once.
fn is_whole(collector: &Collector, rules: &EngineRules, replica: usize, trace: &str) {
    let spans = collector.spans(trace);
    let names: Vec<_> = spans.iter().map(|it| it.span.name.as_str()).collect();
    let each = ["admission", "decide", "attempt"];
    assert_eq!(names[0], "chat emulated");
    assert_eq!(names[1..], [each, each].concat());
    let request = &spans[0].span;
    assert_eq!(hex(&request.parent_span_id), CLIENTS_SPAN);
    for it in &spans {
        assert_eq!(it.replica, (replica + 1).to_string(), "{it:?}");
    }
    for it in &spans[1..] {
        assert_eq!(it.span.parent_span_id, request.span_id, "{it:?}");
    }
    let attempts = [&spans[3], &spans[6]];
    let statuses = attempts.map(|it| it.attribute("http.response.status_code"));
    assert_eq!(statuses, ["503", "200"]);
    assert_eq!(attempts[1].attribute("gen_ai.usage.output_tokens"), "2");
    // Each engine received its attempt as parent.
    let parents = rules.parents.lock().unwrap();
    let told: BTreeMap<_, _> = parents
        .iter()
        .filter(|(_, parent)| parent.contains(trace))
        .map(|(engine, parent)| (parent.clone(), format!("engine-{engine}")))
        .collect();
    let expected = attempts.map(|it| {
        let parent = format!("00-{trace}-{}-01", hex(&it.span.span_id));
        (parent, it.attribute("quorate.backend"))
    });
    assert_eq!(told, BTreeMap::from(expected));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queued_and_retried_request_is_one_trace() {
    let (dir, collector) = (TempDir::new().unwrap(), Collector::default());
    let endpoint = format!("http://{}", collector.serve(None).await);
    let rules = Arc::new(EngineRules {
        gate: Some(Semaphore::new(0)),
        ..EngineRules::default()
    });
    let mut urls = Vec::new();
    for engine in 0..2 {
        urls.push(Arc::clone(&rules).serve(engine).await);
    }
    let replicas = cluster_with(3, &[], &dir, |config| {
        config.tracing.otlp_endpoint = Some(endpoint.clone());
        config.admission.founding.concurrency = Concurrency::Fixed(1);
        let backends = urls.iter().enumerate().map(|(engine, url)| {
            let id = format!("engine-{engine}");
            let spec = json!({ "id": id, "url": url, "models": ["emulated"] });
            serde_json::from_value(spec).unwrap()
        });
        config.backends = backends.collect();
    });
    let (http, at) = (Http::new(), addresses(&replicas));
    http.ready(&at).await;
    for (replica, &at) in at.iter().enumerate() {
        let before = rules.chats();
        let filling = [1, 2].map(|nth| tokio::spawn(chat(at, trace_of(replica, nth))));
        until("both engines are full", async || {
            rules.chats() == before + 2
        })
        .await;
        let trace = trace_of(replica, 3);
        let asked = tokio::spawn(chat(at, trace.clone()));
        until("the third waits", async || waiting(&http, at).await == 1).await;
        rules.refusals.store(1, Ordering::SeqCst);
        rules.gate().add_permits(3);
        for answer in filling {
            assert_eq!(answer.await.unwrap(), StatusCode::OK);
        }
        assert_eq!(asked.await.unwrap(), StatusCode::OK);
        until("the collector is told", async || {
            collector.spans(&trace).len() >= 7
        })
        .await;
        is_whole(&collector, &rules, replica, &trace);
    }
    leave(replicas).await;
}

//! What a gateway's request has in common with one on the data port, beyond its usage: paths,
//! redirects, errors, and when the picker's response begins.

use api::proxy::picker::ext_proc::external_processor_client::ExternalProcessorClient;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{BodySendMode, ProcessingRequest};
use api::proxy::{ApiKeys, ProxySettings, RequestOutcome};
use state::command::{BackendSpec, Command};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::fleet::{Fleet, eventually};
use super::picking::{
    CHAT, Listening, answer_of, engines, head, head_of, header, headers, modes, plain, start,
    start_with, upload,
};

const DUPLEX: BodySendMode = BodySendMode::FullDuplexStreamed;
const BUFFERED: BodySendMode = BodySendMode::Buffered;

#[tokio::test]
async fn a_slash_at_the_end_of_a_path_does_not_reach_the_engine() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    for (path, sent) in [
        ("/v1/chat/completions", None),
        ("/v1/chat/completions/", Some("/v1/chat/completions")),
        (
            "/v1/chat/completions/?a=b",
            Some("/v1/chat/completions?a=b"),
        ),
    ] {
        for mode in [DUPLEX, BUFFERED] {
            let mut talk = picking.open();
            let first = ProcessingMessage::RequestHeaders(head_of("POST", path, false));
            talk.say_with(first, modes(mode, mode, false)).await;
            if mode == BUFFERED {
                talk.next().await;
            }
            talk.say(upload(CHAT, true)).await;
            let (_, changed) = talk.picked().await;
            assert_eq!(header(&changed, ":path").as_deref(), sent, "{path}");
        }
    }
    fleet.is_idle().await;
}

#[tokio::test]
async fn an_engines_redirect_and_refusal_of_credentials_are_not_relayed() {
    let with_keys = |settings: &mut ProxySettings| {
        let mut keys = ApiKeys::default();
        keys.add("sk-1", None);
        settings.api_keys = Some(keys);
    };
    for (status, code) in [
        ("307", "backend_redirects"),
        ("401", "backend_refuses_credentials"),
    ] {
        let engines = engines().await;
        let (fleet, picking) = start_with(&engines, with_keys).await;
        let mut first = head_of("POST", "/v1/chat/completions", false);
        let key = headers(&[("authorization", "Bearer sk-1")]);
        first.headers.as_mut().unwrap().headers.extend(key.headers);
        let mut talk = picking.open();
        talk.say(ProcessingMessage::RequestHeaders(first)).await;
        talk.say(upload(CHAT, true)).await;
        talk.picked().await;
        talk.streamed().await;
        let fields = [(":status", status), ("location", "http://10.0.0.1/")];
        let told = answer_of(&fields, true);
        talk.say(ProcessingMessage::ResponseHeaders(told)).await;
        let Some(Heard::ImmediateResponse(it)) = talk.next().await.response else {
            panic!("{status} is answered");
        };
        assert_eq!(it.status.unwrap().code, 502);
        assert_eq!(it.details, format!("quorate{{{code}}}"));
        talk.is_over().await;
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::Failed, 502), 1);
        assert_eq!(failures(&fleet), 1);
        let charge = fleet.charged().await;
        assert_eq!((charge.input_uncached, charge.ended), (0, 1));
    }
}

#[tokio::test]
async fn backends_without_endpoints_are_named_as_the_reason() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    for (number, engine) in engines.iter().enumerate() {
        let spec = engine.spec(number);
        let url = spec.url.replace("127.0.0.1", "localhost");
        fleet.apply(Command::PutBackend(BackendSpec { url, ..spec }));
    }
    fleet.assume_healthy();
    let mut talk = picking.ask(CHAT, 1000, plain()).await;
    let (status, body) = talk.refused().await;
    assert_eq!(status, 503);
    assert!(body.contains("no_endpoint_offered"), "{body}");
    assert!(body.contains("a host name or a path"), "{body}");
    fleet.is_idle().await;
}

/// A gateway can send a request to another picker until the head of the first one's response.
#[tokio::test]
async fn the_pickers_response_begins_with_its_first_message() {
    let engines = engines().await;
    let (fleet, _) = start(&engines).await;
    let listening = Listening::of(&fleet).await;
    let channel = Channel::from_shared(format!("http://{}", listening.address)).unwrap();
    let channel = channel.connect().await.unwrap();
    let (say, said) = mpsc::channel(8);
    let mut gateway = ExternalProcessorClient::new(channel.clone());
    let asking = tokio::spawn(async move { gateway.process(ReceiverStream::new(said)).await });
    let tell = async |said| {
        let request = Some(said);
        let message = ProcessingRequest { request, ..plain() };
        say.send(message).await.unwrap();
    };
    tell(head()).await;
    let (begun, rest) = CHAT.split_at(30);
    tell(upload(begun, false)).await;
    eventually("a body is being read", || fleet.metrics.reading.get() == 1).await;
    // The reply to this call follows all that was sent on the connection before.
    let mut health = HealthClient::new(channel);
    let anything = HealthCheckRequest::default();
    health.check(anything).await.unwrap();
    assert!(!asking.is_finished());
    tell(upload(rest, true)).await;
    let mut heard = asking.await.unwrap().unwrap().into_inner();
    let first = heard.message().await.unwrap().unwrap();
    assert!(matches!(first.response, Some(Heard::RequestHeaders(_))));
    drop((heard, say));
    fleet.is_idle().await;
}

fn failures(fleet: &Fleet) -> u32 {
    let of = |number| {
        let backend = fleet.backend(number);
        fleet
            .backends
            .circuit(backend, Instant::now())
            .recent_failures
    };
    of(0) + of(1)
}

#[tokio::test]
async fn a_refusal_names_its_error_code_for_the_gateways_log() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    for (body, details) in [
        ("{", "quorate{invalid_request}"),
        (
            r#"{"model":"other","prompt":"x"}"#,
            "quorate{model_not_found}",
        ),
    ] {
        let mut talk = picking.ask(body, 1000, plain()).await;
        let Some(Heard::ImmediateResponse(it)) = talk.next().await.response else {
            panic!("{body} is refused");
        };
        assert_eq!(it.details, details);
    }
    fleet.is_idle().await;
}

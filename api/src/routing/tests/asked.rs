//! Tests prompts and responses of a model whose tokenizer is its engine.

use std::sync::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::super::fixture::{router_with, spec};
use super::tokens::{CHAT, chat, fixture, read, settings};
use super::*;
use crate::prompt::{BlockUnit, ReplyJoin, Tokenizer, TokenizerSpec};

const REPLY: &str = "I am well, thank you; and how are you yourself on this fine day?";

/// An engine with its own tokenizer, and the request bodies that it received.
struct TokenizingEngine {
    bench: Bench,
    asked: Arc<Mutex<Vec<Value>>>,
    own: Arc<Tokenizer>,
}

impl TokenizingEngine {
    /// Starts an engine that tokenizes like fixture `model`; `router` names the router's tokenizer.
    async fn start(model: &str, router: TokenizerSpec) -> Self {
        let own = Tokenizer::load(fixture(model), None).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let url = serve(Arc::clone(&own), Arc::clone(&asked)).await;
        let mut log = Log::new(&[]);
        log.admin(Command::PutBackend(state::command::BackendSpec {
            url,
            ..spec(0, None)
        }));
        let port = Port::new(log);
        let router = router_with(&port, OutboxSettings::default(), settings(router));
        let bench = Bench { port, router };
        Self { bench, asked, own }
    }

    fn ids(&self, body: &Value) -> Vec<u32> {
        let body = body.to_string();
        self.own.encode_request(CHAT, body.as_bytes()).unwrap()
    }

    fn count(&self) -> usize {
        self.asked.lock().unwrap().len()
    }

    /// Runs a chat and waits until the response's blocks are known. Returns how many blocks shared
    /// with the next turn are believed to be cached, and how many an engine has.
    async fn turn(&self, question: &str, reply: &str) -> (u32, usize) {
        let body = chat(&[("user", question)]);
        let first = read(&self.bench, CHAT, &body).await;
        assert_eq!(first.ids, self.ids(&body));
        let (_, mut attempt) = self.bench.start(&first.identity);
        attempt.output(reply, Instant::now());
        let made = self.own.encode_text(reply).unwrap().len() as u64 + 1;
        attempt.usage(usage(first.ids.len() as u64, None, made), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
        let log = &self.bench.port.log;
        loop {
            let router = Arc::clone(&self.bench.router);
            let port = Arc::new(self.bench.port.clone());
            let stop = CancellationToken::new();
            stop.cancel();
            router.run_outbox(port, stop, Duration::from_secs(60)).await;
            if log.lock().unwrap().state.open_leases() == 0 {
                break;
            }
            tokio::task::yield_now().await;
        }
        let turns = [("user", question), ("assistant", reply), ("user", "Well.")];
        let body = chat(&turns);
        let next = read(&self.bench, CHAT, &body).await;
        let matched = self.bench.decide(&next.identity, &[]).unwrap().matched;
        let computed: Vec<u32> = (first.ids.iter().copied())
            .chain(self.own.encode_text(reply).unwrap())
            .collect();
        let common = next.ids.iter().zip(&computed).take_while(|(a, b)| a == b);
        (matched, common.count() / 4)
    }
}

async fn serve(own: Arc<Tokenizer>, asked: Arc<Mutex<Vec<Value>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = Vec::new();
            let body = loop {
                socket.read_buf(&mut request).await.unwrap();
                let text = String::from_utf8_lossy(&request);
                let body = text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
                if let Some(Ok(body)) = body.map(|body| serde_json::from_str::<Value>(&body)) {
                    break body;
                }
            };
            let tokens = own.encode_request("/tokenize", body.to_string().as_bytes());
            asked.lock().unwrap().push(body);
            let answer = json!({ "tokens": tokens }).to_string();
            let head = format!(
                "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                answer.len()
            );
            socket.write_all((head + &answer).as_bytes()).await.unwrap();
        }
    });
    url
}

#[tokio::test]
async fn replies_are_tokenized_by_their_engine() {
    let engine = TokenizingEngine::start("chatml", TokenizerSpec::Engine).await;
    let first = read(&engine.bench, CHAT, &chat(&[("user", "Hi")])).await;
    assert_eq!(first.identity.unit, BlockUnit::Tokens);
    assert!(matches!(
        first.identity.tail.seam,
        Some(ReplyJoin::FromEngine(_))
    ));
    for reply in [REPLY, " a space before", "behind \n", "\nlines\n\nbefore"] {
        let (matched, cached) = engine.turn("How are you?", reply).await;
        let is_kept = matched as usize == cached;
        assert!(
            is_kept || reply.starts_with('\n'),
            "{reply:?}: {matched} of {cached}"
        );
        assert!(matched as usize <= cached, "{reply:?}");
    }
    let (matched, cached) = engine
        .turn("Think!", "<think>hm</think>yes, this is it")
        .await;
    assert!(matched as usize <= cached, "thoughts do not come back");
}

#[tokio::test]
async fn replies_a_template_changes_are_not_matched() {
    // Llama's template trims white space at both ends.
    let engine = TokenizingEngine::start("llama3", TokenizerSpec::Engine).await;
    let (matched, cached) = engine.turn("How are you?", REPLY).await;
    assert_eq!(matched as usize, cached);
    for reply in [
        " a space before, and words",
        "words and white space behind \n ",
    ] {
        let (matched, cached) = engine.turn("How are you?", reply).await;
        assert!(
            matched as usize <= cached,
            "{reply:?}: {matched} of {cached}"
        );
    }
}

#[tokio::test]
async fn kept_reply_rendering_is_rechecked_occasionally() {
    let engine = TokenizingEngine::start("chatml", TokenizerSpec::Engine).await;
    for turn in 0..60 {
        let question = format!("How are you, the {turn}th time?");
        let (matched, cached) = engine.turn(&question, REPLY).await;
        assert_eq!(matched as usize, cached, "{turn}");
    }
    let asked = engine.asked.lock().unwrap();
    let wholes = asked
        .iter()
        .filter(|it| it["add_generation_prompt"] == false);
    let wholes = wholes.count();
    assert!((8..20).contains(&wholes), "{wholes}");
}

#[tokio::test]
async fn engines_that_match_the_tokenizer_files_are_sampled() {
    let TokenizerSpec::HuggingFace(file) = fixture("chatml") else {
        panic!("a file");
    };
    let agrees = TokenizingEngine::start("chatml", TokenizerSpec::EngineOr(file.clone())).await;
    let differs = TokenizingEngine::start("llama3", TokenizerSpec::EngineOr(file)).await;
    for nth in 0..60 {
        let body = chat(&[("user", &format!("How are you, the {nth}th time?"))]);
        for engine in [&agrees, &differs] {
            let read = read(&engine.bench, CHAT, &body).await;
            assert_eq!(read.ids, engine.ids(&body), "its own word stands");
        }
    }
    assert!((8..20).contains(&agrees.count()), "{}", agrees.count());
    assert_eq!(differs.count(), 60);
}

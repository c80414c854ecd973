//! Tests that each turn of a coding agent begins with the prompt of the turn before it, in
//! characters and in the text for tokenizers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use expect_test::expect;
use serde_json::Value;

use super::{ChatRenderer, Prompt, Tokenizer, TokenizerContent, TokenizerSpec, parse};

const MESSAGES: &str = "/v1/messages";
const RECORDED: [(&str, &str); 3] = [
    ("claude-code.json", MESSAGES),
    ("claude-code-subagent.json", MESSAGES),
    ("codex.json", "/v1/responses"),
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn turns(file: &str) -> Vec<Bytes> {
    let bodies = std::fs::read(fixtures().join("agents").join(file)).unwrap();
    let bodies: Vec<Value> = serde_json::from_slice(&bodies).unwrap();
    let bodies = bodies.iter().map(|body| body.to_string().into());
    bodies.collect()
}

fn flattened(path: &str, body: &Bytes) -> String {
    match parse(path, body).unwrap().prompt {
        Prompt::Text(text) => String::from_utf8(text).unwrap(),
        Prompt::Tokens(ids) => panic!("{ids:?} are no text"),
    }
}

fn rendered(tokenizer: &Arc<Tokenizer>, path: &str, body: &Bytes) -> String {
    match tokenizer.content(path, body, ChatRenderer::Vllm).unwrap() {
        TokenizerContent::Text(text) => text.parts.concat(),
        other => panic!("{other:?} is no text"),
    }
}

#[test]
fn a_turn_of_an_agent_extends_the_one_before() {
    let chatml = fixtures().join("tokenizers/chatml/tokenizer.json");
    let chatml = Tokenizer::load(TokenizerSpec::HuggingFace(chatml), None).unwrap();
    for (file, path) in RECORDED {
        let turns = turns(file);
        assert!(turns.len() > 1);
        for (at, pair) in turns.windows(2).enumerate() {
            let [before, after] = [0, 1].map(|turn| flattened(path, &pair[turn]));
            assert!(after.starts_with(&before), "{file} {at}: {after}");
            let [before, after] = [0, 1].map(|turn| rendered(&chatml, path, &pair[turn]));
            // A template ends with the beginning of the reply, or closes a turn that goes on.
            let common = before.bytes().zip(after.bytes());
            let common = common.take_while(|(a, b)| a == b).count();
            let ending = &before[before.floor_char_boundary(common)..];
            assert!(
                ["", "<|im_start|>assistant\n"].contains(&ending),
                "{file} {at}: {ending:?}"
            );
            assert!(!after.contains("billing") && !after.contains("cch="));
        }
    }
}

#[test]
fn the_prompt_of_claude_code_lacks_its_attribution() {
    let turns = turns("claude-code-subagent.json");
    expect![[r#"
        <|tools|>
        [{"name":"Bash","description":"Executes a command in a persistent shell.","input_schema":{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","properties":{"command":{"type":"string","description":"The command to execute"},"timeout":{"type":"number"}},"required":["command"],"additionalProperties":false}},{"name":"Read","description":"Reads a file.","input_schema":{"type":"object","properties":{"file_path":{"type":"string"}},"required":["file_path"],"additionalProperties":false}}]
        <|system|>
        You are an agent that explores code and changes nothing.Report file names with line numbers.
        <|user|>
        List the callers of Basket::add.
        <|assistant|>
        <|tool_use|>id:"toolu_11",name:"Bash",input:{"command":"grep -rn 'Basket::add' src"},
        <|user|>
        <|tool_result|>tool_use_id:"toolu_11",content:"src/cart.rs:41",
    "#]].assert_eq(&flattened(MESSAGES, &turns[1]));
}

#[test]
fn the_prompt_of_codex_has_its_items() {
    let turns = turns("codex.json");
    expect![[r#"
        <|tools|>
        [{"type":"function","name":"shell","description":"Runs a command and returns its output.","strict":false,"parameters":{"type":"object","properties":{"command":{"type":"array","items":{"type":"string"}},"workdir":{"type":"string"}},"required":["command"],"additionalProperties":false}},{"type":"function","name":"update_plan","description":"Updates the plan.","strict":false,"parameters":{"type":"object","properties":{"plan":{"type":"array","items":{"type":"object","properties":{"step":{"type":"string"},"status":{"type":"string"}}}}},"required":["plan"],"additionalProperties":false}}]
        <|system|>
        You are Codex, a coding agent in a terminal.

        Be concise.
        <|developer|>
        <permissions instructions>
        Commands run in a sandbox.
        </permissions instructions>
        <|user|>
        <environment_context>
          <cwd>/home/dev/shop</cwd>
          <shell>bash</shell>
        </environment_context>
        <|user|>
        Why does the test of the basket fail?
        <|reasoning|>
        summary:[{"type":"summary_text","text":"**Running the test**"}],encrypted_content:"Z0FBQUFB",
        <|function_call|>
        name:"shell",arguments:"{\"command\":[\"bash\",\"-lc\",\"cargo test basket\"],\"workdir\":\"/home/dev/shop\"}",call_id:"call_1",
        <|function_call_output|>
        call_id:"call_1",output:"{\"output\":\"assertion failed: left: 2, right: 3\",\"metadata\":{\"exit_code\":101}}",
    "#]].assert_eq(&flattened("/v1/responses", &turns[1]));
}

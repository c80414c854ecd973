"""Uses the SDKs of OpenAI and Anthropic with a replica, as applications do.

`clients.py` runs this file in an environment with the SDK: `sdks.py openai|anthropic URL MODEL`.
Prints the names of the checks, and exits at the first one that fails. Retries are off, so no
request may fail.
"""

import concurrent.futures
import sys

WORDS = "Say something about routers. "
AT_ONCE = 12
MANY_TOKENS = 4000
DONE = []


def check(is_so, what):
    if not is_so:
        sys.exit(f"{DONE[-1] if DONE else 'begin'}, then: {what}")


def done(name):
    DONE.append(name)


def refused(error, call):
    """Returns the error of `call`, which must fail with the type `error`."""
    try:
        call()
    except error as raised:
        return raised
    return sys.exit(f"{DONE[-1]}, then: no {error.__name__}")


def all_at_once(one):
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(AT_ONCE)))


def openai_chats(client, model):
    messages = [{"role": "user", "content": WORDS * 20}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12)
    check(answer.usage.completion_tokens == 12 or answer.choices[0].finish_reason == "stop", answer)
    check(
        answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer
    )
    done("chat")
    chunks = list(
        client.chat.completions.create(model=model, messages=messages, max_tokens=12, stream=True)
    )
    check(all(chunk.usage is None and chunk.choices for chunk in chunks), "usage that was not asked for")
    check(chunks[-1].choices[0].finish_reason, chunks[-1])
    done("stream")
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, stream=True, stream_options=options
    )
    chunks = list(stream)
    check(chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens, chunks[-1])
    check(all(chunk.usage is None for chunk in chunks[:-1]), "usage before the end")
    done("stream with usage")
    raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=1)
    check(raw.headers.get("x-request-id"), dict(raw.headers))
    check(raw.parse().usage.prompt_tokens == answer.usage.prompt_tokens, "another count")
    done("headers")

    def one(number):
        content = f"{number}: {WORDS * 10}"
        told = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], max_tokens=8
        )
        return told.usage.completion_tokens

    check(all(all_at_once(one)), "no tokens")
    done(f"{AT_ONCE} at once")


def openai_rest(openai, client, model):
    listed = client.models.list().data
    check(model in [it.id for it in listed], listed)
    check(client.models.retrieve(model).id == model, "another model")
    done("models")
    text = client.completions.create(model=model, prompt=WORDS * 10, max_tokens=8)
    check(text.usage.completion_tokens > 0, text)
    chunks = list(client.completions.create(model=model, prompt=WORDS * 10, max_tokens=8, stream=True))
    check(chunks and chunks[-1].choices[0].finish_reason, chunks[-1:])
    done("completions")
    try:
        told = client.responses.create(model=model, input=WORDS, max_output_tokens=16)
        check(told.usage.output_tokens > 0, told)
        events = list(
            client.responses.create(model=model, input=WORDS, max_output_tokens=16, stream=True)
        )
        ends = ("response.completed", "response.incomplete")
        check(events[0].type == "response.created" and events[-1].type in ends, events[-1])
        check(events[-1].response.usage.output_tokens > 0, events[-1])
        done("responses")
    except openai.NotFoundError:
        done("responses: the engine has none")
    error = refused(openai.NotFoundError, lambda: client.models.retrieve("nobody/has-it"))
    check(error.code == "model_not_found", error)
    messages = [{"role": "user", "content": WORDS}]
    call = client.chat.completions.create
    error = refused(openai.NotFoundError, lambda: call(model="nobody/has-it", messages=messages))
    check(error.code == "model_not_found" and error.request_id, error)
    refused(openai.BadRequestError, lambda: call(model=model, messages=messages, max_tokens=-1))
    done("errors")
    try:
        vectors = client.embeddings.create(model=model, input=[WORDS, WORDS * 2])
        check(len(vectors.data) == 2, vectors)
        done("embeddings")
    except (openai.BadRequestError, openai.NotFoundError) as error:
        check(isinstance(error.body, dict), error.body)
        done(f"embeddings: {error.status_code} of the engine")
    stream = call(
        model=model,
        messages=messages,
        max_tokens=MANY_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    check(len([chunk for chunk, _ in zip(stream, range(3))]) == 3, "no stream to leave")
    stream.close()
    done("left a stream")


def with_openai(url, model):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    openai_chats(client, model)
    openai_rest(openai, client, model)


def prompt_tokens(usage):
    """Returns the number of prompt tokens. Anthropic counts cached ones apart from the others."""
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    return usage.input_tokens + cached


def with_anthropic(url, model):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": WORDS * 20}]
    call = client.messages.create
    try:
        answer = call(model=model, max_tokens=12, messages=messages, system="Be brief.")
    except anthropic.NotFoundError as error:
        check("not_found" in str(error.body), error.body)
        done("messages: the engine has none")
        return
    check(prompt_tokens(answer.usage) > 0 and answer.usage.output_tokens > 0, answer)
    check(answer.type == "message" and answer.stop_reason, answer)
    done("messages")
    with client.messages.stream(
        model=model, max_tokens=12, messages=messages, system="Be brief."
    ) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    check("".join(pieces) == last.content[0].text, last)
    check(last.usage.output_tokens > 0 and last.stop_reason, last)
    done("stream")
    try:
        counted = client.messages.count_tokens(model=model, messages=messages, system="Be brief.")
        check(counted.input_tokens == prompt_tokens(answer.usage), (counted, answer.usage))
        done("count_tokens")
    except anthropic.NotFoundError:
        done("count_tokens: the engine has none")

    def one(number):
        content = f"{number}: {WORDS * 10}"
        told = call(model=model, max_tokens=8, messages=[{"role": "user", "content": content}])
        return told.usage.output_tokens

    check(all(all_at_once(one)), "no tokens")
    done(f"{AT_ONCE} at once")
    error = refused(
        anthropic.NotFoundError, lambda: call(model="nobody/has-it", max_tokens=1, messages=messages)
    )
    check(error.body["type"] == "error" and error.body["error"]["type"] == "not_found_error", error.body)
    check(error.request_id, "no request id")
    refused(anthropic.BadRequestError, lambda: call(model=model, max_tokens=-1, messages=messages))
    done("errors")
    with call(model=model, max_tokens=MANY_TOKENS, messages=messages, stream=True) as stream:
        check(next(iter(stream)).type == "message_start", "no message_start")
    done("left a stream")


if __name__ == "__main__":
    sdk, url, model = sys.argv[1:]
    {"openai": with_openai, "anthropic": with_anthropic}[sdk](url, model)
    print(", ".join(DONE))

"""Bodies as agents send them: tools, a long system prompt, and turns of tool calls and results, whose
text is full of escapes and of characters outside ASCII. The same size always gives the same body."""

import json
import random

# Position of the number that makes each body unique, near its end.
UNIQUE = "@unique@"

WORDS = """the file returns a list of errors which it reads from disk before each test runs; check
that request headers match and that no handler drops them when a client leaves early""".split()
LINES = [
    'fn main() {\n\tlet path = "C:\\\\data\\\\in.txt";\n\tprintln!("{path:?}");\n}\n',
    '{"name": "größe", "value": "12 µs", "nested": {"quoted": "\\"yes\\""}}\n',
    "\u001b[31merror\u001b[0m: expected `;`, found `}`\n  --> src/lib.rs:41:9\n",
    "| 列 | 説明 |\n| --- | --- |\n| id | 一意の番号 |\n",
    "diff --git a/x b/x\n-\told line\r\n+\tnew line → better\r\n",
]


def prose(draw, length):
    text = ""
    while len(text) < length:
        text += " ".join(draw.choices(WORDS, k=12)) + ".\n"
    return text


def output(draw, length):
    """Returns the output of a tool: code, logs and data."""
    text = ""
    while len(text) < length:
        text += draw.choice(LINES) if draw.random() < 0.6 else prose(draw, 80)
    return text


def tool(draw, number):
    fields = {
        f"field_{n}": {"type": "string", "description": prose(draw, 120)} for n in range(4)
    }
    parameters = {"type": "object", "properties": fields, "required": list(fields)[:2]}
    function = {"name": f"tool_{number}", "description": prose(draw, 400), "parameters": parameters}
    return {"type": "function", "function": function}


def turn(draw, number):
    """Returns a call of a tool and its result."""
    arguments = json.dumps({"path": f"src/part_{number}.rs", "text": output(draw, 300)})
    call = {"name": f"tool_{number % 20}", "arguments": arguments}
    calls = [{"id": f"call_{number:04}", "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": prose(draw, 150), "tool_calls": calls},
        {"role": "tool", "tool_call_id": f"call_{number:04}", "content": output(draw, 2000)},
    ]


def agent_body(size):
    """Returns the JSON of a body of about `size` bytes, with [`UNIQUE`] near its end."""
    draw = random.Random(size)
    tools = [tool(draw, number) for number in range(20 if size > 100_000 else 4)]
    messages = [{"role": "system", "content": prose(draw, size // 20)}]
    last = {"role": "user", "content": "Go on with part " + UNIQUE}
    body = {"model": "m", "max_tokens": 1, "tools": tools, "messages": messages}
    length = len(encode(body).encode())
    number = 0
    while length < size:
        added = turn(draw, number)
        number += 1
        messages += added
        length += len(encode(added).encode())
    messages.append(last)
    return encode(body)


def encode(value):
    """Encodes as the clients' libraries do: compact, with UTF-8 as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

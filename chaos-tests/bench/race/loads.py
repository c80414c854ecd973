"""Load generators of a race: wrk and h2load."""

import collections
import itertools
import json
import re
import subprocess
import sys


from corpus import UNIQUE, agent_body

SIZES = {"1 KB": 1024, "32 KB": 32 * 1024}
AGENT_SIZES = {"32 KB": 32 * 1024, "220 KB": 220 * 1024, "570 KB": 570 * 1024}
# Number of bytes at the end of a prompt that differ between requests.
DIFFERENT = 64
FIRST = itertools.count(1)

# Number of answered requests, and their median latency in microseconds (h2load: the mean).
Load = collections.namedtuple("Load", "requests p50")

# Script for wrk. Each prompt ends in a unique number.
WRK = """
local shared = string.rep("All prompts of this race begin alike. ", {repeats}):sub(1, {shared})
local head = '{{"model":"m","max_tokens":{tokens},{stream}"messages":[{{"role":"user","content":"' .. shared
local sent = {first}
request = function()
    sent = sent + 1
    local body = head .. string.format("%0{different}d", sent) .. '"}}]}}'
    return wrk.format("POST", "/v1/chat/completions", {{["content-type"] = "application/json"}}, body)
end
"""

# Script for wrk that sends the body in two files with a unique number in between.
WRK_FILES = """
local function whole(path)
    local file = assert(io.open(path, "rb"))
    return file:read("*a"), file:close()
end
local head, tail = whole("{head}"), whole("{tail}")
local sent = {first}
request = function()
    sent = sent + 1
    local body = head .. string.format("%016d", sent) .. tail
    return wrk.format("POST", "/v1/chat/completions", {{["content-type"] = "application/json"}}, body)
end
"""


def wrk(stage, subject, size, connections, seconds, events=None):
    """Loads a subject over HTTP/1.1. If `events` is set, requests are for streams of that many
    events."""
    shared = size - DIFFERENT
    script = WRK.format(
        repeats=shared // 38 + 1,
        shared=shared,
        different=DIFFERENT,
        first=next(FIRST) * 100_000_000,
        tokens=events or 1,
        stream='"stream":true,' if events else "",
    )
    return run_wrk(stage, subject, script, connections, seconds)


def wrk_agents(stage, subject, size, connections, seconds):
    """Loads a subject over HTTP/1.1 with the same agent's conversation, whose last message differs."""
    files = [stage.folder / f"agent-{size}-{part}" for part in ("head", "tail")]
    if not files[0].exists():
        for file, part in zip(files, agent_body(size).split(UNIQUE)):
            file.write_text(part)
    script = WRK_FILES.format(head=files[0], tail=files[1], first=next(FIRST) * 100_000_000)
    return run_wrk(stage, subject, script, connections, seconds)


def run_wrk(stage, subject, lua, connections, seconds):
    script = stage.folder / "load.lua"
    script.write_text(lua)
    command = ["taskset", "-c", stage.load_cores, "wrk", "-t1", f"-c{connections}", f"-d{seconds}s"]
    command += ["--timeout", "10s", "--latency", "-s", str(script), subject.url()]
    told = run(command)
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)", told)
    if failed:
        sys.exit(f"{subject.name}: {failed.group(0)}")
    requests = int(re.search(r"(\d+) requests in", told).group(1))
    value, unit = re.search(r"50%\s+([\d.]+)(us|ms|s)", told).groups()
    return Load(requests, microseconds(value, unit))


def h2load(stage, subject, size, connections, streams, seconds):
    """Loads a subject over HTTP/2 without TLS. All prompts are equal, because h2load sends one
    body."""
    body = stage.folder / f"body-{size}.json"
    prompt = ("All prompts of this race are alike. " * (size // 36 + 1))[:size]
    message = {"role": "user", "content": prompt}
    body.write_text(json.dumps({"model": "m", "max_tokens": 1, "messages": [message]}))
    command = ["taskset", "-c", stage.load_cores, "h2load", "-t1", "-c", str(connections)]
    command += ["-m", str(streams), "-D", str(seconds), "-d", str(body)]
    command += ["-H", "content-type: application/json", f"{subject.url()}/v1/chat/completions"]
    told = run(command)
    good, *bad = map(
        int,
        re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", told).groups(),
    )
    bad += map(int, re.search(r"(\d+) failed, (\d+) errored, (\d+) timeout", told).groups())
    if sum(bad) or not good:
        sys.exit(f"{subject.name}: {told}")
    mean = re.search(r"time for request:\s+\S+\s+\S+\s+([\d.]+)(us|ms|s)", told)
    return Load(good, microseconds(*mean.groups()))


def run(command):
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}: {ended.stdout}{ended.stderr}")
    return ended.stdout


def microseconds(value, unit):
    return float(value) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]

"""What limits cost: whether long prompts reach the engine that has them at each limit of a backend,
and how long a user's permit takes."""

import collections
import concurrent.futures
import http.client
import json
import random
import statistics
import sys
import time

from log import start_emulated
from programs import Stage
from races import table
from subjects import start_replicas

LIMITS = ("unlimited", 1, 2, 3, 6, 24, "adaptive")
ENGINES, CONVERSATIONS, TURNS = 3, 6, 5
# KV blocks of an engine: room for three of the long prompts.
BLOCKS = 900
# Words of a first prompt: one at a time, and in bursts. About 1.2 tokens each.
LONG, SHORT, MORE = 6000, 750, 40
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma".split()
# Users of each kind, and requests of each user, whose permits are measured.
USERS, ROUNDS = 6, 200
# Answers name their engine.
SETTINGS = ["users.expose=full"]
# Seconds between a conversation's answer and its next turn.
PAUSE = 0.15
# Smallest share of the figures without a limit that passes.
LEAST = 0.99

Hits = collections.namedtuple("Hits", "same turns cached")


def prefixes(args):
    """Same engine and cached share of long prompts at each limit, one at a time and in bursts."""
    rows, failed = [], []
    with Stage(args, "0,1", "0,1") as stage:
        replicas, (alone,) = (
            start_replicas(stage, start_emulated(stage, ENGINES, BLOCKS, 1), count, settings=SETTINGS)
            for count in (3, 1)
        )
        for limit in LIMITS:
            for replica in (replicas[0], alone):
                send(replica.admin, "PUT", "/admin/v1/admission", {"concurrency": limit})
            time.sleep(1)  # Until the limit applies and the replicas have divided it.
            found = [
                converse(replicas, f"long {limit}", LONG, 1),
                converse(replicas, f"short {limit}", SHORT, CONVERSATIONS),
                converse([alone], f"short {limit}", SHORT, CONVERSATIONS),
            ]
            rows.append([str(limit), *(f"{hits.same}/{hits.turns}, {hits.cached:.3f}" for hits in found)])
            free = found if limit == "unlimited" else free
            # A burst at a limit of 1 has twice as many prompts as places, so some must move.
            cases = (0, 1) if limit != 1 else (0,)
            if any(found[case].same < LEAST * free[case].same for case in cases) or any(
                found[case].cached < LEAST * free[case].cached for case in cases
            ):
                failed.append(str(limit))
    bursts = f"bursts of {CONVERSATIONS}"
    table(["limit", "one at a time: same engine, cached", bursts, f"{bursts}, one replica"], rows)
    if failed:
        sys.exit(f"below {LEAST} of the figures without a limit, at a limit of: {', '.join(failed)}")


def converse(replicas, name, words, at_once):
    """Runs all conversations, `at_once` of them at a time; each turn goes to the next replica."""
    prompts = [prose(f"{name} {number}", words) for number in range(CONVERSATIONS)]
    same = turns = cached = prompt = 0

    def turn(number, round_):
        replica = replicas[(number + round_) % len(replicas)]
        body = {"model": "m", "prompt": prompts[number], "max_tokens": 4}
        headers, told = send(replica.port, "POST", "/v1/completions", body)
        prompts[number] += " " + prose(f"{name} {number} {round_}", MORE)
        return headers["x-quorate-backend"], told["usage"]

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for first in range(0, CONVERSATIONS, at_once):
            group, before = range(first, first + at_once), None
            for round_ in range(TURNS):
                found = list(pool.map(lambda number: turn(number, round_), group))
                if before:
                    same += sum(now[0] == then[0] for now, then in zip(found, before))
                    turns += len(found)
                    cached += sum(usage["prompt_tokens_details"]["cached_tokens"] for _, usage in found)
                    prompt += sum(usage["prompt_tokens"] for _, usage in found)
                before = found
                time.sleep(PAUSE)
    return Hits(same, turns, cached / prompt)


def prose(seed, words):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def send(port, method, path, body):
    """Returns the headers and the JSON document of a response. Exits if it is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        sys.exit(f"{method} {path}: {response.status} {text.decode(errors='replace')}")
    return dict(response.headers), json.loads(text)


def permits(args):
    """Latency of users with a limit on concurrent requests, whose permits other replicas issue."""
    with Stage(args, "0,1", "0,1") as stage:
        replicas = start_replicas(stage, start_emulated(stage), 3)
        for user in range(USERS):
            path = f"/admin/v1/users/limited-{user}"
            send(replicas[0].admin, "PUT", path, {"limits": {"concurrent": 8}})
        time.sleep(1)  # Until the limits apply at every replica.
        found = {"free": [], "limited": []}
        for round_ in range(ROUNDS):
            for kind, times in found.items():
                for user in range(USERS):
                    body = {"model": "m", "prompt": "hello", "max_tokens": 1, "user": f"{kind}-{user}"}
                    replica = replicas[(round_ + user) % len(replicas)]
                    began = time.monotonic()
                    send(replica.port, "POST", "/v1/completions", body)
                    times.append((time.monotonic() - began) * 1000)
        rows = []
        for kind, times in found.items():
            cuts = statistics.quantiles(times, n=100)
            rows.append([kind, *(f"{cuts[at - 1]:.2f}" for at in (50, 90, 99))])
        table(["users", "p50 ms", "p90 ms", "p99 ms"], rows)

"""What requests add to the log: entries, syncs, and bytes on the wire and on disk."""

import collections
import json
import pathlib
import random
import re
import subprocess
import time

from programs import Stage, free_ports, get
from races import table
from subjects import listens, start_replicas, wait_for

# A synthetic trace in the format of Mooncake's: conversations that grow by a few blocks per turn.
BLOCK_TOKENS, SCALE = 512, 16
SHARED_BLOCKS, OWN_BLOCKS = 4, 6
TURNS_MAX, TURN_BLOCKS = 8, 3
BETWEEN_TURNS_MS = 6000
# Cache capacity of an engine in blocks, so large that nothing is evicted.
CACHE_BLOCKS = 262_144
RATES = (5, 50, 200)

Counts = collections.namedtuple("Counts", "entries blocks syncs wire disk cpu_us")


def write_trace(file, rate, seconds):
    """Writes a trace of conversations that together send `rate` requests per second."""
    draw = random.Random(rate)
    blocks = iter(range(SHARED_BLOCKS, 1 << 40))
    requests = []
    while len(requests) < rate * seconds:
        at = draw.uniform(-TURNS_MAX * BETWEEN_TURNS_MS, seconds * 1000)
        chain = list(range(SHARED_BLOCKS)) + [next(blocks) for _ in range(OWN_BLOCKS)]
        for turn in range(draw.randint(1, TURNS_MAX)):
            turn_at = at + turn * BETWEEN_TURNS_MS
            if 0 <= turn_at < seconds * 1000:
                requests.append((turn_at, list(chain)))
            chain += [next(blocks) for _ in range(draw.randint(1, TURN_BLOCKS))]
    with open(file, "w") as out:
        for at, chain in sorted(requests):
            line = {
                "timestamp": int(at),
                "input_length": len(chain) * BLOCK_TOKENS,
                "output_length": draw.randint(16, 256),
                "hash_ids": chain,
            }
            out.write(json.dumps(line) + "\n")


def start_emulated(stage, count=2, blocks=CACHE_BLOCKS, speed=50):
    """Starts engines that cache blocks. Returns their ports."""
    ports = free_ports(count)
    for port in ports:
        words = [stage.args.quorate, "engine", "--listen", f"127.0.0.1:{port}"]
        words += ["--model", "m", "--speed", speed]
        words += ["--num-gpu-blocks", blocks, "--block-size", BLOCK_TOKENS // SCALE]
        stage.start(f"engine-{port}", stage.load_cores, words)
        wait_for(f"engine {port} listens", lambda: listens(port))
    return ports


def metric(replica, name):
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([\d.e+]+)$", get(replica.admin, "/metrics"), re.M)
    return float(found.group(1))


def sent_to_peers(replica, peers):
    """Returns the number of bytes that a replica has sent over its current TCP connections to
    peers, whichever side opened them."""
    command = ["ss", "-tinHpO", "state", "established"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    sent = 0
    for line in lines:
        ends, own, told = line.partition(f"pid={replica.process.child.pid},")
        bytes_sent = re.search(r"bytes_sent:(\d+)", told)
        if own and bytes_sent and any(int(end) in peers for end in re.findall(r":(\d+)\b", ends)):
            sent += int(bytes_sent.group(1))
    return sent


def written(replica):
    told = pathlib.Path(f"/proc/{replica.process.child.pid}/io").read_text()
    return int(re.search(r"^write_bytes: (\d+)", told, re.M).group(1))


def count(cluster, leader):
    peers = {replica.peer for replica in cluster}
    return Counts(
        metric(leader, "quorate_raft_committed_index"),
        metric(leader, "quorate_state_blocks"),
        metric(leader, "quorate_raft_log_sync_seconds_count"),
        sent_to_peers(leader, peers),
        written(leader),
        sum(replica.cpu_us() for replica in cluster),
    )


def during(cluster, act):
    """Calls `act`. Returns the increase of the counts meanwhile, the result, and the duration in
    seconds."""
    leader = next(replica for replica in cluster if replica.role() == "leader")
    before, began = count(cluster, leader), time.monotonic()
    told = act()
    seconds, after = time.monotonic() - began, count(cluster, leader)
    return Counts(*(now - then for now, then in zip(after, before))), told, seconds


def replay(stage, cluster, trace):
    command = ["taskset", "-c", stage.load_cores, str(stage.args.quorate), "replay", "--trace", str(trace)]
    command += ["--scale", f"1/{SCALE}", "--users", "27", "--json", "--target"]
    command += [",".join(replica.url() for replica in cluster)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    time.sleep(1)  # Until the rest of the outbox is in the log.
    return told


def log(args):
    """Entries, syncs, and bytes on the wire and on disk per request; and the cost at rest."""
    with Stage(args) as stage:
        cluster = start_replicas(stage, start_emulated(stage), 3)
        time.sleep(5)
        rest, _, seconds = during(cluster, lambda: time.sleep(2 * args.seconds))
        wire_at_rest = rest.wire / seconds
        print(
            f"At rest, a second: {rest.cpu_us / seconds / 10_000:.2f} % of a core for all three; the"
            f" leader commits {rest.entries / seconds:.1f} entries, syncs {rest.syncs / seconds:.1f}"
            f" times, writes {rest.disk / seconds:.0f} B and sends {wire_at_rest / 1000:.1f} KB to its"
            " followers.\n"
        )
        rows = []
        for rate in RATES:
            trace = stage.folder / f"{rate}.jsonl"
            write_trace(trace, rate, 2 * args.seconds)
            found, told, seconds = during(cluster, lambda: replay(stage, cluster, trace))
            requests = told["total"]["requests"]
            wire = found.wire - wire_at_rest * seconds
            rows.append(
                [
                    f"{requests / seconds:.0f}",
                    f"{found.blocks / requests:.1f}",
                    f"{found.entries / requests:.2f}",
                    f"{found.syncs / seconds:.0f}",
                    f"{wire / 2 / requests:.0f}",
                    f"{found.disk / requests:.0f}",
                ]
            )
        table(
            [
                "requests a second",
                "new blocks a request",
                "entries a request",
                "syncs a second",
                "wire: bytes a request and follower, beyond those at rest",
                "disk: bytes a request, at the leader",
            ],
            rows,
        )

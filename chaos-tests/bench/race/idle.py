"""What replicas without requests cost."""

import pathlib
import re
import time

from programs import Stage
from races import BOTH_CORES, table
from subjects import start_engines, start_replicas

REPLICAS = (1, 3)
# An idle replica writes nothing and rests after some 20 s.
SETTLE_SECONDS = 25


def idle(args):
    """One and three replicas without requests: CPU time, wakes of threads, and memory."""
    rows = []
    for count in REPLICAS:
        with Stage(args, BOTH_CORES, BOTH_CORES) as stage:
            cluster = start_replicas(stage, start_engines(stage), count)
            time.sleep(SETTLE_SECONDS)
            before = [taken(replica) for replica in cluster]
            began = time.monotonic()
            time.sleep(args.seconds)
            passed = time.monotonic() - began
            after = [taken(replica) for replica in cluster]
            cpu, wakes = (
                sum(now[at] - then[at] for then, now in zip(before, after)) / passed
                for at in (0, 1)
            )
            memory = " / ".join(str(resident_mb(replica)) for replica in cluster)
            rows.append([str(count), f"{cpu / 10_000:.1f} %", f"{wakes:.0f}", memory])
    table(["replicas", "CPU: share of a core, all", "wakes a second, all", "memory: MB each"], rows)


def taken(replica):
    """Returns the CPU time of a replica so far, in microseconds, and how often its threads woke."""
    cpu = sum(us for _, us in replica.process.threads().values())
    tasks = pathlib.Path(f"/proc/{replica.process.child.pid}/task").iterdir()
    statuses = [(task / "status").read_text() for task in tasks]
    wakes = [int(re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", it)[1]) for it in statuses]
    return cpu, sum(wakes)


def resident_mb(replica):
    status = pathlib.Path(f"/proc/{replica.process.child.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024

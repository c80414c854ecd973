"""CPU time of a replica by user and kernel, by thread, and by part of the program."""

import collections
import re
import shutil
import subprocess

from loads import SIZES, wrk
from programs import SUBJECT_CORE, Stage, skip
from races import CONNECTIONS, table
from subjects import start_engines, start_replicas

SAMPLES_A_SECOND = 1999
KERNEL_FROM = 1 << 63
ALLOCATOR = re.compile(r"^_?mi_|^(malloc|calloc|realloc|free|aligned_alloc)$|__rust_(de|re)?alloc")
REPLICATION = re.compile(r"\b(openraft\w*|raft|sled)::|\bstate::(\w+::)*apply")
# Threads that only replicate.
REPLICATES = re.compile(r"^(raft|sled)-")
SHOWN = 12


def split(args):
    """CPU time of one replica by user and kernel (in ticks), thread, and part of the program."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        (replica,) = start_replicas(stage, engines, 1)

        def load():
            return wrk(stage, replica, SIZES["1 KB"], CONNECTIONS, args.seconds)

        load()
        before, threads = replica.process.cpu(), replica.process.threads()
        requests = load().requests
        after, threads = replica.process.cpu(), group(threads, replica.process.threads())
        user, kernel = after.user - before.user, after.kernel - before.kernel
        kind_table({"user": user, "kernel": kernel}, "all threads", requests)
        kind_table(threads, "threads by name", requests)
        profile(args, stage, replica, load)


def group(before, after):
    """Returns the CPU time between two samples by thread name, without trailing numbers."""
    groups = collections.Counter()
    for number, (name, cpu) in after.items():
        spent = cpu - (before[number][1] if number in before else 0)
        groups[re.sub(r"-?\d+$", "", name)] += spent
    return groups


def kind_table(kinds, head, requests):
    """Prints the CPU time of each kind per request, largest first. Omits shares below 0.05 %."""
    total = sum(kinds.values())
    rows = [
        [kind, f"{cpu / requests:.2f}", f"{cpu / total:.1%}"]
        for kind, cpu in sorted(kinds.items(), key=lambda one: -one[1])
        if cpu / total >= 0.0005
    ]
    rows.append(["together", f"{total / requests:.2f}", ""])
    table([f"{head} (1 KB, {CONNECTIONS} connections)", "CPU us a request", "share"], rows)


def profile(args, stage, replica, load):
    """Samples a replica under load with perf, and prints the shares of parts of the program."""
    if not shutil.which("perf"):
        return skip("parts of the program", "perf is not here: apt-get install linux-perf")
    if not has_symbols(args.quorate):
        why = "it has no symbols: give --quorate one of the profile `profiling`"
        return skip("parts of the program", why)
    data = stage.folder / "perf.data"
    pid = str(replica.process.child.pid)
    command = ["perf", "record", "-e", "cpu-clock", "-F", str(SAMPLES_A_SECOND), "-g", "-p", pid]
    recorder = subprocess.Popen(
        ["taskset", "-c", SUBJECT_CORE, *command, "-o", str(data), "--", "sleep", str(args.seconds)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        load()
        _, told = recorder.communicate(timeout=30)
    finally:
        if recorder.poll() is None:
            recorder.kill()
            recorder.wait()
    if recorder.returncode:
        return skip("parts of the program", f"perf: {told.strip()}")
    parts_table(list(samples_in(data)))


def has_symbols(program):
    """Returns whether the program has a symbol table (ELF section `.symtab`). Without readelf,
    assumes that it has one."""
    if not shutil.which("readelf"):
        return True
    told = subprocess.run(["readelf", "-SW", str(program)], capture_output=True, text=True).stdout
    return ".symtab" in told


class Sample:
    """A stack sample of a thread: its frames, innermost first, each with address and name."""

    def __init__(self, thread, frames):
        self.thread, self.frames = thread, frames

    def function(self):
        address, name = self.frames[0]
        return "the kernel" if address >= KERNEL_FROM else name

    def replicates(self):
        return bool(REPLICATES.search(self.thread)) or any(
            REPLICATION.search(name) for _, name in self.frames
        )

    def part(self):
        if self.function() == "the kernel":
            return "kernel"
        if ALLOCATOR.search(self.function()):
            return "allocator"
        return "replication" if self.replicates() else "the rest"


def samples_in(data):
    command = ["perf", "script", "--no-inline", "-i", str(data), "-F", "comm,tid,ip,sym"]
    told = subprocess.run(command, capture_output=True, text=True).stdout
    for sample in told.split("\n\n"):
        frames = re.findall(r"^\s+([0-9a-f]+) (.+)$", sample, re.MULTILINE)
        if frames:
            thread = sample.lstrip("\n").split(None, 1)[0]
            yield Sample(thread, [(int(address, 16), name) for address, name in frames])


def parts_table(samples):
    """Prints the shares of parts and functions. Without frame pointers, stacks are cut short, so
    the share of replication is a lower bound."""
    total = len(samples)
    if not total:
        return skip("parts of the program", "perf took no samples")
    parts = collections.Counter(sample.part() for sample in samples)
    parts["replication with its share of kernel and allocator"] = sum(
        sample.replicates() for sample in samples
    )
    depth = sum(len(sample.frames) for sample in samples) / total
    rows = [[part, f"{count / total:.1%}"] for part, count in parts.most_common()]
    table([f"part ({total} samples, {depth:.0f} frames deep on average)", "share"], rows)
    own = collections.Counter(sample.function() for sample in samples)
    rows = [[f"`{name}`", f"{count / total:.1%}"] for name, count in own.most_common(SHOWN)]
    table(["function, without those it calls", "share"], rows)

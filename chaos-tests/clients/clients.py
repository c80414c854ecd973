#!/usr/bin/env python3
"""Checks that benchmark programs and SDKs work through Quorate without changes.

Starts three replicas in front of running or emulated engines. The programs in the given virtual
environments then send requests through the data ports: benchmarks, and the SDKs of OpenAI and
Anthropic. With emulated engines, benchmarks run with their default settings; with running engines,
they send few requests. A program works if it reports that it completed its task, without an error
and with the engine's token counts. Skips programs that are not installed, with a message. Exits
with 1 if a program fails.

See docs/guide/clients.md.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "deploy"))

from cluster import Cluster, free_ports, get, on_loopback  # noqa: E402

REPLICAS = 3
PROGRAM_TIMEOUT_S = 1800
SETTINGS = 'drain.dns_ttl = "0s"'
MODELS = '[[models]]\nname = "*"\n'


# Number of requests that aiperf sends by default.
AIPERF_REQUESTS = 10

# Number of runs of genai-bench by default: five scenarios at nine levels of concurrency each.
GENAI_BENCH_RUNS = 45

# Outcomes that no request may have.
OUR_FAULT = {"failed", "broken-off"}


class Failed(Exception):
    """A program failed, or reported a wrong result."""


def check(is_so, what):
    if not is_so:
        raise Failed(what)


def listed_models(url):
    return [model["id"] for model in json.loads(get(f"{url}/v1/models"))["data"]]


class Scene:
    """Context of all programs: the cluster, the arguments, the folder for output, and the model."""

    def __init__(self, cluster, args, folder):
        self.cluster, self.args, self.folder = cluster, args, folder
        self.urls = [f"http://{data}" for data, *_ in cluster.replicas]
        for url in self.urls:
            cluster.until(f"{url} lists a model", lambda: listed_models(url))
        self.model = args.model or listed_models(self.urls[0])[0]

    def program(self, name):
        """Returns the path of a program; `None` if no environment has it."""
        for venv in self.args.venv:
            path = venv.absolute() / "bin" / name
            if path.exists():
                return path
        return None

    def python_with(self, package):
        """Returns an interpreter that has a package; `None` if no environment has it."""
        for venv in self.args.venv:
            if list((venv / "lib").glob(f"python*/site-packages/{package}/__init__.py")):
                return venv.absolute() / "bin" / "python"
        return None

    def run(self, name, *command, cwd=None):
        """Runs a program with its output in a file, and returns the output. Raises `Failed` if the
        exit status is not 0."""
        path = self.folder / f"{name.replace(' ', '-').replace('/', '-')}.txt"
        home = self.folder / "home"
        environment = {
            **os.environ,
            "HF_HOME": str(home / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OPENAI_API_KEY": "none",
            "HOME": str(home),
            "COLUMNS": "200",
        }
        home.mkdir(exist_ok=True)
        with path.open("wb") as log:
            done = subprocess.run(
                ["nice", "-n", "10", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=cwd or self.folder,
                timeout=PROGRAM_TIMEOUT_S,
                check=False,
            )
        told = path.read_text(errors="replace")
        check(done.returncode == 0, f"exit status {done.returncode}: {told[-600:]}")
        return told

    def few(self, *settings):
        """Returns `settings` that limit the load on running engines; none for emulated engines."""
        return settings if self.args.engine else ()

    def tokenizer(self):
        check(self.args.tokenizer, "give --tokenizer")
        return self.args.tokenizer.absolute()

    def cached_tokenizer(self):
        """Copies the tokenizer to a cache in the format of the Hugging Face hub, and returns its
        name there. Offline, aiperf accepts no folder."""
        revision = "0" * 40
        repository = self.folder / "home/huggingface/hub/models--quorate--tokenizer"
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs/main").write_text(revision)
        for file in self.tokenizer().iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy(file, snapshot)
        return "quorate/tokenizer"

    def outcomes(self):
        """Returns the number of requests that the replicas have ended so far, by outcome. Omits
        those that they answered themselves."""
        counts = collections.Counter()
        for _, admin, _ in self.cluster.replicas:
            for line in get(f"http://{admin}/metrics").decode().splitlines():
                outcome = re.match(r'quorate_proxy_requests_total{.*outcome="([^"]+)".*} (\d+)', line)
                if outcome and outcome[1] != "local":
                    counts[outcome[1]] += int(outcome[2])
        return counts


def vllm_bench(scene, program, url, backend):
    result = scene.folder / f"vllm-{backend}.json"
    path = [] if backend == "vllm" else ["--endpoint", "/v1/chat/completions"]
    scene.run(
        f"vllm bench serve {backend}",
        *[program, "bench", "serve", "--base-url", url, "--backend", backend, *path],
        *["--model", scene.model, "--tokenizer", scene.tokenizer()],
        *scene.few("--num-prompts", scene.args.requests),
        *["--save-result", "--result-dir", result.parent, "--result-filename", result.name],
    )
    told = json.loads(result.read_text())
    check(told["completed"] == told["num_prompts"], f"completed {told['completed']}")
    check(told["failed"] == 0, f"failed {told['failed']}")
    check(told["total_output_tokens"] > 0, "no output tokens")
    return f"{told['completed']} completed, {told['failed']} failed, {told['total_output_tokens']} output tokens"


def aiperf(scene, program, url, *flags):
    out = scene.folder / "-".join(["aiperf", *flags])
    scene.run(
        out.name,
        *[program, "profile", "--model", scene.model, "--url", url],
        *["--tokenizer", scene.cached_tokenizer()],
        *scene.few("--request-count", scene.args.requests, "--osl", 64),
        *[*flags, "--ui", "none", "--artifact-dir", out],
    )
    (report,) = out.rglob("profile_export_aiperf.json")
    told = json.loads(report.read_text())
    count = told["request_count"]["avg"]
    errors = (told.get("error_request_count") or {}).get("avg") or 0
    tokens = told[
        "total_usage_completion_tokens" if "total_usage_completion_tokens" in told else "total_osl"
    ]
    asked = scene.args.requests if scene.args.engine else AIPERF_REQUESTS
    check(count == asked and errors == 0, f"{count} completed, {errors} errors")
    check(tokens["avg"] > 0, "no output tokens")
    return f"{count:.0f} completed, {errors} errors, {tokens['avg']:.0f} output tokens"


def genai_bench(scene, program, url):
    out = scene.folder / "genai-bench"
    scene.run(
        "genai-bench",
        *[program, "benchmark", "--api-backend", "openai", "--api-base", url, "--api-key", "none"],
        *[
            "--task",
            "text-to-text",
            "--api-model-name",
            scene.model,
            "--model-tokenizer",
            scene.tokenizer(),
        ],
        *scene.few("--traffic-scenario", "D(100,100)", "--num-concurrency", 1, "--num-concurrency", 4),
        *["--max-time-per-run", 5, "--max-requests-per-run", scene.args.requests],
        *["--log-dir", scene.folder],
        *["--experiment-base-dir", out],
    )
    runs = []
    for report in out.rglob("*.json"):
        told = json.loads(report.read_text())
        if "aggregated_metrics" in told:
            runs.append(told["aggregated_metrics"])
    asked = 2 if scene.args.engine else GENAI_BENCH_RUNS
    check(len(runs) == asked, f"{len(runs)} of {asked} runs")
    completed = sum(run["num_completed_requests"] for run in runs)
    errors = sum(run["num_error_requests"] for run in runs)
    check(
        errors == 0 and completed >= asked * scene.args.requests,
        f"{completed} completed, {errors} errors",
    )
    return f"{completed} completed in {asked} runs, {errors} errors"


def guidellm(scene, program, url):
    report = scene.folder / "guidellm.json"
    # A sweep has no default length; this is the one in its documentation.
    data, end = "prompt_tokens=256,output_tokens=128", "kind=max_duration,seconds=30"
    if scene.args.engine:
        data, end = "prompt_tokens=256,output_tokens=64", f"kind=max_requests,count={scene.args.requests}"
    scene.run(
        "guidellm",
        *[program, "run", "--backend", f"kind=openai_http,target={url},model={scene.model}"],
        *["--tokenizer", f"kind=huggingface_auto,model={scene.tokenizer()}"],
        *["--data", f"kind=synthetic_text,{data}"],
        *["--profile", "kind=sweep", "--constraint", end],
        *["--output", f"kind=json,path={report}", "--disable-progress"],
    )
    told = json.loads(report.read_text())["benchmarks"]
    totals = [run["metrics"]["request_totals"] for run in told]
    completed = sum(total["successful"] for total in totals)
    errors = sum(total["errored"] for total in totals)
    check(errors == 0 and completed > 0, f"{completed} completed, {errors} errors")
    return f"{completed} completed in {len(totals)} runs, {errors} errors"


def sdk(scene, python, package):
    """Runs the checks of an SDK at each replica, with an interpreter that has the SDK."""
    sums = []
    for url in scene.urls:
        told = scene.run(f"{package} sdk", python, HERE / "sdks.py", package, url, scene.model)
        sums.append(told.strip().splitlines()[-1])
    check(len(set(sums)) == 1, f"replicas differ: {sums}")
    return f"at each replica: {sums[0]}"


def programs(scene):
    """Returns each program's name, package, path (`None` if it is not installed), and run
    function."""
    first, second, third = scene.urls
    vllm = scene.program("vllm")
    return [
        ("vllm bench serve, completions", "vllm", vllm, lambda it: vllm_bench(scene, it, first, "vllm")),
        (
            "vllm bench serve, chat",
            "vllm",
            vllm,
            lambda it: vllm_bench(scene, it, second, "openai-chat"),
        ),
        ("aiperf", "aiperf", scene.program("aiperf"), lambda it: aiperf(scene, it, third)),
        (
            "aiperf, streams",
            "aiperf",
            scene.program("aiperf"),
            lambda it: aiperf(scene, it, third, "--streaming"),
        ),
        (
            "genai-bench",
            "genai-bench",
            scene.program("genai-bench"),
            lambda it: genai_bench(scene, it, first),
        ),
        ("guidellm", "guidellm", scene.program("guidellm"), lambda it: guidellm(scene, it, second)),
        ("OpenAI SDK", "openai", scene.python_with("openai"), lambda it: sdk(scene, it, "openai")),
        (
            "Anthropic SDK",
            "anthropic",
            scene.python_with("anthropic"),
            lambda it: sdk(scene, it, "anthropic"),
        ),
    ]


def version(path, package):
    """Returns the version of a package in a program's environment."""
    site = map(str, path.parent.parent.glob("lib/python*/site-packages"))
    found = importlib.metadata.distributions(path=list(site))
    names = {it.metadata["Name"]: it.version for it in found if it.metadata["Name"]}
    return names.get(package, "unknown")


def try_all(scene):
    """Runs every program. Returns the rows of the table, and whether no program failed."""
    rows, is_well = [], True
    for name, package, found, run in programs(scene):
        if scene.args.only and scene.args.only not in name:
            continue
        if found is None:
            print(f"skipped: {name}: no --venv has it", file=sys.stderr)
            continue
        print(f"running {name}", file=sys.stderr)
        begin, before = time.monotonic(), scene.outcomes()
        try:
            told, mark = run(found), "works"
        except (Failed, OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
            told, mark, is_well = f"{type(error).__name__}: {error}", "FAILED", False
        scene.cluster.check_alive()
        outcomes = scene.outcomes() - before
        if outcomes.keys() & OUR_FAULT:
            mark, is_well = "FAILED", False
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        seconds = round(time.monotonic() - begin)
        rows.append((name, version(found, package), mark, told, ended, seconds))
    return rows, is_well


def table(rows):
    lines = [
        "| program | version | | its own result | at Quorate | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += ["| " + " | ".join(str(cell).replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    quorate = os.environ.get("QUORATE_BIN", ROOT / "target/release/quorate")
    parser.add_argument(
        "--quorate", default=quorate, type=pathlib.Path, help="the program [%(default)s]"
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an engine that runs; may be repeated [three emulated ones]",
    )
    parser.add_argument(
        "--venv",
        action="append",
        default=[],
        type=pathlib.Path,
        metavar="DIR",
        help="virtual environment with programs; may be repeated",
    )
    parser.add_argument(
        "--tokenizer",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of the model's tokenizer, which benchmarks make prompts with",
    )
    parser.add_argument("--model", help="[the first that is listed]")
    parser.add_argument(
        "--requests",
        type=int,
        default=20,
        help="of each run of a benchmark, if --engine is given; always of genai-bench's [%(default)s]",
    )
    parser.add_argument(
        "--speed", type=float, default=10, help="of emulated engines, 1: a GPU's [%(default)s]"
    )
    parser.add_argument("--only", metavar="TEXT", help="only programs whose name contains this")
    parser.add_argument(
        "--keep", type=pathlib.Path, metavar="DIR", help="folder for logs and results [none are kept]"
    )
    return parser.parse_args()


def main():
    args = arguments()
    if not args.quorate.is_file():
        sys.exit(f"not run: there is no {args.quorate}: cargo build --release")
    with contextlib.ExitStack() as stack:
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            folder = args.keep.absolute()
        else:
            folder = pathlib.Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="quorate-clients-"))
            )
        cluster = stack.enter_context(Cluster(args.quorate.absolute(), folder, on_loopback(REPLICAS)))
        for url in args.engine:
            name = f"engine-{len(cluster.engines) + 1}"
            cluster.engines[name] = {"id": name, "url": url.rstrip("/")}
        if not args.engine:
            for port in free_ports(3):
                cluster.add_engine(f"127.0.0.1:{port}", "--speed", str(args.speed))
        cluster.configure(SETTINGS, MODELS)
        cluster.start_replicas()
        rows, is_well = try_all(Scene(cluster, args, folder))
        print(table(rows))
    if not rows:
        sys.exit("nothing was run")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()

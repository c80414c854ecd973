#!/usr/bin/env python3
"""Races Quorate against nginx, and against other routers: CPU of the whole process per request, and
added latency.

One core for the subject, one for the load (wrk, h2load) and the engines (nginx, a fixed answer).
Prompts share all but their last 64 bytes. Rounds are interleaved, and figures are medians; what counts
is the ratio to nginx in the same run. Needs nginx and wrk (Debian's packages) and two cores. Routers
from PyPI run where `--routers` names a virtual environment that has them; what is missing is skipped
with a word.
"""

import argparse
import os
import pathlib
import shutil
import signal
import sys

import races
from programs import skip
from log import log
from split import split

# Each race, and the tools that it needs besides those of all.
RACES = {
    "basic": (races.basic, {}),
    "http2": (races.http2, {"h2load": "nghttp2-client"}),
    "tls": (races.tls, {"openssl": "openssl"}),
    "streams": (races.streams, {}),
    "fleet": (races.fleet, {}),
    "replicas": (races.replicas, {}),
    "cores": (races.cores, {}),
    "split": (split, {}),
    "log": (log, {"ss": "iproute2"}),
}
TOOLS = {"nginx": "nginx-light", "wrk": "wrk", "taskset": "util-linux"}


def arguments():
    here = pathlib.Path(__file__).resolve().parent
    told = "\n".join(f"  {name:10}{run.__doc__}" for name, (run, _) in RACES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"races:\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "races", nargs="*", metavar="RACE", help="as below, or all of them: all [basic]"
    )
    program = here.parents[1] / "target/release/quorate"
    parser.add_argument("--quorate", default=program, help="the program [%(default)s]")
    parser.add_argument("--routers", help="virtual environment with routers from PyPI")
    parser.add_argument("--seconds", type=int, default=5, help="of each load [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    args = parser.parse_args()
    args.here = here
    args.races = list(RACES) if "all" in args.races else args.races or ["basic"]
    unknown = [name for name in args.races if name not in RACES]
    if unknown:
        parser.error(f"no race: {', '.join(unknown)}; there are {', '.join(RACES)} and all")
    return args


def lacking(tools):
    """What to install for tools that are not here, or nothing."""
    missing = {tool: package for tool, package in tools.items() if not shutil.which(tool)}
    if missing:
        return f"no {', '.join(missing)} here: apt-get install {' '.join(missing.values())}"
    return None


def main():
    args = arguments()
    if not pathlib.Path(args.quorate).is_file():
        sys.exit(f"not run: there is no {args.quorate}: cargo build --release")
    if (os.cpu_count() or 1) < 2:
        sys.exit("not run: two cores are needed")
    # So that what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    for name in args.races:
        run, tools = RACES[name]
        why = lacking(TOOLS | tools)
        if why:
            skip(name, why)
        else:
            print(f"### {name}\n", flush=True)
            run(args)


if __name__ == "__main__":
    main()

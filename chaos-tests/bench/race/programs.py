"""Processes of a race, which are pinned to cores and end with the race, and their CPU time."""

import collections
import contextlib
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.request

SUBJECT_CORE, LOAD_CORE = "0", "1"
TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")
# The certificates of a race are self-signed.
ANY_CERTIFICATE = ssl.create_default_context()
ANY_CERTIFICATE.check_hostname = False
ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE

Cpu = collections.namedtuple("Cpu", "user kernel")


def skip(what, why):
    print(f"skipped: {what}: {why}", file=sys.stderr)


def free_ports(count):
    """Returns free ports of the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def get(port, path, scheme="http"):
    url = f"{scheme}://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(url, timeout=5, context=ANY_CERTIFICATE) as answer:
        return answer.read().decode()


def cpu_in(stat):
    """Returns the CPU time in the text of a process's or thread's `stat` file, in microseconds."""
    fields = stat.rsplit(")", 1)[1].split()
    return Cpu(int(fields[11]) * TICK_US, int(fields[12]) * TICK_US)


class Process:
    """A process pinned to a core, with its children."""

    def __init__(self, folder, name, core, command):
        self.log = open(folder / f"{name}.log", "ab")
        command = ["taskset", "-c", core, *map(str, command)]
        self.child = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def members(self):
        """Yields the directories of the process and its children in /proc."""
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                session = stat.read_text().rsplit(")", 1)[1].split()[3]
                if int(session) == self.child.pid:
                    yield stat.parent

    def cpu(self):
        """Returns the CPU time of the process and its children so far."""
        user = kernel = 0
        for member in self.members():
            with contextlib.suppress(OSError, IndexError):
                taken = cpu_in((member / "stat").read_text())
                user, kernel = user + taken.user, kernel + taken.kernel
        return Cpu(user, kernel)

    def cpu_us(self):
        return sum(self.cpu())

    def threads(self):
        """Returns each thread's name and CPU time so far in microseconds, by thread id. The
        resolution is finer than that of clock ticks."""
        threads = {}
        for task in pathlib.Path(f"/proc/{self.child.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                nanoseconds = int((task / "schedstat").read_text().split()[0])
                threads[task.name] = ((task / "comm").read_text().strip(), nanoseconds / 1000)
        return threads

    def move(self, core):
        """Pins all threads to another core."""
        for member in self.members():
            for task in (member / "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), {int(core)})

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self.log.close()


class Stage:
    """The temporary folder and the processes of one race, which are removed with it."""

    def __init__(self, args, subject_cores=SUBJECT_CORE, load_cores=LOAD_CORE, parent=None):
        self.args, self.parent = args, parent
        self.subject_cores, self.load_cores = subject_cores, load_cores
        self.processes = []

    def __enter__(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="quorate-race-", dir=self.parent)
        self.folder = pathlib.Path(self.temporary.name)
        return self

    def start(self, name, core, command):
        process = Process(self.folder, name, core, command)
        self.processes.append(process)
        return process

    def home(self, name):
        home = self.folder / name
        home.mkdir()
        return home

    def __exit__(self, kind, _error, _trace):
        for process in self.processes:
            process.stop()
        if kind is not None and kind is not KeyboardInterrupt:
            self.tell_logs()
        self.temporary.cleanup()

    def tell_logs(self):
        for log in sorted(self.folder.glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-5:]
            print(f"--- {log.name}", *tail, sep="\n", file=sys.stderr)

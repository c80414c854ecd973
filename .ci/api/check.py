"""Starts a cluster of three replicas and holds its admin API against its description.

Arguments: the binary, the folder of tools, a folder for files that nobody keeps.
"""

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "deploy"))

from cluster import Cluster, free_ports, on_loopback  # noqa: E402

# The weakest first.
ROLES = ["viewer", "operator", "admin"]


class AdminCluster(Cluster):
    """Three replicas and an emulated engine, on loopback, with tokens."""

    def __init__(self, binary, folder):
        super().__init__(binary, folder, on_loopback(3))
        self.tokens = {role: "qa-" + secrets.token_hex(24) for role in ROLES}
        self.token = self.tokens["admin"]
        tokens = folder / "tokens"
        with tokens.open("w") as out:
            for role, token in self.tokens.items():
                out.write(f"ci-{role}:{role}:{hashlib.sha256(token.encode()).hexdigest()}\n")
        tokens.chmod(0o600)
        self.add_engine(f"127.0.0.1:{free_ports(1)[0]}")
        self.configure(f"admin.tokens_file = {json.dumps(str(tokens))}", '[[models]]\nname = "*"\n')

    def url(self, path, at=0):
        return f"http://{self.replicas[at][1]}{path}"

    def request(self, method, url, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def restore_engine(self):
        """Registers the engine again, which the requests have drained or removed."""
        url = {"url": self.engines["engine-1"]["url"]}
        self.request("PUT", self.url("/admin/v1/backends/engine-1"), url)
        self.request("POST", self.url("/admin/v1/backends/engine-1/undrain"))

    def check_digests(self):
        """All replicas have the same state."""
        for at in [1, 2]:
            for _ in range(20):
                now = self.request("GET", self.url("/admin/v1/digest?read=linearizable"))
                url = self.url(f"/admin/v1/digest?index={now['index']}", at)
                try:
                    assert self.request("GET", url) == now, f"replica {at + 1} has another state"
                    break
                except urllib.error.HTTPError as refusal:
                    # It is further already, and has not kept that digest.
                    assert refusal.code == 404, refusal
            else:
                raise SystemExit(f"no digest of replica {at + 1} could be compared")

    def fill(self):
        """Gives every list something to page through."""
        for name in ["ann", "bob", "cy"]:
            self.request("PUT", self.url(f"/admin/v1/users/{name}"), {"weight_milli": 2000})
            self.request("POST", self.url("/admin/v1/keys"), {"user": name})
        for number in range(5):
            message = {"role": "user", "content": f"Question {number}: " + "why? " * 200}
            body = {"model": "m", "messages": [message], "max_tokens": 4}
            models = self.request("GET", f"http://{self.replicas[0][0]}/v1/models")
            body["model"] = models["data"][0]["id"]
            self.request("POST", f"http://{self.replicas[0][0]}/v1/chat/completions", body)
        for name in ["spare-1", "spare-2"]:
            self.request("PUT", self.url(f"/admin/v1/backends/{name}"), {"url": "http://127.0.0.1:9"})


def step(what):
    print(f"-- {what} ({time.monotonic() - BEGAN:.0f}s)", flush=True)


def run(*command, **more):
    """Runs a command that must succeed."""
    done = subprocess.run([str(part) for part in command], **more)
    if done.returncode != 0:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(map(str, command[:3]))} ...")


def check_events(cluster):
    """The stream of events has ids, and goes on behind one: schemathesis would wait for its end."""
    headers = {"authorization": f"Bearer {cluster.token}"}
    request = urllib.request.Request(cluster.url("/admin/v1/events"), headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["content-type"] == "text/event-stream", answer.headers
        first = answer.readline()
        assert first == b"event: connected\n", first
        lines = [answer.readline() for _ in range(2)]
    last = lines[1].removeprefix(b"id: ").strip().decode()
    headers["last-event-id"] = last
    again = urllib.request.Request(cluster.url("/admin/v1/events"), headers=headers)
    with urllib.request.urlopen(again, timeout=30) as answer:
        lines = [answer.readline() for _ in range(3)]
        assert lines[2] == f"id: {last}\n".encode(), lines


def check_roles(cluster, document):
    """Every call is refused without a token, and with one of a weaker role than it asks for."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            role = operation["x-quorate-role"]
            if role == "none":
                continue
            tries = [(None, 401)]
            tries += [(cluster.tokens[weaker], 403) for weaker in ROLES[: ROLES.index(role)]]
            for token, expected in tries:
                headers = {} if token is None else {"authorization": f"Bearer {token}"}
                url = cluster.url(path.replace("{", "").replace("}", ""))
                request = urllib.request.Request(url, headers=headers, method=method.upper())
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        status = answer.status
                except urllib.error.HTTPError as refusal:
                    status = refusal.code
                assert status == expected, f"{method} {path}: {status}, expected {expected}"


def main():
    binary, tools, scratch = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    venv, modules = tools / "venv" / "bin", tools / "node_modules"
    cluster = AdminCluster(binary, scratch)
    with cluster:
        step("a cluster of three")
        cluster.start_replicas()
        cluster.fill()
        document = scratch / "openapi.json"
        described = cluster.request("GET", cluster.url("/admin/v1/openapi.json"))
        document.write_text(json.dumps(described, indent=1))
        check_events(cluster)
        check_roles(cluster, described)
        step("lint")
        lint = [modules / ".bin" / "spectral", "lint", "--fail-severity", "hint"]
        run(*lint, "--ruleset", HERE / "spectral.yaml", document)
        step("a client in Python")
        client = scratch / "python"
        config = HERE / "python-client.yaml"
        generate = [venv / "openapi-python-client", "generate", "--meta", "none", "--overwrite"]
        environment = {**os.environ, "PATH": f"{venv}:{os.environ['PATH']}"}
        generate += ["--config", config, "--fail-on-warning"]
        run(*generate, "--path", document, "--output-path", client / "quorate_admin", env=environment)
        environment = {**os.environ, "PYTHONPATH": str(client), "QUORATE_TOKEN": cluster.token}
        run(venv / "python", HERE / "read_lists.py", cluster.url(""), env=environment)
        step("a client in TypeScript")
        client = scratch / "typescript"
        client.mkdir()
        (client / "node_modules").symlink_to(modules)
        for name in ["read_lists.ts", "tsconfig.json", "package.json"]:
            shutil.copy(HERE / name, client)
        run(modules / ".bin" / "openapi-typescript", document, "-o", client / "admin.d.ts")
        run(modules / ".bin" / "tsc", "-p", client)
        environment = {**os.environ, "QUORATE_TOKEN": cluster.token}
        run("node", client / "read_lists.js", cluster.url(""), env=environment)
        step("requests made from the description")
        environment = {**os.environ, "QUORATE_TOKEN": cluster.token}
        test = [venv / "schemathesis", "--config-file", HERE / "schemathesis.toml", "run"]
        run(*test, document, "--url", cluster.url(""), *sys.argv[4:], env=environment, cwd=scratch)
        cluster.check_alive()
        step("the cluster is one")
        cluster.restore_engine()
        cluster.wait_all_ready()
        cluster.check_digests()
    step("done")


BEGAN = time.monotonic()
main()

"""The chart in a real control plane of Kubernetes: installed, scaled, rolled, killed and cut off."""

import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import yaml

from api import ControlPlane, wait_for
from node import NAME, Node

HERE = pathlib.Path(__file__).resolve().parent
QUORATE = os.environ["QUORATE"]
NAMESPACE = "llm"
SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/quorate"
ENGINES = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/vllm"
BINDING = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings/quorate"
# What of the chart 1.20 does not know yet: the budget's group is younger. The route needs a gateway, of which
# nothing runs here.
LEFT_OUT = ["PodDisruptionBudget", "HTTPRoute"]
CLIENTS = 4
METRICS = 9090


def expect(what, is_met=None, limit_s=120):
    print(f"expected: {what}", flush=True)
    if is_met:
        wait_for(what, is_met, limit_s)


def definition():
    """The custom resource of pools, with the schema that the objects are held to."""
    schema = yaml.safe_load((HERE / "schemas/gateway.yaml").read_text())["InferencePool"]
    spec = schema["properties"]["spec"]
    plain(spec)
    version = {"name": "v1", "served": True, "storage": True}
    version["schema"] = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    group = "inference.networking.k8s.io"
    names = {"plural": "inferencepools", "singular": "inferencepool", "kind": "InferencePool"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"inferencepools.{group}",
            # The API server wants a reference for groups of `k8s.io`; it reads any.
            "annotations": {"api-approved.kubernetes.io": "https://gateway-api-inference-extension.sigs.k8s.io"},
        },
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def plain(schema):
    """Makes a JSON schema one that a custom resource may have: structural, without what it forbids."""
    if isinstance(schema, dict):
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
        schema.pop("uniqueItems", None)
        if "const" in schema:
            schema["enum"] = [schema.pop("const")]
        if "enum" in schema and "type" not in schema:
            schema["type"] = "string"
        for each in schema.values():
            plain(each)
    elif isinstance(schema, list):
        for each in schema:
            plain(each)


def engines(count):
    """A Deployment of emulated engines."""
    labels = {"app": "vllm"}
    container = {"name": "vllm", "image": "quorate", "args": ["engine", "--listen", "0.0.0.0:8000", "--speed", "20"]}
    container |= {"ports": [{"name": "http", "containerPort": 8000}]}
    container |= {"readinessProbe": {"httpGet": {"path": "/health", "port": "http"}}}
    spec = {"terminationGracePeriodSeconds": 20, "containers": [container], "automountServiceAccountToken": False}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm"},
        "spec": {"replicas": count, "selector": {"matchLabels": labels}, "template": template},
    }


class Trial:
    """The control plane, its node, and what runs there."""

    def __init__(self, programs, folder):
        self.folder = folder
        (folder / "control-plane").mkdir()
        self.plane = ControlPlane(programs, folder / "control-plane")
        self.node = Node(self.plane, NAMESPACE, QUORATE, folder)

    def install(self):
        """Does what the guide says: a Secret, and the chart."""
        created = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self.plane.create(NAMESPACE, created)
        self.plane.create(NAMESPACE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME}})
        self.plane.create(NAMESPACE, definition())
        made = subprocess.run(
            [QUORATE, "token", "create", "--role", "admin", "ada", "--out", self.folder / "token"],
            check=True, capture_output=True, text=True,
        )
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "quorate"}}
        secret["stringData"] = {"secret": "s" * 40, "tokens": made.stdout}
        self.plane.create(NAMESPACE, secret)
        self.token = (self.folder / "token").read_text().strip()
        values = ["--values", HERE / "gateway/values.yaml"]
        # Which engine answered, and what it held.
        values += ["--set", "env[0].name=QUORATE_USERS__EXPOSE", "--set", "env[0].value=full"]
        values += ["--set", f"listen.metrics={METRICS}"]
        rendered = subprocess.run(
            ["helm", "template", "quorate", HERE / "helm/quorate", "--namespace", NAMESPACE, *values],
            check=True, capture_output=True, text=True,
        ).stdout
        objects = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] not in LEFT_OUT]
        path = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
        wait_for("the API has pools", lambda: self.plane.get(path))
        for each in objects:
            self.plane.create(NAMESPACE, each)
        self.plane.create(NAMESPACE, engines(2))
        print(f"installed: {len(objects)} objects, all but {' and '.join(LEFT_OUT)}")

    def admin(self, pod, path):
        """Asks the admin API of a replica inside its pod, where it is on loopback."""
        command = ["ip", "netns", "exec", self.node.pod(pod).network]
        command += ["curl", "--silent", "--show-error", "--max-time", "5"]
        command += ["--header", f"authorization: Bearer {self.token}", f"http://127.0.0.1:8081{path}"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not told.returncode, told.stderr
        return json.loads(told.stdout)

    def backends(self, pod):
        """The state of every backend, by id, as a replica has it."""
        return {each["id"]: each for each in self.admin(pod, "/admin/v1/backends")["backends"]}

    def serving(self, pod):
        """How many backends take requests."""
        states = [each["state"] for each in self.backends(pod).values()]
        return sum(each["is_healthy"] and not each["is_draining"] for each in states)

    def voters(self, pod):
        members = self.admin(pod, "/admin/v1/cluster")["members"]
        return sorted(number for number, each in members.items() if each["is_voter"])

    def scale(self, path, count):
        self.plane.patch(path, {"spec": {"replicas": count}})

    def ready(self):
        """Names of the replicas that Kubernetes calls ready."""
        pods = self.plane.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        return sorted(
            each["metadata"]["name"]
            for each in pods
            if each["metadata"]["labels"].get("app.kubernetes.io/name") == "quorate"
            and not each["metadata"].get("deletionTimestamp")
            and any(c["type"] == "Ready" and c["status"] == "True" for c in each["status"].get("conditions", []))
        )

    def ask(self, address, prompt):
        """Has a replica answer; the engine that did, and how much of the prompt it had."""
        message = {"role": "user", "content": prompt}
        body = {"model": "emulated", "max_tokens": 8, "messages": [message]}
        url = f"http://{address}:8080/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            json.load(answer)["choices"]
            return answer.headers["x-quorate-backend"], answer.headers["x-quorate-prefix"]

    def stop(self):
        self.node.stop()
        self.plane.stop()


class Load:
    """Clients that send requests to what the Service has, as kube-proxy would, and count what they get."""

    def __init__(self, trial):
        self.trial, self.counts = trial, collections.Counter()
        self.errors = []
        self.is_over = threading.Event()
        self.workers = [threading.Thread(target=self.work, args=(nth,), daemon=True) for nth in range(CLIENTS)]

    def __enter__(self):
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        for worker in self.workers:
            worker.join()

    def work(self, nth):
        chosen = random.Random(nth)
        while not self.is_over.is_set():
            addresses = self.trial.node.addresses.get("quorate")
            if not addresses:
                time.sleep(0.1)
                continue
            try:
                self.trial.ask(chosen.choice(addresses), f"Client {nth}. " + "Tell me about quorums. " * 40)
                self.counts["answered"] += 1
            except (OSError, ValueError, KeyError) as error:
                self.counts["failed"] += 1
                self.errors.append(repr(error))
            time.sleep(0.05)


def without_failure(trial, what, *steps):
    """Runs steps under load, in which no request may fail."""
    with Load(trial) as load:
        for step in steps:
            step()
    print(f"{what}: {load.counts['answered']} requests answered, {load.counts['failed']} failed")
    assert load.counts["answered"] and not load.counts["failed"], load.errors[:3]


def starts(trial):
    names = ["quorate-0", "quorate-1", "quorate-2"]
    expect("three replicas are ready", lambda: trial.ready() == names)
    for name in names:
        expect(f"{name} follows the pool: two engines", lambda name=name: trial.serving(name) == 2)
    for name in names:
        url = f"http://{trial.node.pod(name).address}:{METRICS}/metrics"
        with urllib.request.urlopen(url, timeout=5) as page:
            assert b"quorate_build_info" in page.read()
    expect("Prometheus reads each replica's metrics without a token")
    prompt = "Which lamp is lit? " + "The boats come home at night. " * 60
    first, _ = trial.ask(trial.node.pod("quorate-0").address, prompt)
    time.sleep(1)
    for name in names[1:]:
        engine, prefix = trial.ask(trial.node.pod(name).address, prompt)
        expect(f"{name} sends the prompt to the same engine, {prefix}")
        held, blocks = map(int, prefix.split("/"))
        assert engine == first and held == blocks > 0


def engines_come_and_go(trial):
    def up():
        trial.scale(ENGINES, 4)
        expect("four engines serve", lambda: trial.serving("quorate-1") == 4)

    def down():
        trial.scale(ENGINES, 2)
        expect("two engines serve, two drain", lambda: trial.serving("quorate-1") == 2)

    without_failure(trial, "engines scaled from 2 to 4 to 2", up, down)


def api_server_dies(trial):
    before = sorted(trial.backends("quorate-0"))
    trial.plane.kill("kube-apiserver")
    time.sleep(3)
    expect("without an API server, replicas keep their engines")
    assert sorted(trial.backends("quorate-0")) == before and trial.serving("quorate-0") == 2
    trial.plane.start_api_server()
    trial.scale(ENGINES, 3)
    expect("when it is back, they follow again", lambda: trial.serving("quorate-2") == 3)


def rights_are_lost(trial):
    bound = trial.plane.get(BINDING)
    trial.plane.delete(BINDING)
    for name in trial.ready():
        # A watch goes on until it ends; a new one is refused.
        trial.node.pod(name).kill(signal.SIGKILL)
    sources = lambda: json.dumps(trial.admin("quorate-0", "/admin/v1/discovery"))
    expect("without rights, the source says what the API server says", lambda: "forbidden" in sources())
    expect("and the engines stay", lambda: trial.serving("quorate-0") == 3)
    kept = {key: bound["metadata"][key] for key in ["name", "labels"]}
    trial.plane.create(NAMESPACE, {**bound, "metadata": kept})
    trial.scale(ENGINES, 2)
    expect("with the rights back, it follows again", lambda: trial.serving("quorate-0") == 2)


def scales(trial):
    trial.scale(SETS, 5)
    expect("five replicas are ready", lambda: len(trial.ready()) == 5)
    expect("five replicas vote", lambda: len(trial.voters("quorate-0")) == 5)

    def down():
        trial.scale(SETS, 3)
        are_three = lambda: len(trial.voters("quorate-0")) == len(trial.ready()) == 3
        expect("three replicas are left, and three vote", are_three)

    without_failure(trial, "replicas scaled from 5 to 3", down)


def rolls(trial):
    def roll():
        before = {name: trial.node.pod(name).uid for name in trial.ready()}
        note = {"kubectl.kubernetes.io/restartedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ")}
        trial.plane.patch(SETS, {"spec": {"template": {"metadata": {"annotations": note}}}})
        for name, uid in before.items():
            is_new = lambda name=name, uid=uid: trial.node.pod(name).uid != uid and name in trial.ready()
            expect(f"{name} is a new pod, and ready", is_new, 240)

    without_failure(trial, "a rolling restart", roll)


def volume_is_lost(trial):
    pod = trial.node.pod("quorate-2")
    voters = trial.voters("quorate-0")
    pod.kill(signal.SIGKILL)
    shutil.rmtree(trial.node.claim("data-quorate-2"))
    trial.plane.delete(pod.path(), {"gracePeriodSeconds": 0})
    is_back = lambda: "quorate-2" in trial.ready() and trial.voters("quorate-2") == voters
    expect("a pod without its volume comes back under its id", is_back)


def main():
    programs, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    folder.chmod(0o755)
    trial = Trial(programs, folder)
    try:
        trial.node.start()
        trial.plane.start()
        trial.install()
        trial.node.run()
        for part in [starts, engines_come_and_go, api_server_dies, rights_are_lost, scales, rolls, volume_is_lost]:
            part(trial)
        print("the chart works")
    except BaseException:
        for log in sorted(folder.glob("*.log")) + sorted(folder.glob("control-plane/*.log")):
            print(f"-- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        print("\n".join(collections.Counter(trial.node.lost).keys())[-3000:])
        raise
    finally:
        trial.stop()


main()

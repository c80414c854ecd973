"""Replicas with pickers, engines, and Envoys that run the shipped examples or variants of them."""

import copy
import json
import pathlib
import re
import sys
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))

from cluster import Cluster, free_ports, get, on_loopback  # noqa: E402

REPLICAS, ENGINES = 3, 4
# As many replicas, the first ones, are told that the gateway allows them to override modes.
ALLOW_OVERRIDES = 1
GATEWAY = ROOT / "deploy/gateways/envoy.yaml"
BALANCER = ROOT / "deploy/load-balancers/envoy.yaml"
EXTENSIONS = "type.googleapis.com/envoy.extensions"
MANAGER = "envoy.filters.network.http_connection_manager"


class Failed(Exception):
    """A check did not hold."""


def check(is_so, what):
    if not is_so:
        raise Failed(what)


def metric(page, name, **labels):
    """The sum of the series of a page that have these labels."""
    check(f"# TYPE {name} " in page, f"there is no metric {name}")
    total = 0
    for line in page.splitlines():
        told = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if told and all(f'{key}="{value}"' in (told[1] or "") for key, value in labels.items()):
            total += float(told[2])
    return total


def socket_address(told):
    host, port = told.split(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


class Stand(Cluster):
    """A cluster whose replicas are data ports and pickers."""

    def __init__(self, binary, envoy, folder):
        super().__init__(binary, folder, on_loopback(REPLICAS))
        self.envoy = envoy
        self.pickers = [f"127.0.0.1:{port}" for port in free_ports(REPLICAS)]

    def start_engines(self):
        for port in free_ports(ENGINES):
            # A stream of 32 tokens takes 0.7 s.
            self.add_engine(f"127.0.0.1:{port}")

    def start_replica(self, number):
        command = [self.binary, "serve", "--config", self.config(number)]
        command += ["--set", f"listen.picker={self.pickers[number - 1]}"]
        if number <= ALLOW_OVERRIDES:
            command += ["--set", "picker.bodies=streamed"]
        return self.start(f"replica-{number}", *command)

    def admin(self, number, path, body=None, method="PUT"):
        """What the admin API of a replica answers: to a GET, or, with a body, to a PUT of it."""
        request = urllib.request.Request(f"http://{self.replicas[number - 1][1]}{path}")
        if body:
            request.method, request.data = method, json.dumps(body).encode()
            request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def models(self, data):
        return [model["id"] for model in json.loads(get(f"http://{data}/v1/models"))["data"]]

    def metric(self, number, name, **labels):
        return metric(get(f"http://{self.replicas[number - 1][1]}/metrics").decode(), name, **labels)

    def metric_of_all(self, name, **labels):
        return sum(self.metric(number, name, **labels) for number in self.running())

    def log(self, name):
        return pathlib.Path(self.folder, f"{name}.log").read_text()

    def running(self):
        return [nth for nth in range(1, REPLICAS + 1) if self.processes[f"replica-{nth}"].poll() is None]

    def leader(self):
        for number in self.running():
            if self.admin(number, "/admin/v1/cluster")["role"] == "leader":
                return number
        raise ValueError("nobody leads")

    def wait_quiet(self):
        """Waits until no replica has a request, not even of a client that left."""
        for name in ["quorate_picker_streams", "quorate_proxy_in_flight_requests"]:
            self.until(f"{name} is 0", lambda name=name: self.metric_of_all(name) == 0)

    def moved(self, node):
        """A part of an example, with the addresses of this stand."""
        if isinstance(node, list):
            return [self.moved(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "socket_address" in node:
            host = int(node["socket_address"]["address"].rsplit(".", 1)[1])
            port = node["socket_address"]["port_value"]
            ours = {9002: self.pickers, 8080: [data for data, *_ in self.replicas]}
            address = ours[port][host - 11] if port in ours else f"127.0.0.1:{port}"
            return socket_address(address)
        return {key: self.moved(value) for key, value in node.items()}

    def example(self, path):
        """An example with the addresses of this stand, its listener at a free port, and that port."""
        config = yaml.safe_load(path.read_text())
        (port,) = free_ports(1)
        config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = port
        return self.moved(config), port

    def start_envoy(self, name, config):
        """Starts an Envoy and returns once it listens."""
        path = pathlib.Path(self.folder, f"{name}.json")
        (admin,) = free_ports(1)
        config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}}
        path.write_text(json.dumps(config))
        words = [
            self.envoy,
            "--config-path",
            path,
            "--concurrency",
            2,
            "--log-level",
            "warning",
            "--disable-hot-restart",
        ]
        process = self.start(name, *map(str, words))

        def is_ready():
            if process.poll() is not None:
                sys.exit(f"{name} ended:\n{self.log(name)[-3000:]}")
            return get(f"http://127.0.0.1:{admin}/ready")

        self.until(f"{name} is ready", is_ready)


def manager(listener):
    """The settings of a listener's HTTP connection manager."""
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def ext_proc(listener):
    """The settings of a listener's ext_proc filter."""
    filters = manager(listener)["http_filters"]
    return next(each for each in filters if each["name"] == "envoy.filters.http.ext_proc")["typed_config"]


def another(config, name):
    """A copy of the example's listener, added at a free port; the copy and the port."""
    listener = copy.deepcopy(config["static_resources"]["listeners"][0])
    (port,) = free_ports(1)
    listener["name"] = name
    listener["address"]["socket_address"]["port_value"] = port
    config["static_resources"]["listeners"].append(listener)
    return listener, port

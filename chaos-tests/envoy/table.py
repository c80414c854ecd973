"""One table of requests, through the data port and through pickers in every mode: what comes back and what the
engine sees is equal, but for the differences that are listed here."""

import copy
import gzip
import json

from http1 import request_bytes, send
from stand import ALLOW_OVERRIDES, EXTENSIONS, GATEWAY, another, check, ext_proc, manager, socket_address

KEY = "x-gateway-destination-endpoint"
# Requests in the mode that is refused: some would pass, as their body comes with the head.
REFUSALS = 10

# Headers of answers that only one way has.
UNCOMPARED = {
    "server": "of Envoy",
    "x-envoy-upstream-service-time": "of Envoy",
    "vary": "of the data port, which may compress nothing but says so",
    "connection": "of one hop",
    "transfer-encoding": "of one hop",
    "content-length": "of one hop: an answer may be sent in chunks",
}
# Headers of answers whose values are of the moment or the replica.
MOMENTARY = [
    "date",
    "retry-after",
    "x-quorate-index",
    "x-quorate-prefix",  # The first way leaves the prompt cached.
    "x-quorate-replica",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
]
# Headers that engines see from a gateway only, or with other values.
UNCOMPARED_AT_ENGINES = {
    "host": "the data port puts the engine's",
    KEY: "of the picker",
    "x-envoy-expected-rq-timeout-ms": "of Envoy",
    "x-envoy-external-address": "of Envoy",
    "x-envoy-internal": "of Envoy",
    "x-forwarded-for": "of Envoy",
    "x-forwarded-proto": "of Envoy",
    "via": "of the data port",
    "connection": "of one hop",
    "transfer-encoding": "of one hop",
    "content-length": "of one hop: a body may be sent in chunks",
    "x-quorate-replica": "of the replica",
    "trailer": "of one hop",
    "te": "of one hop",
}


def chat(do="answer", model="spy", **more):
    message = {"role": "user", "content": f"do:{do} " + more.pop("text", "")}
    return json.dumps({"model": model, "messages": [message], **more}).encode()


def post(body, path="/v1/chat/completions", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return "POST", path, {"content-type": "application/json", **headers}, body


def get_of(path, method="GET"):
    return method, path, {}, None


PREFLIGHT = {"origin": "http://a", "access-control-request-method": "POST"}


def pieces(body, size):
    return [body[at : at + size] for at in range(0, len(body), size)]


# By the status at the data port. `MODE`, `A_KEY` and `FORGED` stand for what a run puts there.
REQUESTS = {
    200: {
        "an answer": post(chat()),
        "a stream": post(chat("stream", stream=True)),
        "a stream with usage": post(chat("stream", stream=True, stream_options={"include_usage": True})),
        "a stream with trailers": post(chat("trailers", stream=True)),
        "a prompt of 32 KB": post(chat(text="w" * 32_000)),
        "a prompt of 400 KB": post(chat(text="w" * 400_000)),
        "a prompt of 3 MB": post(chat(text="w" * 3_000_000)),
        "a body in chunks": post(pieces(chat(text="w" * 20_000), 1500)),
        "a body with trailers": post(pieces(chat(text="w" * 2_000), 1500), trailers="x-checksum: 1\r\n"),
        "a gzipped body": post(gzip.compress(chat(), mtime=0), content_encoding="gzip"),
        "an answer of 2 MB": post(chat("long")),
        "completions": post(b'{"model":"spy","prompt":"yes?"}', "/v1/completions"),
        "embeddings": post(b'{"model":"spy","input":"yes?"}', "/v1/embeddings"),
        "messages": post(chat(max_tokens=9), "/v1/messages"),
        "responses": post(b'{"model":"spy","input":"yes?"}', "/v1/responses"),
        "rerank": post(b'{"model":"spy","query":"yes?","documents":["a"]}', "/v1/rerank"),
        "a trailing slash": post(chat(), "/v1/chat/completions/"),
        "a query": post(chat(), "/v1/chat/completions?a=b"),
        "stripped fields and headers": post(chat(priority=1), x_vllm_priority="1", x_data_parallel_rank="0"),
        "headers without effect": post(chat(), x_quorate_policy="random", x_quorate_select="a=b"),
        "an objective": post(chat(), x_gateway_inference_objective="1"),
        "an endpoint that the client names": post(chat(), x_gateway_destination_endpoint="127.0.0.1:1"),
        "a key of the cluster": post(chat(), authorization="Bearer A_KEY"),
        "a key of the engine": post(chat(), authorization="Bearer sk-of-the-engine"),
        "the first of a limited user": post(chat(), x_quorate_user="limited-MODE"),
        "a limited user whom the gateway names": post(chat(), x_gateway_inference_fairness_id="limited-MODE"),
        "models": get_of("/v1/models"),
        "a model": get_of("/v1/models/spy"),
        "the head of models": get_of("/v1/models", "HEAD"),
        "an engine at a name": post(chat(model="named")),
        "an engine below a path": post(chat(model="below")),
        "an end in mid-stream": post(chat("cut", stream=True)),
    },
    400: {
        "a refusal of the engine": post(chat("refuse")),
        "a refusal of 2 MB": post(chat("refuse_at_length")),
        "malformed JSON": post(b'{"model":'),
        "no body": post(b""),
        "no JSON": post(b"x" * 200),
        "a refused field": post(chat(bootstrap_room=1)),
    },
    401: {"a forged key": post(chat(), authorization="Bearer FORGED")},
    404: {
        "an unknown model": post(chat(model="none")),
        "an unknown model's page": get_of("/v1/models/none"),
        "an unknown path": post(chat(), "/v1/none"),
        "a stored response": get_of("/v1/responses/resp_1"),
    },
    405: {
        "a wrong method": get_of("/v1/chat/completions"),
        "a preflight": ("OPTIONS", "/v1/chat/completions", PREFLIGHT, None),
    },
    415: {"an unknown encoding": post(chat(), content_encoding="br")},
    417: {"an unknown expectation": post(chat(), expect="miracles")},
    429: {
        "a limit of the engine": post(chat("limit")),
        "the second of a limited user": post(chat(), x_quorate_user="limited-MODE"),
    },
    502: {
        "a redirect of the engine": post(chat("redirect")),
        "an end in mid-answer": post(chat("half")),
    },
    503: {"an engine that is full": post(chat("busy"))},
}


def is_unaddressed(answer):
    """An endpoint of a gateway is an address and a port."""
    return answer.status == 503 and b"no_endpoint_offered" in answer.body and b"address" in answer.body


# What differs by design (docs/guide/gateways.md): how it looks through a gateway.
DIFFERENT = {
    "an engine at a name": is_unaddressed,
    "an engine below a path": is_unaddressed,
    "a stored response": lambda answer: answer.status == 501,
    # Data ports do not read the header.
    "a limited user whom the gateway names": lambda answer: answer.status == 429,
    # The gateway resets its stream to Quorate, so that no event can follow.
    "an end in mid-stream": lambda answer: answer.cut or answer.status == 502,
    "an end in mid-answer": lambda answer: answer.cut or answer.status == 502,
}


def modes(request, answer, **more):
    told = {"request_body_mode": request, "response_body_mode": answer}
    return {"processing_mode": told, "message_timeout": "60s", **more}


# Name of a mode, what it changes in the example's ext_proc, and its cluster of engines. In a mode with overrides, the
# pickers are those whose config says so.
MODES = {
    "as shipped": ({}, "engines"),
    "override_host": ({}, "listed"),
    "BUFFERED, BUFFERED": (modes("BUFFERED", "BUFFERED"), "engines"),
    "BUFFERED, STREAMED": (modes("BUFFERED", "STREAMED"), "engines"),
    "STREAMED early, STREAMED": (
        modes("STREAMED", "STREAMED", send_body_without_waiting_for_header_response=True), "engines"),
    "STREAMED early, FULL_DUPLEX_STREAMED": (
        modes("STREAMED", "FULL_DUPLEX_STREAMED", send_body_without_waiting_for_header_response=True), "engines"),
    "STREAMED with overrides": (modes("STREAMED", "STREAMED", allow_mode_override=True), "listed"),
}  # fmt: skip
# What a picker refuses whose config does not say that the gateway allows overrides.
REFUSED = modes("STREAMED", "STREAMED")
# Envoy sends trailers after the replies to the pieces; the picker replies once it has the trailers.
DEADLOCKS = {("a body with trailers", mode) for mode in MODES if "early" in mode}


def listed_engines(spies):
    """A cluster that knows its engines, and takes the one that the picker names."""
    key = {"key": "envoy.lb", "path": [{"key": KEY}]}
    served = {"key": "envoy.lb", "path": [{"key": f"{KEY}-served"}]}
    policies = f"{EXTENSIONS}.load_balancing_policies"
    fallback = {"name": "fallback", "typed_config": {"@type": f"{policies}.round_robin.v3.RoundRobin"}}
    override = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": key}],
        "selected_host_key": served,
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    endpoints = [
        {"endpoint": {"address": socket_address(f"127.0.0.1:{spy.server.server_port}")}} for spy in spies
    ]
    return {
        "name": "listed",
        "type": "STATIC",
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "picked", "typed_config": override}}]
        },
        "load_assignment": {"cluster_name": "listed", "endpoints": [{"lb_endpoints": endpoints}]},
    }


def envoy_of_modes(stand, spies):
    """Starts an Envoy with a listener for each mode, and one for what is refused; their addresses."""
    config, _ = stand.example(GATEWAY)
    clusters = config["static_resources"]["clusters"]
    (pickers,) = [cluster for cluster in clusters if cluster["name"] == "pickers"]
    clusters.append(listed_engines(spies))
    clusters.append(with_endpoints(pickers, "allow-overrides", slice(0, ALLOW_OVERRIDES)))
    clusters.append(with_endpoints(pickers, "refuse-overrides", slice(ALLOW_OVERRIDES, None)))
    addresses = {}
    for mode, (changes, cluster) in {**MODES, "refused": (REFUSED, "engines")}.items():
        listener, port = another(config, mode)
        if changes:
            # By default 1 MiB, beyond which bodies that are not FULL_DUPLEX_STREAMED fail.
            listener["per_connection_buffer_limit_bytes"] = 16 << 20
        settings = ext_proc(listener)
        for key, value in changes.items():
            settings[key] = {**settings[key], **value} if isinstance(value, dict) else value
        if changes == REFUSED or "allow_mode_override" in changes:
            name = "refuse-overrides" if changes == REFUSED else "allow-overrides"
            settings["grpc_service"]["envoy_grpc"]["cluster_name"] = name
        for host in manager(listener)["route_config"]["virtual_hosts"]:
            for route in host["routes"]:
                route["route"]["cluster"] = cluster
        addresses[mode] = f"127.0.0.1:{port}"
    stand.start_envoy("envoy-of-modes", config)
    return addresses


def with_endpoints(cluster, name, some):
    """A copy of a cluster with some of its endpoints."""
    cluster = {**copy.deepcopy(cluster), "name": name}
    (locality,) = cluster["load_assignment"]["endpoints"]
    locality["lb_endpoints"] = locality["lb_endpoints"][some]
    return cluster


class Seen:
    """What a way made of a request: the answer, and what the engine saw."""

    def __init__(self, spies, address, request, way, words):
        for spy in spies:
            spy.seen.clear()
        method, path, headers, body = request
        told = {"connection": "close", "x-request-id": f"id-of-{way}", **headers}
        for word, value in {"MODE": way, **words}.items():
            told = {name: text.replace(word, value) for name, text in told.items()}
        self.answer = send(address, request_bytes(method, path, told, body), method)
        self.seen = [told for spy in spies for told in spy.seen]
        self.way = way

    def compared(self):
        """What must be equal in all ways."""

        def of_any(headers, uncompared):
            told = [(name, value.replace(self.way, "WAY")) for name, value in headers.items() if name not in uncompared]
            return sorted((name, "*" if name in MOMENTARY else value) for name, value in told)

        seen = [
            (method, path, of_any(headers, UNCOMPARED_AT_ENGINES), body) for method, path, headers, body in self.seen
        ]
        body = self.answer.body.replace(self.way.encode(), b"WAY")
        return {
            "status": self.answer.status,
            "headers": of_any(self.answer.headers, UNCOMPARED),
            "body": body,
            "cut": self.answer.cut,
            "seen": seen,
        }


def run(stand, spies):
    """Sends the table through all modes, and raises with all differences."""
    addresses = envoy_of_modes(stand, spies)
    key = stand.admin(1, "/admin/v1/keys", {"user": "ada"}, "POST")["secret"]
    words = {"A_KEY": key, "FORGED": key[:-4] + ("aaaa" if key[-4:] != "aaaa" else "bbbb")}
    wrong, equal = {}, 0
    for status, name, request in ((status, *row) for status, rows in REQUESTS.items() for row in rows.items()):
        expected = Seen(spies, stand.replicas[0][0], request, "data-port", words).compared()
        check(expected["status"] == status, f"{name}, at the data port: {short(expected)}")
        for nth, mode in enumerate(MODES):
            if (name, mode) in DEADLOCKS:
                continue
            seen = Seen(spies, addresses[mode], request, f"mode{nth}", words)
            if name not in DIFFERENT:
                told = [
                    f"{what}: {short(value)}; at the data port: {short(expected[what])}"
                    for what, value in seen.compared().items()
                    if value != expected[what]
                ]
                equal += 1
            else:
                told = [] if DIFFERENT[name](seen.answer) else [short(seen.compared())]
            for difference in told:
                wrong.setdefault(f"{name}: {difference}", []).append(mode)
    for _ in range(REFUSALS):
        seen = Seen(spies, addresses["refused"], REQUESTS[200]["an answer"], "refused", {})
        if seen.seen or seen.answer.status != 503 or seen.answer.body:
            wrong.setdefault(f"STREAMED without a further setting is not refused: {short(seen.compared())}", []).append(
                "that mode"
            )
    for code in ["model_not_found", "invalid_api_key", "rate_limit_exceeded", "no_endpoint_offered"]:
        stand.until(f"Envoy logs {code}", lambda code=code: f" quorate{{{code}}} " in stand.log("envoy-of-modes"))
    stand.wait_quiet()
    others = stand.metric_of_all("quorate_picker_served_total", by="other")
    firsts = stand.metric_of_all("quorate_picker_served_total", by="first")
    check(firsts and not others, f"{others:.0f} answers of engines that were not picked, {firsts:.0f} of those that were")
    told = "\n".join(f"{difference}; in {', '.join(modes)}" for difference, modes in wrong.items())
    check(not wrong, f"{len(wrong)} differences of pickers from the data port:\n{told}")
    print(
        f"table: {equal} answers in {len(MODES)} modes equal the data port's; {len(DIFFERENT)} rows differ by design"
    )


def short(value):
    told = repr(value)
    return told if len(told) < 700 else f"{told[:500]} ... {told[-150:]}"

"""Replies that a gateway makes itself: those of filters before ext_proc reach the client as they are, and those that
stand in for an engine's open no circuit."""

import concurrent.futures
import itertools
import json
import socket

from http1 import TIMEOUT_S, ask, head, read, request_bytes, send
from stand import ENGINES, EXTENSIONS, GATEWAY, another, check, ext_proc, manager
from table import PREFLIGHT, chat, listed_engines, modes, post, short

HTTP = f"{EXTENSIONS}.filters.http"
# Enough that each replica sees every engine fail more often than opens a circuit.
AT_ONCE = 90
FIRST_LINES = """
function envoy_on_request(handle)
  if handle:headers():get(":path") == "/v1/lua" then
    handle:respond({[":status"] = "429", ["retry-after"] = "9"}, "of lua")
  end
end
"""


# A key of RFC 7517, appendix A.1.
ISSUER = {"keys": [{"kty": "EC", "crv": "P-256", "alg": "ES256", "x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4",
                    "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"}]}  # fmt: skip


def http_filter(name, kind, **settings):
    return {"name": f"envoy.filters.http.{name}", "typed_config": {"@type": f"{HTTP}.{name}.v3.{kind}", **settings}}


# What a gateway may have before ext_proc: each answers one path, or one kind of request.
FILTERS = [
    http_filter("health_check", "HealthCheck", pass_through_mode=False,
                headers=[{"name": ":path", "string_match": {"exact": "/v1/health"}}]),
    http_filter("cors", "Cors"),
    http_filter("lua", "Lua", default_source_code={"inline_string": FIRST_LINES}),
    http_filter("rbac", "RBAC", rules={"action": "DENY", "policies": {"forbidden": {
        "permissions": [{"url_path": {"path": {"exact": "/v1/forbidden"}}}], "principals": [{"any": True}]}}}),
    http_filter("jwt_authn", "JwtAuthentication",
                providers={"issuer": {"issuer": "us", "local_jwks": {"inline_string": json.dumps(ISSUER)}}},
                rules=[{"match": {"path": "/v1/token"}, "requires": {"provider_name": "issuer"}}]),
    {**http_filter("api_key_auth", "ApiKeyAuth"), "disabled": True},
    http_filter("local_ratelimit", "LocalRateLimit", stat_prefix="limited"),
]  # fmt: skip
KEYED = {
    "@type": f"{HTTP}.api_key_auth.v3.ApiKeyAuthPerRoute",
    "credentials": [{"key": "k", "client": "c"}],
    "key_sources": [{"header": "x-api-key"}],
}
LIMITED = {
    "@type": f"{HTTP}.local_ratelimit.v3.LocalRateLimit",
    "stat_prefix": "limited",
    "token_bucket": {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "3600s"},
    "filter_enabled": {"default_value": {"numerator": 100}},
    "filter_enforced": {"default_value": {"numerator": 100}},
}
CROSS_ORIGIN = {
    "@type": f"{HTTP}.cors.v3.CorsPolicy",
    "allow_origin_string_match": [{"exact": "http://a"}],
    "allow_methods": "POST",
}

UPGRADE = {"connection": "upgrade", "upgrade": "websocket"}
BEFORE = {
    "403 of rbac": post(chat(), "/v1/forbidden"),
    "401 of jwt_authn": post(chat(), "/v1/token"),
    "401 of api_key_auth": post(chat(), "/v1/keyed"),
    "429 of lua": post(chat(), "/v1/lua"),
    "429 of local_ratelimit": post(chat(), "/v1/limited"),
    "200 of cors": ("OPTIONS", "/v1/chat/completions", PREFLIGHT, None),
    "200 of health_check": ("GET", "/v1/health", {}, None),
    "403 to an upgrade": ("GET", "/v1/chat/completions", UPGRADE, None),
}


def listener_before(config, name, changes):
    """A listener with filters before ext_proc; `None` as changes: without ext_proc."""
    listener, port = another(config, name)
    settings = manager(listener)
    settings["request_timeout"] = "1s"
    if changes is None:
        settings["http_filters"].pop(0)
        settings["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = "listed"
    else:
        ext_proc(listener).update(changes)
    settings["http_filters"][:0] = FILTERS
    (host,) = settings["route_config"]["virtual_hosts"]
    host["typed_per_filter_config"] = {"envoy.filters.http.cors": CROSS_ORIGIN}
    plain = host["routes"][0]["route"]
    host["routes"][:0] = [
        {"match": {"path": "/v1/keyed"}, "route": plain,
         "typed_per_filter_config": {"envoy.filters.http.api_key_auth": KEYED}},
        {"match": {"path": "/v1/limited"}, "route": plain,
         "typed_per_filter_config": {"envoy.filters.http.local_ratelimit": LIMITED}},
    ]  # fmt: skip
    return f"127.0.0.1:{port}"


def ask_before(address, request):
    method, path, headers, body = request
    return send(address, request_bytes(method, path, {"connection": "close", **headers}, body), method)


def stalled(address):
    """The answer to an upload that stops half-way, of which Envoy gets tired after a second."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stream:
        length = {"content-type": "application/json", "content-length": 1000}
        stream.sendall(head("POST", "/v1/chat/completions", length) + chat())
        return read(stream)


def told(answer):
    """What must be equal: not the moment, and not whether a body is sent in chunks."""
    uncompared = ["content-length", "date", "transfer-encoding", "x-request-id"]
    headers = {name: value for name, value in answer.headers.items() if name not in uncompared}
    return answer.status, headers, answer.body


def before(stand, spies):
    """Replies of filters before ext_proc."""
    config, _ = stand.example(GATEWAY)
    config["static_resources"]["clusters"].append(listed_engines(spies))
    plain = listener_before(config, "plain", None)
    ways = {
        "as shipped": listener_before(config, "as shipped", {}),
        "BUFFERED": listener_before(config, "BUFFERED", modes("BUFFERED", "BUFFERED")),
        "BUFFERED, STREAMED": listener_before(config, "STREAMED", modes("BUFFERED", "STREAMED")),
    }
    stand.start_envoy("envoy-with-filters", config)
    broken = stand.metric_of_all("quorate_picker_requests_total", outcome="broken")
    wrong = []
    for address in [plain, *ways.values()]:
        ask_before(address, BEFORE["429 of local_ratelimit"])  # The one that the bucket lets pass.
    cases = {name: lambda address, request=request: ask_before(address, request) for name, request in BEFORE.items()}
    cases["408 of an upload that stops"] = stalled
    for name, case in cases.items():
        expected = told(case(plain))
        check(str(expected[0]) == name.split()[0], f"{name}, without a picker: {expected}")
        for way, address in ways.items():
            answer = told(case(address))
            if answer != expected:
                wrong.append(f"{name}, {way}: {short(answer)}; without a picker {short(expected)}")
    stand.wait_quiet()
    count = stand.metric_of_all("quorate_picker_requests_total", outcome="broken") - broken
    if count:
        wrong.append(f"{count:.0f} streams count as broken")
    check(not wrong, f"{len(wrong)} replies of filters before ext_proc are wrong:\n" + "\n".join(wrong))
    print(f"filters: {len(cases)} replies before ext_proc arrive in {len(ways)} modes as without a picker")


# Replies of Envoy's router in place of an engine's: the action of a route, by status and details.
def own_replies(route):
    return {
        "504 response_timeout": {"route": {**route, "timeout": "0.2s"}},
        "503 no_healthy_upstream": {"route": {**route, "cluster": "nobody"}},
        "503 overflow": {"route": {**route, "cluster": "crowded"}},
        "418 direct_response": {"direct_response": {"status": 418, "body": {"inline_string": "a teapot"}}},
    }


def statuses_at_once(address, name):
    """Sends a crowd to a route; the answers' statuses."""

    def one(nth):
        body = {"model": "emulated", "max_tokens": 32, "messages": [{"role": "user", "content": f"{nth} times"}]}
        headers = {"content-type": "application/json", "x-case": name}
        return ask(address, "POST", "/v1/chat/completions", headers, json.dumps(body).encode()).status

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(AT_ONCE)))


def instead(stand, _):
    """Replies of Envoy's router, where it tells the picker the reason and where it does not."""
    config, _ = stand.example(GATEWAY)
    clusters = config["static_resources"]["clusters"]
    crowded = {**clusters[0], "name": "crowded"}
    crowded["circuit_breakers"] = {"thresholds": [{"max_connections": 1, "max_pending_requests": 1, "max_requests": 1}]}
    clusters += [crowded, {"name": "nobody", "type": "STATIC"}]
    ways = {}
    for way in ["with the reason", "without"]:
        listener, port = another(config, way)
        if way == "without":
            del ext_proc(listener)["response_attributes"]
        (host,) = manager(listener)["route_config"]["virtual_hosts"]
        (example,) = host["routes"]
        for name, action in own_replies(example["route"]).items():
            exact = {"name": "x-case", "string_match": {"exact": name}}
            host["routes"].insert(0, {"match": {**example["match"], "headers": [exact]}, **action})
        ways[way] = f"127.0.0.1:{port}"
    stand.start_envoy("envoy-that-replies", config)
    wrong = []
    for way, name in itertools.product(ways, own_replies({})):
        statuses = statuses_at_once(ways[way], name)
        # Envoy may let one of a crowd pass.
        check(statuses.count(int(name.split()[0])) >= AT_ONCE / 2, f"{name}: {statuses}")
        stand.wait_quiet()
        opened = {nth: stand.metric(nth, "quorate_backend_circuit_open") for nth in stand.running()}
        if any(opened.values()):
            wrong.append(f"{name}, {way}: open circuits of {ENGINES} healthy engines, by replica: {opened}")
    check(not wrong, "Envoy's own replies count as engines':\n" + "\n".join(wrong))
    print(f"circuits: {len(own_replies({}))} kinds of Envoy's own replies open none, {' and '.join(ways)}")

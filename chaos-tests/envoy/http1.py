"""A client of HTTP/1.1 that sends what it is told, and an engine that records what it gets."""

import contextlib
import http.client
import http.server
import json
import re
import socket
import threading
import time

TIMEOUT_S = 30


class Answer:
    """What came back: `cut` if it broke off."""

    def __init__(self, status, headers, body, cut=False):
        self.status, self.headers, self.body, self.cut = status, headers, body, cut

    def __repr__(self):
        return f"{self.status} {self.headers} {self.body[:300]!r}{' cut' if self.cut else ''}"


def head(method, path, headers):
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: quorate.test",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def request_bytes(method, path, headers, body):
    """A request; a list of pieces as the body is sent in chunks."""
    headers = dict(headers)
    if isinstance(body, list):
        trailers = headers.pop("trailers", "")
        headers["transfer-encoding"] = "chunked"
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in body)
        return head(method, path, headers) + chunks + b"0\r\n" + trailers.encode() + b"\r\n"
    if body is not None:
        headers["content-length"] = len(body)
        return head(method, path, headers) + body
    return head(method, path, headers)


def ask(address, method, path, headers=None, body=None):
    return send(address, request_bytes(method, path, {"connection": "close", **(headers or {})}, body), method)


def send(address, data, method="POST"):
    """Sends bytes over a connection of their own, and reads an answer."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stream:
        # It may have answered already.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stream.sendall(data)
        return read(stream, method)


def read(stream, method="POST"):
    answer = http.client.HTTPResponse(stream, method=method)
    answer.begin()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    try:
        return Answer(answer.status, headers, answer.read())
    except http.client.IncompleteRead as cut:
        return Answer(answer.status, headers, cut.partial, cut=True)
    except (ConnectionResetError, ValueError):
        return Answer(answer.status, headers, b"", cut=True)


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**more):
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "spy", **more}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def delta(text):
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def answer_of(text):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "spy", "choices": [choice]}
    return json.dumps({**told, "usage": USAGE}).encode()


class Spy:
    """An engine with the model `spy`, that answers as a word `do:WORD` in the body says."""

    def __init__(self, port, prefix=""):
        self.seen, spy = [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def plain(self, status, body, **headers):
                self.send_response_only(status)
                for name, value in {"content-type": "application/json", **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_GET(self):  # noqa: N802
                if self.path == f"{prefix}/v1/models":
                    self.plain(200, b'{"object":"list","data":[{"id":"spy","object":"model"}]}')
                else:
                    self.plain(200 if self.path == f"{prefix}/health" else 404, b"{}")

            def do_POST(self):  # noqa: N802
                if "chunked" in self.headers.get("transfer-encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    while self.rfile.readline() != b"\r\n":
                        pass
                else:
                    body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                spy.seen.append((self.command, self.path, headers, body))
                told = re.search(rb"do:(\w+)", body)
                try:
                    getattr(self, f"do_{told[1].decode()}" if told else "do_answer")()
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def do_answer(self):
                self.plain(200, answer_of("yes"), x_of_engine="kept")

            def do_long(self):
                self.plain(200, answer_of("y" * 2_000_000))

            def do_redirect(self):
                self.plain(307, b"moved", location="/elsewhere")

            def do_refuse(self):
                self.plain(400, b'{"error":{"message":"no","type":"invalid_request_error","code":400}}')

            def do_refuse_at_length(self):
                self.plain(400, b"no, " * 500_000)

            def do_busy(self):
                self.plain(503, b'{"error":{"message":"full","code":503}}', retry_after="7")

            def do_limit(self):
                self.plain(429, b'{"error":{"message":"slow","code":429}}', retry_after="7")

            def do_slow(self):
                time.sleep(1.5)
                self.do_answer()

            def events(self, *events, is_whole=True, trailers=b""):
                self.send_response_only(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for each in events:
                    self.wfile.write(chunk(each))
                    self.wfile.flush()
                    time.sleep(0.03)
                if is_whole:
                    self.wfile.write(b"0\r\n" + trailers + b"\r\n")
                self.close_connection = not is_whole

            def do_stream(self, **how):
                wants_usage = b"include_usage" in spy.seen[-1][3]
                usage = [event(choices=[], usage=USAGE)] if wants_usage else []
                self.events(*map(delta, "abc"), *usage, b"data: [DONE]\n\n", **how)

            def do_trailers(self):
                self.do_stream(trailers=b"x-checksum: 1\r\n")

            def do_cut(self):
                self.events(delta("a"), delta("b"), is_whole=False)

            def do_half(self):
                self.send_response_only(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"id":')
                self.close_connection = True

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.handle_error = lambda *_: None  # A connection that was reset.
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

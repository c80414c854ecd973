"""Kills, drains and freezes of replicas under load behind the shipped examples: only requests that are under way at
the replica may fail, by its own count of them, and none that begins later."""

import contextlib
import json
import pathlib
import signal
import threading

from http1 import ask
from stand import BALANCER, ENGINES, GATEWAY, REPLICAS, Failed, another, check, ext_proc
from table import chat, modes

CLIENTS = 30
# Answers to wait for before something happens, and after.
ANSWERS = 3 * CLIENTS
# Longer than what Envoy keeps for a retry. As many wait for less than admission.max_wait at an engine of 1.5 s each.
LONG_BYTES, LONG_PROMPTS = 200_000, 6
STREAMS, AT_REPLICAS = "quorate_picker_streams", "quorate_proxy_in_flight_requests"


class Load:
    """Clients that ask all the time, most of them for streams of 1.2 s. They can be told to begin nothing new."""

    def __init__(self, stand, address):
        self.stand, self.address = stand, address
        self.may_begin, self.is_over = True, False
        self.changed = threading.Condition()
        self.begun = self.under_way = self.answered = 0
        self.failed = []
        self.clients = [threading.Thread(target=self.client, args=[nth], daemon=True) for nth in range(CLIENTS)]

    def __enter__(self):
        for client in self.clients:
            client.start()
        return self

    def __exit__(self, *_):
        with self.changed:
            self.is_over = self.may_begin = True
            self.changed.notify_all()
        for client in self.clients:
            client.join()

    def client(self, seed):
        nth = 0
        while not self.is_over:
            nth += 1
            with self.changed:
                self.changed.wait_for(lambda: self.may_begin)
                self.begun += 1
                self.under_way += 1
                number = self.begun
            failure = chat_fails(self.address, f"{seed} asks {nth % 8}", nth % 10 < 7)
            with self.changed:
                self.under_way -= 1
                if failure:
                    self.failed.append((number, failure))
                else:
                    self.answered += 1
                self.changed.notify_all()

    def wait_answers(self, count=ANSWERS):
        with self.changed:
            goal = self.answered + count
            if not self.changed.wait_for(lambda: self.answered >= goal, timeout=60):
                raise Failed(f"{goal - self.answered} of {count} answers are missing after 60 s: {self.failed[-3:]}")

    def hit(self, happens, victims, count_of):
        """Makes something happen to replicas. Returns how many requests they had by their count, and how many
        had begun at all. None begins while they are counted, so that they have at most as many when it happens."""
        with self.changed:
            self.may_begin = False

        def counts():
            told = {nth: self.stand.metric(nth, count_of) for nth in self.stand.running()}
            # Each request that has begun has arrived somewhere, or is over.
            return told if sum(told.values()) >= self.under_way else None

        with self.begins_again():
            self.stand.until("every request has arrived", counts)
            told = counts()
            check(told, "requests under way that no replica has")
            happens()
            return sum(told[victim] for victim in victims), self.begun

    @contextlib.contextmanager
    def begins_again(self):
        try:
            yield
        finally:
            with self.changed:
                self.may_begin = True
                self.changed.notify_all()

    def losses(self, what, allowed, begun):
        """Checks what failed since the last time."""
        failed, self.failed = self.failed, []
        late = [told for told in failed if told[0] > begun]
        check(not late, f"{what}: {len(late)} requests that began later failed: {late[:5]}")
        check(
            len(failed) <= allowed, f"{what}: {len(failed)} requests failed, and {allowed:.0f} were there: {failed[:5]}"
        )
        print(
            f"{what}: {len(failed)} requests failed, {allowed:.0f} could; {self.begun - begun} later ones were answered"
        )


def chat_fails(address, text, is_stream, tokens=55):
    """What failed about a chat, if something did."""
    message = {"role": "user", "content": text + ": tell me about quorums. " * 20}
    body = {"model": "emulated", "stream": is_stream, "max_tokens": tokens, "messages": [message]}
    try:
        answer = ask(
            address, "POST", "/v1/chat/completions", {"content-type": "application/json"}, json.dumps(body).encode()
        )
    except OSError as error:
        return repr(error)
    ending = b"data: [DONE]\n\n" if is_stream else b"}"
    is_whole = answer.status == 200 and not answer.cut and answer.body.endswith(ending)
    return None if is_whole else repr(answer)[:400]


def kill(stand, victims):
    """Kills replicas; their connections are closed when it returns."""
    for victim in victims:
        stand.processes[f"replica-{victim}"].kill()
    for victim in victims:
        stand.processes[f"replica-{victim}"].wait()


def freeze(stand, victim):
    """Stops a replica; none of its threads runs when it returns."""
    process = stand.processes[f"replica-{victim}"]
    process.send_signal(signal.SIGSTOP)
    tasks = pathlib.Path(f"/proc/{process.pid}/task")
    stand.until("it stands still", lambda: all(") T " in (task / "stat").read_text() for task in tasks.iterdir()))


def followers(stand):
    leader = stand.leader()
    return [nth for nth in range(1, REPLICAS + 1) if nth != leader]


def killed(stand, load, what, victims, count_of):
    """Kills replicas, and starts them again."""
    load.wait_answers()
    allowed, begun = load.hit(lambda: kill(stand, victims), victims, count_of)
    check(allowed > 0, f"{what}: no request was there")
    load.wait_answers()
    for victim in victims:
        stand.start_replica(victim)
    stand.wait_all_ready()
    load.wait_answers()
    load.losses(what, allowed, begun)


def drained(stand, load, what, victim):
    load.wait_answers()
    begun, process = load.begun, stand.processes[f"replica-{victim}"]
    process.send_signal(signal.SIGTERM)
    check(process.wait(60) == 0, f"{what}: the replica did not end as it should")
    load.wait_answers()
    stand.start_replica(victim)
    stand.wait_all_ready()
    load.wait_answers()
    load.losses(what, 0, begun)


def frozen(stand, load, what, victim):
    load.wait_answers()
    allowed, begun = load.hit(lambda: freeze(stand, victim), [victim], STREAMS)
    try:
        load.wait_answers(2 * ANSWERS)
    finally:
        stand.processes[f"replica-{victim}"].send_signal(signal.SIGCONT)
    stand.wait_all_ready()
    load.wait_answers()
    load.losses(what, allowed, begun)


def pickers(stand, spies):
    """Pickers die behind a gateway."""
    config, port = stand.example(GATEWAY)
    fails_open, open_port = another(config, "fails open")
    ext_proc(fails_open).update(modes("BUFFERED", "BUFFERED", failure_mode_allow=True))
    stand.start_envoy("envoy-as-shipped", config)
    with Load(stand, f"127.0.0.1:{port}") as load:
        killed(stand, load, "kill of the leader's picker", [stand.leader()], STREAMS)
        killed(stand, load, "kill of a follower's picker", followers(stand)[:1], STREAMS)
        drained(stand, load, "drain of a picker", followers(stand)[0])
        frozen(stand, load, "freeze of a picker", followers(stand)[0])
        killed(stand, load, "two of three pickers dead", followers(stand), STREAMS)
    queued(stand, spies[0], f"127.0.0.1:{port}")
    stand.wait_quiet()
    nobody(stand, [f"127.0.0.1:{port}", f"127.0.0.1:{open_port}"])


def nobody(stand, addresses):
    """Without a picker, no request reaches an engine, not even one that its client names, and where Envoy goes on."""
    all_of_them = stand.running()
    kill(stand, all_of_them)
    engine = stand.engines["engine-1"]["url"].removeprefix("http://")
    headers = {"content-type": "application/json", "x-gateway-destination-endpoint": engine}
    body = b'{"model":"emulated","prompt":"Is anybody there?"}'
    for address in addresses:
        answer = ask(address, "POST", "/v1/completions", headers, body)
        check(answer.status == 503, f"without a picker: {answer}")
    for number in all_of_them:
        stand.start_replica(number)
    stand.wait_all_ready()
    print("no picker: 503, whatever endpoint the client names")


def queued(stand, spy, address):
    """Requests that wait in the queue of a picker that is killed: another one takes them, but for long prompts, of
    which Envoy keeps no more than the beginning."""
    settings = stand.admin(1, "/admin/v1/admission")["config"]
    stand.admin(1, "/admin/v1/admission", {**settings, "concurrency": 1})
    try:
        short_prompts(stand, address)
        long_prompts(stand, spy, address)
    finally:
        stand.admin(1, "/admin/v1/admission", settings)


def short_prompts(stand, address):
    lost, there = killed_with_queue(stand, 6 * ENGINES, lambda nth: chat_fails(address, f"queued {nth}", True))
    # No more than one at each engine had left the queue.
    check(there > ENGINES, f"{there:.0f} requests at the killed picker")
    check(len(lost) <= ENGINES, f"{len(lost)} of {there:.0f} requests in a killed picker's queue failed: {lost[-3:]}")
    print(f"queue of a killed picker: {len(lost)} requests failed of {there:.0f} there")


def long_prompts(stand, spy, address):
    body = chat("slow", text="w" * LONG_BYTES)
    spy.seen.clear()

    def fails(_):
        answer = ask(address, "POST", "/v1/chat/completions", {"content-type": "application/json"}, body)
        return None if answer.status == 200 and not answer.cut else repr(answer)[:400]

    lost, there = killed_with_queue(stand, LONG_PROMPTS, fails)
    bodies = [seen[-1] for seen in spy.seen]
    check(there and bodies, f"{there:.0f} long prompts at the killed picker, {len(bodies)} at the engine")
    check(set(bodies) == {body}, f"an engine got other bodies, of {[len(each) for each in bodies]} bytes")
    check(len(lost) <= there, f"{len(lost)} of {there:.0f} long prompts at a killed picker failed: {lost[-3:]}")
    print(f"long prompts there: {len(lost)} requests failed of {there:.0f}; the engine got all others whole")


def killed_with_queue(stand, asking, fails):
    """Kills a picker while as many clients wait; why some of them failed, and how many were at that picker."""
    ends = []
    clients = [threading.Thread(target=lambda nth=nth: ends.append(fails(nth)), daemon=True) for nth in range(asking)]
    for client in clients:
        client.start()
    stand.until("all requests are at pickers", lambda: stand.metric_of_all(STREAMS) == asking)
    # Envoy may not use one yet that has just been started again.
    there, victim = max((stand.metric(nth, STREAMS), nth) for nth in followers(stand))
    kill(stand, [victim])
    for client in clients:
        client.join()
    stand.start_replica(victim)
    stand.wait_all_ready()
    check(len(ends) == asking, f"{len(ends)} of {asking} requests ended")
    return [why for why in ends if why], there


def ports(stand, _):
    """Replicas die behind Envoy as a plain proxy."""
    config, port = stand.example(BALANCER)
    stand.start_envoy("envoy-as-balancer", config)
    with Load(stand, f"127.0.0.1:{port}") as load:
        killed(stand, load, "kill of the leader", [stand.leader()], AT_REPLICAS)
        drained(stand, load, "drain of a replica", followers(stand)[0])
        killed(stand, load, "two of three replicas dead", followers(stand), AT_REPLICAS)
    stand.wait_quiet()

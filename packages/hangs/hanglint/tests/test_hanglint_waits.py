"""Waits that cannot last are no findings; the same ones without an end are."""

import pytest

from offbeat_hanglint import Settings, analyse

ASKS = """import zmq

class Client:
    def ask(self, question):
        self.socket.send(question)
        {0}
"""
RESOLVES = """import asyncio
import ray

async def resolve(reference):
    return {0}
"""


def rules(folder, text):
    (folder / "main.py").write_text(text)
    return {finding.rule for finding in analyse([folder], Settings()).findings if finding.confidence == "high"}


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("return self.socket.recv()", True),
        ("return self.socket.recv(zmq.DONTWAIT)", False),
        ("return self.socket.recv_pyobj(flags=zmq.NOBLOCK)", False),
        ("if self.socket.poll(10):\n            return self.socket.recv()", False),
        ("if self.other.poll(10):\n            return self.socket.recv()", True),
    ],
)
def test_a_socket_that_is_asked_first_is_not_waited_for(tmp_path, line, waits):
    assert ("HL061" in rules(tmp_path, ASKS.format(line))) == waits


def test_a_socket_made_elsewhere_may_have_a_timeout(tmp_path):
    made = "import zmq\n\ndef ask({0}):\n    {1}\n    return socket.recv()\n"
    assert "HL061" not in rules(tmp_path, made.format("socket", "socket.send(b'')"))
    assert "HL061" in rules(tmp_path, made.format("context", "socket = context.socket(zmq.REQ)"))


@pytest.mark.parametrize(
    ("value", "blocks"),
    [("ray.get(reference)", True), ("await asyncio.to_thread(ray.get, reference)", False)],
)
def test_what_a_thread_waits_for_does_not_block_the_event_loop(tmp_path, value, blocks):
    assert ("HL062" in rules(tmp_path, RESOLVES.format(value))) == blocks


TIMED = """import zmq

class Receiver:
    def start(self, context):
        self.socket = context.socket(zmq.SUB)
        {0}

    def receive(self):
        return self.socket.recv()
"""


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("self.socket.setsockopt(zmq.RCVTIMEO, self.timeout_ms)", False),
        ("self.socket.set(zmq.SocketOption.RCVTIMEO, 1000)", False),
        ("self.socket.RCVTIMEO = 1000", False),
        ("self.socket.rcvtimeo = 1000", False),
        ("self.socket.setsockopt(zmq.SNDTIMEO, 1000)", True),
        ("self.socket.setsockopt(zmq.SUBSCRIBE, b'')", True),
    ],
)
def test_a_timeout_that_another_method_has_set_counts(tmp_path, line, waits):
    assert ("HL061" in rules(tmp_path, TIMED.format(line))) == waits


def test_a_socket_that_a_base_class_elsewhere_has_made_counts_with_its_timeout(tmp_path):
    (tmp_path / "base.py").write_text(TIMED.format("self.socket.RCVTIMEO = 1000"))
    child = (
        "from base import Receiver\n\nclass Child(Receiver):\n    def ask(self):\n        return self.socket.recv()\n"
    )
    assert "HL061" not in rules(tmp_path, child)
    (tmp_path / "base.py").write_text(TIMED.format("pass"))
    assert "HL061" in rules(tmp_path, child)


POLLS = """import ray

class Dispatcher:
    async def reap(self, references):
        {0}

def finished(references):
    return {1}

async def reap_all(references):
    return finished(references)
"""


@pytest.mark.parametrize(
    ("line", "blocks"),
    [
        ("done, _ = ray.wait(references, timeout=0)", False),
        ("done, _ = ray.wait(references, timeout=0.0, num_returns=2)", False),
        ("done = ray.get(references, timeout=0)", False),
        ("done, _ = ray.wait(references)", True),
        ("done, _ = ray.wait(references, timeout=None)", True),
        ("done, _ = ray.wait(references, timeout=30)", True),
    ],
)
def test_a_look_that_returns_at_once_does_not_block_the_event_loop(tmp_path, line, blocks):
    assert ("HL062" in rules(tmp_path, POLLS.format(line, "references"))) == blocks


@pytest.mark.parametrize(
    ("value", "blocks"), [("ray.wait(references, timeout=0)", False), ("ray.get(references)", True)]
)
def test_a_function_that_only_looks_does_not_block_its_callers_either(tmp_path, value, blocks):
    (tmp_path / "main.py").write_text(POLLS.format("pass", value))
    found = [each for each in analyse([tmp_path], Settings()).findings if each.function == "reap_all"]
    assert ("HL062" in {each.rule for each in found}) == blocks


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("ray.get([group.ready() for group in groups])", True),
        ("ray.get([groups[0].ready(), groups[1].ready()])", True),
        ("ready = [group.ready() for group in groups]\n    ray.get(ready)", True),
        ("ray.get([group.ready() for group in groups], timeout=60)", False),
        ("ray.get([actor.ping.remote() for actor in groups])", False),
    ],
)
def test_several_placement_groups_are_waited_for_like_one(tmp_path, line, waits):
    assert ("HL060" in rules(tmp_path, f"import ray\n\ndef place(groups):\n    {line}\n")) == waits

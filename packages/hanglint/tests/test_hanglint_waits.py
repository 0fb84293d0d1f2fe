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


def test_a_socket_that_somebody_else_has_made_may_have_a_timeout(tmp_path):
    made = "import zmq\n\ndef ask({0}):\n    {1}\n    return socket.recv()\n"
    assert "HL061" not in rules(tmp_path, made.format("socket", "socket.send(b'')"))
    assert "HL061" in rules(tmp_path, made.format("context", "socket = context.socket(zmq.REQ)"))


@pytest.mark.parametrize(
    ("value", "blocks"),
    [("ray.get(reference)", True), ("await asyncio.to_thread(ray.get, reference)", False)],
)
def test_what_a_thread_waits_for_does_not_block_the_event_loop(tmp_path, value, blocks):
    assert ("HL062" in rules(tmp_path, RESOLVES.format(value))) == blocks

"""A language model as judge, over a real server on this machine: what is asked, read, kept, and asked again."""

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_core import ConfigError
from offbeat_data import CompletionText, Prompt, RewardConfig, RewardError, RewardScore, build_reward

PROMPT = Prompt(
    index=7,
    ids=np.array([1], np.int32),
    text="<user>What is {5}+7?<assistant>",
    answer="12",
    fields={"prompt": [{"role": "user", "content": "What is {5}+7?"}]},
)


class Endpoint:
    """Answers as `reply` says: a status with a text, or None to hang up without an answer; with further `headers`."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.at_s: list[float] = []
        self.headers: dict[str, str] = {}
        self.reply: Callable[[int, dict[str, Any]], tuple[int, str] | None] = lambda number, body: (200, "Score: 7")
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append((body, dict(self.headers)))
                endpoint.at_s.append(time.monotonic())
                answer = endpoint.reply(len(endpoint.asked), body)
                if answer is None:
                    self.close_connection = True
                    return
                status, text = answer
                usage = {"prompt_tokens": 30, "completion_tokens": 5}
                reply = (
                    {"choices": [{"message": {"content": text}}], "usage": usage} if status == 200 else {"error": text}
                )
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in endpoint.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join(10)


def ask(endpoint: Endpoint, texts: list[str], timeout_s: float = 20.0, **options: Any) -> list[RewardScore]:
    judge = {"url": endpoint.url, "model": "judge", "backoff_s": 0.01, **options}
    reward = build_reward(RewardConfig(name="judge", judge=judge, timeout_s=timeout_s))
    written = [CompletionText(text=text) for text in texts]
    return asyncio.run(reward.await_group(PROMPT, written, ["judge"], timeout_s))


def test_a_judge_sees_question_answer_and_completion_and_its_last_score_counts(endpoint: Endpoint) -> None:
    endpoint.reply = lambda number, body: (200, "At first Score: 2, but then\nScore: **8**")
    [score] = ask(endpoint, ["It is {answer} 12."], system="Be strict.", options={"top_p": 0.9})
    assert score.value == pytest.approx(0.8)
    assert score.costs["judge/prompt_tokens"] == 30
    assert score.costs["judge/completion_tokens"] == 5
    [(body, headers)] = endpoint.asked
    assert (body["model"], body["temperature"], body["max_tokens"], body["top_p"]) == ("judge", 0.0, 512, 0.9)
    assert body["messages"][0] == {"role": "system", "content": "Be strict."}
    asked = body["messages"][1]["content"]
    for part in ("What is {5}+7?\n", "Reference answer:\n12\n", "It is {answer} 12.\n"):
        assert part in asked, "what is filled in is not filled in again"
    assert "Authorization" not in headers


@pytest.mark.parametrize(
    ("reply", "options", "expected"),
    [
        ("Score: 10", {}, 1.0),
        ("Score: 99", {}, 1.0),
        ("Score: -3", {}, 0.0),
        ("score: 3/4", {"divide_by": 1.0}, 0.75),
        ("Verdict: YES", {"pattern": r"Verdict:\s*(\w+)", "scores": {"yes": 1, "no": -1.0}}, 1.0),
        ("Verdict: no", {"pattern": r"Verdict:\s*(\w+)", "scores": {"yes": 1, "no": -1.0}}, -1.0),
    ],
)
def test_replies_are_read_by_a_pattern(
    reply: str, options: dict[str, Any], expected: float, endpoint: Endpoint
) -> None:
    endpoint.reply = lambda number, body: (200, reply)
    assert ask(endpoint, ["x"], **options)[0].value == pytest.approx(expected)


def test_a_reply_without_a_score_and_a_refusal_are_errors_with_their_text(endpoint: Endpoint) -> None:
    endpoint.reply = lambda number, body: (200, "I would rather not say.")
    with pytest.raises(RewardError, match=r"reply on prompt 7 holds no score .*I would rather not say"):
        ask(endpoint, ["x"])
    endpoint.reply = lambda number, body: (400, "no such model")
    with pytest.raises(RewardError, match=r"refuses: status 400: .*no such model"):
        ask(endpoint, ["x"])
    assert len(endpoint.asked) == 2, "neither is asked again"


def test_what_fails_in_passing_is_asked_again_and_no_oftener_than_told(endpoint: Endpoint) -> None:
    troubles: list[tuple[int, str] | None] = [(503, "busy"), None, (429, "slow down"), (200, "Score: 5")]
    endpoint.reply = lambda number, body: troubles[number - 1]
    [score] = ask(endpoint, ["x"])
    assert (score.value, score.costs["judge/retries"]) == (0.5, 3.0)
    endpoint.asked.clear()
    endpoint.reply = lambda number, body: (500, "broken")
    with pytest.raises(RewardError, match=r"did not answer in 3 attempts: status 500"):
        ask(endpoint, ["x"], max_retries=2)
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    ("retry_after", "waited_s"),
    [("7", 7.0), ("0", 0.0), ("-5", 0.0), ("86400", 30.0), ("inf", 30.0), ("nan", 0.25), ("Fri, 1 Jan 2100", 0.25)],
)
def test_a_judge_that_says_when_to_come_back_is_asked_then_and_never_puts_it_off_for_ever(
    retry_after: str, waited_s: float, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits_s.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    monkeypatch.setattr("random.uniform", lambda low, high: low)
    endpoint.headers["Retry-After"] = retry_after
    endpoint.reply = lambda number, body: (429, "slow down") if number == 1 else (200, "Score: 5")
    assert ask(endpoint, ["x"], backoff_s=0.5)[0].value == 0.5
    assert waits_s == [waited_s]


def test_a_judge_whose_certificate_is_not_trusted_is_sent_nothing(endpoint: Endpoint, tmp_path: Path) -> None:
    certificate = own_certificate(tmp_path / "own.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    endpoint.server.socket = context.wrap_socket(endpoint.server.socket, server_side=True)
    with pytest.raises(RewardError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(endpoint, ["x"], url=endpoint.url.replace("http:", "https:"), max_retries=0)
    assert endpoint.asked == []


def own_certificate(path: Path) -> Path:
    """Write a certificate of this machine that is signed with its own key, and the key."""
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a judge")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(made.public_bytes(pem) + private)
    return path


def test_many_are_asked_side_by_side_and_one_that_hangs_costs_itself(endpoint: Endpoint) -> None:
    def reply(number: int, body: dict[str, Any]) -> tuple[int, str]:
        time.sleep(30 if "hang" in body["messages"][0]["content"] else 0.5)
        return 200, "Score: 10"

    endpoint.reply = reply
    started_s = time.monotonic()
    assert [score.value for score in ask(endpoint, [f"number {number}" for number in range(16)])] == [1.0] * 16
    assert time.monotonic() - started_s < 6, "one after the other it would be 8 s"
    with pytest.raises(TimeoutError):
        ask(endpoint, ["hang"], timeout_s=1.0)


def test_a_rate_limit_spreads_requests_and_is_no_reason_to_be_late(endpoint: Endpoint) -> None:
    started_s = time.monotonic()
    scores = ask(endpoint, [str(number) for number in range(11)], timeout_s=4.0, requests_per_minute=120.0)
    assert len(scores) == 11
    assert endpoint.at_s[-1] - started_s >= 5.0, "ten times half a second"


def test_replies_are_kept_by_content(endpoint: Endpoint, tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    first = ask(endpoint, ["a", "b", "a"], cache_folder=folder)
    assert len(endpoint.asked) == 2, "the same one is under way"
    assert sum(score.costs["judge/cached"] for score in first) == 1
    again = ask(endpoint, ["a", "b"], cache_folder=folder)
    assert [score.value for score in again] == [0.7, 0.7]
    assert [dict(score.costs) for score in again] == [{"judge/cached": 1.0}] * 2
    ask(endpoint, ["a"], cache_folder=folder, temperature=0.5)
    assert len(endpoint.asked) == 3, "another request"
    for path in (tmp_path / "kept").rglob("*.json"):
        path.write_text("{cut off")
    ask(endpoint, ["a"], cache_folder=folder)
    assert len(endpoint.asked) == 4


def test_a_key_comes_from_the_environment_and_is_never_told(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="key_env = 'JUDGE_KEY': there is no such variable"):
        ask(endpoint, ["x"], key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    ask(endpoint, ["x"], key_env="JUDGE_KEY", cache_folder=str(tmp_path))
    assert endpoint.asked[0][1]["Authorization"] == "Bearer sk-very-secret"
    assert not any("sk-very" in path.read_text() for path in tmp_path.rglob("*.json"))
    endpoint.reply = lambda number, body: (401, "who are you?")
    with pytest.raises(RewardError) as caught:
        ask(endpoint, ["x"], key_env="JUDGE_KEY")
    assert "sk-very" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "needs reward.judge.url"),
        ({"model": ""}, "needs reward.judge.model"),
        ({"url": "http://example.org/v1"}, "must be https, or http on this machine"),
        ({"url": "file:///etc/passwd"}, "must be https, or http on this machine"),
        ({"url": "https://user:pass@example.org/v1"}, "must hold no password"),
        ({"pattern": "score"}, "needs a group"),
        ({"pattern": "("}, "not a regular expression"),
        ({"template": "Judge {answer}"}, "must contain {completion}"),
        ({"lowest": 2.0}, "must be below"),
        ({"scores": {"yes": "much"}}, "must be numbers by word"),
        ({"options": {"temperature": 1.0}}, "reward.judge.options must not hold temperature"),
        ({"options": {"model": "other", "top_p": 0.9}}, "must not hold model"),
        ({"temprature": 1}, "did you mean temperature"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    settings = {"url": "https://example.org/v1", "model": "m", **options}
    with pytest.raises(ConfigError, match=message):
        build_reward(RewardConfig(name="judge", judge=settings))
    with pytest.raises(ConfigError, match=r"table reward.judge has no effect"):
        build_reward(RewardConfig(name="exact_match", judge=settings))

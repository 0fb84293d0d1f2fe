"""schemathesis against the command as a user starts it: what /openapi.json says is what the server does."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from offbeat_serve import TOKEN_VARIABLE
from offbeat_testing import RunningCommand

TOKEN = "a-token-for-tests-only"
LIMITS = {"--max-model-len": 2048, "--max-samples": 2, "--max-prompts": 2, "--default-max-tokens": 2}


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TEMPLATES = {
    "a place for tools": "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + TEMPLATE,
    "no place for tools": TEMPLATE,
}


@pytest.fixture(scope="module", params=TEMPLATES)
def command(request, model: Path, tmp_path_factory: pytest.TempPathFactory):
    model = shutil.copytree(model, tmp_path_factory.mktemp("openapi") / "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATES[request.param])
    patched = pytest.MonkeyPatch()
    patched.setenv(TOKEN_VARIABLE, TOKEN)
    words = [word for pair in LIMITS.items() for word in pair]
    with RunningCommand("offbeat_serve", model, "--port", 0, "--device", "cpu", "--num-threads", 1, *words) as running:
        patched.undo()
        running.wait_until(lambda: "Ctrl-C ends" in running.output, "the line that says where")
        yield running


@pytest.fixture(scope="module")
def url(command: RunningCommand) -> str:
    [address] = re.findall(r"at (http://127\.0\.0\.1:\d+)/v1", command.output)
    return address


def test_the_description_is_of_this_model_and_these_limits(request, url):
    described = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    asked = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert asked["n"]["anyOf"][0]["maximum"] == 2
    one_prompt = asked["prompt"]["anyOf"][1]
    assert (one_prompt["maxItems"], one_prompt["items"]["maximum"]) == (2047, 319)
    assert described["security"] == [{"token": []}]
    chat = described["components"]["schemas"]["ChatRequest"]
    assert ("anyOf" in chat) == ("no place" in request.node.name)


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_schemathesis_finds_nothing(url, command, tmp_path):
    """Every check it has: statuses, media types, headers, schemas, refusal of wrong data, acceptance of right data,
    methods, and that nothing is revealed without the token."""
    # A seed, because a schema cannot say how many tokens a text has: a very long one is refused, and rightly so.
    words = ["--phases", "coverage,fuzzing", "--max-examples", "20", "--seed", "2", "--no-color"]
    words += ["-H", f"Authorization: Bearer {TOKEN}", "--request-timeout", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *words],
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("schemathesis_hooks.py"))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Operations:       4 selected / 4 total" in done.stdout
    assert "No issues found" in done.stdout
    assert TOKEN not in command.output
    assert "Traceback" not in command.output


def test_ctrl_c_answers_who_is_waiting_and_ends_cleanly(url, command):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    ask = {"prompt": [67], "max_tokens": 2000, "n": 2, "ignore_eos": True}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.post, "/v1/completions", json=ask)
        with httpx.Client(base_url=url, headers=headers, timeout=60) as other:
            command.wait_until(lambda: other.get("/health").json()["num_running"] == 2, "the samples to run")
        command.press_ctrl_c()
        choices = asked.result(timeout=60).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    assert command.wait() == 0
    assert "Traceback" not in command.output

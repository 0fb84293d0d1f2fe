"""A checkpoint is given away as the Hub takes it, with a card of the run's figures, and no token is ever shown."""

import http.server
import json
import threading
from typing import ClassVar

import pytest

from offbeat_core import ConfigError, RunFolderError
from offbeat_run import CommandWords, PushError, RunFolder, check_destination, model_card, print_conclusion, push
from offbeat_run._metrics.metrics import MetricsLog

TOKEN = "hf_verysecretverysecret"
CONFIG = """
[model]
path = "/home/jane/models/tiny-llm"
[data]
path = "/home/jane/data/sums.jsonl"
split = "train"
eval_size = 4
[eval.sets.aime]
path = "reasoning-gym:basic_arithmetic"
"""


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "my-run") as run:
        run.write_text(run.config, CONFIG)
        run.keep()
        with MetricsLog(run, tensorboard=False) as log:
            for step, value in ((0, 0.25), (4, 0.5), (8, 0.75)):
                interval = {"eval/aime/pass_at_8_low": value - 0.1, "eval/aime/pass_at_8_high": value + 0.1}
                log.write(step, {"eval/aime/pass_at_8": value, **interval, "train/reward": value})
        for step in (4, 8):
            with run.checkpoints.write(step, score=1.0 / step) as folder:
                for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "loop.json"):
                    (folder / name).write_text(f"{name} of {step}")
                (folder / "trainer").mkdir()
                (folder / "trainer" / "engine.json").write_text("{}")
                (folder / "adapter").mkdir()
                (folder / "adapter" / "adapter_config.json").write_text("{}")
        yield run


def front_matter(card):
    yaml = pytest.importorskip("yaml")
    dashes, text, rest = card.split("---\n", 2)
    assert not dashes
    return yaml.safe_load(text), rest


def test_the_card_has_figures_data_and_configuration_of_this_checkpoint(run):
    card = model_card(run, run.checkpoints.find(4), "grpo-async-app")
    about, text = front_matter(card)
    assert about == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["offbeat", "grpo"],
    }
    assert "`tiny-llm` after 4 updates" in text
    assert "| `eval/aime/pass_at_8` | 0.250 | 0.500 | 0.400 to 0.600 |" in text
    assert "trained on `sums.jsonl`, split train" in text
    assert "held out: 4 of these" in text
    assert "validated on aime: `reasoning-gym:basic_arithmetic`" in text
    assert 'path = ".../sums.jsonl"' in text
    assert "/home/jane" not in card
    run.write_text(run.settled, run.config.read_text() + '\n[algorithm]\ncorrection = "token_tis"\n')
    card = model_card(run, run.checkpoints.find(4), "grpo-async-app")
    assert 'correction = "token_tis"' in card, "what a run has chosen for itself"
    assert "/home/jane" not in card


def test_a_base_model_of_the_hub_is_named_as_there(run):
    cached = "/home/x/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2"
    run.write_text(run.config, CONFIG.replace("/home/jane/models/tiny-llm", cached))
    about, text = front_matter(model_card(run, run.checkpoints.find(8), "sft-app"))
    assert (about["base_model"], about["tags"]) == ("Qwen/Qwen3-0.6B", ["offbeat", "sft"])
    assert "`Qwen/Qwen3-0.6B` after 8 updates" in text


def test_a_folder_gets_what_others_need_and_nothing_of_training(run, tmp_path, capsys):
    out = tmp_path / "deep" / "given"
    words = CommandWords(options={"push-to": str(out)})
    check_destination(words)
    push(run, words, "grpo-async-app")
    assert f"pushed the checkpoint of update 4 to {out}" in capsys.readouterr().out, "the best one"
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        *(".gitattributes", "README.md", "adapter/adapter_config.json", "chat_template.jinja", "config.json"),
        *("model.safetensors", "tokenizer.json"),
    ]
    with pytest.raises(RunFolderError, match="is not empty"):
        check_destination(words)
    push(run, CommandWords(options={"push-to": str(tmp_path / "last"), "step": "8"}), "grpo-async-app")
    assert (tmp_path / "last" / "config.json").read_text() == "config.json of 8"
    with pytest.raises(RunFolderError, match=r"no whole checkpoint of this update in .*; there are 4, 8"):
        push(run, CommandWords(options={"push-to": str(tmp_path / "x"), "step": "6"}), "grpo-async-app")


def test_the_end_of_a_run_puts_a_card_beside_the_best_weights(run, capsys):
    print_conclusion(run, {}, application="sft-app")
    assert "model card:" in capsys.readouterr().out
    assert "after 4 updates of `sft-app`" in (run.checkpoints.find(4).path / "README.md").read_text()


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub that takes small files: creates a repository, says how to send files, takes a commit."""

    seen: ClassVar[list] = []
    refuses = False

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.path, self.headers.get("Authorization"), body))
        url = f"http://127.0.0.1:{self.server.server_address[1]}/me/given"
        if self.refuses:
            self.answer({"error": f"no: {self.headers.get('Authorization')}"}, 403)
        elif self.path.endswith("/repos/create"):
            self.answer({"url": url})
        elif self.path.endswith("/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            self.answer({"commitUrl": f"{url}/commit/1", "commitOid": "1", "success": True})
        else:
            self.answer({}, 404)

    def do_GET(self):
        self.answer({"id": "me/given", "sha": "0", "siblings": []})

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A small hub on this machine, which huggingface_hub is sent to."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants, hf_api

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_api.api if hasattr(hf_api, "api") else hf_api.HfApi(), "endpoint", address, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    Hub.seen, Hub.refuses = [], False
    yield Hub
    server.shutdown()
    server.server_close()


def test_the_hub_gets_the_same_files_in_a_private_repository(hub, run, capsys):
    words = CommandWords(options={"push-to": "hub:me/given"})
    check_destination(words)
    push(run, words, "grpo-async-app")
    [created] = [json.loads(body) for path, _, body in hub.seen if path.endswith("/repos/create")]
    assert created.get("private") is True or created.get("visibility") == "private"
    [commit] = [body.decode() for path, _, body in hub.seen if "/commit/" in path]
    lines = [json.loads(line) for line in commit.splitlines()]
    sent = {line["value"]["path"] for line in lines if line["key"] == "file"}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= sent
    assert not any(name.startswith("trainer") or name == "loop.json" for name in sent)
    assert all(given == f"Bearer {TOKEN}" for _, given, _ in hub.seen)
    printed = capsys.readouterr()
    assert "pushed the checkpoint of update 4" in printed.out
    assert TOKEN not in printed.out + printed.err + commit


def test_what_the_hub_refuses_is_one_line_without_the_token(hub, run):
    hub.refuses = True
    with pytest.raises(PushError) as caught:
        push(run, CommandWords(options={"push-to": "hub:me/given"}), "grpo-async-app")
    said = str(caught.value)
    assert "the Hub has not taken me/given" in said
    assert "push" in said
    assert TOKEN not in said
    assert "\n" not in said


def test_a_destination_is_checked_before_anything_starts(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="needs a token of the Hub"):
        check_destination(CommandWords(options={"push-to": "hub:me/given"}))
    with pytest.raises(ConfigError, match="names a repository"):
        check_destination(CommandWords(options={"push-to": "hub:given"}))
    check_destination(CommandWords())
    (tmp_path / "file").write_text("kept")
    with pytest.raises(RunFolderError, match=r"file: is a file; choose a folder"):
        check_destination(CommandWords(options={"push-to": str(tmp_path / "file")}))
    with pytest.raises(RunFolderError, match=r"file/there: .*file cannot be written to; choose another folder"):
        check_destination(CommandWords(options={"push-to": str(tmp_path / "file" / "there")}))
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_that_takes_nothing_is_reported_with_the_checkpoint_that_stays(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("offbeat_run._publish.push.atomic_folder", refuse)
    with pytest.raises(PushError, match=r"given: cannot be written: Permission denied; the checkpoint is in .*step-"):
        push(run, CommandWords(options={"push-to": str(tmp_path / "given")}), "app")

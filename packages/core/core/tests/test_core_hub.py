"""Names of the Hub are told from paths, and its files fetched by the real client from a Hub on loopback."""

import shutil
from collections import namedtuple

import pytest

from offbeat_core import (
    ConfigError,
    DataError,
    HubName,
    ModelError,
    fetch_hub_files,
    fetch_hub_model,
    find_hub_name,
    hub_digests,
    open_hub_repository,
    path_advice,
    pin_hub_name,
)
from offbeat_core._models import hub_files
from offbeat_testing import HubServer

constants = pytest.importorskip("huggingface_hub.constants")
WEIGHTS = bytes(range(256)) * 400
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("path", "kind", "name"),
    [
        ("Qwen/Qwen3-0.6B", "model", HubName(repository="Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", "model", HubName(repository="Qwen/Qwen3-0.6B", revision="refs/pr/1")),
        ("openai/gsm8k", "dataset", HubName(repository="openai/gsm8k")),
        ("openai/gsm8k:main", "dataset", HubName(repository="openai/gsm8k", config="main")),
        (
            f"hub:openai/gsm8k:main/train@{COMMIT}",
            "dataset",
            HubName(repository="openai/gsm8k", config="main", split="train", revision=COMMIT),
        ),
        ("hub:gpt2", "model", HubName(repository="gpt2")),
        *((path, "model", None) for path in ("gpt2", "/models/qwen", "~/qwen", "./Qwen/Qwen3", "a/b/c", "Qwen/", "")),
        *((path, "dataset", None) for path in ("my/rows.jsonl", "arithmetic:2", "openenv:http://x", "rows/a.parquet")),
    ],
)
def test_a_name_of_the_hub_is_told_from_a_path(path, kind, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = find_hub_name(path, kind)
    assert found == name
    if found is not None:
        assert find_hub_name(str(found), kind) == found
        assert COMMIT not in found.shown


def test_what_is_here_is_a_path_unless_the_hub_is_forced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    assert find_hub_name("Qwen/Qwen3-0.6B", "model") is None
    assert "write hub:Qwen/Qwen3-0.6B" in path_advice("Qwen/Qwen3-0.6B")
    assert find_hub_name("hub:Qwen/Qwen3-0.6B", "model") == HubName(repository="Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match="a model has no part main"):
        find_hub_name("Qwen2/Qwen3-0.6B:main", "model")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "pytorch_model.bin").write_bytes(WEIGHTS)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    with HubServer() as server:
        server.use_in_this_process(monkeypatch, tmp_path / "cache")
        server.repository = server.add("Qwen/Tiny", folder)
        yield server


NAME = HubName(repository="Qwen/Tiny")


def test_only_what_a_run_reads_is_fetched_once_and_pinned(hub):
    pinned = pin_hub_name(NAME, "model")
    assert pinned.revision == hub.repository.commit
    folder = fetch_hub_model(pinned)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    digests = hub_digests(folder)
    assert set(digests) == {"config.json", "model.safetensors"}
    before = hub.sent_bytes
    assert fetch_hub_model(pinned) == folder
    assert hub.sent_bytes == before
    (hub.repository.folder / "config.json").write_text('{"model_type": "qwen2"}')  # a newer commit
    hub.add("Qwen/Tiny", hub.repository.folder)
    assert pin_hub_name(NAME, "model") != pinned
    assert pin_hub_name(pinned, "model") == pinned


def test_a_download_that_breaks_off_is_said_and_the_next_command_fetches_what_is_missing(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's own tries
    second = hub.repository.folder / "model-00002-of-00002.safetensors"
    second.write_bytes(b"x" * 2000)
    hub.repository = hub.add("Qwen/Tiny", hub.repository.folder, cut_after_bytes=2000, num_cuts=100)
    pinned = pin_hub_name(NAME, "model")
    with pytest.raises(ModelError, match=r"Qwen/Tiny@.{12}: the model could not be fetched: .* run the command again"):
        fetch_hub_model(pinned)
    hub.requests.clear()
    hub.repository.num_cuts = 1
    assert fetch_hub_model(pinned).joinpath("model.safetensors").read_bytes() == WEIGHTS
    assert [line.rpartition("/")[2] for line in hub.requests if line.startswith("GET /Qwen")] == [
        "model.safetensors"
    ] * 2


def test_a_file_of_another_digest_is_refused_and_removed(hub):
    hub.repository.damaged = {"model.safetensors"}
    pinned = pin_hub_name(NAME, "model")
    with pytest.raises(ModelError, match=r"model\.safetensors was damaged on its way: its sha256 is"):
        fetch_hub_model(pinned)
    hub.repository.damaged = set()
    assert fetch_hub_model(pinned).joinpath("model.safetensors").read_bytes() == WEIGHTS


def test_without_the_hub_what_the_cache_has_is_taken(hub, monkeypatch):
    with pytest.raises(ModelError, match="no such model on the Hub, and no such path here"):
        pin_hub_name(HubName(repository="Qwen/None"), "model")
    with pytest.raises(ModelError, match="has no revision v9: give a branch, a tag or a commit"):
        pin_hub_name(HubName(repository="Qwen/Tiny", revision="v9"), "model")
    pinned = pin_hub_name(NAME, "model")
    folder = fetch_hub_model(pinned)
    for name, value in (("HF_HUB_OFFLINE", True), ("ENDPOINT", "http://127.0.0.1:9")):
        with monkeypatch.context() as without:
            without.setattr(constants, name, value)
            assert pin_hub_name(NAME, "model") == pinned
            assert fetch_hub_model(pinned) == folder
            assert "model.safetensors" in open_hub_repository(pinned, "model").sizes
            shutil.move(folder.parents[1], folder.parents[2] / "away")
            with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set|the Hub cannot be reached|Connection refused"):
                pin_hub_name(NAME, "model")
            shutil.move(folder.parents[2] / "away", folder.parents[1])


def test_a_gated_model_says_how_to_get_in(hub, monkeypatch):
    hub.repository.is_gated = True
    with pytest.raises(ModelError, match="access to this model must be asked for on its page"):
        pin_hub_name(NAME, "model")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert fetch_hub_model(pin_hub_name(NAME, "model")).is_dir()


def test_the_disk_is_asked_for_room_before_anything_comes(hub, monkeypatch):
    pinned, Usage = pin_hub_name(NAME, "model"), namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    with pytest.raises(
        ModelError, match=r"are to be fetched, and .* has room for 0\.00 GiB; make room, or set HF_HOME"
    ):
        fetch_hub_files(pinned, "model", ["*.safetensors"])
    assert hub.sent_bytes == 0


@pytest.mark.timeout(60)
def test_a_hub_that_does_not_answer_is_given_up(hub, monkeypatch):
    pinned = pin_hub_name(NAME, "model")
    monkeypatch.setattr(hub_files, "_ANSWER_WITHIN_S", 0.5)
    hub.answers.clear()
    for ask in (lambda: pin_hub_name(NAME, "dataset"), lambda: fetch_hub_model(pinned)):
        with pytest.raises((ModelError, DataError), match=r"could not be fetched|cannot be reached"):
            ask()

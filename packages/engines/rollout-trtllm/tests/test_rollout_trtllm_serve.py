"""The server form: which clients may call it, and what it says when it cannot start."""

import asyncio
import subprocess
import sys

import pytest
from trtllm_peers import ask, record_of

from offbeat_core import BackendError, ConfigError, PeerFailedError, RolloutEngineConfig
from offbeat_rollout_trtllm import EngineControl
from offbeat_rollout_trtllm._versions import find_release
from offbeat_rollout_trtllm.serve import serve

CONFIG = RolloutEngineConfig(model_path="no-model")


def test_with_a_token_no_other_client_is_served(start_engine, tmp_path, monkeypatch):
    monkeypatch.setenv("OFFBEAT_TRTLLM_TOKEN", "secret")
    address = start_engine(tmp_path / "no-model").address
    for path in ("/version", "/offbeat/devices"):
        assert ask(address, "GET", path)
    for wrong in ("other", ""):
        monkeypatch.setenv("OFFBEAT_TRTLLM_TOKEN", wrong)
        for method, path in (("GET", "/version"), ("POST", "/update_weights"), ("GET", "/offbeat/devices")):
            with pytest.raises(PeerFailedError, match=r"401.*missing or wrong"):
                ask(address, method, path, {"weights": {}})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "somewhere"])
def test_other_addresses_than_loopback_need_a_token(host):
    with pytest.raises(ConfigError, match="OFFBEAT_TRTLLM_TOKEN"):
        asyncio.run(serve(CONFIG, host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_without_the_engine_it_says_where_it_runs(host):
    with pytest.raises(BackendError, match="container"):
        asyncio.run(serve(CONFIG, host=host))


def test_asking_for_help_needs_no_engine():
    command = [sys.executable, "-m", "offbeat_rollout_trtllm.serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--options" in done.stdout


def test_an_unknown_route_and_a_failing_one_are_told_apart(start_engine, tmp_path):
    address = start_engine(tmp_path / "no-model").address
    with pytest.raises(PeerFailedError, match="404"):
        ask(address, "GET", "/offbeat/nothing")
    with pytest.raises(PeerFailedError, match=r"500.*not found in ipc_handles"):
        ask(address, "POST", "/update_weights", {"weights": {"GPU-other": ""}})


def test_weights_that_a_client_of_the_engine_s_own_route_hands_over_are_not_served_before_they_are_whole(
    start_engine, tmp_path
):
    address = start_engine(tmp_path / "no-model").address
    with pytest.raises(PeerFailedError, match="not found in ipc_handles"):
        ask(address, "POST", "/update_weights", {"weights": {"GPU-other": ""}})
    answer = ask(address, "POST", "/offbeat/generate", {"sample_id": "1", "prompt_ids": [5], "params": {}})
    assert "the engine holds no whole set of weights" in answer["error"]


def test_a_trainer_without_an_event_loop_can_release_and_take_memory(start_engine, tmp_path):
    address = start_engine(tmp_path / "no-model").address
    control, release = EngineControl(address, deadline_s=20), find_release("1.2.1")
    assert find_release(control.version()) is release
    control.release_memory([*release.weight_tags, *release.cache_tags])
    control.resume_memory(release.weight_tags)
    with pytest.raises(PeerFailedError, match="'weights' is not a valid"):
        control.resume_memory(["weights"])
    assert [each[:2] for each in record_of(address)["tags"]] == [["sleep", "sampler"], ["wakeup", "sampler"]]
    assert address in str(control)

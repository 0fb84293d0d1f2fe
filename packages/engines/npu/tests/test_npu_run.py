"""Whole runs on the stand-in device: what names another device, in any role, ends them."""

import json
import re
import sys
import tomllib

import npu_standin
import pytest
import torch

from offbeat_actors import _server
from offbeat_npu import NpuDevice, _runtime
from offbeat_run import read_timeline
from offbeat_testing import RunningCommand, forked_main, small_grpo_run, small_sft_run, tiny_model

# Large steps, each sent before anything is sampled anew.
IN_STEP = (
    *("--engine.max_updates=2", "--engine.learning_rate=1e-2", "--algorithm.entropy_coefficient=1"),
    *("--async.staleness_threshold=0", "--async.partial_rollout=false", "--eval.every_updates=0"),
)
# The memory of an NPU is known only once a process has opened it.
BUDGET = (
    "engine.max_tokens_per_microbatch = 8192, activation_checkpointing = true (the memory of the devices is not known"
)


def where_it_is_installed(site, main):
    """`main` with the device's plugin installed in `site`; each role says at its end what the device has held."""
    serve = _server.main

    def serve_and_report(fd):
        serve(fd)
        if hasattr(torch, "npu"):
            print("the device held", torch.npu.max_memory_allocated(0), "bytes")

    def run():
        sys.path.append(str(site))
        _runtime._import_runtime.cache_clear()  # another test of this process may have looked for it in vain
        _server.main = serve_and_report
        return main()

    return run


def assert_recomputed(run):
    """The run said that it would recompute activations, and gave the engine settled values."""
    assert BUDGET in (run / "plan.txt").read_text()
    settled = tomllib.loads((run / "settled.toml").read_text())["engine"]
    assert (settled["max_tokens_per_microbatch"], settled["activation_checkpointing"]) == (8192, True)
    kept = tomllib.loads((run / "config.toml").read_text())["engine"]
    assert (kept["max_tokens_per_microbatch"], kept["activation_checkpointing"]) == (8192, True), "a resume goes on so"


@pytest.mark.parametrize("device", ["auto", pytest.param("npu", marks=pytest.mark.nightly)])
def test_a_run_trains_and_samples_on_the_device(standin, tmp_path, device):
    npu_standin.write_plugin(tmp_path / "site", standin)
    main = forked_main("grpo_async_app", "offbeat_engine_torch", "offbeat_rollout_torch")
    config = small_grpo_run(tmp_path, tiny_model(tmp_path / "model", hidden_size=32))
    words = ["train", config, "--out", tmp_path / "run", f"--engine.device={device}", f"--rollout.device={device}"]
    with RunningCommand(where_it_is_installed(tmp_path / "site", main), *words, *IN_STEP) as process:
        assert process.wait() == 0, process.output
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = (each for each in logged if "train/reward" in each)
    assert first["engine/grad_norm"] > 1e-3, "there were no other weights to send"
    assert second["mismatch/abs_max_nats_lag0"] < 1e-4, "the engine did not sample with the weights of now"
    assert_recomputed(tmp_path / "run")
    for role in ("trainer-0", "rollout-0"):
        held = re.search(r"the device held (\d+) bytes", (tmp_path / "run" / "logs" / f"{role}.log").read_text())
        assert held is not None, f"{role} did not open the device"
        assert int(held[1]) > (tmp_path / "model" / "model.safetensors").stat().st_size, f"{role} computed elsewhere"


ROOM_FOR_ALL_BUT_MOMENTS = 82 * 2**20
"""Bytes of a device that holds engines of 66.2 MiB beside weights of 0.2, and not beside a trainer of 8, by the
estimate for TURNS."""
TURNS = (
    *("--cluster.colocate=true", "--async.staleness_threshold=0", "--async.partial_rollout=false"),
    *("--engine.device=npu", "--rollout.device=npu", "--engine.dtype=float32", "--rollout.dtype=float32"),
    *("--engine.max_tokens_per_microbatch=512", "--engine.activation_checkpointing=false"),
    *("--rollout.options={kv_cache_tokens = 65536}", "--rollout.sync_bucket_bytes=1048576"),
    *("--engine.max_updates=3", "--eval.every_updates=0", "--checkpoint.every=0"),
)


@pytest.mark.timeout(240)
def test_roles_in_turns_park_no_more_than_makes_room(standin, tmp_path, monkeypatch):
    """Without a word of the user's the trainer's weights and the engine's stay; the run is that in which all goes."""
    npu_standin.write_plugin(tmp_path / "site", standin)
    monkeypatch.setattr(NpuDevice, "memory_of_smallest", classmethod(lambda cls: ROOM_FOR_ALL_BUT_MOMENTS))
    main = forked_main("grpo_async_app", "offbeat_engine_torch", "offbeat_rollout_torch")
    config = small_grpo_run(tmp_path, tiny_model(tmp_path / "model", hidden_size=32))
    seen = {}
    for name, words in {"least": (), "all": ("--cluster.sleep_level=2",)}.items():
        run = tmp_path / name
        started = ["train", config, "--out", run, *TURNS, *words]
        with RunningCommand(where_it_is_installed(tmp_path / "site", main), *started) as process:
            assert process.wait() == 0, process.output
        steps = [event["name"] for event in read_timeline(run / "timeline.json") if event["ph"] == "X"]
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [each["engine/grad_norm"] for each in logged if "engine/grad_norm" in each]
        seen[name] = steps.count("sleep 1"), steps.count("sleep 2"), losses
    text = " ".join((tmp_path / "least" / "plan.txt").read_text().split())
    assert "cluster.sleep_level = 1: engines park KV cache, the trainer all but its weights (of 82 MiB a device" in text
    (least_moments, least_all, least), (moments, everything, losses) = seen["least"], seen["all"]
    assert least_moments == moments >= 3
    assert least_all == 1, "at the start, before there are engines"
    assert everything == 1 + moments
    assert len(least) == 3
    assert least == losses


def test_a_fine_tuning_on_the_device_recomputes_what_its_memory_may_not_hold(standin, tmp_path):
    npu_standin.write_plugin(tmp_path / "site", standin)
    main = forked_main("sft_app", "offbeat_engine_torch")
    config, run = small_sft_run(tmp_path, tiny_model(tmp_path / "model", hidden_size=32)), tmp_path / "run"
    open_words = ["--engine.device=auto", "--engine.max_tokens_per_microbatch=0"]
    words = ["train", config, "--out", run, *open_words, "--engine.max_updates=2", "--eval.every_updates=0"]
    with RunningCommand(where_it_is_installed(tmp_path / "site", main), *words) as process:
        assert process.wait() == 0, process.output
    assert_recomputed(run)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("train/loss" in each for each in logged) == 2

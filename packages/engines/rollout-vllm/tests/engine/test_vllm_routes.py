"""Routes of tokens by vLLM's own classes: they need Triton, so that no engine on a CPU returns any."""

from dataclasses import fields

import numpy as np
from engine_checks import config_of, request
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import CompletionOutput, RequestOutput

from offbeat_rollout_vllm import _setup
from offbeat_rollout_vllm._requests import Sample
from offbeat_rollout_vllm._setup import RETURN_ROUTES, Setup
from offbeat_rollout_vllm._vllm_objects import read_output
from offbeat_testing import tiny_model


def output(ids, routes_TLK, finish_reason):
    """Make what vLLM hands on after a step, with routes of all tokens before the last once a sample has ended."""
    logprobs = [{token: type("Logprob", (), {"logprob": -1.0})()} for token in ids]
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        routed_experts=routes_TLK,
        finish_reason=finish_reason,
    )
    return RequestOutput("r/0", None, [5, 6], None, [completion], finish_reason is not None)


def test_the_last_output_of_a_sample_says_the_experts_of_prompt_and_completion():
    routes_TLK = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    sample = Sample("r/0", request(prompt=np.array([5, 6])), 0)
    for each in (output([7], None, None), output([8, 9], routes_TLK, "length")):
        sample.push(read_output(each, 0), frozenset())
    assert sample.routes.unpack().tolist() == routes_TLK.tolist()
    silent = Sample("r/1", request(prompt=np.array([5, 6])), 0)
    silent.push(read_output(output([7], None, "length"), 0), frozenset())
    assert silent.routes is None


def test_vllm_is_asked_where_it_can_say_them(tmp_path, monkeypatch):
    assert set(RETURN_ROUTES) <= {each.name for each in fields(EngineArgs)}
    asked = []
    monkeypatch.setattr(_setup, "choose_form", lambda _, __, extra, *rest, **named: (asked.append(extra), 1))
    mixture, dense = (tiny_model(tmp_path / family, family) for family in ("qwen3_moe", "qwen3"))

    def returns(folder, **settings):
        routes = Setup(config_of(folder, **settings)).capabilities.routes
        assert (RETURN_ROUTES.items() <= asked[-1].items()) is routes
        return routes

    assert not returns(mixture, return_routes=True), "a build for CPUs"
    monkeypatch.setattr(_setup, "is_cpu_build", lambda name, version: False)
    assert returns(mixture, return_routes=True)
    assert not returns(mixture)
    assert not returns(dense, return_routes=True)
    assert not returns(mixture, return_routes=True, options={"enable_prefix_caching": False})

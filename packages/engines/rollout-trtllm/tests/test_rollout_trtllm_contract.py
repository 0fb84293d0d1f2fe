"""The adapter, and the stand-in it is tested with, keep to the interface recorded from TensorRT-LLM's source."""

import ast
import copy
import inspect
import json
from pathlib import Path

import pytest
import trtllm_standin
from record_api import compare, find_symbol, names_of

from offbeat_core import RolloutEngineConfig, SamplingParams
from offbeat_rollout_trtllm import SUPPORTED_VERSIONS, USES, Use
from offbeat_rollout_trtllm._local_link import engine_arguments
from offbeat_rollout_trtllm._options import TrtllmOptions
from offbeat_rollout_trtllm._requests import to_engine_params

FOLDER = Path(__file__).parent / "recorded"
# One record for each series of the table; the newest is the one that drift is measured against.
RECORDS = {path.stem.removeprefix("tensorrt-llm-"): path for path in sorted(FOLDER.glob("tensorrt-llm-*.json"))}
RECORD = json.loads(RECORDS["1.2"].read_text())


def symbol(path, name):
    found = find_symbol(RECORD, f"tensorrt_llm/{path}", name)
    assert found is not None, f"{name} of {path} is not recorded"
    return found


@pytest.mark.parametrize("series", sorted(RECORDS))
@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.symbol}-{'-'.join(use.names)[:40]}")
def test_everything_the_adapter_names_is_recorded(series, use: Use):
    record = json.loads(RECORDS[series].read_text())
    found = find_symbol(record, use.path, use.symbol)
    assert found is not None, f"{use.symbol} is not in {use.path} of {series}: {use.why}"
    assert not set(use.names) - names_of(found), use.why


def test_every_supported_series_is_recorded_with_its_source():
    assert SUPPORTED_VERSIONS.keys() <= RECORDS.keys()
    for path in RECORDS.values():
        record = json.loads(path.read_text())
        assert record["repository"] == "NVIDIA/TensorRT-LLM"
        assert all(entry.get("commit") or entry.get("stored") for entry in record["files"].values())


def test_arguments_of_the_engine_are_fields_of_its_settings():
    options = TrtllmOptions(weights="fp8_blocks", fp8_kv_cache=True)
    arguments = engine_arguments(RolloutEngineConfig(model_path="m"), options, SUPPORTED_VERSIONS["1.2"])
    known = names_of(symbol("llmapi/llm_args.py", "BaseLlmArgs")) | names_of(
        symbol("llmapi/llm_args.py", "TorchLlmArgs")
    )
    assert not arguments.keys() - known


def test_sampling_parameters_are_fields_of_theirs():
    params = SamplingParams(top_k=3, top_p=0.5, min_p=0.1, seed=1, stop_token_ids=(4,))
    given = to_engine_params(params, seed=-1, eos_ids=(2,), max_tokens=5)
    assert not given.keys() - names_of(symbol("sampling_params.py", "SamplingParams"))


def test_memory_tags_are_the_engine_s():
    fields = symbol("_torch/virtual_memory.py", "ExecutorMemoryType")["fields"]
    recorded = {ast.literal_eval(value["default"]) for value in fields.values()}
    release = SUPPORTED_VERSIONS["1.2"]
    tags = {*release.weight_tags, *release.cache_tags}
    assert tags == {tag for tag in recorded if not tag.startswith("_no_capture")}
    assert {tag.value for tag in trtllm_standin.ExecutorMemoryType} == recorded


@pytest.mark.parametrize(
    ("path", "name", "ours"),
    [
        ("_torch/async_llm.py", "AsyncLLM.__init__", trtllm_standin.AsyncLLM.__init__),
        ("_torch/async_llm.py", "AsyncLLM.release", trtllm_standin.AsyncLLM.release),
        ("_torch/async_llm.py", "AsyncLLM.resume", trtllm_standin.AsyncLLM.resume),
        ("_torch/async_llm.py", "AsyncLLM.collective_rpc", trtllm_standin.AsyncLLM.collective_rpc),
        ("llmapi/llm.py", "BaseLLM.generate_async", trtllm_standin.AsyncLLM.generate_async),
        ("llmapi/llm.py", "BaseLLM.shutdown", trtllm_standin.AsyncLLM.shutdown),
        ("llmapi/rlhf_utils.py", "WorkerExtension.update_weights", trtllm_standin.WorkerExtension.update_weights),
        ("executor/result.py", "GenerationResult.abort", trtllm_standin.GenerationResult.abort),
        (
            "executor/result.py",
            "GenerationResult.prompt_token_ids",
            trtllm_standin.GenerationResult.prompt_token_ids.fget,
        ),
        ("_torch/utils.py", "get_device_uuid", trtllm_standin.get_device_uuid),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_stand_in_has_no_parameter_of_its_own(path, name, ours):
    recorded = symbol(path, name)
    assert set(inspect.signature(ours).parameters) <= {each["name"] for each in recorded["parameters"]}
    assert inspect.iscoroutinefunction(ours) == (recorded["kind"] == "async function")


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("sampling_params.py", trtllm_standin.SamplingParams),
        ("executor/result.py", trtllm_standin.CompletionOutput),
        ("executor/result.py", trtllm_standin.Logprob),
        ("llmapi/llm_args.py", trtllm_standin.KvCacheConfig),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_stand_in_has_no_field_of_its_own(path, ours):
    assert set(ours.__annotations__) <= set(symbol(path, ours.__name__)["fields"])


def test_a_newer_record_with_other_tags_or_parameters_is_told_apart():
    newer = copy.deepcopy(RECORD)
    files = newer["files"]
    del files["tensorrt_llm/_torch/virtual_memory.py"]["symbols"]["ExecutorMemoryType"]["fields"]["MODEL_ENGINE_MAIN"]
    release = files["tensorrt_llm/_torch/async_llm.py"]["symbols"]["AsyncLLM"]["methods"]["release"]
    release["parameters"] = [each for each in release["parameters"] if each["name"] != "tags"]
    del files["tensorrt_llm/serve/openai_server.py"]["symbols"]["OpenAIServer"]["routes"]["POST /update_weights"]
    differences = "\n".join(compare(RECORD, newer))
    for line in (
        "field MODEL_ENGINE_MAIN is gone",
        "AsyncLLM.release: parameter tags is gone",
        "route POST /update_weights",
    ):
        assert line in differences
    assert compare(RECORD, RECORD) == []

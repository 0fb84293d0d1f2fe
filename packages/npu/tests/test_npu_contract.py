"""What this package calls of torch-npu, vllm-ascend and MindSpeed is there, as recorded from their sources."""

import inspect
import json
from pathlib import Path

import npu_standin
import pytest
from record_api import compare, find_symbol, names_of

from offbeat_npu import REFERENCE, engine_environment, engine_options
from offbeat_npu._vllm import ADDITIONAL

FOLDER = Path(__file__).parent / "recorded"
TORCH_NPU = json.loads((FOLDER / "torch-npu-2.13.0.json").read_text())
VLLM_ASCEND = json.loads((FOLDER / "vllm-ascend-0.18.0.json").read_text())
MINDSPEED = json.loads((FOLDER / "mindspeed-core_r0.16.0.json").read_text())
RUNTIME = {
    "npu/__init__.py": ["_is_in_bad_fork", "device_count", "is_available", "is_initialized", "mem_get_info"],
    "npu/memory.py": ["empty_cache", "max_memory_allocated", "memory_allocated", "reset_peak_memory_stats"],
    "npu/random.py": ["get_rng_state", "manual_seed_all", "set_rng_state"],
    "npu/utils.py": ["current_device", "current_stream", "set_device", "stream", "synchronize"],
}
OPERATORS = {
    "npu_rms_norm": "npu_rms_norm_meta",
    "npu_swiglu": "npu_swiglu_meta",
    "npu_fusion_attention": "npu_fusion_attention_forward",
}


@pytest.mark.parametrize("record", [TORCH_NPU, VLLM_ASCEND, MINDSPEED], ids=lambda record: record["package"])
def test_a_record_says_where_it_comes_from(record):
    assert record["repository"].startswith("https://")
    assert record["note"].startswith("Recorded from ")
    assert all(len(entry["sha256"]) == 64 for entry in record["files"].values())


@pytest.mark.parametrize(("path", "names"), RUNTIME.items())
def test_the_stand_in_has_the_functions_of_the_runtime(path, names):
    """With no more parameters than the real ones, under the same names."""
    runtime = npu_standin.runtime(native=None)
    for name in names:
        real = find_symbol(TORCH_NPU, f"torch_npu/{path}", name)
        assert real is not None, f"{name} is not recorded"
        ours = list(inspect.signature(runtime[name]).parameters)
        theirs = [each["name"] for each in real["parameters"]]
        assert ours == theirs[: len(ours)], name


@pytest.mark.parametrize(("operator", "recorded"), OPERATORS.items())
def test_references_take_what_the_operators_take(operator, recorded):
    real = find_symbol(TORCH_NPU, "torch_npu/op_plugin/meta/_meta_registrations.py", recorded)
    ours = set(inspect.signature(getattr(REFERENCE, operator)).parameters)
    assert ours - {"x"} <= names_of(real) - {"self"} | {"x"}


def test_the_profiler_takes_what_the_seam_gives_it():
    path = "torch_npu/profiler/profiler.py"
    assert "activities" in names_of(find_symbol(TORCH_NPU, path, "profile.__init__"))
    assert {"start", "stop"} <= names_of(find_symbol(TORCH_NPU, path, "profile"))
    ours = inspect.signature(npu_standin.Profile.export_chrome_trace).parameters
    export = find_symbol(TORCH_NPU, path, "_KinetoProfile.export_chrome_trace")
    assert [each["name"] for each in export["parameters"]] == list(ours)
    assert "_KinetoProfile" in find_symbol(TORCH_NPU, path, "profile")["bases"]


def test_settings_of_vllm_ascend_are_those_that_it_reads():
    read = VLLM_ASCEND["files"]["vllm_ascend/ascend_config.py"]["reads"]["additional_config"]
    assert set(read) == ADDITIONAL
    assert set(engine_options()["additional_config"]) <= ADDITIONAL
    assert set(engine_environment()) <= set(VLLM_ASCEND["files"]["vllm_ascend/envs.py"]["reads"]["os"])
    worker = find_symbol(VLLM_ASCEND, "vllm_ascend/worker/worker.py", "NPUWorker")
    assert {"sleep", "wake_up"} <= names_of(worker)


def test_mindspeed_is_patched_again_by_a_mapping():
    repatch = find_symbol(MINDSPEED, "mindspeed/megatron_adaptor.py", "repatch")
    assert [each["name"] for each in repatch["parameters"]] == ["args"]


def test_a_newer_record_without_a_name_is_drift():
    newer = json.loads(json.dumps(MINDSPEED))
    del newer["files"]["mindspeed/megatron_adaptor.py"]["symbols"]["repatch"]
    assert compare(MINDSPEED, newer) == ["mindspeed/megatron_adaptor.py: repatch is gone"]

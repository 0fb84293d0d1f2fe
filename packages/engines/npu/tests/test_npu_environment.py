"""What `doctor` says of drivers, CANN and versions; names for processes; MindSpeed in time."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_core import (
    BackendError,
    ConfigError,
    RolloutEngineSettings,
    engine_needs,
    installed_backends,
    load_backend,
)
from offbeat_npu import (
    RAY_RESOURCE,
    VISIBLE_DEVICES,
    NpuDevice,
    _environment,  # its paths are replaced
    _runtime,
    cann_version,
    check_pair,
    examine_environment,
)
from offbeat_npu._environment import CANN_HOMES, _mindspeed, _torch_npu
from offbeat_placement import ClusterView
from offbeat_rollout_vllm import VllmRolloutEngine

HERE = Path(__file__).parent


def findings(tmp_path, environment):
    return dict(
        examine_environment(environment=environment, driver=tmp_path / "version.info", devices=tmp_path / "dev")
    )


def test_an_empty_machine_is_told_what_to_install(tmp_path):
    found = findings(tmp_path, {})
    assert found["npu driver"].startswith("missing: install the NPU driver")
    assert found["npu devices"].startswith("none")
    assert "ASCEND_HOME_PATH" in found["npu CANN"]
    assert "set_env.sh" in found["npu CANN"]
    assert found["npu torch-npu"].startswith("not installed: pip install")


def test_a_machine_without_anything_of_npus_gets_one_line(tmp_path, monkeypatch):
    for name in CANN_HOMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_environment, "DRIVER", tmp_path / "version.info")
    if any(Path("/dev").glob("davinci*")) or _environment._version("torch-npu"):
        pytest.skip("this machine has something of NPUs")
    assert NpuDevice.findings() == [("npu", _environment.NOTHING_INSTALLED)]
    monkeypatch.setenv(CANN_HOMES[0], str(tmp_path))
    assert len(NpuDevice.findings()) == 4


def test_a_machine_with_everything_is_described(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "davinci7", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "version.info").write_text("Version=25.2.0\nascendhal_version=7.35.19\n")
    home = tmp_path / "cann"
    (home / "x86_64-linux").mkdir(parents=True)
    (home / "x86_64-linux" / "ascend_toolkit_install.info").write_text("package_name=Ascend\nversion=8.5.0\n")
    found = findings(tmp_path, {"ASCEND_HOME_PATH": str(home)})
    assert (found["npu driver"], found["npu devices"], found["npu CANN"]) == ("25.2.0", "2 here", "8.5.0")
    assert cann_version(home) == "8.5.0"
    both = {"ASCEND_TOOLKIT_HOME": str(tmp_path / "gone"), "ASCEND_HOME_PATH": str(home)}
    assert findings(tmp_path, both)["npu CANN"] == "8.5.0", "the one that CANN's own set_env.sh sets counts first"


def test_an_old_cann_and_a_wrong_path_are_said(tmp_path):
    (tmp_path / "ascend_nnrt_install.info").write_text("version=8.2.RC1\n")
    assert findings(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path)})["npu CANN"].startswith("8.2.RC1: too old")
    assert "is no folder" in findings(tmp_path, {"ASCEND_TOOLKIT_HOME": str(tmp_path / "gone")})["npu CANN"]


@pytest.mark.parametrize(
    ("mindspeed", "core", "finding"),
    [
        ("0.16.0", "0.16.1", "0.16.0, fits megatron-core 0.16.1"),
        ("0.12.1", "0.16.1", "0.12.1 beside megatron-core 0.16.1: .*check out core_r0.16"),
        ("0.16.0", "", "0.16.0, without megatron-core: .*0.16"),
    ],
)
def test_mindspeed_must_be_of_the_megatron_core_that_is_here(mindspeed, core, finding):
    versions = {"mindspeed": mindspeed} | ({"megatron-core": core} if core else {})
    assert re.match(finding, _mindspeed(versions)), _mindspeed(versions)


@pytest.mark.parametrize(
    ("versions", "finding"),
    [
        ({"torch": "2.13.1", "torch-npu": "2.13.0"}, "2.13.0, fits torch 2.13.1$"),
        ({"torch": "2.13.0", "torch-npu": "2.12.0"}, r"2.12.0 beside torch 2.13.0: .*'torch-npu==2\.13\.\*'$"),
    ],
)
def test_torch_npu_must_be_of_the_torch_that_is_here(versions, finding):
    assert re.match(finding, _torch_npu(versions)), _torch_npu(versions)


def test_a_runtime_that_lacks_a_package_of_its_own_names_that_one(tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text("import no_such_package_of_cann\n")
    monkeypatch.syspath_prepend(tmp_path)
    _runtime._import_runtime.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"No module named 'no_such_package_of_cann'; install what it needs"):
            NpuDevice()
    finally:
        _runtime._import_runtime.cache_clear()


def test_without_the_runtime_there_are_no_devices():
    assert NpuDevice.count() == 0
    with pytest.raises(BackendError, match=r"torch_npu is not installed.*offbeat-npu\[engine\]"):
        NpuDevice()


def test_names_are_rays_own():
    npu = pytest.importorskip("ray._private.accelerators.npu")
    assert npu.NPUAcceleratorManager.get_resource_name() == RAY_RESOURCE
    assert npu.NPUAcceleratorManager.get_visible_accelerator_ids_env_var() == VISIBLE_DEVICES


def test_a_plan_asks_ray_for_npus_by_rays_name():
    assert ClusterView.named("1x8", ["npu:0"]).nodes[0].num_free(RAY_RESOURCE) == 8


def test_auto_means_npus_even_where_torch_answers_for_them_as_cuda():
    """MindSpeed's adaptor imports torch_npu.contrib.transfer_to_npu, which makes both kinds count alike."""
    kinds = [load_backend("offbeat.device", name) for name in installed_backends("offbeat.device")]
    assert max(kinds, key=lambda kind: kind.preference) is NpuDevice


def needs(device, releases=("0.18",), **options):
    return engine_needs(
        "vllm", RolloutEngineSettings(device=device, tensor_parallel=2, options=options), releases=releases
    )


def test_vllm_is_shown_the_devices_that_it_is_to_use(monkeypatch):
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    assert needs("npu:4").variables[VISIBLE_DEVICES] == "4,5"
    assert VISIBLE_DEVICES not in needs("npu").variables
    monkeypatch.setenv(VISIBLE_DEVICES, "2,3,6")  # a scheduler's choice, among which the numbers count
    assert needs("npu:1").variables[VISIBLE_DEVICES] == "3,6"
    with pytest.raises(ConfigError, match=r"devices 2, 3 are asked for.*=2,3,6 shows this process 3"):
        needs("npu:2")


def test_vllm_keeps_plain_weights_and_reads_its_settings_anew():
    found = needs("npu", additional_config={"enable_kv_nz": True})
    assert found.variables["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert found.options == {"additional_config": {"refresh": True, "enable_kv_nz": True}}
    assert not found.notice
    with pytest.raises(ConfigError, match="did you mean enable_kv_nz"):
        needs("npu", additional_config={"enable_kv_nx": True})


def test_a_plan_says_that_no_plugin_fits_the_vllm_that_is_used():
    [notice] = VllmRolloutEngine.notices_of(RolloutEngineSettings(device="npu"))
    assert "newest known one, 0.18, is for vllm 0.18 on torch 2.9, and vllm 0.32 is used" in notice
    assert NpuDevice.engine_needs("another engine", (), {}, ()).notice == ""


def test_a_plugin_that_is_installed_fits_though_it_is_newer_than_any_that_was_recorded(monkeypatch):
    assert "is used here: until the two meet none starts" in needs("npu", ("0.32",)).notice
    monkeypatch.setattr("offbeat_npu._environment.version", {"vllm-ascend": "0.32.1"}.__getitem__)
    assert needs("npu", ("0.32",)).notice == ""


def test_versions_of_vllm_and_its_plugin_must_agree():
    check_pair("0.18.1", "0.18.0")
    with pytest.raises(BackendError, match=r"vllm-ascend 0\.18\.0 is a plugin of vllm 0\.18.*pip install 'vllm==0\.18"):
        check_pair("0.32.0", "0.18.0")
    with pytest.raises(BackendError, match="is not installed is here"):
        check_pair("", "0.18.0")


ENGINE = (
    "import mindspeed.megatron_adaptor, megatron.core.parallel_state as state; from offbeat_npu import patch_megatron"
)

FIRST = "from offbeat_npu import patch_megatron; patch_megatron({'tensor_model_parallel_size': 2})"

ORDERS = {
    "in time": ("", "patched {'tensor_model_parallel_size': 2}"),
    "megatron was imported first": ("import megatron.core.parallel_state", "before it is imported"),
    "a second engine of the same settings": (
        f"{FIRST}; import megatron.core.parallel_state as state; state.is_made = True; print('open')",
        "patched {'tensor_model_parallel_size': 2}\nopen\ndone\nwords for us ['--ours'], for the adaptor []",
    ),
    "a second engine of other settings": (
        f"{ENGINE}; patch_megatron({{'tensor_model_parallel_size': 4}}); state.is_made = True",
        "other settings",
    ),
    "groups exist": (
        "import mindspeed.megatron_adaptor, megatron.core.parallel_state as state; state.is_made = True",
        "before its groups exist",
    ),
}


LONG = ("in time", "groups exist")


@pytest.mark.parametrize(
    ("first", "expected"),
    [pytest.param(*each, marks=[pytest.mark.nightly] * (name in LONG)) for name, each in ORDERS.items()],
    ids=ORDERS,
)
def test_mindspeed_comes_before_megatron_or_not_at_all(tmp_path, first, expected):
    """The order alone: neither MindSpeed nor torch_npu can run here, so modules of their names stand in for them.

    MindSpeed's adaptor takes the words of the command line for Megatron's.
    """
    modules = {
        "torch_npu.py": "",
        "mindspeed/megatron_adaptor.py": "import sys\nwords = sys.argv[1:]\ndef repatch(args): print('patched', args)",
        "megatron/core/parallel_state.py": "is_made = False\ndef model_parallel_is_initialized(): return is_made",
    }
    for name, text in modules.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
{first}
from offbeat_npu import patch_megatron
from offbeat_core import BackendError
try:
    patch_megatron({{"tensor_model_parallel_size": 2}})
    print("done")
    print("words for us", f"{{sys.argv[1:]}}, for the adaptor", sys.modules["mindspeed.megatron_adaptor"].words)
except BackendError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, "--ours"], capture_output=True, text=True, timeout=100, check=True
    )
    assert expected in ended.stdout

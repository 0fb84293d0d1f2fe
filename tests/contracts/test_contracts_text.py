"""Rules about the text of every committed file."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from source_rules import (
    backend_branches,
    machine_addresses,
    named_devices,
    platform_words,
    swallowed_errors,
    too_long,
    unsafe_loading,
)
from workspace import ROOT, committed_files

FILES = committed_files()
SOURCES = [path for path in FILES if path.suffix == ".py"]
SHIPPED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in {"packages", "apps"} and "src" in path.parts]
# Its package, the rule itself, and what hanglint knows of the libraries that people use.
ONE_PLATFORM_FOLDERS = (
    "packages/engines/npu",
    "tests/contracts",
    "packages/hangs/hanglint/src/offbeat_hanglint/_libraries",
)
# Files that may load a format able to run code, each with its reason.
OWN_MEMORY = (
    "torch hands out its flight recorder with stacks as a pickle of this process's own memory; nothing is read or sent"
)
ENGINES_FORM = "TensorRT-LLM 1.2 takes handles over HTTP as a pickle only; it is written, never read"
UNSAFE_LOADING_ALLOWED: dict[str, str] = {
    "packages/hangs/liveness/src/offbeat_liveness/_process/flight_recorder.py": OWN_MEMORY,
    "packages/hangs/liveness/src/offbeat_liveness/_process/nccl_recorder.py": OWN_MEMORY
    + ", over a socket in a folder that only this user can enter",
    "packages/engines/rollout-trtllm/src/offbeat_rollout_trtllm/_handles.py": ENGINES_FORM,
}
# Files that name a kind of device, each with its reason. Everything else asks the seam, `offbeat_mesh.open_device`.
MEGATRON_SAYS_SO = "megatron-core writes cuda where it means the device"
IN_MAIN_MEMORY = "computed or read in main memory, whatever the device, and moved from there"
HANDLES = "handles on a GPU's memory are opened by CUDA alone"
# One module in two packages; the second may not import the first, and the tests of the first cover both.
COPIES = (
    (
        "packages/core/core/src/offbeat_core/_printable.py",
        "packages/hangs/liveness/src/offbeat_liveness/_printable.py",
    ),
    ("packages/core/core/src/offbeat_core/_lazy.py", "packages/testing/src/offbeat_testing/_lazy.py"),
)
DEVICES_ALLOWED: dict[str, str] = {
    "packages/runtime/device/src/offbeat_device/_cuda.py": "this is the seam",
    "packages/engines/engine-megatron/src/offbeat_engine_megatron/_layers/attention.py": MEGATRON_SAYS_SO,
    "packages/engines/engine-megatron/src/offbeat_engine_megatron/_layers/experts.py": MEGATRON_SAYS_SO,
    "packages/engines/engine-megatron/src/offbeat_engine_megatron/_megatron.py": MEGATRON_SAYS_SO,
    "packages/engines/engine-torch/src/offbeat_engine_torch/_policy.py": IN_MAIN_MEMORY,
    "packages/engines/rollout-torch/src/offbeat_rollout_torch/_decoder.py": "complex products are those of two devices",
    "packages/engines/rollout-torch/src/offbeat_rollout_torch/_layers/linear.py": "packed products are a CPU's",
    "packages/engines/rollout-trtllm/src/offbeat_rollout_trtllm/_handles.py": HANDLES,
    "packages/engines/rollout-vllm/src/offbeat_rollout_vllm/_in_workers/extension.py": "vLLM for CPUs cannot sleep",
    "packages/engines/training/src/offbeat_training/_logprobs.py": "products of a wider result are CUDA's alone",
    "packages/runtime/weightsync/src/offbeat_weightsync/_transports/slots.py": HANDLES,
}


def broken(paths: list[Path], rule: Callable[[str], list[str]]) -> list[str]:
    """Return `path: what` for every place that breaks a rule."""
    return [f"{path.relative_to(ROOT)}: {what}" for path in paths for what in rule(_text(path))]


def _text(path: Path) -> str:
    """Return a file's text; empty for a binary one."""
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode()


def test_no_file_holds_a_machine_path_or_a_registry_address() -> None:
    assert broken(FILES, machine_addresses) == []


def test_no_file_holds_what_a_merge_has_left() -> None:
    found = [path for path in FILES if re.search(r"^(<{7}|>{7}) ", _text(path), re.MULTILINE)]
    assert found == []


def test_one_platform_is_named_in_its_own_package_only() -> None:
    of_packages = [path for path in FILES if path.relative_to(ROOT).parts[0] == "packages"]  # their documents too
    every = {*SOURCES, *of_packages}
    elsewhere = sorted(path for path in every if not str(path.relative_to(ROOT)).startswith(ONE_PLATFORM_FOLDERS))
    assert broken(elsewhere, platform_words) == []


@pytest.mark.parametrize("rule", [too_long, swallowed_errors], ids=lambda rule: rule.__name__)
def test_every_source_keeps(rule: Callable[[str], list[str]]) -> None:
    assert broken(SOURCES, rule) == []


def test_nothing_shipped_loads_a_format_that_can_run_code() -> None:
    checked = [path for path in SHIPPED if str(path.relative_to(ROOT)) not in UNSAFE_LOADING_ALLOWED]
    assert broken(checked, unsafe_loading) == []


def test_no_code_branches_on_the_name_of_a_backend() -> None:
    # These two distinguish torch.distributed's own backends, gloo and nccl.
    own = ("packages/hangs/liveness", "packages/runtime/mesh")
    checked = [path for path in SHIPPED if not any(folder in path.as_posix() for folder in own)]
    assert broken(checked, backend_branches) == []


def test_no_shipped_code_names_a_device_but_the_seam() -> None:
    found = {path.relative_to(ROOT).as_posix(): broken([path], named_devices) for path in SHIPPED}
    assert [place for path, places in found.items() if path not in DEVICES_ALLOWED for place in places] == []
    assert [path for path in DEVICES_ALLOWED if not found.get(path)] == [], "these names are gone: forbid them again"


@pytest.mark.parametrize("paths", COPIES, ids=lambda paths: Path(paths[0]).stem)
def test_a_module_that_two_packages_need_alike_is_alike(paths: tuple[str, str]) -> None:
    first, second = (ast.parse((ROOT / path).read_text()).body[1:] for path in paths)  # the lines before say why
    assert [ast.dump(each) for each in first] == [ast.dump(each) for each in second]

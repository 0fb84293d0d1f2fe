"""Rules about the text of every committed file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from source_rules import (
    backend_branches,
    machine_addresses,
    platform_words,
    swallowed_errors,
    too_long,
    unsafe_loading,
)
from workspace import ROOT, committed_files

FILES = committed_files()
SOURCES = [path for path in FILES if path.suffix == ".py"]
SHIPPED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in {"packages", "apps"} and "src" in path.parts]
# Its package, and the rule itself.
ONE_PLATFORM_FOLDERS = ("packages/npu", "tests/contracts")
# Files that may load a format able to run code, each with its reason.
OWN_MEMORY = (
    "torch hands out its flight recorder with stacks as a pickle of this process's own memory; nothing is read or sent"
)
ENGINES_FORM = "TensorRT-LLM 1.2 takes handles over HTTP as a pickle only; it is written, never read"
UNSAFE_LOADING_ALLOWED: dict[str, str] = {
    "packages/dist/src/offbeat_dist/liveness/_flight_recorder.py": OWN_MEMORY,
    "packages/testing/src/offbeat_testing/_ranks/_collectives.py": OWN_MEMORY,
    "packages/rollout-trtllm/src/offbeat_rollout_trtllm/_handles.py": ENGINES_FORM,
}


def broken(paths: list[Path], rule: Callable[[str], list[str]]) -> list[str]:
    """`path: what` for every place that breaks a rule."""
    return [f"{path.relative_to(ROOT)}: {what}" for path in paths for what in rule(_text(path))]


def _text(path: Path) -> str:
    """A file's text; empty for a binary one."""
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode()


def test_no_file_holds_a_machine_path_or_a_registry_address() -> None:
    assert broken(FILES, machine_addresses) == []


def test_one_platform_is_named_in_its_own_package_only() -> None:
    elsewhere = [path for path in SOURCES if not str(path.relative_to(ROOT)).startswith(ONE_PLATFORM_FOLDERS)]
    assert broken(elsewhere, platform_words) == []


@pytest.mark.parametrize("rule", [too_long, swallowed_errors], ids=lambda rule: rule.__name__)
def test_every_source_keeps(rule: Callable[[str], list[str]]) -> None:
    assert broken(SOURCES, rule) == []


def test_nothing_shipped_loads_a_format_that_can_run_code() -> None:
    checked = [path for path in SHIPPED if str(path.relative_to(ROOT)) not in UNSAFE_LOADING_ALLOWED]
    assert broken(checked, unsafe_loading) == []


def test_no_code_branches_on_the_name_of_a_backend() -> None:
    # offbeat-dist is where torch.distributed's own backends, gloo and nccl, are told apart.
    checked = [path for path in SHIPPED if "packages/dist" not in path.as_posix()]
    assert broken(checked, backend_branches) == []

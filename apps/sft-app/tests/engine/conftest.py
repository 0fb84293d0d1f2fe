"""Runs on megatron-core, which the nox session `test(sft-app+engine)` has; elsewhere they are left out."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from offbeat_testing import fork_roles, tiny_model
from sft_app import _cli

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two ranks can share along each axis."""
    return tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=2, num_kv_heads=2)


@pytest.fixture(scope="session")
def forked_main() -> Callable[[], NoReturn]:
    """The command line for a `RunningCommand` whose ranks are all forks: four of them import megatron-core once."""
    for module in ("sft_app._commands", "offbeat_engine_torch", "offbeat_engine_megatron._megatron"):
        import_module(module)  # before anything forks
    import_module("offbeat_engine_megatron._megatron").load_megatron()

    def main() -> NoReturn:
        fork_roles()
        _cli.main()

    return main

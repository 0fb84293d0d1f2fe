"""What the tests of the TensorRT-LLM adapter share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the processes of trtllm_peers

from trtllm_peers import EngineProcess

from offbeat_testing import tiny_model, tiny_vision_model

StartEngine = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("trtllm") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision-language model."""
    return tiny_vision_model(tmp_path_factory.mktemp("trtllm") / "qwen3_vl", "qwen3_vl")


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Start engine processes that end with the test."""
    running: list[EngineProcess] = []

    def start(model: str | Path, num_workers: int = 1, **options: object) -> EngineProcess:
        running.append(EngineProcess(str(model), num_workers, **options))
        return running[-1]

    yield start
    for each in running:
        each.stop()


@pytest.fixture
def replicas(request: pytest.FixtureRequest, start_engine: StartEngine, tmp_path: Path) -> list[str]:
    """Address of the engine of each replica of the test's mesh, with as many workers as the replica has ranks."""
    given = getattr(request.node, "callspec", None)
    axes = given.params.get("mesh") if given else None
    if axes is None:
        axes = request.node.get_closest_marker("mesh").kwargs
    num_ranks = axes.get("tp", 1) * axes.get("cp", 1) * axes.get("pp", 1)
    return [start_engine(tmp_path / "no-model", num_ranks).address for _ in range(axes.get("dp", 1))]

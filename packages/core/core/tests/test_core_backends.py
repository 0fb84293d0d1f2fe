"""Backends and kinds of device are found by entry point, from real installed metadata."""

import re
import sys

import pytest

from offbeat_core import (
    BackendError,
    EngineNeeds,
    RolloutEngineSettings,
    engine_needs,
    installed_backends,
    load_backend,
    require_backend,
)

KIND = "offbeat.example"


@pytest.fixture
def example_backend(tmp_path, monkeypatch):
    """A distribution on sys.path that registers two backends, one of them broken."""
    metadata = tmp_path / "offbeat_example-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offbeat-example\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(
        f"[{KIND}]\nworking = offbeat_example_backend:Engine\nbroken = offbeat_example_backend:Missing\n"
    )
    (tmp_path / "offbeat_example_backend.py").write_text("class Engine:\n    name = 'working'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("offbeat_example_backend", None)


@pytest.mark.usefixtures("example_backend")
def test_a_registered_backend_is_loaded_by_name():
    assert installed_backends(KIND) == ("broken", "working")
    assert load_backend(KIND, "working").name == "working"


@pytest.mark.usefixtures("example_backend")
def test_a_required_backend_is_asked_for_the_engine_that_it_adapts():
    engine = require_backend(KIND, "working")
    asked = []
    engine.check_installed = lambda *settings: asked.append(settings)
    settings = RolloutEngineSettings()
    assert require_backend(KIND, "working") is engine
    assert require_backend(KIND, "working", settings) is engine
    assert asked == [(), (settings,)]


@pytest.mark.usefixtures("example_backend")
def test_a_broken_backend_keeps_its_own_error():
    with pytest.raises(AttributeError, match="Missing"):
        load_backend(KIND, "broken")


@pytest.mark.usefixtures("example_backend")
def test_an_unknown_name_lists_the_ones_there_are():
    message = f"{KIND} backend 'wroking' is not installed (installed adapters: broken, working); check the name"
    with pytest.raises(BackendError, match=re.escape(message)):
        load_backend(KIND, "wroking")


def test_a_known_backend_that_is_not_installed_comes_with_its_install_line(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    line = 'install it with: pip install "offbeat-rollout-vllm[engine]"'
    with pytest.raises(BackendError, match=re.escape(f"(installed adapters: none); {line}")):
        load_backend("offbeat.rollout", "vllm")


def test_nothing_is_installed_under_a_kind_that_is_not_used():
    assert installed_backends("offbeat.unused") == ()


KINDS = """
from offbeat_core import EngineNeeds

class Plain:
    pass

class Demanding:
    @classmethod
    def engine_needs(cls, library, devices, options, releases):
        said = f"{library} {' '.join(releases)} on {list(devices)}"
        return EngineNeeds(variables={"DEVICES": str(len(devices))}, options=options | {"block": 4}, notice=said)
"""


@pytest.fixture
def kinds(tmp_path, monkeypatch):
    metadata = tmp_path / "demanding_device-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: demanding-device\nVersion: 0.1\n")
    points = "plain = demanding_device:Plain\ndemanding = demanding_device:Demanding\n"
    (metadata / "entry_points.txt").write_text(f"[offbeat.device]\n{points}")
    (tmp_path / "demanding_device.py").write_text(KINDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("demanding_device", None)


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("device", ["auto", "plain:1", "nowhere:0"])
def test_nothing_is_needed_of_a_kind_that_asks_for_nothing(device):
    assert engine_needs("engine", RolloutEngineSettings(device=device), releases=["1.0"]) == EngineNeeds()


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize(("device", "devices"), [("demanding", []), ("demanding:2", [2, 3, 4, 5])])
def test_a_device_is_given_what_is_going_to_run_on_it(device, devices):
    settings = RolloutEngineSettings(device=device, tensor_parallel=4, options={"form": "async"})
    needs = engine_needs("engine", settings, releases=["1.0", "1.1"])
    assert needs.notice == f"engine 1.0 1.1 on {devices}"
    assert needs.variables == {"DEVICES": str(len(devices))}
    assert needs.options == {"form": "async", "block": 4}

"""A kind of device says what engines need on it, and whoever starts one need not know the kind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat_types import EngineNeeds, RolloutEngineSettings, engine_needs

KINDS = """
from offbeat_types import EngineNeeds

class Plain:
    pass

class Demanding:
    @classmethod
    def engine_needs(cls, library, devices, options, releases):
        said = f"{library} {' '.join(releases)} on {list(devices)}"
        return EngineNeeds(variables={"DEVICES": str(len(devices))}, options=options | {"block": 4}, notice=said)
"""


@pytest.fixture(autouse=True)
def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    metadata = tmp_path / "demanding_device-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: demanding-device\nVersion: 0.1\n")
    points = "plain = demanding_device:Plain\ndemanding = demanding_device:Demanding\n"
    (metadata / "entry_points.txt").write_text(f"[offbeat.device]\n{points}")
    (tmp_path / "demanding_device.py").write_text(KINDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("demanding_device", None)


@pytest.mark.parametrize("device", ["auto", "plain:1", "nowhere:0"])
def test_nothing_is_needed_of_a_kind_that_asks_for_nothing(device: str) -> None:
    assert engine_needs("engine", RolloutEngineSettings(device=device), releases=["1.0"]) == EngineNeeds()


@pytest.mark.parametrize(("device", "devices"), [("demanding", []), ("demanding:2", [2, 3, 4, 5])])
def test_a_device_is_told_what_is_going_to_run_on_it(device: str, devices: list[int]) -> None:
    settings = RolloutEngineSettings(device=device, tensor_parallel=4, options={"form": "async"})
    needs = engine_needs("engine", settings, releases=["1.0", "1.1"])
    assert needs.notice == f"engine 1.0 1.1 on {devices}"
    assert needs.variables == {"DEVICES": str(len(devices))}
    assert needs.options == {"form": "async", "block": 4}

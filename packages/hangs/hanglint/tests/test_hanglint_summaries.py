"""What an installed library does is computed from its sources, written as data, and read by the next run."""

import sys
import tomllib
from pathlib import Path

import pytest
from test_hanglint_command import rules_found, run

LIBRARY = """
import torch.distributed as dist
import pathlib; pathlib.Path(__file__).with_name("imported").touch()


def mean_over(value, group):
    dist.all_reduce(value, group=group)
    return value


def mean(value):
    return total(value) / dist.get_world_size()


def total(value):
    dist.all_reduce(value)
    return value


def log(value, everywhere=False):
    if everywhere:
        dist.all_reduce(value)


def local(value):
    return value * 2


class Reducer:
    def collect(self, values):
        dist.all_gather_object([], values)
"""
PROGRAM = """
import torch.distributed as dist
from fleet import mean, local, log


def report(loss):
    if dist.get_rank() == 0:
        print(mean(loss), local(loss), log(loss))
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library called fleet, where Python finds it."""
    folder = tmp_path / "site" / "fleet"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from fleet.parts import mean, local, log\n")
    (folder / "parts.py").write_text(LIBRARY)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return folder


def test_a_librarys_collectives_are_written_and_then_known(library: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.py").write_text(PROGRAM)
    assert rules_found(project) == [], "what fleet does is not known yet"
    assert run("--summarise-installed", "fleet", "--output", project / "fleet.toml").code == 0
    (project / "hanglint.toml").write_text('summaries = ["fleet.toml"]\n')
    assert rules_found(project) == ["HL001"]
    assert not (library / "imported").exists()


def test_a_summary_says_where_a_function_is_over_which_axes_and_what_names_the_group(library: Path) -> None:
    data = tomllib.loads(run("--summarise-installed", library).stdout)
    functions = {
        name: (entry["modules"], how) for entry in data["collectives"] for name, how in entry["functions"].items()
    }
    assert functions == {
        "mean": (["fleet.parts", "fleet"], {"axes": ["world"]}),
        "mean_over": (["fleet.parts"], {"axes": ["world"], "group": 1}),
        "total": (["fleet.parts"], {"axes": ["world"]}),
    }
    assert data["methods"] == [{"names": ["collect"], "receivers": ["reducer"], "axes": ["world"]}]


@pytest.mark.parametrize(
    "content", ["= 1", "[[collectives]]\nfunctions = 1", "[[methods]]\naxes = 1", "[[collectives]]\nmodules = 1"]
)
def test_a_summary_of_another_form_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "ours.toml").write_text(content)
    (tmp_path / "hanglint.toml").write_text('summaries = ["ours.toml"]\n')
    done = run(tmp_path)
    assert done.code == 2
    assert done.stderr.startswith("hanglint: `summaries` must have the form of")
    assert done.stderr.count("\n") == 1


def test_what_is_not_installed_is_refused(tmp_path: Path) -> None:
    assert "got no.such.library" in run("--summarise-installed", "no.such.library").stderr
    assert "has none" in run("--summarise-installed", tmp_path).stderr

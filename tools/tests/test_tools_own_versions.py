"""Every package installs beside the oldest and the newest versions that its ranges admit, as uv resolves them."""

import os
import subprocess
import sys

import pytest
from own_versions import build_all, choose, offer
from ranges import edges
from released import Range, Version, kept_wheels, version_of
from wheels import TYPES, wheel_of
from workspace import ROOT, packages

PACKAGES = packages()
KEPT = kept_wheels()
EDGES = list(edges(PACKAGES, KEPT))
BEHIND = [edge for edge in EDGES if edge.reason_behind]
every_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.key)


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """Return folders of wheels: of the working tree with kept ones beside them, and kept ones alone."""
    folder = tmp_path_factory.mktemp("wheels")
    build_all(folder / "built")
    offer("newest", folder / "built", folder / "newest")
    offer("oldest", folder / "built", folder / "oldest")
    offer("oldest", folder / "none", folder / "kept")
    return folder


@every_package
def test_the_oldest_versions_are_those_of_the_lower_bounds(offered, package):
    chosen = choose([f"{package.name}=={version_of(package)}"], offered / "oldest", "lowest")
    always = [edge for edge in EDGES if edge.package == package and edge.requirement in package.dependencies]
    for edge in always:
        assert chosen[edge.other.name] >= Range.of(edge.requirement).lower
        assert chosen[edge.other.name] in Range.of(edge.requirement)
    ours = {
        edge.other.name: max(Range.of(one.requirement).lower for one in EDGES if one.other == edge.other)
        for edge in always
    }
    assert all(chosen[name] <= highest for name, highest in ours.items()), "an older version would have done"


@every_package
def test_the_newest_versions_are_those_of_the_workspace_but_where_a_package_is_behind(offered, package):
    chosen = choose([package.name], offered / "newest", "highest")
    present = {other.name: version_of(other) for other in PACKAGES}
    held = {edge.other.name for edge in BEHIND if edge.package.name in chosen}
    assert {name: version for name, version in chosen.items() if name not in held} == {
        name: present[name] for name in chosen if name not in held
    }


@pytest.mark.parametrize("edge", BEHIND, ids=lambda edge: f"{edge.package.key}-{edge.other.key}")
def test_a_package_that_is_behind_brings_a_kept_version_and_others_stay_with_the_newest(offered, edge):
    name, newest = edge.other.name, offered / "newest"
    assert version_of(edge.other) not in Range.of(edge.requirement)
    behind = choose([edge.package.name], newest, "highest")[name]
    assert behind in {wheel.version for wheel in KEPT[name]}
    assert behind in Range.of(edge.requirement)
    widened = [each for each in EDGES if each.other == edge.other and not each.reason_behind]
    assert len(widened) >= 2
    for each in widened:
        extras = f"[{','.join(each.package.extras)}]" if each.requirement not in each.package.dependencies else ""
        assert choose([each.package.name + extras], newest, "highest")[name] == version_of(edge.other)
        # In one environment all of them take the version that each admits.
        both = choose([each.package.name + extras, edge.package.name], newest, "highest")
        assert both[name] == behind


def test_what_was_released_stays_installable(offered):
    for wheel in (wheel for wheels in KEPT.values() for wheel in wheels):
        chosen = choose([f"{wheel.name}=={wheel.version}"], offered / "kept", "highest")
        assert chosen[wheel.name] == wheel.version


def test_a_solution_that_does_not_exist_is_said_in_uv_s_words(offered):
    with pytest.raises(ValueError, match="uv finds no versions for 'offbeat-core>=7'"):
        choose(["offbeat-core>=7"], offered / "newest", "highest")


def test_a_version_that_is_kept_and_in_the_workspace_is_taken_as_asked(tmp_path):
    (tmp_path / "releases").mkdir()
    (tmp_path / "built").mkdir()
    for folder, text in {"releases": "kept", "built": "here"}.items():
        (tmp_path / folder / "a-0.1.0-py3-none-any.whl").write_text(text)
    (tmp_path / "built" / "a-0.1.1-py3-none-any.whl").write_text("here")
    for which, first in {"oldest": "kept", "newest": "here"}.items():
        offer(which, tmp_path / "built", tmp_path / which, tmp_path)
        assert [path.read_text() for path in sorted((tmp_path / which).glob("*.whl"))] == [first, "here"]


def test_a_parameter_that_an_older_version_lacks_is_found_by_types(tmp_path):
    for module, text in {
        "offbeat_core": "def f(a: int) -> int:\n    return a\n",  # as in an older version
        "offbeat_one": "from offbeat_core import f\n\nf(1, deadline_s=2)\n",
    }.items():
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(text)
        (tmp_path / module / "py.typed").touch()
    command = [sys.executable, "-m", "mypy", *TYPES, f"--cache-dir={tmp_path / 'cache'}", "-p", "offbeat_one"]
    environment = {**os.environ, "MYPYPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert 'Unexpected keyword argument "deadline_s" for "f"' in done.stdout


def test_a_wheel_is_built_by_the_first_session_that_asks_for_it(tmp_path, monkeypatch):
    """As `nox -s versions` does in a fresh clone."""
    package, folder, num_built = packages()[0], tmp_path / "wheels", []

    def build(to):
        num_built.append(1)
        to.mkdir()
        (to / f"{package.import_name}-0.1.0-py3-none-any.whl").touch()

    monkeypatch.setattr("environments.NOX", tmp_path)
    monkeypatch.setattr("wheels.BUILT", folder)
    monkeypatch.setattr("wheels.build_all", build)
    assert [wheel_of(package).parent for _ in range(2)] == [folder] * 2
    assert num_built == [1]


def test_the_first_release_that_not_all_follow():
    assert ROOT.joinpath("releases/offbeat_weightsync-0.1.0-py3-none-any.whl").is_file()
    old, new = KEPT["offbeat-weightsync"][:2]
    assert (old.version, new.version) == (Version(0, 1), Version(0, 2))
    assert set(old.public_names) - set(new.public_names) == {"remove_old_versions"}

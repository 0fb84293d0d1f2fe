"""`nox -l` says of each session what it shows, and lists everything of a backend under one word."""

import re
import subprocess
import sys

import pytest
from sessions import in_order, tags_of, text_of, text_of_wheel
from workspace import ROOT, Package, packages

LINE = re.compile(r"[*-] (?P<name>\S+)( \[(?P<tags>[a-z,]+)\])? -> (?P<text>.+)")


@pytest.fixture(scope="module")
def listing():
    command = [sys.executable, "-m", "nox", f"--noxfile={ROOT / 'noxfile.py'}", "--list"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def sessions(listing):
    found = [LINE.fullmatch(line) for line in listing.splitlines() if line.startswith(("* ", "- "))]
    assert all(found), "a session without a text"
    return {each["name"]: ((each["tags"] or "").split(","), each["text"]) for each in found}


def test_no_two_sessions_have_one_text(sessions):
    texts = [text for _, text in sessions.values()]
    assert len(sessions) > 100
    assert len(set(texts)) == len(texts)


def test_everything_of_a_backend_has_its_tag_and_stands_together(sessions):
    names = [name for name in sessions if "(" in name]
    for package in packages():
        own = [name for name in names if re.search(rf"\({re.escape(package.key)}[+)]", name)]
        own += [name for name in names if name.startswith(f"hardware({package.key}-")]
        assert {f"test({package.key})", f"wheels({package.key})"} <= set(own)
        assert all(set(tags_of(package)) <= set(sessions[name][0]) for name in own)
        places = sorted(names.index(name) for name in own if not name.startswith(("engines", "long_engines")))
        assert places == list(range(places[0], places[0] + len(places)))


def test_every_tag_of_a_backend_is_named_above_the_list(listing, sessions):
    named = re.search(r"The tags are\s(.*?);", listing, re.DOTALL)[1].split(", ")
    assert set(named) == {tag for package in packages() for tag in tags_of(package)}
    assert {"megatron", "ray", "torch", "trtllm", "vllm"} < set(named)


def test_what_needs_a_device_is_listed_without_one(sessions):
    assert {"hardware(liveness-cuda)", "hardware(rollout-vllm-cuda)"} <= set(sessions)


def test_a_package_that_does_not_say_what_its_tests_show_is_named(tmp_path):
    package = Package(folder=tmp_path / "one", metadata={"project": {"name": "offbeat-one"}})
    with pytest.raises(ValueError, match=r"one/pyproject.toml needs test = "):
        text_of(package, "test")
    assert text_of_wheel(package) == "The wheel of offbeat-one installs alone, its names load; brings nothing else."


def test_packages_of_one_backend_follow_each_other(tmp_path):
    def package(key, *tags):
        return Package(folder=tmp_path / key, metadata={"tool": {"offbeat": {"sessions": {"tags": list(tags)}}}})

    found = [package("a", "second"), package("b"), package("c", "first"), package("d", "second")]
    assert [each.key for each in in_order(found)] == ["b", "c", "a", "d"]

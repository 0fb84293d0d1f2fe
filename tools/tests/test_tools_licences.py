"""A dependency without a licence, or with one that is not allowed, is found; one of the GPL's family is named."""

import licences
import pytest

RULES = """\
[names]
"MIT License" = "MIT"

[allowed]
"MIT" = "permissive"
"Apache-2.0 WITH LLVM-exception" = "permissive"

[packages]
bare = { licence = "MIT", reason = "its file is MIT's" }
lesser = { stated = "LGPL-2.1-only", licence = "LGPL-2.1-only", reason = "not shipped" }
"""


@pytest.fixture
def licence_of(tmp_path):
    (tmp_path / "rules.toml").write_text(RULES)

    def read(name: str, *lines: str) -> licences.Licence:
        folder = tmp_path / "site" / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        head = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n"
        (folder / "METADATA").write_text(head + "".join(f"{line}\n" for line in lines))
        (found,) = licences.licences([tmp_path / "site"], {"ours"}, tmp_path / "rules.toml")
        return found

    return read


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("", False),
        ("GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT AND (GPL-3.0-only OR MIT)", True),
        ("(MIT OR GPL-2.0-only) AND GPL-3.0-only", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache-2.0", False),
    ],
)
def test_all_sides_of_and_and_one_of_or_are_allowed(expression, allowed):
    assert licences.is_allowed(expression, ["MIT", "Apache-2.0 WITH LLVM-exception"]) is allowed


def test_a_package_without_a_licence_is_refused(licence_of):
    assert not licence_of("empty").allowed


def test_a_vague_classifier_gives_way_to_the_field(licence_of):
    found = licence_of("vague", "Classifier: License :: OSI Approved", "License: MIT License")
    assert (found.text, found.allowed) == ("MIT", True)


def test_the_text_of_a_licence_is_not_its_name(licence_of):
    assert not licence_of("long", f"License: {'MIT ' * 20}").allowed


def test_an_entry_is_for_what_the_metadata_said_when_it_was_written(licence_of):
    assert licence_of("bare").reason == "its file is MIT's"


def test_an_entry_does_not_cover_another_licence(licence_of):
    assert not licence_of("bare", "License-Expression: GPL-3.0-only").allowed


def test_what_is_of_the_gpl_is_named_though_it_is_allowed(licence_of):
    found = licence_of("lesser", "License-Expression: LGPL-2.1-only")
    assert found.allowed
    assert found.is_gpl
    assert "| lesser | 1.0 | LGPL-2.1-only | not shipped |" in licences.table([found], ["cuda-python"], ["cpu"])


def test_every_allowed_licence_has_a_reason():
    rules = licences.tomllib.loads(licences.RULES.read_text())
    assert all(rules["allowed"].values())
    assert all(own["reason"] and own["licence"] for own in rules["packages"].values())

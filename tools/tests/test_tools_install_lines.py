"""Install lines are found wherever a page shows one, and a package of ours from elsewhere is noticed."""

import zipfile

import pytest
from install_lines import InstallError, InstallLine, foreign, install, install_lines
from workspace import packages

OURS = {package.name: package for package in packages()}
RECORD = "offbeat_core/__init__.py,sha256={},4\noffbeat_core-0.1.0.dist-info/RECORD,,\n"


def line(text):
    return InstallLine(text=text, places=("page.md:1",))


def test_lines_of_blocks_tables_and_sentences_are_found():
    found = {each.text: each.places for each in install_lines()}
    assert any(place.startswith("README.md:") for place in found["pip install grpo-async-app"])
    assert any(place.startswith("docs/packages.md:") for place in found["pip install offbeat-mesh"])
    assert any(place.startswith("docs/hanglint.md:") for place in found["pip install offbeat-hanglint"])
    assert 'pip install "offbeat-data[mcp]"' in found
    for each in install_lines():
        each.packages_of(OURS)


def test_a_package_that_is_not_ours_under_a_name_like_ours_is_refused():
    with pytest.raises(InstallError, match=r"page.md:1: there is no package offbeat-cor$"):
        line("pip install offbeat-cor").packages_of(OURS)


def test_an_installer_that_cannot_be_run_is_refused_and_not_passed_over(tmp_path):
    with pytest.raises(InstallError, match="add this kind"):
        install(line("uv add offbeat-core"), tmp_path / "venv", "an index")


@pytest.mark.parametrize(
    ("version", "digest", "said"),
    [
        ("0.1.0", "right", []),
        ("0.1.0", "other", ["offbeat_core 0.1.0 has another offbeat_core/__init__.py"]),
        ("99.0.0", "right", ["offbeat_core 99.0.0 is not one of the server's wheels"]),
    ],
)
def test_what_another_index_has_under_our_name_is_noticed(tmp_path, version, digest, said):
    with zipfile.ZipFile(tmp_path / "offbeat_core-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("offbeat_core-0.1.0.dist-info/RECORD", RECORD.format("right"))
    installed = tmp_path / f"venv/lib/python3.11/site-packages/offbeat_core-{version}.dist-info"
    installed.mkdir(parents=True)
    (installed / "RECORD").write_text(RECORD.format(digest))
    assert foreign(tmp_path / "venv", tmp_path, OURS) == said

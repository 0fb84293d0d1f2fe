"""Versions and ranges follow what packages use of each other, and a release edits one package and its dependants."""

import zipfile

import pytest
import release
from ranges import imports_of, mend, problems
from released import KeptWheel, Range, Version, kept_wheels
from workspace import packages

GROUND = '__all__ = ["kept", "old"]\n\n\ndef kept(): ...\n\n\ndef old(): ...\n'
PYPROJECT = """[project]
name = "offbeat-{key}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [{dependencies}]

[project.optional-dependencies]
fast = ["Fast_Math >=1.0; sys_platform == 'linux' or sys_platform == 'darwin'"]

[project.scripts]
offbeat-{key} = "offbeat_{key}:main"

[build-system]
requires = ["uv_build>=0.13,<0.14"]
build-backend = "uv_build"

[tool.uv.build-backend]
module-name = "offbeat_{key}"
"""


def write_source(root, key, text):
    (root / f"packages/{key}/src/offbeat_{key}/__init__.py").write_text(text)


def add_package(root, key, text, *dependencies):
    (root / f"packages/{key}/src/offbeat_{key}").mkdir(parents=True)
    quoted = ", ".join(f'"{each}"' for each in dependencies)
    (root / f"packages/{key}/pyproject.toml").write_text(PYPROJECT.format(key=key, dependencies=quoted))
    (root / f"packages/{key}/CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n- Something.\n\n## 0.1.0\n")
    (root / f"packages/{key}/README.md").write_text("A package.\n")
    write_source(root, key, text)


def keep_as_it_is(root, package):
    """Write the wheel that a build would, without a build."""
    (root / "releases").mkdir(exist_ok=True)
    version = package.metadata["project"]["version"]
    path = root / "releases" / f"{package.import_name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for source in package.source.rglob("*.py"):
            wheel.write(source, source.relative_to(package.folder / "src").as_posix())
        requires = [f"Requires-Dist: {each}" for each in package.dependencies]
        in_extra = (
            "Requires-Dist: fast-math>=1.0 ; (sys_platform == 'linux' or sys_platform == 'darwin') and extra == 'fast'"
        )
        metadata = ["Name: x", "Requires-Python: >=3.11", *requires, in_extra, "Provides-Extra: fast", ""]
        folder = f"{package.import_name}-{version}.dist-info"
        wheel.writestr(f"{folder}/METADATA", "\n".join(metadata))
        wheel.writestr(
            f"{folder}/entry_points.txt", f"[console_scripts]\n{package.name} = {package.import_name}:main\n"
        )


@pytest.fixture
def root(tmp_path):
    """Make a workspace of one base package and three that need it, all released as 0.1.0."""
    add_package(tmp_path, "ground", GROUND)
    for key in ("first", "second", "third"):
        text = "from offbeat_ground import kept\n\n__all__ = []\n"
        add_package(tmp_path, key, text, "numpy>=2", "offbeat-ground>=0.1,<0.2")
    for package in packages(tmp_path):
        keep_as_it_is(tmp_path, package)
    return tmp_path


def edit(root, key, was, now):
    path = root / f"packages/{key}/pyproject.toml"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, now))


def versions(root):
    return {package.key: package.metadata["project"]["version"] for package in packages(root)}


def ranges(root):
    return {package.key: package.dependencies[-1] for package in packages(root) if package.dependencies}


def test_a_released_workspace_holds(root):
    assert problems(root) == []
    assert mend(root) == []
    assert [line.split(": ")[1] for line in release.status(root)] == ["0.1.0 released, unchanged"] * 4


def test_a_new_name_raises_the_version_and_the_lower_bound_of_its_user_alone(root):
    write_source(root, "ground", GROUND.replace('"kept", ', '"kept", "new", ') + "\n\ndef new(): ...\n")
    write_source(root, "first", "def later():\n    from offbeat_ground import kept, new\n\n\n__all__ = []\n")
    found = "\n".join(problems(root))
    assert "offbeat-ground must be 0.1.1 or higher: 0.1.0 has no new" in found
    assert "offbeat-first: offbeat-ground>=0.1,<0.2 admits 0.1.0, which lacks offbeat_ground.new" in found
    mend(root)
    assert problems(root) == []
    assert versions(root) == {"ground": "0.1.1", "first": "0.1.1", "second": "0.1.0", "third": "0.1.0"}
    assert ranges(root)["first"] == "offbeat-ground>=0.1.1,<0.2"
    assert ranges(root)["second"] == ranges(root)["third"] == "offbeat-ground>=0.1,<0.2"


@pytest.mark.timeout(20)
def test_a_bump_that_a_dependant_does_not_admit_is_found(root):
    edit(root, "ground", "0.1.0", "0.2.0")
    edit(root, "second", '"offbeat-ground>=0.1,<0.2"', '"offbeat-ground>=0.1.0, <0.2.0"')
    edit(root, "third", '"offbeat-ground>=0.1,<0.2"', "'offbeat-ground>=0.1,<0.2'")
    first, *others = problems(root)
    assert "offbeat-first: offbeat-ground>=0.1,<0.2 does not admit 0.2.0, which the workspace has" in first
    assert len(others) == 2
    mend(root)
    assert set(ranges(root).values()) == {"offbeat-ground>=0.1,<0.3"}
    # What the edits do not find is said: they would be tried for ever.
    edit(root, "third", "'offbeat-ground>=0.1,<0.3'", '"offbeat-ground>=0.1,<\\u0030.4"')
    with pytest.raises(ValueError, match=r"needs the requirement .*<0\.4' as a plain string"):
        mend(root)


@pytest.mark.parametrize(
    ("was", "now", "version", "reason"),
    [
        ("numpy>=2", "numpy>=3", "0.1.1", "has other requirements on numpy"),
        ('"numpy>=2"', '"numpy>=2", "scipy"', "0.1.1", "has other requirements on scipy"),
        ("Fast_Math >=1.0", "fast-math[c]", "0.1.1", "has other requirements on fast-math"),
        ("offbeat-ground>", "offbeat-ground[fast]>", "0.1.1", "has other requirements on offbeat-ground"),
        (', "offbeat-ground>=0.1,<0.2"]', "]", "0.1.1", "has other requirements on offbeat-ground"),
        (">=3.11", ">=3.12", "0.1.1", "has other requirements on python"),
        ("fast =", "slow = []\nfast =", "0.1.1", "has no extra [slow]"),
        ("first:main", "first:run", "0.1.1", "has no entry point console_scripts: offbeat-first = offbeat_first:run"),
        ("offbeat-first =", "first =", "0.2.0", "had entry point console_scripts: offbeat-first, which is gone"),
        ("fast =", "slow =", "0.2.0", "had extra [fast], which is gone"),
    ],
)
def test_what_an_installer_reads_makes_a_version(root, was, now, version, reason):
    edit(root, "first", was, now)
    assert f"offbeat-first must be {version} or higher: 0.1.0 {reason}" in "\n".join(problems(root))
    assert release.main(["--prepare", "first"], root) == 0
    assert problems(root) == []
    assert versions(root) == {"ground": "0.1.0", "first": version, "second": "0.1.0", "third": "0.1.0"}


def test_another_spelling_of_the_same_requirement_makes_no_version(root):
    edit(root, "first", '"numpy>=2", "offbeat-ground>=0.1,<0.2"', '"offbeat_ground<0.2.0, >=0.1.0", "NumPy >= 2.0"')
    edit(root, "first", "Fast_Math >=1.0; ", "fast-math>=1;")
    edit(root, "first", "offbeat_ground<0.2.0, >=0.1.0", "offbeat-ground>=0.1.0, <0.2.0")
    assert problems(root) == []
    assert release.status(root)[0] == "offbeat-first: 0.1.0 released, unchanged"


def test_a_name_that_is_gone_makes_a_breaking_version(root):
    write_source(root, "ground", GROUND.replace(', "old"', ""))
    assert any("must be 0.2.0 or higher: 0.1.0 had old, which is gone" in each for each in problems(root))


def test_a_range_may_not_admit_versions_that_nothing_is_known_of(root):
    path = root / "packages/first/pyproject.toml"
    for wrong, said in {">=0.1,<0.4": "which do not exist yet", ">=0.0.9,<0.2": "begins with a version"}.items():
        was = path.read_text()
        path.write_text(was.replace(">=0.1,<0.2", wrong))
        assert any(said in each for each in problems(root))
        mend(root)
        assert ranges(root)["first"] == "offbeat-ground>=0.1,<0.2"
        path.write_text(was)
    path.write_text(path.read_text().replace(">=0.1,<0.2", "==0.1.*"))
    assert problems(root) == [
        "offbeat-first: a range between packages has the form \"name>=0.1,<0.2\": got 'offbeat-ground==0.1.*'"
    ]


def test_an_extra_that_an_admitted_version_lacks_is_found(root):
    edit(root, "first", "offbeat-ground>", "offbeat-ground[fast,slow]>")
    assert any("lacks extra [slow]" in each for each in problems(root))


def test_a_version_that_was_built_on_a_package_of_another_name_is_admitted_no_longer(root):
    """It brings the contracts twice: what one half of an environment makes is of no class that the other knows."""
    text = "from offbeat_first import kept\n\n__all__ = []\n"
    add_package(root, "fourth", text, "offbeat-first>=0.1,<0.2")
    write_source(root, "first", '__all__ = ["kept"]\nkept = 1\n')
    (root / "packages/ground").rename(root / "packages/core")
    (root / "packages/core/src/offbeat_ground").rename(root / "packages/core/src/offbeat_core")
    for key in ("core", "first", "second", "third"):
        path = root / f"packages/{key}/pyproject.toml"
        path.write_text(path.read_text().replace("ground", "core"))
    for key in ("first", "second", "third"):
        path = root / f"packages/{key}/src/offbeat_{key}/__init__.py"
        path.write_text(path.read_text().replace("offbeat_ground", "offbeat_core"))
    found = "offbeat-fourth: offbeat-first>=0.1,<0.2 admits 0.1.0, which lacks offbeat_first.kept, a build without"
    assert any(each.startswith(f"{found} offbeat-ground, which is gone") for each in problems(root))
    mend(root)
    assert ranges(root)["fourth"] == "offbeat-first>=0.1.1,<0.2"
    assert problems(root) == []


def test_an_extra_that_goes_is_a_problem_of_the_package_that_asks_for_it(root):
    edit(root, "first", "offbeat-ground>", "offbeat-ground[fast]>")
    edit(root, "ground", "fast =", "slow =")
    release.prepare("ground", breaking=False, behind={}, root=root)
    assert versions(root)["ground"] == "0.2.0"
    (found,) = problems(root)
    assert (
        "offbeat-first: offbeat-ground[fast]>=0.1,<0.3 asks for [fast], which 0.2.0 in the workspace does not" in found
    )


def test_a_release_edits_one_package_and_the_ranges_of_its_dependants(root, capsys):
    write_source(root, "ground", GROUND.replace(', "old"', ""))
    assert release.main(["--prepare", "ground", "--behind", "third=its tests need a device"], root) == 0
    assert versions(root) == {"ground": "0.2.0", "first": "0.1.1", "second": "0.1.1", "third": "0.1.0"}
    assert ranges(root) == {
        "first": "offbeat-ground>=0.1,<0.3",
        "second": "offbeat-ground>=0.1,<0.3",
        "third": "offbeat-ground>=0.1,<0.2",
    }
    assert "## 0.2.0\n- Something." in (root / "packages/ground/CHANGELOG.md").read_text()
    first = (root / "packages/first/CHANGELOG.md").read_text()
    assert "## Unreleased\n- Admits offbeat-ground>=0.1,<0.3.\n- Something." in first
    assert "Admits" not in (root / "packages/third/CHANGELOG.md").read_text()
    assert problems(root) == []
    # A second reason takes the place of the first.
    write_source(root, "ground", GROUND.replace(', "old"', "") + "\n")
    head = "# Changelog\n\n## Unreleased\n- More.\n"
    (root / "packages/ground/CHANGELOG.md").write_text(head)
    behind = {"third": 'there is "no" device,\nnot yet'}
    release.prepare("ground", breaking=False, behind=behind, root=root)
    named = next(package for package in packages(root) if package.key == "third").metadata["tool"]["offbeat"]["behind"]
    assert named == {"offbeat-ground": behind["third"]}
    assert problems(root) == []
    # Once it admits the new version, the reason has to go.
    path = root / "packages/third/pyproject.toml"
    path.write_text(path.read_text().replace("<0.2", "<0.3"))
    assert any("remove the line of [tool.offbeat.behind]" in each for each in problems(root))


def test_a_version_that_is_raised_is_headed_in_the_changelog(root):
    (root / "packages/first/CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n- First.\n")
    write_source(root, "ground", GROUND.replace('"old"', '"old", "new"'))
    write_source(root, "first", "from offbeat_ground import new\n\n__all__ = []\n")
    mend(root)
    assert (root / "packages/first/CHANGELOG.md").read_text() == (
        "# Changelog\n\n## Unreleased\n- Admits offbeat-ground>=0.1.1,<0.2.\n\n## 0.1.0\n- First.\n"
    )


def test_a_dependant_that_uses_a_new_name_cannot_stay_behind(root):
    write_source(root, "ground", GROUND.replace('"old"', '"new"'))
    write_source(root, "third", "import offbeat_ground as ground\n\n__all__ = []\nground.new()\n")
    release.prepare("ground", breaking=False, behind={"third": "it is untested"}, root=root)
    (found,) = problems(root)
    assert "which lacks offbeat_ground.new; it can stay behind no longer: remove its line" in found


def test_a_changed_default_is_breaking_by_declaration(root):
    write_source(root, "ground", GROUND.replace("kept()", "kept(size=2)"))
    assert "code has changed: release as 0.1.1" in release.status(root)[1]
    release.prepare("ground", breaking=True, behind={}, root=root)
    assert versions(root)["ground"] == "0.2.0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prepare", "ground"], "there is nothing to release"),
        (["--prepare", "nothing"], "no package 'nothing'; there are first, ground, second, third"),
        (["--prepare", "ground", "--breaking", "--behind", "ground=why"], "ground do not depend on offbeat-ground"),
        (["--keep", "ground"], "0.1.0 is released already"),
    ],
)
def test_what_cannot_be_released_is_said_in_a_line(root, capsys, arguments, said):
    assert release.main(arguments, root) == 1
    assert said in capsys.readouterr().err
    assert versions(root)["ground"] == "0.1.0"


def test_a_release_needs_words_in_the_changelog(root):
    (root / "packages/ground/CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n")
    with pytest.raises(release.ReleaseError, match="write under one what has changed"):
        release.prepare("ground", breaking=True, behind={}, root=root)
    assert versions(root)["ground"] == "0.1.0"


def test_a_kept_version_is_a_wheel_that_uv_has_built(root):
    release.prepare("ground", breaking=True, behind={}, root=root)
    assert release.keep("ground", root).name == "offbeat_ground-0.2.0-py3-none-any.whl"
    kept = kept_wheels(root)["offbeat-ground"]
    assert [wheel.version for wheel in kept] == [Version(0, 1), Version(0, 2)]
    assert kept[-1].public_names == ["kept", "old"]
    assert kept[-1].metadata.extras == {"fast"}
    assert release.status(root)[1] == "offbeat-ground: 0.2.0 released, unchanged"


def test_a_range_is_read_and_written_alike():
    for text in (">=0.1,<0.2", ">=0.1.3,<0.3", ">=1.0,<2.0"):
        assert str(Range.of(f"offbeat-ground[a,b]{text}")) == text
    assert Version(0, 2) not in Range.of("offbeat-ground >=0.1,<0.2 ; extra == 'fast'")


def test_imports_are_found_in_every_form():
    source = """
import a.parts as parts, other
import a
from a._inner import one as uno
def f():
    from a import two
    return parts.three, a.four, other.five, uno.six
"""
    expected = {("a._inner", "one"), ("a", "two"), ("a.parts", "three"), ("a", "four")}
    assert imports_of(source, {"a"}) == expected


def test_a_private_name_of_a_kept_version_is_looked_for_in_its_module(tmp_path):
    path = tmp_path / "offbeat_a-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("offbeat_a/__init__.py", "from offbeat_a._b import C, D\n__all__ = ['C']\n")
        wheel.writestr("offbeat_a/_b.py", "if True:\n    class C: ...\nD: int = 1\n")
    kept = KeptWheel(path)
    assert kept.has("offbeat_a", "C")
    assert kept.has("offbeat_a", "_b")
    assert kept.has("offbeat_a._b", "D")
    assert not kept.has("offbeat_a", "D")
    assert not kept.has("offbeat_a._b", "E")
    assert not kept.has("offbeat_a._c", "C")

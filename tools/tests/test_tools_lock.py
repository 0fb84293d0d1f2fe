"""The lock's text is read, written and compared as its users rely on. Resolving for real is `nox -s lock_check`."""

import lock
import pytest

EXPORT = """\
anyio==4.16.0 ; sys_platform != 'emscripten' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:cc
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:dd
torch==2.13.0 \\
    --hash=sha256:ee
"""
PINS = [
    "anyio==4.16.0",
    "numpy==2.4.6 ; python_full_version < '3.12'",
    "numpy==2.5.5 ; python_full_version >= '3.12'",
    "torch==2.13.0",
]
PYPROJECT = f"""\
[project]
name = "root"
version = "0"

[tool.uv]
{lock.PINS_START}
constraint-dependencies = [
    "old==1",
]
{lock.PINS_END}

[tool.offbeat.lock]
hold = ["torch==2.13.0"]
"""


@pytest.fixture
def workspace_folder(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def test_a_marker_stays_only_where_a_package_has_several_versions():
    assert lock.pins_of(EXPORT) == PINS


def test_hashes_belong_to_their_version():
    assert lock.hashes_of(EXPORT)["numpy==2.5.5"] == {"sha256:dd"}
    assert lock.hashes_of(EXPORT)["anyio==4.16.0"] == {"sha256:aa", "sha256:bb"}


def test_extras_that_exclude_each_other_are_exported_apart():
    sides = ", ".join(f'{{ package = "one", extra = "{extra}" }}' for extra in ("gpu", "cpu", "tpu"))
    assert lock.excluded_extras(f"[tool.uv]\nconflicts = [[{sides}]]\n") == [
        ["gpu", "tpu"],
        ["cpu", "tpu"],
        ["cpu", "gpu"],
    ]
    assert lock.excluded_extras(PYPROJECT) == [[]]


def test_exports_are_merged_line_by_line():
    here = "anyio==4.16.0 ; sys_platform == 'linux' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    there = "zstd==1.0 \\\n    --hash=sha256:ff\n"
    assert lock.merged([EXPORT, EXPORT]) == EXPORT
    assert (
        lock.merged([there, EXPORT, here])
        == EXPORT.replace("'emscripten'", "'emscripten' or sys_platform == 'linux'") + there
    )
    with pytest.raises(lock.LockError, match=r"torch==2.13.0 has other files"):
        lock.merged([EXPORT, EXPORT.replace("sha256:ee", "sha256:00")])


def test_both_files_are_written_and_agree(workspace_folder):
    lock.write(EXPORT, workspace_folder)
    assert lock.committed_pins(workspace_folder) == PINS
    assert (workspace_folder / lock.LOCK_NAME).read_text() == lock.HEADER + EXPORT
    assert lock.held(workspace_folder) == ["torch==2.13.0"]
    once = (workspace_folder / "pyproject.toml").read_text()
    lock.write(EXPORT, workspace_folder)
    assert (workspace_folder / "pyproject.toml").read_text() == once


def test_a_file_edited_by_hand_is_found(workspace_folder):
    lock.write(EXPORT, workspace_folder)
    pyproject = workspace_folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"anyio==4.16.0"', '"anyio==4.15.0"'))
    with pytest.raises(lock.LockError, match=r"(?s)disagree.*nox -s lock.*- anyio==4.16.0\n.*\+ anyio==4.15.0"):
        lock.check(workspace_folder)


def resolved_as(export, monkeypatch):
    """Replace the registry, which a test that compares texts need not ask."""
    monkeypatch.setattr(lock, "resolve", lambda pins, root: export)


def test_metadata_that_needs_more_is_found(workspace_folder, monkeypatch):
    lock.write(EXPORT, workspace_folder)
    resolved_as(EXPORT + "zstd==1.0 \\\n    --hash=sha256:ff\n", monkeypatch)
    with pytest.raises(lock.LockError, match=r"metadata needs[^$]*\+ zstd==1.0"):
        lock.check(workspace_folder)


def test_a_file_that_is_gone_is_found_and_a_new_one_is_fine(workspace_folder, monkeypatch):
    lock.write(EXPORT, workspace_folder)
    resolved_as(EXPORT.replace("sha256:ee", "sha256:ee \\\n    --hash=sha256:ff"), monkeypatch)
    lock.check(workspace_folder)
    resolved_as(EXPORT.replace("sha256:ee", "sha256:00"), monkeypatch)
    with pytest.raises(lock.LockError, match=r"no longer offered, of torch==2.13.0"):
        lock.check(workspace_folder)


def test_a_pyproject_without_the_block_is_refused():
    with pytest.raises(lock.LockError, match="put them back"):
        lock.with_pins("[tool.uv]\n", PINS)


@pytest.mark.timeout(30)
def test_a_uv_that_does_not_answer_is_given_up(workspace_folder, tmp_path, monkeypatch):
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent))
    monkeypatch.setattr(lock, "UV_TIMEOUT_S", 0.2)
    with pytest.raises(lock.LockError, match=r"uv lock.*gave no answer for 0\.2 s"):
        lock.resolve(PINS, workspace_folder)

"""What the tools ask of the machine: a browser, pip's wheels, a device."""

import os
import stat
from pathlib import Path

import find_bubblewrap
import find_chromium
import find_links
import pytest
from hardware import HardwareTests, hardware_tests, num_passed, why_absent
from workspace import Package


def executable(path, script="#!/bin/sh\n"):
    """Write a program that can be found."""
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare_machine(tmp_path, monkeypatch):
    """Return a machine with nothing on PATH but a folder to put programs in."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("OFFBEAT_CHROMIUM", "PIP_FIND_LINKS", "CI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_browser_on_path_is_taken(bare_machine):
    browser = executable(bare_machine / "google-chrome")
    assert find_chromium.find() == str(browser)


def test_a_named_browser_comes_first(bare_machine, monkeypatch):
    executable(bare_machine / "chromium")
    named = executable(bare_machine / "mine")
    monkeypatch.setenv("OFFBEAT_CHROMIUM", str(named))
    assert find_chromium.find() == str(named)


def test_nothing_is_installed_on_a_machine_that_is_not_thrown_away(bare_machine, capsys):
    executable(bare_machine / "apt-get", f"#!/bin/sh\necho called >> {bare_machine}/calls\n")
    assert find_chromium.main() == 1
    assert "apt-get install chromium" in capsys.readouterr().err
    assert not (bare_machine / "calls").exists()


def test_only_ci_cannot_do_without_a_browser(bare_machine, monkeypatch, capsys):
    assert find_chromium.find_if_required() is None
    assert "apt-get install chromium" in capsys.readouterr().err
    browser = executable(bare_machine / "chromium")
    assert find_chromium.find_if_required() == str(browser)
    browser.unlink()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(FileNotFoundError, match="no Chromium"):
        find_chromium.find_if_required()


def test_a_browser_that_is_named_must_be_there(bare_machine, monkeypatch):
    executable(bare_machine / "chromium")
    monkeypatch.setenv("OFFBEAT_CHROMIUM", str(bare_machine / "gone"))
    with pytest.raises(FileNotFoundError, match="no Chromium"):
        find_chromium.find_if_required()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs")
def test_ci_installs_debians_package(bare_machine, monkeypatch):
    monkeypatch.setenv("CI", "true")
    made = bare_machine / "chromium"
    executable(
        bare_machine / "apt-get",
        f'#!/bin/sh\n[ "$1" = install ] && echo "#!/bin/sh" > {made} && /bin/chmod +x {made}\nexit 0\n',
    )
    assert find_chromium.find() == str(made)


def test_pips_wheels_are_found(bare_machine, monkeypatch):
    assert find_links.find_links() == []
    executable(bare_machine / "pip", '#!/bin/sh\n[ "$*" = "config get global.find-links" ] && echo "a b"\n')
    assert find_links.find_links() == ["a", "b"]
    monkeypatch.setenv("PIP_FIND_LINKS", "c")
    assert find_links.find_links() == ["c"]


def package_for(device, probe):
    """Write a package that declares a device."""
    return Package(folder=Path("packages/runtime/mesh"), metadata={"tool": {"offbeat": {"hardware": {device: probe}}}})


def test_a_device_that_is_not_here_is_skipped_with_the_reason(tmp_path):
    (absent,) = hardware_tests([package_for("cuda", "offbeat-no-such-program -L")])
    assert (absent.key, absent.folder) == ("mesh-cuda", Path("packages/runtime/mesh/tests/cuda"))
    assert why_absent(absent) == "no cuda here: `offbeat-no-such-program -L` is not installed"
    probe = executable(tmp_path / "probe", "#!/bin/sh\necho no device found >&2\nexit 9\n")
    (failing,) = hardware_tests([package_for("cuda", str(probe))])
    assert str(why_absent(failing)).endswith("says 'no device found'")


def test_a_device_that_is_here_is_used(tmp_path):
    probe = executable(tmp_path / "probe")
    assert why_absent(HardwareTests(package=package_for("cuda", ""), device="cuda", probe=str(probe))) is None


def test_a_session_that_only_skips_has_passed_nothing(tmp_path):
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuites><testsuite tests="3" skipped="3" failures="0" errors="0"/></testsuites>')
    assert num_passed(junit) == 0
    junit.write_text('<testsuites><testsuite tests="5" skipped="1" failures="1" errors="0"/></testsuites>')
    assert num_passed(junit) == 3


def test_only_ci_cannot_do_without_bubblewrap(bare_machine, monkeypatch, capsys):
    assert find_bubblewrap.find_if_required() is None
    assert "apt-get install bubblewrap" in capsys.readouterr().err
    monkeypatch.setenv("CI", "true")
    with pytest.raises(FileNotFoundError, match="no bubblewrap"):
        find_bubblewrap.find_if_required()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs")
def test_ci_installs_debians_bubblewrap(bare_machine, monkeypatch):
    monkeypatch.setenv("CI", "true")
    made = bare_machine / "bwrap"
    executable(
        bare_machine / "apt-get",
        f'#!/bin/sh\n[ "$4" = bubblewrap ] && echo "#!/bin/sh" > {made} && /bin/chmod +x {made}\nexit 0\n',
    )
    assert find_bubblewrap.find() == str(made)

"""Files that containers/ names are there. The images are not built here: `nox -s release` lints their files."""

import re
from pathlib import Path

import pytest
from workspace import ROOT, packages

FILES = sorted((ROOT / "containers").glob("Dockerfile.*"))
SECRET = re.compile(r"token|password|secret|key|credential", re.IGNORECASE)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def arguments(path: Path, name: str) -> list[str]:
    """Return the arguments of each instruction of a name."""
    return [argument for instruction, argument in instructions(path) if instruction == name]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def file(request):
    return request.param


def test_both_images_are_there():
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


def test_what_is_copied_is_there_and_is_sent_to_the_builder(file):
    copied = [each.split()[:-1] for each in arguments(file, "COPY") if not each.startswith("--from=")]
    sources = [source for each in copied for source in each]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert [source for source in sources if f"!{source}" not in sent] == []
    assert "*" in sent, "only what is named is sent: no .git, no runs"


def test_links_of_what_is_copied_lead_to_what_is_copied(file):
    copied = {word for each in arguments(file, "COPY") for word in each.split()}
    for package in packages():
        for link in (path for path in package.folder.iterdir() if path.is_symlink()):
            target = link.resolve().relative_to(ROOT)
            assert target.parts[0] in copied, f"{link.relative_to(ROOT)} leads to {target}"


def test_installed_extras_are_those_of_a_package(file):
    known = {package.name: package.extras for package in packages()}
    named = re.findall(r'"(offbeat-[a-z-]+|[a-z-]+-app)\[([a-z,-]+)\]"', " ".join(arguments(file, "RUN")))
    assert [name for name, extras in named if not set(extras.split(",")) <= set(known[name])] == []


def test_the_command_is_a_program_of_ours_and_shows_help(file):
    scripts = {script for package in packages() for script in package.metadata["project"].get("scripts", {})}
    [command] = arguments(file, "CMD")
    program, option = re.findall(r'"([^"]+)"', command)
    assert (program in scripts, option) == (True, "--help")


def test_base_images_have_a_version_and_stages_a_name(file):
    stages: set[str] = set()
    for argument in arguments(file, "FROM"):
        image, *rest = argument.split()
        assert image in stages or re.search(r":\d+\.\d+", image), f"{image}: latest changes"
        stages |= set(rest[1:])
    copied_from = re.findall(r"--from=(\S+)", " ".join(arguments(file, "COPY")))
    assert set(copied_from) <= stages


def test_the_image_runs_without_root_checks_or_secrets(file):
    users = arguments(file, "USER")
    assert all(re.fullmatch(r"[1-9]\d*", user) for user in users)
    assert users
    assert arguments(file, "HEALTHCHECK") == ["NONE"]
    given = " ".join([*arguments(file, "ENV"), *arguments(file, "ARG")])
    assert not SECRET.search(given)


def test_no_file_names_the_address_of_a_registry(file):
    assert "://" not in file.read_text()

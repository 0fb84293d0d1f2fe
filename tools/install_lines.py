"""Runs every install line of the pages, each in an empty environment, against an index server on loopback.

    python tools/install_lines.py --tools .nox/release/bin     with the wheels of build/release/dist

The server has our packages alone and redirects every other name to the machine's own index, so that an installer asks
no other place for a name of ours. What it installs of ours is compared file by file with the wheels of the server.
The table of results is build/release/install-lines.md.
"""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from doc_blocks import blocks, command_lines, pages
from find_links import find_links
from workspace import ROOT, Package, dist_name, packages

FOLDER: Final = ROOT / "build" / "release"
INSTALLERS: Final = re.compile(r"(?:- run: )?(?P<line>(?:pip install|uv pip install|uv add|uv tool install|uvx) .+)")
# Lines with these are resolved and not installed, each with the reason.
RESOLVED_ONLY: Final[Mapping[str, str]] = {
    "offbeat-rollout-vllm[engine]": "vLLM's CUDA build takes several GB and needs a GPU to be imported",
}
# Engines that can be imported without a device.
RUN_ON_CPUS: Final = frozenset(("offbeat-engine-megatron[engine]",))
# A name for a package that a reader would add.
EXAMPLES: Final = frozenset(("offbeat-rollout-x",))
EXCLUDES: Final = re.compile(r"printf '(?P<names>[^']+)' > (?P<file>\S+)")
START_TIMEOUT_S: Final = 30.0
# An application with torch from a cold cache, on two busy cores.
INSTALL_TIMEOUT_S: Final = 900.0
COMMAND_TIMEOUT_S: Final = 120.0


class InstallError(Exception):
    """An install line that does not keep what its page says; the text has the end of what the program wrote."""


@dataclass(frozen=True, kw_only=True)
class InstallLine:
    """An install line and where it is shown.

    Args:
        text: such as 'pip install "offbeat-data[mcp]"'.
        places: page and line of each.
    """

    text: str
    places: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Return its words, without quotes."""
        return shlex.split(self.text)

    def packages_of(self, ours: Mapping[str, Package]) -> list[Package]:
        """Return the packages of ours that it names, also by their folder.

        Raises:
            InstallError: it names one as ours that is not.
        """
        folders = {f"./{package.folder.relative_to(ROOT)}": package for package in ours.values()}
        found = [folders[word] for word in self.words if word in folders]
        for word in self.words:
            name = dist_name(word) if re.match(r"[A-Za-z]", word) else ""
            if name in ours:
                found.append(ours[name])
            elif name.startswith("offbeat") and name not in EXAMPLES:
                raise InstallError(f"{self.places[0]}: there is no package {name}")
        return found

    @property
    def why_resolved_only(self) -> str:
        """Return why it is not installed here; empty where it is."""
        for word in self.words:
            if word in RESOLVED_ONLY:
                return RESOLVED_ONLY[word]
            if word.endswith("[engine]") and word not in RUN_ON_CPUS:
                return "its engine needs the runtime of a device to be imported"
        return ""


def install_lines() -> list[InstallLine]:
    """Return the install lines of all pages, in code blocks and in the text, each once."""
    found: dict[str, list[str]] = {}
    for page in pages():
        for place, line in _shown(page):
            if matched := INSTALLERS.fullmatch(line.strip()):
                found.setdefault(matched["line"], []).append(place)
    return [InstallLine(text=text, places=tuple(places)) for text, places in sorted(found.items())]


def _shown(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page with their places."""
    for block in blocks(page):
        for line in command_lines(block):
            yield block.name, line
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("    "):
            for span in re.findall(r"`([^`]+)`", line):
                yield f"{page}:{number}", span


@contextmanager
def index_server(tools: Path, dist: Path) -> Iterator[str]:
    """Serve the wheels and sdists of a folder on loopback; the address of its simple index."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(tools / "pypi-server"), "run", "--interface=127.0.0.1", f"--port={port}", "--hash-algo=sha256"]
    if own := _machine_index():
        command += [f"--fallback-url={own}"]
    server = subprocess.Popen([*command, str(dist)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}/"
        _wait_for(f"{address}health", server)
        yield f"{address}simple/"
    finally:
        server.terminate()
        server.wait()


def _machine_index() -> str:
    """Return the index that pip is configured with; empty for pip's default, which is the server's too."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    set_here = os.environ.get("PIP_INDEX_URL")
    return set_here or subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise InstallError(f"the index server does not answer at {address}") from error
            time.sleep(0.1)


def run(command: Sequence[str | Path], folder: Path, timeout_s: float, **environment: str) -> str:
    """Run a command and return its output.

    Raises:
        InstallError: it fails or takes too long.
    """
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{command[0]} has not ended after {timeout_s:g} s") from error
    if done.returncode:
        raise InstallError(" ".join(done.stdout.split())[-500:])
    return done.stdout


def install(line: InstallLine, venv: Path, index: str) -> None:
    """Run an install line in an environment, or resolve it where it is not to be installed here.

    Raises:
        InstallError: the installer is not one of those that are known here, or fails.
    """
    words = line.words
    is_local = any(word.startswith("./") for word in words)
    folder = ROOT if is_local else venv.parent
    settings = {
        "PIP_INDEX_URL": index,
        "PIP_NO_COMPILE": "1",
        "UV_DEFAULT_INDEX": index,
        "UV_FIND_LINKS": " ".join(find_links()),
        "UV_NO_CONFIG": "1",
        "VIRTUAL_ENV": str(venv),
    }
    options = words[words.index("install") + 1 :] if "install" in words else []
    if line.why_resolved_only:
        run(["uv", "pip", "install", "--dry-run", *options], folder, INSTALL_TIMEOUT_S, **settings)
    elif words[:3] == ["uv", "pip", "install"]:
        run(["uv", "pip", "install", "--no-progress", *options], folder, INSTALL_TIMEOUT_S, **settings)
    elif words[:2] == ["pip", "install"]:
        run([venv / "bin/python", "-m", "pip", "install", *options], folder, INSTALL_TIMEOUT_S, **settings)
    else:
        raise InstallError(f"{line.text}: only lines of pip and uv pip can be run; add this kind")


def record_of(lines: str) -> set[str]:
    """Return the files of a RECORD with their digests, without what an installer adds or rewrites."""
    return {line.rpartition(",")[0] for line in lines.splitlines() if ",sha256=" in line}


def foreign(venv: Path, dist: Path, ours: Mapping[str, Package]) -> list[str]:
    """Return what is installed under a name of ours but is not the server's, a line each."""
    found = []
    for folder in venv.glob("lib/python*/site-packages/*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        if dist_name(name) not in ours:
            continue
        wheel = dist / f"{name}-{version}-py3-none-any.whl"
        if not wheel.is_file():
            found.append(f"{name} {version} is not one of the server's wheels")
            continue
        with zipfile.ZipFile(wheel) as archive:
            expected = record_of(archive.read(f"{name}-{version}.dist-info/RECORD").decode())
        missing = expected - record_of((folder / "RECORD").read_text())
        found += [f"{name} {version} has another {each.partition(',')[0]}" for each in sorted(missing)]
    return found


def use(line: InstallLine, venv: Path, named: Sequence[Package]) -> str:
    """Import what a line has installed and ask its commands for their version; the versions.

    Raises:
        InstallError: one does not work.
    """
    if "--no-deps" in line.words:
        return "not imported: what it needs is in the container"
    modules = ", ".join(package.import_name for package in named)
    run([venv / "bin/python", "-P", "-c", f"import {modules}"], venv.parent, COMMAND_TIMEOUT_S)
    commands = [name for package in named for name in package.metadata["project"].get("scripts", {})]
    asked = [run([venv / "bin" / name, "--version"], venv.parent, COMMAND_TIMEOUT_S).strip() for name in commands]
    return ", ".join(["imported", *asked])


def try_line(line: InstallLine, named: Sequence[Package], index: str, dist: Path, ours: Mapping[str, Package]) -> str:
    """Run one line in an empty environment; what was found.

    Raises:
        InstallError: it does not install, or not what the server has, or it does not work.
    """
    with tempfile.TemporaryDirectory(prefix="offbeat-install-") as folder:
        venv = Path(folder) / "venv"
        run(["uv", "venv", "--seed", f"--python={sys.executable}", venv], Path(folder), COMMAND_TIMEOUT_S)
        (Path(folder) / "dist").symlink_to(dist)
        for page in {place.partition(":")[0] for place in line.places}:
            for found in EXCLUDES.finditer((ROOT / page).read_text()):
                (Path(folder) / found["file"]).write_text(found["names"].replace("\\n", "\n"))
        install(line, venv, index)
        if line.why_resolved_only:
            return f"resolved only: {line.why_resolved_only}"
        if not any(word.startswith("./") for word in line.words) and (wrong := foreign(venv, dist, ours)):
            raise InstallError("; ".join(wrong))
        return use(line, venv, named)


def try_all(tools: Path, dist: Path, lines: Sequence[InstallLine]) -> Iterator[tuple[InstallLine, str, bool]]:
    """Yield every line that names a package of ours, what was found, and whether it works."""
    ours = {package.name: package for package in packages()}
    with index_server(tools, dist) as index:
        for line in lines:
            try:
                if named := line.packages_of(ours):
                    yield line, try_line(line, named, index, dist, ours), True
            except InstallError as error:
                yield line, str(error), False


def table(rows: Sequence[tuple[InstallLine, str, bool]]) -> str:
    """Return the page of results: each line, how many places show it, what was found, and whether it works."""
    lines = ["# Install lines", "", "| line | places | found | result |", "|---|---|---|---|"]
    for line, found, works in rows:
        lines.append(f"| `{line.text}` | {len(line.places)} | {found} | {'passed' if works else '**fails**'} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True, help="bin folder with pypi-server")
    parser.add_argument("--dist", type=Path, default=FOLDER / "dist", help="folder with our wheels and sdists")
    parser.add_argument("lines", nargs="*", help="parts of the lines to run; default: all")
    chosen = parser.parse_args(arguments)
    wanted = [line for line in install_lines() if not chosen.lines or any(part in line.text for part in chosen.lines)]
    dist = chosen.dist.absolute()
    if not any(dist.glob("*.whl")):
        parser.error(f"{chosen.dist} has no wheels: run `nox -s release` first")
    rows = []
    for line, found, works in try_all(chosen.tools.absolute(), dist, wanted):
        print(f"{'passed' if works else 'FAILS '}  {line.text}: {found}", flush=True)
        rows.append((line, found, works))
    (dist.parent / "install-lines.md").write_text(table(rows))
    return not rows or not all(works for *_, works in rows)


if __name__ == "__main__":
    sys.exit(main())

"""The recording tool: what it reads out of source, and how it compares two records."""

import json
import subprocess
import sys

import pytest
from record_api import RecordingError, compare, find_symbol, names_of, record
from workspace import ROOT

SOURCE = '''
import missing_engine

LEVEL = 2

try:
    import fast
except ImportError:
    def fallback(a, /, b=1, *rest, c, d: int = 2, **more) -> str: ...

@dataclass
class Params:
    """Text."""
    size: int = 3
    name: str
    MODE = "on"

    async def run(self, tags: list[str], *, wait=True): ...

class Server:
    def routes(self):
        self.app.add_api_route("/health", self.health)
        self.app.add_api_route("/load", self.load, methods=["POST", "PUT"])

    @app.get("/version")
    def version(self): ...
'''


def wanted(*symbols, path="engine/api.py"):
    return {
        "package": "engine",
        "version": "1.0",
        "repository": "someone/engine",
        "files": {path: {"commit": "abc", "symbols": list(symbols)}},
    }


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "api.py").write_text(SOURCE)
    return tmp_path


def recorded(sources, *symbols):
    return record(wanted(*symbols), sources)


def test_signatures_fields_and_routes_are_read_without_importing(sources):
    found = recorded(sources, "fallback", "Params", "Server")
    assert names_of(find_symbol(found, "engine/api.py", "fallback")) == {"a", "b", "rest", "c", "d", "more"}
    assert names_of(find_symbol(found, "engine/api.py", "Params")) == {"size", "name", "MODE", "run"}
    kinds = [each["kind"] for each in find_symbol(found, "engine/api.py", "fallback")["parameters"]]
    assert kinds == ["positional", "either", "rest", "keyword", "keyword", "keywords"]
    run = find_symbol(found, "engine/api.py", "Params.run")
    assert run["kind"] == "async function"
    assert run["parameters"][-1] == {"name": "wait", "kind": "keyword", "default": "True"}
    routes = find_symbol(found, "engine/api.py", "Server")["routes"]
    assert routes == {
        "GET /health": "self.health",
        "POST /load": "self.load",
        "PUT /load": "self.load",
        "GET /version": "version",
    }
    assert found["files"]["engine/api.py"]["commit"] == "abc"
    assert json.loads(json.dumps(found)) == found


def test_what_is_not_there_is_named_all_at_once(sources):
    with pytest.raises(RecordingError, match=r"engine/api\.py: Gone.*Missing"):
        recorded(sources, "Params", "Gone", "Missing")
    with pytest.raises(RecordingError, match=r"engine/other\.py"):
        record(wanted("Params", path="engine/other.py"), sources)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("size: int = 3", "size: int = 4", "size was 3 by default, and is 4"),
        ("    size: int = 3\n", "", "field size is gone"),
        ("tags: list[str], *, wait=True", "*, wait=True", "Params.run: parameter tags is gone"),
        ("tags: list[str], *, wait=True", "tags, level, *, wait=True", "parameter level is new and has no default"),
        ("tags: list[str], *, wait=True", "tags, wait=True", "wait was keyword, and is either"),
        ("async def run", "def run", "was a async function, and is a function"),
        ("class Params", "class Parameters", "Params is gone"),
        ("LEVEL = 2", "LEVEL = 3", "LEVEL was 2, and is 3"),
        ('"/health"', '"/healthy"', "route GET /health is gone"),
        ("b=1, *rest, c, d: int = 2, **more", "b=1, **more", None),
        ("wait=True", "wait=True, deadline=None", None),
        ("size: int = 3", "size: int = 3\n    extra: int = 1", None),
    ],
)
def test_a_change_is_told_if_a_caller_would_stumble_over_it(sources, before, after, message):
    symbols = ("LEVEL", "fallback", "Params", "Server")
    old = recorded(sources, *symbols)
    file = sources / "engine" / "api.py"
    assert before in SOURCE
    file.write_text(SOURCE.replace(before, after))
    remaining = [name for name in symbols if f"{name} is gone" != message]
    new = recorded(sources, *remaining)
    changes = "\n".join(compare(old, new))
    assert (message in changes) if message else not changes


def test_the_command_records_and_compares(sources, tmp_path):
    (tmp_path / "wanted.json").write_text(json.dumps(wanted("Params")))

    def run(*words):
        command = [sys.executable, str(ROOT / "tools" / "record_api.py"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run("record", tmp_path / "wanted.json", sources, "-o", tmp_path / "old.json").returncode == 0
    assert run("compare", tmp_path / "old.json", tmp_path / "old.json").returncode == 0
    (sources / "engine" / "api.py").write_text(SOURCE.replace("    size: int = 3\n", ""))
    assert run("record", tmp_path / "wanted.json", sources, "-o", tmp_path / "new.json").returncode == 0
    done = run("compare", tmp_path / "old.json", tmp_path / "new.json")
    assert done.returncode == 1
    assert "size is gone" in done.stdout
    (tmp_path / "wanted.json").write_text(json.dumps(wanted("Nothing")))
    done = run("record", tmp_path / "wanted.json", sources, "-o", tmp_path / "none.json")
    assert done.returncode == 1
    assert "Nothing" in done.stderr
    assert not (tmp_path / "none.json").exists()

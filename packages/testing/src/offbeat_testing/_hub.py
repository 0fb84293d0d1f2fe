"""A Hugging Face Hub on loopback that serves folders of this machine to the real clients.

It answers what huggingface_hub asks when it looks up and fetches a repository: information, the tree of a commit, and
files by range. The client is sent to it by `HF_ENDPOINT`, in a process of its own or by `HubServer.environment`.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import pytest

_ROUTE: Final = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<api>[^/]+/[^/]+)(?:/(?P<verb>revision|tree)/(?P<at>.+))?"
    r"|/(?P<data>datasets/)?(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[0-9a-f]{40})/(?P<file>.+)"
)
_LARGE_BYTES: Final = 1024
"""Files of at least this size are large ones, which the Hub knows by their sha256; it has 10 MB."""


@dataclass
class HubRepositoryFolder:
    """A repository that is served.

    Args:
        folder: of its files.
        commit: that "main" stands for.
        branches: further ones, each with the folder of its files.
        is_gated: needs a token.
        cut_after_bytes: the next so many answers end after these bytes, the connection with them.
        num_cuts: answers that are still to be cut.
        damaged: files of which the last byte is sent wrong.
    """

    folder: Path
    commit: str
    branches: dict[str, Path] = field(default_factory=dict)
    is_gated: bool = False
    cut_after_bytes: int = 0
    num_cuts: int = 0
    damaged: set[str] = field(default_factory=set)

    def find(self, revision: str) -> tuple[str, Path] | None:
        """Return the commit that a revision stands for, and the folder of its files; None where there is none."""
        known = {self.commit: (self.commit, self.folder), "main": (self.commit, self.folder)}
        for branch, folder in self.branches.items():
            commit = _commit_of(folder)
            known |= {branch: (commit, folder), commit: (commit, folder)}
        return known.get(revision)


def _commit_of(folder: Path) -> str:
    """Return a commit made of the contents of a folder's files."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by their path in it."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


class HubServer:
    """A Hub on a free port of loopback, while it is open.

    Args:
        token: that gated repositories need.
    """

    def __init__(self, token: str = "hf_of_a_test") -> None:
        self.token = token
        self.requests: list[str] = []
        self.sent_bytes = 0
        self.answers = threading.Event()
        """Requests wait until it is set, as it is at first."""
        self.answers.set()
        self._repositories: dict[tuple[str, str], HubRepositoryFolder] = {}
        handler = type("_BoundHandler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="hub")

    @property
    def address(self) -> str:
        """Return the address that `HF_ENDPOINT` takes."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the variables of a process whose client asks this server, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def use_in_this_process(self, monkeypatch: "pytest.MonkeyPatch", cache: Path) -> None:
        """Send the client of this process and of its forks to this server, for the length of a test."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))

    def add(self, name: str, folder: Path, kind: str = "model", **faults: Any) -> HubRepositoryFolder:
        """Serve a folder as the repository of a name, under a commit made of its files' contents."""
        repository = HubRepositoryFolder(folder, _commit_of(folder), **faults)
        self._repositories[f"{kind}s", name] = repository
        return repository

    def find(self, kind: str, name: str) -> HubRepositoryFolder | None:
        """Return the repository of a name."""
        return self._repositories.get((kind, name))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.answers.wait()
        found = _ROUTE.fullmatch(path)
        kind = "datasets" if found and (found["kind"] == "datasets" or found["data"]) else "models"
        repository = self.hub.find(kind, found["api"] or found["repository"]) if found else None
        if found is None or repository is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif repository.is_gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(HTTPStatus.FORBIDDEN, "GatedRepo")
        elif (at := repository.find(found["at"] or found["revision"] or "main")) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        elif found["file"]:
            self._send_file(repository, *at, found["file"])
        elif found["verb"] == "tree":
            self._send_json([_tree_entry(name, path) for name, path in _files_of(at[1]).items()])
        else:
            self._send_json(_information(found["api"], *at))

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", status.phrase)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, repository: HubRepositoryFolder, commit: str, folder: Path, name: str) -> None:
        path = _files_of(folder).get(name)
        if path is None:
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        body = path.read_bytes()
        oid = _oid(body)
        if name in repository.damaged:
            body = body[:-1] + bytes([body[-1] ^ 1])
        first, last = self._range(len(body))
        part = body[first : last + 1]
        self.send_response(HTTPStatus.PARTIAL_CONTENT if "Range" in self.headers else HTTPStatus.OK)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{oid}"')
        self.send_header("Accept-Ranges", "bytes")
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if repository.num_cuts and len(part) > repository.cut_after_bytes:
            repository.num_cuts -= 1
            part = part[: repository.cut_after_bytes]
            self.close_connection = True
        self.wfile.write(part)
        self.hub.sent_bytes += len(part)

    def _range(self, num_bytes: int) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None:
            return 0, num_bytes - 1
        return int(found[1]), min(int(found[2] or num_bytes - 1), num_bytes - 1)


def _oid(body: bytes) -> str:
    """Return the name of a file's contents: sha256 of a large one, what git calls a small one."""
    if len(body) >= _LARGE_BYTES:
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


def _tree_entry(name: str, path: Path) -> dict[str, Any]:
    body = path.read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": _oid(body)}
    if len(body) >= _LARGE_BYTES:
        entry |= {"oid": "0" * 40, "lfs": {"oid": _oid(body), "size": len(body), "pointerSize": 130}}
    return entry


def _information(name: str, commit: str, folder: Path) -> dict[str, Any]:
    siblings = []
    for each, path in _files_of(folder).items():
        entry = _tree_entry(each, path)
        lfs = entry.get("lfs")
        large = {"lfs": {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": 130}} if lfs else {}
        siblings.append({"rfilename": each, "size": entry["size"], "blobId": entry["oid"], **large})
    return {
        "id": name,
        "modelId": name,
        "sha": commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
        "cardData": _card(folder / "README.md"),
    }


def _card(readme: Path) -> Mapping[str, Any]:
    """Return the settings at the head of a README, as the Hub reads them."""
    from huggingface_hub import metadata_load

    found: Mapping[str, Any] | None = metadata_load(readme) if readme.is_file() else None
    return found or {}

"""Files of the Hugging Face Hub, in its cache on this machine.

Downloads are those of huggingface_hub, with its cache (`HF_HOME`), tokens (`HF_TOKEN`, `hf auth login`), mirror
(`HF_ENDPOINT`) and offline switch (`HF_HUB_OFFLINE`). After a download that broke off, its whole files stay and the
others are fetched. Here a name is pinned to a commit before anything is fetched, the disk is asked for room, only the
files that are needed come, and what has come is held to the digests that the Hub has of it.
"""

import hashlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from offbeat_core._errors import BackendError, DataError, ModelError, UserError
from offbeat_core._hub_names import HubKind, HubName, find_hub_name, is_commit
from offbeat_core._models.files import TOKENIZER_FILES

_MODEL_FILES: Final = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    *TOKENIZER_FILES,
)
"""Files of a model that a run reads, in the repository's first folder: no second copy in another format, no code."""
DATASET_FORMS: Final = (".parquet", ".jsonl", ".ndjson", ".json")
"""Endings of the files of a data set that are read here."""
_AS_PARQUET: Final = "refs/convert/parquet"
"""Revision in which the Hub keeps its own conversion of public data sets: CONFIG/SPLIT/0000.parquet."""
_ANSWER_WITHIN_S: float = 30.0
"""Longest silence of the Hub in a lookup, which its library would wait for without an end; downloads have a limit of
their own, HF_HUB_DOWNLOAD_TIMEOUT."""
_ROOM_SHARE: Final = 1.02
"""Room asked for over the bytes to come: the file system and the cache keep books of their own."""
_CHUNK_BYTES: Final = 2**24


@dataclass(frozen=True, kw_only=True)
class HubRepository:
    """Files of a repository at one commit.

    Args:
        name: pinned.
        sizes: bytes of each file by its path in the repository.
        card: settings at the head of its README.
    """

    name: HubName
    sizes: Mapping[str, int]
    card: Mapping[str, Any]


def pin_hub_name(name: HubName, kind: HubKind) -> HubName:
    """Return the name with the commit that its revision stands for now.

    Where the Hub is switched off or cannot be reached, it is the commit that the cache has of it. Of a data set in
    another form than is read here, it is the commit of the Hub's own conversion.

    Raises:
        UserError: no such repository or revision, no right to read it, or no way to the Hub and nothing in the cache.
    """
    if is_commit(name.revision):
        return name
    with _saying_why(name, kind):
        try:
            info = _look_up(name, kind)
        except Exception as error:
            reference = _reference(name, kind)
            if not reference.is_file() or not _is_out_of_reach(error):
                raise
            return replace(name, revision=reference.read_text().strip())
    if kind == "dataset" and not name.revision and not any(file.endswith(DATASET_FORMS) for file in _sizes_of(info)):
        return pin_hub_name(replace(name, revision=_AS_PARQUET), kind)
    pinned = replace(name, revision=str(info.sha))
    _note_commit(name, kind, pinned.revision)
    return pinned


def _note_commit(name: HubName, kind: HubKind, commit: str) -> None:
    """Note in the cache what a branch or tag stands for, as the library does where it fetches by that name."""
    reference = _reference(name, kind)
    with suppress(OSError):  # a cache that others share may be read alone
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)


def open_hub_repository(name: HubName, kind: HubKind) -> HubRepository:
    """Ask the Hub for the files of a pinned name; where it is out of reach, look into the cache.

    Raises:
        UserError: as of `pin_hub_name`.
    """
    hub = _library()
    with _saying_why(name, kind):
        try:
            info = _look_up(name, kind)
        except Exception as error:
            folder = _cached_folder(name, kind)
            if not folder.is_dir() or not _is_out_of_reach(error):
                raise
            files = [file for file in folder.rglob("*") if file.is_file()]
            return HubRepository(
                name=name,
                sizes={str(file.relative_to(folder)): file.stat().st_size for file in files},
                card=_card_of(hub, folder / "README.md"),
            )
    card = info.card_data.to_dict() if info.card_data else {}
    return HubRepository(name=name, sizes=_sizes_of(info), card=card)


def local_model(path: str) -> str:
    """Return a model's path as it is, or, of a name of the Hub, the folder in the cache, fetched.

    Raises:
        ModelError: as of `fetch_hub_files`.
    """
    name = find_hub_name(path, "model")
    return path if name is None else str(fetch_hub_model(pin_hub_name(name, "model")))


def fetch_hub_model(name: HubName) -> Path:
    """Return the folder of a model in the cache, with all that a run reads of it.

    Raises:
        ModelError: as of `fetch_hub_files`.
    """
    return fetch_hub_files(name, "model", _MODEL_FILES)


def fetch_hub_files(name: HubName, kind: HubKind, patterns: Sequence[str]) -> Path:
    """Return the folder of a repository in the cache, once files that match a pattern are whole.

    Args:
        name: pinned.
        kind: of the repository.
        patterns: as of a shell; one without a slash means the first folder alone.

    Raises:
        UserError: as of `pin_hub_name`; or the disk has no room, or a file has another digest than the Hub says.
    """
    hub = _library()
    arguments: dict[str, Any] = {"repo_type": kind, "revision": name.revision, "allow_patterns": list(patterns)}
    if not any("/" in pattern for pattern in patterns):
        arguments["ignore_patterns"] = ["*/*"]
    folder, missing = _cached_folder(name, kind), dict[str, int]()
    with _saying_why(name, kind):
        try:
            sizes = _sizes_of(_look_up(name, kind))
            wanted = _library("huggingface_hub.utils").filter_repo_objects(
                sizes, allow_patterns=arguments["allow_patterns"], ignore_patterns=arguments.get("ignore_patterns")
            )
            missing = {file: sizes[file] for file in wanted if not (folder / file).exists()}
            _require_room(name, kind, sum(missing.values()))
        except Exception as error:
            if not _is_out_of_reach(error):
                raise
            arguments["local_files_only"] = True
        folder = Path(hub.snapshot_download(name.repository, **arguments))
        for file in missing:
            _check_digest(name, kind, folder / file)
    return folder


def _require_room(name: HubName, kind: HubKind, num_bytes: int) -> None:
    """Refuse a download that would fill the disk."""
    cache = Path(_library("huggingface_hub.constants").HF_HUB_CACHE)
    place = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if num_bytes * _ROOM_SHARE > free:
        raise _ERRORS[kind](
            f"{name.shown}: {num_bytes / 2**30:.2f} GiB are to be fetched, and {cache} has room for "
            f"{free / 2**30:.2f} GiB; make room, or set HF_HOME to a folder on a larger disk"
        )


def _check_digest(name: HubName, kind: HubKind, file: Path) -> None:
    """Compare a large file with its digest, by which the cache calls it; remove it where they differ."""
    blob = file.resolve()
    if not re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return  # a small file, which git holds under a digest of its own
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with blob.open("rb") as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
    if digest.hexdigest() != blob.name:
        file.unlink()
        blob.unlink()
        raise _ERRORS[kind](
            f"{name.shown}: {file.name} was damaged on its way: its sha256 is {digest.hexdigest()[:12]}... where the "
            f"Hub has {blob.name[:12]}...; it was removed, run the command again"
        )


def hub_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a folder of the cache, which the cache calls its contents by."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_symlink()]
    return {str(file.relative_to(folder)): Path(os.readlink(file)).name for file in files}


_ERRORS: Final[dict[HubKind, type[UserError]]] = {"model": ModelError, "dataset": DataError}


def _library(module: str = "huggingface_hub") -> Any:
    """Import huggingface_hub, or a module of it; most runs do without."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError('names of the Hub need huggingface_hub: pip install "offbeat-core[hub]"') from error


def _is_out_of_reach(error: Exception) -> bool:
    """Return whether there was no answer of the Hub, or one that says nothing of the repository."""
    if not isinstance(error, (_library("huggingface_hub.errors").HTTPError, OSError)):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500


def _cache_of(name: HubName, kind: HubKind) -> Path:
    """Return the folder of a repository in the cache.

    Source: huggingface_hub, docs, "Understand caching".
    """
    cache = Path(_library("huggingface_hub.constants").HF_HUB_CACHE)
    return cache / "--".join([f"{kind}s", *name.repository.split("/")])


def _cached_folder(name: HubName, kind: HubKind) -> Path:
    """Return where the cache has the files of a commit."""
    return _cache_of(name, kind) / "snapshots" / name.revision


def _reference(name: HubName, kind: HubKind) -> Path:
    """Return the file of the cache that holds the commit of a branch or tag."""
    return _cache_of(name, kind) / "refs" / (name.revision or "main")


def _look_up(name: HubName, kind: HubKind) -> Any:
    """Ask the Hub for a repository at a revision: its commit, its card, and its files with their sizes."""
    hub = _library()
    session = hub.get_session()
    if session.timeout.read is None:  # also of the lookups that the library makes in a download
        session.timeout = _ANSWER_WITHIN_S
    return hub.HfApi().repo_info(
        name.repository, repo_type=kind, revision=name.revision or None, files_metadata=True, timeout=_ANSWER_WITHIN_S
    )


def _sizes_of(info: Any) -> dict[str, int]:
    return {each.rfilename: int(each.size or 0) for each in info.siblings or ()}


def _card_of(hub: Any, readme: Path) -> Mapping[str, Any]:
    if not readme.is_file():
        return {}
    found: Mapping[str, Any] = hub.RepoCard.load(readme, ignore_metadata_errors=True).data.to_dict()
    return found


@contextmanager
def _saying_why(name: HubName, kind: HubKind) -> Iterator[None]:
    """Raise what the library says as one error that tells what to do."""
    errors: Any = _library("huggingface_hub.errors")
    wrong, what = _ERRORS[kind], "model" if kind == "model" else "data set"
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise wrong(
            f"{name.shown}: access to this {what} must be asked for on its page of the Hub, and then needs your token: "
            "hf auth login, or HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise wrong(
            f"{name.shown}: there is no such {what} on the Hub, and no such path here; look at its spelling; a private "
            "one needs your token: hf auth login, or HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        if name.revision == _AS_PARQUET:
            forms = ", ".join(DATASET_FORMS)
            raise wrong(
                f"{name.repository}: no file of {forms}, and the Hub has no conversion of it: convert it"
            ) from error
        raise wrong(
            f"{name.shown}: this {what} has no revision {name.revision}: give a branch, a tag or a commit"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise wrong(
            f"{name.shown}: {_not_here(what)}, and HF_HUB_OFFLINE is set: unset it to fetch the {what}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        is_off = _library("huggingface_hub.constants").HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set: unset it" if is_off else "the Hub cannot be reached: look at the network"
        raise wrong(f"{name.shown}: {_not_here(what)}, and {reason} to fetch the {what}") from error
    except (errors.HTTPError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise wrong(
            f"{name.shown}: the {what} could not be fetched: {type(error).__name__}: {first_line}; the "
            "files that are whole stay, run the command again for the others"
        ) from error


def _not_here(what: str) -> str:
    return f"the {what} is not whole in the Hub's cache on this machine"

"""Writes and reads checkpoints: a Hugging Face folder, and beside it what training needs to go on.

config.json, model*.safetensors, tokenizer   plain transformers loads the folder
mtp*.safetensors                             layers of multi-token prediction, which transformers does not look at
adapter/                                     with LoRA: the adapters in PEFT's form; the weights above are merged
trainer/optimizer*.safetensors               Adam's moments, whole tensors: "exp_avg.NAME" and "exp_avg_sq.NAME"
trainer/engine.json                          format, updates done and refused, and which file holds which moments

All tensors are float32; of weights in bfloat16 these are the values that they are rounded from. Whole tensors under
Hugging Face names, so that any layout reads what any other has written; the format is that of
offbeat-engine-torch, and either engine goes on from what the other has saved. Every rank gathers bucket by bucket and
writes the files that are its own. megatron-core's own checkpoints are not used: with torch's Adam they lose the count
of steps when the layout changes, and after loading all parameters share one step tensor, which Adam then counts up
once for each of them.
"""

import dataclasses
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor

from offbeat_dist import Device, Mesh
from offbeat_engine_megatron._background import BackgroundWrite
from offbeat_engine_megatron._folders import publish, recover, stage, sync_tree
from offbeat_engine_megatron._lora import Adapters, peft_name
from offbeat_engine_megatron._optimizer import ClippedOptimizer
from offbeat_engine_megatron._optimizer_state import MOMENTS, OptimizerState
from offbeat_engine_megatron._ranks import Ranks
from offbeat_engine_megatron._shape import read_model
from offbeat_engine_megatron._tensor_files import (
    Entry,
    PlannedFile,
    TensorFolder,
    index_of,
    plan_files,
    write_files,
)
from offbeat_engine_megatron._weights import HeldWeights
from offbeat_types import MODEL_INDEX_FILE, ModelError, RunFolderError, UserError, drop_model_files

if TYPE_CHECKING:
    from offbeat_engine_megatron._plan import Plan

T = TypeVar("T")

FORMAT: Final = 2
FOLDER: Final = "trainer"
STATE_FILE: Final = "engine.json"
ADAPTER_FOLDER: Final = "adapter"
ADAPTER_FILE: Final = "adapter_model.safetensors"
ADAPTER_SETTINGS: Final = "adapter_config.json"
MTP_LAYERS: Final = "num_nextn_predict_layers"
"""In config.json, as DeepSeek-V3 and others say it."""

HOST_RNG, DEVICE_RNG = "rng.host", "rng.device"
TOKENIZER_FILES: Final = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)

Stream = Iterator[tuple[str, Tensor]]


class Checkpoints:
    """What one engine saves and loads. All ranks call every method, in the same order with the same arguments.

    Args:
        ranks: who they are.
        mesh: of them.
        held: the weights.
        optimizer: of them.
        device: of this rank.
        plan: of the engine.
        adapters: what is trained instead of the weights, if so.
        ahead: layers of multi-token prediction, if there are such.
    """

    def __init__(
        self,
        ranks: Ranks,
        mesh: Mesh,
        held: HeldWeights,
        optimizer: ClippedOptimizer,
        device: Device,
        plan: "Plan",
        adapters: Adapters | None = None,
        ahead: HeldWeights | None = None,
    ) -> None:
        self._adapters, self._ahead = adapters, ahead
        self._trained = (held if adapters is None else adapters.held, *([] if ahead is None else [ahead]))
        self._ranks, self._held, self._optimizer, self._device = ranks, held, optimizer, device
        self._rank = mesh.group("dp", "cp", "tp", "pp").rank
        self._plan = plan
        self._background = BackgroundWrite(mesh, plan.options.save_deadline_s)

    def finish(self) -> None:
        """Wait for the write in the background; see `BackgroundWrite.finish`."""
        self._background.finish()

    def export(self, folder: Path) -> None:
        """Write a folder that plain transformers loads; weights that it held are removed first.

        Raises:
            RunFolderError: it cannot be written; on all ranks.
        """
        self.finish()
        self._on_each("save_weights", lambda: folder.mkdir(parents=True, exist_ok=True))
        self._on_each("save_weights", lambda: drop_model_files(folder) if self._ranks.leader else None)
        files = self._files(with_state=False)
        self._on_each("save_weights", lambda: self._write(folder, files, self._stream(with_state=False)))
        self._on_each("save_weights", lambda: self._finish_export(folder, files))

    def save(self, folder: Path, steps_refused: int, *, background: bool) -> None:
        """Write a checkpoint, which takes the place of an older one when all of it is on the disk.

        Args:
            folder: a checkpoint in it is replaced; where there is none, weights in it are, and other files stay.
            steps_refused: the engine's count.
            background: return when the host holds a copy of everything; the rest goes on in threads.

        Raises:
            RunFolderError: it cannot be written, or the one before it could not; on all ranks.
        """
        self.finish()
        made = self._on_each("save", lambda: str(stage(folder)) if self._ranks.leader else "")
        staged = Path(self._ranks.exchange(made)[0])
        files = self._files(with_state=True)
        state = self._state(files, steps_refused)
        self._on_each("save", lambda: self._make_folders(staged) if self._ranks.leader else None)

        def complete() -> None:
            self._finish_export(staged, files)
            (staged / FOLDER / STATE_FILE).write_text(json.dumps(state) + "\n")
            replaces = (folder / FOLDER / STATE_FILE).is_file()
            if not replaces:
                drop_model_files(folder)
            publish(staged, folder, replaces=replaces)

        def clear() -> None:
            if self._ranks.leader:
                shutil.rmtree(staged, ignore_errors=True)

        stream = self._stream(with_state=True)
        if background:
            held = [(name, tensor.cpu()) for name, tensor in self._own(files, stream)]
            deque(stream, maxlen=0)
            self._background.begin(folder, partial(self._write, staged, files, iter(held), own=True), complete, clear)
            return
        try:
            self._on_each("save", lambda: self._write(staged, files, stream))
            self._on_each("save", lambda: complete() if self._ranks.leader else None)
        finally:
            clear()

    def load(self, folder: Path) -> int:
        """Read what `save` has written; how many steps had been refused.

        Headers and shapes of all files are checked before anything is changed. A read that fails after that, such as
        from a disk that breaks, leaves the policy half loaded and the group ended: start anew.

        Raises:
            ModelError: the folder is not a whole checkpoint of this model; on all ranks, before anything is changed.
            OSError, SafetensorError, PeerFailedError: a file that was whole cannot be read to its end.
        """
        self.finish()
        self._on_each("load", lambda: recover(folder) if self._ranks.leader else None, ModelError)
        state, weights, moments = self._on_each("load", lambda: self._open(folder), ModelError)
        with weights, moments, self._ranks.together("load"):
            optimizer = OptimizerState(self._optimizer)
            for each in self._trained:
                each.read_values(weights, "", optimizer.put_weights)
                for name in MOMENTS:
                    each.read_values(moments, f"{name}.", partial(_put, optimizer, name))
            self._optimizer.steps_taken = state["steps_taken"]
            optimizer.count_steps(state["steps_taken"])
            self._set_random_state(folder / FOLDER, sorted(state["parts"]))
        refused: int = state["steps_refused"]
        return refused

    # ── what is written ───────────────────────────────────────────────────────────────────────────────────────────

    def _files(self, *, with_state: bool) -> list[PlannedFile]:
        """All files with tensors in the order of `_stream`, the same on all ranks; the state's with their folder."""
        files = plan_files("model", _entries(self._held), self._ranks.size)
        if self._ahead is not None:
            files += plan_files("mtp", _entries(self._ahead), self._ranks.size)
        if not with_state:
            return files
        buckets = [bucket for held in self._trained for bucket in _entries(held)]
        if self._adapters is not None:
            stored = tuple(dataclasses.replace(e, name=peft_name(e.name)) for bucket in buckets for e in bucket)
            files.append(PlannedFile(name=f"{ADAPTER_FOLDER}/{ADAPTER_FILE}", writer=0, entries=stored))
        pairs = [[_of(moment, entry) for moment in MOMENTS for entry in bucket] for bucket in buckets]
        random = tuple(
            Entry(name=name, shape=tuple(state.shape), dtype=torch.uint8) for name, state in self._random_state()
        )
        return files + [
            dataclasses.replace(file, name=f"{FOLDER}/{file.name}", entries=random + file.entries)
            for file in plan_files("optimizer", pairs, self._ranks.size)
        ]

    def _stream(self, *, with_state: bool) -> Stream:
        """Every tensor on every rank, one bucket at a time. All ranks iterate to the end."""
        self._optimizer.gather_weights()
        state = OptimizerState(self._optimizer)
        yield from self._held.gather(None if self._adapters is not None else state.weights)
        if self._ahead is not None:
            yield from self._ahead.gather(state.weights)
        if with_state and self._adapters is not None:
            yield from self._adapters.stream(state.weights)
        for held in self._trained if with_state else ():
            for bucket in held.buckets():
                for name in MOMENTS:
                    for tensor_name, tensor in held.whole(bucket, partial(state.moment, name=name)):
                        yield f"{name}.{tensor_name}", tensor

    def _own(self, files: Sequence[PlannedFile], stream: Stream) -> Stream:
        """What this rank writes."""
        for file in files:
            random = dict(self._random_state())
            for entry in file.entries:
                pair = (entry.name, random[entry.name]) if entry.name in random else next(stream)
                if file.writer == self._rank:
                    yield pair

    def _write(self, folder: Path, files: Sequence[PlannedFile], stream: Stream, *, own: bool = False) -> None:
        """Write this rank's files; the stream is taken to its end whatever happens, for the others wait in it.

        Args:
            folder: of the files.
            files: all of them.
            stream: of all tensors.
            own: the stream is of this rank's tensors alone.
        """
        try:
            mine = [file for file in files if file.writer == self._rank]
            write_files(folder, mine, stream if own else self._own(files, stream))
        finally:
            deque(stream, maxlen=0)

    def _finish_export(self, folder: Path, files: Sequence[PlannedFile]) -> None:
        """What the leader writes beside the weights."""
        if not self._ranks.leader:
            return
        config, mtp_layers = self._plan.hf_config, self._plan.shape.mtp_layers
        if mtp_layers or hasattr(config, MTP_LAYERS):
            setattr(config, MTP_LAYERS, mtp_layers)
        config.save_pretrained(folder)
        weights = [file for file in files if file.name.startswith("model")]
        if len(weights) > 1:
            (folder / MODEL_INDEX_FILE).write_text(index_of(weights) + "\n")
        source = Path(self._plan.config.model_path).expanduser()
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        sync_tree(folder)

    def _make_folders(self, staged: Path) -> None:
        (staged / FOLDER).mkdir(exist_ok=True)
        if self._adapters is not None:
            (staged / ADAPTER_FOLDER).mkdir(exist_ok=True)
            settings = self._adapters.settings(self._plan.config.model_path)
            (staged / ADAPTER_FOLDER / ADAPTER_SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")

    def _state(self, files: Sequence[PlannedFile], steps_refused: int) -> dict[str, Any]:
        steps = self._optimizer.steps_taken
        stem = f"{MOMENTS[0]}."
        parts = {
            file.name.removeprefix(f"{FOLDER}/"): {
                entry.name.removeprefix(stem): {"step": float(steps), "box": [[0, size] for size in entry.shape]}
                for entry in file.entries
                if entry.name.startswith(stem)
            }
            for file in files
            if file.name.startswith(f"{FOLDER}/")
        }
        return {"format": FORMAT, "steps_taken": steps, "steps_refused": steps_refused, "parts": parts}

    def _random_state(self) -> list[tuple[str, Tensor]]:
        return [(HOST_RNG, torch.get_rng_state()), (DEVICE_RNG, self._device.rng_state())]

    # ── what is read ──────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, folder: Path) -> tuple[dict[str, Any], TensorFolder, TensorFolder]:
        """State, weights and moments of a checkpoint, when it is whole and of this model."""
        state = _read_state(folder)
        self._check_adapters(folder)
        _, theirs = read_model(str(folder))
        if theirs != self._plan.shape:
            raise ModelError(
                f"{folder} is a checkpoint of another model: {theirs}; this engine trains {self._plan.shape}"
            )
        pieces: dict[str, list[Any]] = {}
        for file, parts in state["parts"].items():
            for name, part in parts.items():
                for moment in MOMENTS:
                    stored = f"{moment}.{name}"
                    pieces.setdefault(stored, []).append(([tuple(each) for each in part["box"]], file, stored))
        shapes = {
            f"{moment}.{slot.name}": slot.shape for held in self._trained for slot in held.slots for moment in MOMENTS
        }
        unknown = sorted(set(pieces) - set(shapes))
        if unknown:
            raise ModelError(f"{folder}: the optimizer's state is of another model: it knows {unknown[0]}")
        weights = (
            TensorFolder(folder) if self._adapters is None else _open_adapter(folder / ADAPTER_FOLDER, self._adapters)
        )
        try:
            for held in self._trained:
                held.check(weights)
            moments = TensorFolder(folder / FOLDER, pieces)
        except ModelError:
            weights.__exit__(None, None, None)
            raise
        for name in pieces:
            moments.check(name, shapes[name])
        return state, weights, moments

    def _check_adapters(self, folder: Path) -> None:
        has_adapters = (folder / ADAPTER_FOLDER).is_dir()
        if has_adapters and self._adapters is None:
            raise ModelError(f"{folder} was saved with LoRA; resume with the same lora_rank")
        if self._adapters is not None and not has_adapters:
            raise ModelError(f"{folder} holds no adapters, yet lora_rank is set; resume with lora_rank = 0")

    def _set_random_state(self, folder: Path, files: Sequence[str]) -> None:
        """Set this rank's, or the first writer's when other ranks have written."""
        name = files[self._rank if len(files) == self._ranks.size else 0]
        with TensorFolder(folder, {each: [((), name, each)] for each in (HOST_RNG, DEVICE_RNG)}) as tensors:
            torch.set_rng_state(tensors.read(HOST_RNG, ()))
            state = tensors.read(DEVICE_RNG, ())
        if state.shape == self._device.rng_state().shape:  # another kind of device goes on from its own
            self._device.set_rng_state(state)

    def _on_each(self, what: str, work: Callable[[], T], kind: type[UserError] = RunFolderError) -> T:
        """Do it on every rank; where one fails all raise the same kind of error, and the groups go on.

        Args:
            what: the work, for people.
            work: no collective in it, or one that it carries through when it fails.
            kind: of the error.
        """
        failure: Exception | None = None
        with self._ranks.together(what):
            try:
                found = work()
            except (OSError, UserError) as error:
                failure = error
        reasons = self._ranks.exchange("" if failure is None else str(failure))
        if failure is not None:
            raise kind(str(failure)) from failure
        for rank, reason in enumerate(reasons):
            if reason:
                raise kind(f"{what}: trainer rank {rank}: {reason}")
        return found


def _entries(held: HeldWeights) -> list[list[Entry]]:
    return [[Entry(name=slot.name, shape=slot.shape) for slot in bucket] for bucket in held.buckets()]


def _of(moment: str, entry: Entry) -> Entry:
    return Entry(name=f"{moment}.{entry.name}", shape=entry.shape)


def _put(state: OptimizerState, name: str, parameter: Any, values: Tensor) -> None:
    state.put_moment(parameter, name, values)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / FOLDER / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}): the folder is not a checkpoint that `save` finished"
        ) from error
    if state.get("format") != FORMAT or not {"steps_taken", "steps_refused", "parts"} <= state.keys():
        raise ModelError(
            f"{path} must have format {FORMAT}: got {state.get('format')}; it was written by another version or engine"
        )
    return state


def _open_adapter(folder: Path, adapters: Adapters) -> TensorFolder:
    """Adapters under the names of their slots.

    Raises:
        ModelError: they are not those of this model, or of another rank.
    """
    slots = {peft_name(slot.name): slot for slot in adapters.held.slots}
    with TensorFolder(folder) as found:
        wrong = sorted(found.names ^ set(slots))
        if wrong:
            raise ModelError(f"{folder}: adapters differ from the model's, first at {wrong[0]}; use the same lora_rank")
        try:
            for name, slot in slots.items():
                found.check(name, slot.shape)
        except ModelError as error:
            raise ModelError(f"{error}; use the same lora_rank") from None
    return TensorFolder(folder, {slot.name: [((), ADAPTER_FILE, name)] for name, slot in slots.items()})

"""Writes and reads checkpoints, and folders that plain transformers loads.

`offbeat_training.TrainerState` says how they lie.

Every rank gathers bucket by bucket and writes the files that are its own.
"""

import dataclasses
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import Tensor

from offbeat_core import (
    ModelError,
    RunFolderError,
    TensorSpec,
    UserError,
    copy_tokenizer,
    drop_model_files,
    publish_folder,
    recover_folder,
    stage_folder,
    sync_tree,
)
from offbeat_device import Device
from offbeat_engine_megatron._layout import Plan
from offbeat_engine_megatron._model import Policy
from offbeat_engine_megatron._optimizer import ClippedOptimizer, OptimizerState
from offbeat_engine_megatron._shape import read_model
from offbeat_engine_megatron._weights import HeldWeights
from offbeat_mesh import Mesh
from offbeat_training import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    MOMENTS,
    STATE_FILE,
    TRAINER_FOLDER,
    BackgroundWrite,
    PlannedFile,
    TensorFolder,
    TrainerRanks,
    TrainerState,
    check_adapter_folder,
    describe_part,
    find_damage,
    open_adapters,
    peft_name,
    plan_files,
    random_state,
    spec_of,
    whole_box,
    write_files,
    write_model_index,
    write_state,
)

GENERATION_CONFIG: Final = "generation_config.json"
MTP_LAYERS: Final = "num_nextn_predict_layers"
"""Key in config.json, as DeepSeek-V3 and others name it."""

T = TypeVar("T")

Stream = Iterator[tuple[str, Tensor]]


class Checkpoints:
    """Saves and loads for one engine. All ranks call every method, in the same order with the same arguments."""

    def __init__(
        self,
        ranks: TrainerRanks,
        mesh: Mesh,
        policy: Policy,
        optimizer: ClippedOptimizer,
        device: Device,
        plan: Plan,
    ) -> None:
        self._ranks, self._policy, self._optimizer, self._device = ranks, policy, optimizer, device
        self._plan = plan
        self._background = BackgroundWrite(mesh, plan.options.save_deadline_s)

    def finish(self) -> None:
        """Wait for the write in the background; see `BackgroundWrite.finish`."""
        self._background.finish()

    def export(self, folder: Path) -> None:
        """Write a folder that plain transformers loads, instead of weights that it held; see `MegatronTrainEngine`."""
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
            background: return when the host holds a copy of everything; the rest runs in threads.
        """
        self.finish()
        made = self._on_each("save", lambda: str(stage_folder(folder)) if self._ranks.leader else "")
        staged = Path(self._ranks.exchange(made)[0])
        files = self._files(with_state=True)
        steps_taken = self._optimizer.steps_taken
        self._on_each("save", lambda: self._make_folders(staged) if self._ranks.leader else None)

        def complete() -> None:
            self._finish_export(staged, files)
            write_state(staged, steps_taken, steps_refused, _parts(files, steps_taken))
            replaces = (folder / STATE_FILE).is_file()
            if not replaces:
                drop_model_files(folder)
            publish_folder(staged, folder, replaces=replaces)

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
        """
        self.finish()
        self._on_each("load", lambda: recover_folder(folder) if self._ranks.leader else None, ModelError)
        opened, weights, state = self._on_each("load", lambda: self._open(folder), ModelError)
        with opened, self._ranks.together("load"):
            optimizer = OptimizerState(self._optimizer)
            for each in self._policy.stored:
                each.read_values(weights, "", optimizer.put_weights)
            for each in self._policy.trained:
                for name in MOMENTS:
                    each.read_values(state.moments, f"{name}.", partial(optimizer.put_moment, name))
            self._optimizer.steps_taken = state.steps_taken
            optimizer.count_steps(state.steps_taken)
            state.restore_random_state(self._device, self._ranks.place, self._ranks.size)
        return state.steps_refused

    def _open(self, folder: Path) -> tuple[ExitStack, TensorFolder, TrainerState]:
        """Return what is stored, by slot, and what lies beside it: headers and shapes are checked."""
        adapters, ours = self._policy.adapters, self._plan.shape
        state = TrainerState(folder)
        check_adapter_folder(folder, wanted=adapters is not None)
        _, theirs = read_model(str(folder))
        if not any(folder.glob("mtp*.safetensors")):  # config.json may speak of layers that transformers leaves out
            theirs = dataclasses.replace(theirs, mtp_layers=0)
        if theirs != ours:
            raise ModelError(f"{folder} is a checkpoint of another model: {theirs}; this engine trains {ours}")
        with ExitStack() as opened:
            opened.enter_context(state)
            shapes = {slot.name: slot.shape for held in self._policy.trained for slot in held.slots}
            files = TensorFolder(folder) if adapters is None else open_adapters(folder / ADAPTER_FOLDER, shapes)
            weights = opened.enter_context(files)
            state.check(shapes)
            for held in self._policy.stored:
                held.check(weights)
            if damage := find_damage(folder, self._ranks.place, self._ranks.size):
                raise ModelError(damage)
            return opened.pop_all(), weights, state

    def _files(self, *, with_state: bool) -> list[PlannedFile]:
        """Return all files with tensors in the order of `_stream`, the same on all ranks.

        The state's with their folder.
        """
        files = plan_files("model", _specs(self._policy.weights), self._ranks.size)
        if self._policy.mtp is not None:
            files += plan_files("mtp", _specs(self._policy.mtp), self._ranks.size)
        if not with_state:
            return files
        buckets = [bucket for held in self._policy.trained for bucket in _specs(held)]
        if self._policy.adapters is not None:
            stored = tuple(dataclasses.replace(e, name=peft_name(e.name)) for bucket in buckets for e in bucket)
            files.append(PlannedFile(name=f"{ADAPTER_FOLDER}/{ADAPTER_FILE}", writer=0, specs=stored))
        pairs = [[_of(moment, spec) for moment in MOMENTS for spec in bucket] for bucket in buckets]
        random = tuple(spec_of(name, state) for name, state in random_state(self._device).items())
        return files + [
            dataclasses.replace(file, name=f"{TRAINER_FOLDER}/{file.name}", specs=random + file.specs)
            for file in plan_files("optimizer", pairs, self._ranks.size)
        ]

    def _stream(self, *, with_state: bool) -> Stream:
        """Every tensor on every rank, one bucket at a time. All ranks iterate to the end."""
        self._optimizer.gather_weights()
        state, adapters, mtp = OptimizerState(self._optimizer), self._policy.adapters, self._policy.mtp
        yield from self._policy.weights.gather(state.weights if adapters is None else adapters.merged)
        if mtp is not None:
            yield from mtp.gather(state.weights)
        if with_state and adapters is not None:
            yield from adapters.stream(state.weights)
        for held in self._policy.trained if with_state else ():
            for bucket in held.buckets():
                for name in MOMENTS:
                    for tensor_name, tensor in held.whole(bucket, partial(state.moment, name)):
                        yield f"{name}.{tensor_name}", tensor

    def _own(self, files: Sequence[PlannedFile], stream: Stream) -> Stream:
        """Return what this rank writes."""
        for file in files:
            random = random_state(self._device)
            for spec in file.specs:
                pair = (spec.name, random[spec.name]) if spec.name in random else next(stream)
                if file.writer == self._ranks.place:
                    yield pair

    def _write(self, folder: Path, files: Sequence[PlannedFile], stream: Stream, *, own: bool = False) -> None:
        """Write this rank's files; the stream is read to its end whatever happens, because the others wait in it.

        The stream is of all tensors, or with `own` of this rank's alone.
        """
        try:
            mine = [file for file in files if file.writer == self._ranks.place]
            write_files(folder, mine, stream if own else self._own(files, stream))
        finally:
            deque(stream, maxlen=0)

    def _finish_export(self, folder: Path, files: Sequence[PlannedFile]) -> None:
        """Write what the leader adds to the weights."""
        if not self._ranks.leader:
            return
        config, mtp_layers = self._plan.hf_config, self._plan.shape.mtp_layers
        if mtp_layers or hasattr(config, MTP_LAYERS):
            setattr(config, MTP_LAYERS, mtp_layers)
        config.save_pretrained(folder)
        weights = [file for file in files if file.name.startswith("model")]
        write_model_index(folder, weights)
        source = Path(self._plan.config.model_path).expanduser()
        copy_tokenizer(source, folder)
        if (source / GENERATION_CONFIG).is_file():
            shutil.copyfile(source / GENERATION_CONFIG, folder / GENERATION_CONFIG)
        sync_tree(folder)

    def _make_folders(self, staged: Path) -> None:
        (staged / TRAINER_FOLDER).mkdir(exist_ok=True)
        if self._policy.adapters is not None:
            (staged / ADAPTER_FOLDER).mkdir(exist_ok=True)
            self._policy.adapters.write_config(staged / ADAPTER_FOLDER, self._plan.config.model_path)

    def _on_each(self, what: str, work: Callable[[], T], kind: type[UserError] = RunFolderError) -> T:
        """Do it on every rank; where one fails all raise the same kind of error, and the groups stay usable.

        There is no collective in the work, or one that it carries through when it fails.
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


def _specs(held: HeldWeights) -> list[list[TensorSpec]]:
    return [[TensorSpec(slot.name, "float32", slot.shape) for slot in bucket] for bucket in held.buckets()]


def _of(moment: str, spec: TensorSpec) -> TensorSpec:
    return dataclasses.replace(spec, name=f"{moment}.{spec.name}")


def _parts(files: Sequence[PlannedFile], steps_taken: int) -> dict[str, Any]:
    """Return which moments lie in which file of the optimizer's."""
    before = f"{MOMENTS[0]}."
    return {
        file.name.removeprefix(f"{TRAINER_FOLDER}/"): {
            spec.name.removeprefix(before): describe_part(float(steps_taken), whole_box(spec.shape))
            for spec in file.specs
            if spec.name.startswith(before)
        }
        for file in files
        if file.name.startswith(f"{TRAINER_FOLDER}/")
    }

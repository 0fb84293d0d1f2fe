"""Trainings: what is trained, on which data, by which settings. Each is a configuration of an application."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from offbeat._live_view import live_view
from offbeat._process import output_of
from offbeat._rewards import RewardArgument, read_reward
from offbeat._run import Event, MessageEvent, Run
from offbeat._sections import Sections, config_text, data_section, named, with_files, write_rows
from offbeat_core import parse_config, place_paths


class Training:
    """Model, data and settings of a run. They are checked when it is made."""

    application: ClassVar[str]
    name: ClassVar[str]

    def __init__(
        self,
        model: Any,
        data: Any,
        eval_data: Any,
        sections: Mapping[str, Any],
        functions: Mapping[str, Any] = {},
    ) -> None:
        model_section = model if isinstance(model, Mapping) else {"path": model}
        own = {"model": dict(model_section), "data": data_section(data, eval_data)}
        self._sections: Sections = {**own, **named(sections)}
        self._functions: dict[str, Callable[..., Any]] = dict(functions)
        text, _ = self._text(Path("rows"))
        parse_config(text, self._config_type(), name=self.name)

    def plan(self) -> str:
        """Return what the command `plan` prints: resources, memory, one rendered prompt. Nothing is trained.

        Raises:
            OffbeatError: that of the command.
        """
        with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
            text, rows = self._text(Path(folder))
            for file, each in rows.items():
                write_rows(each, file)
            return output_of(self.application, ["plan", "FILE"], text=text, functions=self._functions)

    def start(self, folder: str | Path | None = None) -> Run:
        """Start a run, and return at once.

        Args:
            folder: of the run, which does not exist yet; None: runs/NAME-DATE-TIME. Rows that were given as objects are
                written beside it, into FOLDER-data: the run reads them again when it is resumed.
        """
        path = Path(folder).expanduser().absolute() if folder else _new_folder(self.name)
        text, rows = self._text(path.with_name(f"{path.name}-data"))
        for file, each in rows.items():
            write_rows(each, file)
        words = ["train", "FILE", "--out", path]
        return Run(self.application, words, path, text=text, functions=self._functions, made=list(rows))

    def train(self, folder: str | Path | None = None, *, on_event: Callable[[Event], object] = lambda _: None) -> Run:
        """Run to the end. Ctrl-C ends it after it has saved the update in progress.

        A program prints what the command prints; the cell of a notebook shows curves and the last lines.

        Args:
            folder: as `start`.
            on_event: called with each event, in the thread of the caller. If it raises, the run ends as by Ctrl-C.

        Raises:
            OffbeatError: that of the command, of its own class.
            KeyboardInterrupt: Ctrl-C has ended it.
        """
        return follow_to_end(self.start(folder), on_event)

    def _text(self, folder: Path) -> tuple[str, dict[Path, Any]]:
        """Return the configuration as TOML, and by the files that it names in the folder the rows for them."""
        sections, rows = with_files(self._sections, folder)
        return config_text(place_paths(sections, self._config_type())), rows

    @classmethod
    def _config_type(cls) -> type[Any]:
        raise NotImplementedError


class GRPO(Training):
    """Asynchronous GRPO and its relatives, by grpo-async-app.

    Args:
        model: a folder, a name of the Hub, or the `model` section.
        data: a path, a name of the Hub, a list of dicts, a Dataset (anything with `to_parquet`, or rows and
            `column_names`), or the `data` section, whose `path` and `eval_path` may be any of these.
        reward: a name as in `reward.name`, a function, a list of these, a dict of these with their weights, or the
            `reward` section, whose `name` or `weights` may be such.
        eval_data: held-out data, as `data`.
        sections: settings, by section and key as in the TOML file; `async_` is the section `async`.

    Raises:
        ConfigError: as the command has it.
    """

    application, name = "grpo-async-app", "grpo"

    def __init__(
        self,
        model: Any,
        data: Any,
        reward: RewardArgument = None,
        *,
        eval_data: Any = None,
        **sections: Mapping[str, Any],
    ) -> None:
        section, functions = read_reward(reward)
        super().__init__(model, data, eval_data, {**sections, **({"reward": section} if section else {})}, functions)

    @classmethod
    def _config_type(cls) -> type[Any]:
        from grpo_async_app import GrpoConfig

        return GrpoConfig


class SFT(Training):
    """Supervised fine-tuning, by sft-app. Arguments and errors are those of `GRPO`, without a reward."""

    application, name = "sft-app", "sft"

    def __init__(self, model: Any, data: Any, *, eval_data: Any = None, **sections: Mapping[str, Any]) -> None:
        super().__init__(model, data, eval_data, sections)

    @classmethod
    def _config_type(cls) -> type[Any]:
        from sft_app import SftConfig

        return SftConfig


class DPO(SFT):
    """Learning from preferences, by sft-app: DPO, or the loss that `preference={"loss": ...}` names."""

    name = "dpo"

    def __init__(self, model: Any, data: Any, *, eval_data: Any = None, **sections: Mapping[str, Any]) -> None:
        preference = {"loss": "dpo", **sections.pop("preference", {})}
        super().__init__(model, data, eval_data=eval_data, preference=preference, **sections)


def follow_to_end(run: Run, on_event: Callable[[Event], object]) -> Run:
    """Show what a run does until it ends, and return it; raises as `Training.train`."""
    view, is_interrupted = live_view(run), False
    while True:
        try:
            for event in run:
                if view:
                    view.take(event)
                elif isinstance(event, MessageEvent):
                    print(event.text, flush=True)
                on_event(event)
            if view:
                view.draw()
            run.wait()
            break
        except KeyboardInterrupt:
            is_interrupted = True
            run.interrupt()
        except BaseException:
            if run.code is None:
                run.stop()
            raise
    if is_interrupted:
        raise KeyboardInterrupt
    return run


def import_config(framework: str, file: str | Path) -> str:
    """Return the configuration, as TOML, that another framework's options describe; comments say what differs.

    Args:
        framework: verl, trl, openrlhf or prime-rl for GRPO; verl-sft, trl-sft, trl-dpo, trl-kto, trl-orpo, trl-cpo or
            trl-reward for the trainers of sft-app.
        file: a script, or a file of options.

    Raises:
        OffbeatError: that of the command.
    """
    application = "sft-app" if framework == "verl-sft" or framework.startswith("trl-") else "grpo-async-app"
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        written = Path(folder) / "imported.toml"
        output_of(application, ["import", framework.removesuffix("-sft"), file, "--out", written])
        return written.read_text(encoding="utf-8")


def _new_folder(name: str) -> Path:
    """Return a folder as the command would choose it; runs of the same second get numbers."""
    path = Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 100)))
    return next(each for each in names if not each.exists() and not each.with_name(f"{each.name}-data").exists())

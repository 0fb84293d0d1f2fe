"""The model card of a checkpoint: what it was trained from, on and how, and what the run has measured.

Source: https://huggingface.co/docs/hub/model-cards, the metadata between the lines of dashes.
"""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from offbeat_core import MAX_CONFIG_BYTES, RunFolderError, atomic_write, hide_secrets, parse_toml, read_small
from offbeat_run._checkpoints import Checkpoint
from offbeat_run._config.described import hub_name, model_name, source_name
from offbeat_run._console.quantities import number_text
from offbeat_run._folder.folder import RunFolder
from offbeat_run._metrics.names import METRIC_NAMES
from offbeat_run._metrics.series import Points, read_run_metrics

CARD: Final = "README.md"
_FIGURES: Final = ("train/reward", "train/loss", "train/response_tokens", "train/entropy")
"""Besides everything that validations have measured."""
_LEFT_OUT: Final = ("_low", "_high", "_p95", "/versions")
_PATH_IN_TOML: Final = re.compile(r'"(?:/|~/|\./)[^"\n]*/([^"/\n]+)/?"')


def model_card(run: RunFolder, checkpoint: Checkpoint, application: str) -> str:
    """Write about a checkpoint, in Markdown with the Hub's metadata.

    Args:
        run: that it is of.
        checkpoint: of the run.
        application: that has trained it, such as "grpo-async-app".

    Returns:
        The text. Folders of this machine appear as their last name, and secrets of the environment as theirs.
    """
    shown = run.settled if run.settled.is_file() else run.config
    try:
        text = read_small(shown, MAX_CONFIG_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunFolderError(f"{shown}: cannot be read: {error.strerror}; restore it from a copy") from error
    config = parse_toml(text, str(shown)).tables
    base = str(config.get("model", {}).get("path", ""))
    parts = [
        _metadata(base, application),
        f"# {run.path.name}\n",
        f"{_name(base)} after {checkpoint.step} updates of `{application}` {_version(application)}"
        "(offbeat). This card was written automatically; the model's output has not been reviewed.\n",
        "## Figures\n",
        _figures(run, checkpoint),
        "## Data\n",
        _data(config),
        "## Use\n",
        _USE,
        "## Configuration\n",
        f"<details><summary>{shown.name}</summary>\n\n{_fenced(_without_folders(text))}\n</details>\n",
    ]
    return hide_secrets("\n".join(parts))


def write_card(run: RunFolder, checkpoint: Checkpoint, application: str) -> Path:
    """Put the card of a checkpoint beside its weights."""
    path = checkpoint.path / CARD
    with atomic_write(path) as file:
        file.write(model_card(run, checkpoint, application))
    return path


def _metadata(base: str, application: str) -> str:
    method = "grpo" if application.startswith("grpo") else "sft"
    lines = ["library_name: transformers", "pipeline_tag: text-generation", f"tags:\n- offbeat\n- {method}"]
    if found := hub_name(base):
        lines.append(f"base_model: {found}")
    return "---\n" + "\n".join(lines) + "\n---\n"


def _name(path: str) -> str:
    return f"`{_plain(model_name(path))}`"


def _version(application: str) -> str:
    try:
        return f"{version(application)} "
    except PackageNotFoundError:
        return ""


def _figures(run: RunFolder, checkpoint: Checkpoint) -> str:
    series = {name: each.points() for name, each in read_run_metrics(run.metrics, []).series.items()}
    names = [name for name in series if name.startswith("eval/") and not name.endswith(_LEFT_OUT)]
    rows = [_row(name, series, checkpoint.step) for name in (*names, *_FIGURES) if name in series]
    if not rows:
        return "The run has measured nothing yet.\n"
    head = "| metric | first | at this checkpoint | 95 % interval | what it is |\n| --- | --- | --- | --- | --- |\n"
    return head + "".join(rows)


def _row(name: str, series: Mapping[str, Points], step: int) -> str:
    first, here = series[name][0][1], _at(series[name], step)
    known = METRIC_NAMES.get(name)
    low, high = (_at(series[f"{name}_{end}"], step) if f"{name}_{end}" in series else None for end in ("low", "high"))
    interval = f"{number_text(low)} to {number_text(high)}" if low is not None and high is not None else ""
    doc = f"{known.doc}{f' In {known.unit}.' if known.unit else ''}" if known else ""
    return f"| `{name}` | {number_text(first)} | {number_text(here)} | {interval} | {doc} |\n"


def _at(points: Points, step: int) -> float:
    """Return the value at a step, or the last one before it."""
    return next((value for at, value in reversed(points) if at <= step), points[0][1])


def _data(config: Mapping[str, Any]) -> str:
    data = config.get("data", {})
    lines = [f"- trained on {_source(data)}"]
    if data.get("eval_path") or data.get("eval_size"):
        held = (
            _source({"path": data.get("eval_path"), "split": data.get("eval_split")}) if data.get("eval_path") else ""
        )
        lines.append(f"- held out: {held or str(data['eval_size']) + ' of these'}")
    sets = config.get("eval", {}).get("sets", {})
    lines += [f"- validated on {_plain(name)}: {_source(each)}" for name, each in sets.items()]
    return "\n".join(lines) + "\n"


def _source(data: Mapping[str, Any]) -> str:
    """Return a generator such as arithmetic:2 as it is, a file or a folder by its name."""
    name = source_name(str(data.get("path") or ""))
    return f"`{_plain(name)}`" + (f", split {_plain(str(data['split']))}" if data.get("split") else "")


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "'").replace("|", "/").split())


def _without_folders(text: str) -> str:
    return _PATH_IN_TOML.sub(r'".../\1"', text)


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}toml\n{text.rstrip()}\n{fence}\n"


_USE: Final = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH OR NAME OF THIS MODEL")
model = AutoModelForCausalLM.from_pretrained("PATH OR NAME OF THIS MODEL")
```
"""

"""A job for a batch system: a recipe that is planned, and the machines that it takes."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml
from jinja2 import Environment, StrictUndefined

from offbeat_core import ConfigError, load_config, split_overrides, write_new_file
from offbeat_recipes._plan_command import Planner
from offbeat_recipes._recipe_text import relative_keys
from offbeat_run import CommandWords, doing, print_text

SAVE_S: Final = 240.0
"""Time to finish the update in progress and save it, seconds: machines that are taken away give notice of minutes here,
where `checkpoint.on_signal_s` is made for the 30 s that follow a SIGTERM."""
CLEAN_UP_S: Final = 60
"""Time after that for a job to stop Ray and be queued again, seconds."""
MAX_RESTARTS: Final = 3
"""Times that a job is started again after it has failed or stalled: a node may be broken, and the next one not."""
JOIN_S: Final = 600
"""Longest wait for all nodes to join, seconds: images are pulled, and Python starts from a shared disk."""
RAY_VERSION: Final = "2.60.0"
"""Release of Ray that offbeat-actors[ray] installs, and so that an image holds."""
_NAME_LENGTH: Final = 40
"""Characters of a job's name: KubeRay admits 47, and retries get a suffix."""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A run that a batch system starts.

    Args:
        program: "sft-app" or "grpo-async-app".
        name: of the job, made of lower case letters, digits and dashes.
        config: file of the recipe.
        settings: `--section.key=value` words for `train`.
        num_nodes: machines.
        devices_per_node: accelerators of each of them; 0 for a run on CPUs.
        kind: of these, as Ray calls it, such as "GPU"; "" for none.
        save_s: time that the run has to save after a signal, seconds.
    """

    program: str
    name: str
    config: Path
    settings: tuple[str, ...]
    num_nodes: int
    devices_per_node: int
    kind: str
    save_s: float

    @property
    def nodes_text(self) -> str:
        """Return the machines in words, such as "2 nodes with 8 GPU each"."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return f"{nodes} with {self.devices_per_node} {self.kind} each" if self.devices_per_node else nodes

    @property
    def warn_s(self) -> int:
        """Return the time before its end at which a job needs a signal, seconds."""
        return int(self.save_s) + CLEAN_UP_S


def plan_job(
    planner: Planner[Any], words: CommandWords, file: str, program: str, *, is_copied: bool = False
) -> BatchJob:
    """Plan a recipe on the machines of `--cluster`, or of its section `cluster`, and print where its ranks go.

    Args:
        planner: of the application.
        words: of the command line.
        file: the recipe.
        program: the application's name.
        is_copied: the job has the recipe in another folder than this one.

    Raises:
        ConfigError: the machines are not named, or are those of a running Ray cluster; or relative paths in a recipe
            that is copied.
        UserError: whatever `plan` says of the recipe there.
    """
    config: Any = load_config(file, planner.config_type, words.overrides)
    typed = {key for key, _ in split_overrides(words.overrides)}
    if is_copied and (keys := [key for key in relative_keys(config) if key not in typed]):
        raise ConfigError(
            f"{file}: {', '.join(keys)}: a relative path is relative to the folder of the file, and the job has a copy "
            "of the file elsewhere: write paths as they are on the machines of the job, beginning with / or ~"
        )
    shape = words.options.get("cluster") or _own_shape(config.cluster)
    if not shape or shape == "live":
        raise ConfigError(
            "a batch system has to know the machines: give --cluster NODESxDEVICES, such as 2x8, or set "
            "cluster.num_nodes and cluster.accelerators_per_node"
        )
    doing("placing the run", shape)
    view = planner.find_view(config, shape)
    launcher = "ray" if len(view.nodes) > 1 else "local"
    overrides = (*words.overrides, f"--cluster.launcher={launcher}")
    placement = planner.plan_elsewhere(load_config(file, planner.config_type, overrides), view).placement
    if placement is not None:
        print_text(placement.picture)
    held = [{kind: len(numbers) for kind, numbers in node.free.items()} for node in view.nodes]
    if any(each != held[0] for each in held):
        raise ConfigError(f"--cluster {shape}: a job takes nodes that are alike; leave out those that differ")
    kind, number = next(iter(held[0].items()), ("", 0))
    return BatchJob(
        program=program,
        name=_name_of(Path(file)),
        config=Path(file).expanduser().absolute(),
        settings=words.overrides,
        num_nodes=len(view.nodes),
        devices_per_node=number,
        kind=kind,
        save_s=max(SAVE_S, config.checkpoint.on_signal_s),
    )


def _own_shape(cluster: Any) -> str:
    if not (cluster.num_nodes and cluster.accelerators_per_node):
        return ""
    return f"{cluster.num_nodes}x{cluster.accelerators_per_node}"


def _name_of(file: Path) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:_NAME_LENGTH].strip("-")


def quote_all(words: Iterable[object]) -> str:
    """Return words as a shell reads them back, whatever is in them."""
    return " ".join(shlex.quote(str(word)) for word in words)


def checked(option: str, text: str, pattern: str, wanted: str) -> str:
    """Return the value of an option that has to look like a pattern.

    Raises:
        ConfigError: it does not.
    """
    if not re.fullmatch(pattern, text):
        raise ConfigError(f"{option} takes {wanted}: got {text!r}")
    return text


def render(template: str, job: BatchJob, values: Mapping[str, Any]) -> str:
    """Fill a template of this folder; `quote` in it makes a word of the shell, `yaml` a string of YAML."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters |= {
        "quote": lambda value: quote_all([value]),
        "quote_all": quote_all,
        "yaml": json.dumps,  # a string of JSON is one of YAML
        "yaml_block": _yaml_block,
    }
    text = (files(__package__) / template).read_text()
    shared = {"job": job, "join_s": JOIN_S, "max_restarts": MAX_RESTARTS, "ray_version": RAY_VERSION}
    return environment.from_string(text).render(shared | dict(values))


def _yaml_block(text: str, width: int) -> str:
    """Return a text as a block of YAML, which reads as it is; as one string where YAML would not give it back."""
    block = "|2\n" + textwrap.indent(text, " " * width).rstrip("\n")
    is_kept = yaml.safe_load(f"{' ' * (width - 2)}text: {block}\n") == {"text": text}
    return block if is_kept else json.dumps(text)


def write_job(words: CommandWords, job: BatchJob, text: str, suffix: str, submit: str) -> int:
    """Write the file of `--out`, by default named after the job, and print the line that submits it.

    Args:
        words: of the command line.
        job: that the file is for.
        text: of the file.
        suffix: of its default name.
        submit: command line, with {} for the file.

    Raises:
        ConfigError: a path or a setting holds a control character, which a line of the file cannot.
        RunFolderError: there is such a file, or it cannot be written.
    """
    for word in (*job.settings, str(job.config), str(Path.cwd())):
        if not word.isprintable():
            raise ConfigError(f"a job cannot hold control characters: got {word!r}; put the setting into the file")
    path = Path(words.options.get("out", f"{job.name}{suffix}"))
    write_new_file(path, text, "--out")
    print_text(f"{path} is written, for {job.nodes_text}. Look it through, and submit it with:")
    print_text(f"  {submit.format(quote_all([path]))}")
    return 0

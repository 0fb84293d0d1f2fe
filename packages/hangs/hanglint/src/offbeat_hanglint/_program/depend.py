"""On what a name's value depends: on the rank along which axes, or on something else that is local to a process.

A dependence is a tag with the name that showed it: axes as in `axes.py`, or one of

    data    the rank's own batch, its gradients, its losses
    time    what each process sees at its own moment: a future that is done, a clock, a random number
    file    what is on a disk when this process looks
    error   whether an exception came
    fill    what this process has put into a container so far
"""

from typing import Final

from offbeat_hanglint._axes import (
    NONE,
    UNKNOWN,
    WORLD,
    Axes,
    attribute_axes,
    environment_axes,
    group_axes,
    rank_axes,
    words,
)
from offbeat_hanglint._program.program import Program
from offbeat_hanglint._program.reach import Reach

Depends = dict[str, str]

LOCAL: Final = frozenset(("data", "time", "file", "error", "fill", "beyond"))
_AGREED_WORDS: Final = frozenset(
    (
        "size",
        "num",
        "count",
        "backend",
        "type",
        "enabled",
        "distributed",
        "initialized",
        "config",
        "cfg",
        "dtype",
        "mode",
        "steps",
        "dir",
        "path",
    )
)
MAX_DEPTH: Final = 4
# Prefixes of predicates: their definition says more than the words of their name.
_PREDICATES: Final = ("is_", "_is_", "has_", "_has_", "should_", "_should_")
_DATA_WORDS: Final = frozenset(
    (
        *(
            "batch",
            "batches",
            "pixel",
            "pixels",
            "image",
            "images",
            "video",
            "videos",
            "audio",
            "mask",
            "masks",
            "labels",
            "loss",
            "losses",
            "grad",
        ),
        *(
            "grads",
            "overflow",
            "inf",
            "nan",
            "logits",
            "samples",
            "sample",
            "example",
            "examples",
            "tokens",
            "sequences",
            "rewards",
            "vision",
            "multimodal",
            "finite",
        ),
        *(
            "inputs",
            "features",
            "anchors",
            "unfinished",
            "finished",
            "eos",
            "experience",
            "rollout",
            "trajectories",
            "prompts",
            "responses",
        ),
    )
)
_CONFIG_WORDS: Final = frozenset(
    (
        *(
            "config",
            "cfg",
            "args",
            "use",
            "enable",
            "enabled",
            "num",
            "size",
            "max",
            "min",
            "token",
            "path",
            "dir",
            "name",
            "type",
            "scale",
            "fn",
            "func",
            "function",
        ),
        *(
            "per",
            "only",
            "steps",
            "every",
            "class",
            "cls",
            "id",
            "dtype",
            "device",
            "clip",
            "weight",
            "mode",
            "coef",
            "processor",
            "loader",
            "key",
            "keys",
            "average",
            "aux",
            "sampler",
        ),
    )
)
_FILL_WORDS: Final = frozenset(
    (
        "buffer",
        "cache",
        "queue",
        "pending",
        "backlog",
        "bucket",
        "metrics",
        "stats",
        "timers",
        "log",
        "logs",
        "history",
        "outputs",
        "results",
        "accumulated",
    )
)


def is_data_name(name: str) -> bool:
    """Return whether a variable of this name holds a rank's own data."""
    parts = set(words(name))
    return bool(parts & _DATA_WORDS) and not parts & _CONFIG_WORDS


def is_filled_name(name: str) -> bool:
    """Return whether a container of this name is filled by each rank as it goes."""
    parts = set(words(name))
    return bool(parts & _FILL_WORDS) and not parts & (_CONFIG_WORDS - {"size"})


class Dependence:
    """Answers for names of a program, through attributes, globals and the returns of functions."""

    def __init__(self, program: Program, reach: Reach) -> None:
        self.program = program
        self.reach = reach
        self._returns: dict[int, Depends] = {}
        self._elements: dict[tuple[int, int], Depends] = {}
        self._attributes: dict[tuple[int, str, str], Depends] = {}

    def of_atom(self, caller: int, atom: str, depth: int = 0) -> Depends:
        """Dependence of one name, attribute or call as written in function `caller`."""
        if atom.endswith(")"):
            return self.of_call(caller, atom, depth)
        if atom.endswith("]"):
            head, _, key = atom[:-1].rpartition("[")
            element = self.of_element(caller, head, int(key), depth) if head.endswith("()") and key.isdigit() else None
            if element is not None:
                return element
            axes = environment_axes(key) if head.endswith("environ") else rank_axes(key) if key else NONE
            return dict.fromkeys(axes, atom) if axes else self.of_atom(caller, head, depth) if "[" not in head else {}
        last = atom.rsplit(".", 1)[-1]
        axes = attribute_axes(atom)
        if axes and axes != WORLD and not last.startswith(_PREDICATES):
            return dict.fromkeys(axes, atom)
        function = self.program.functions[caller]
        deeper: Depends = {}
        if not axes and _AGREED_WORDS & set(words(last)):
            return {}
        if atom.startswith("self.") and atom.count(".") == 1 and function.class_name:
            deeper = self.of_attribute(self.program.file_of[caller], function.class_name, last, depth)
        elif "." not in atom and atom not in function.parameters:
            deeper = self.of_variable(caller, atom, depth)
        if axes:
            ranks = {tag: why for tag, why in deeper.items() if tag not in LOCAL}
            is_precise = axes == WORLD or not ranks.keys() & {"world", "node", "rank"}
            return ranks if ranks and is_precise else dict.fromkeys(axes, atom)
        return deeper

    def of_call(self, caller: int, atom: str, depth: int = 0) -> Depends:
        """Dependence of what a call returns."""
        name, _, arguments = atom[:-1].rpartition("(")
        last = name.rsplit(".", 1)[-1]
        if last in ("getenv", "get") and ("environ" in name or last == "getenv"):
            return dict.fromkeys(environment_axes(arguments), f"{name}({arguments})")
        axes = rank_axes(last)
        chosen = _chosen_group(name, last, arguments)
        if axes and chosen:
            spanned = (
                self.program.resolve_group(caller, chosen) if group_axes(chosen) == UNKNOWN else group_axes(chosen)
            )
            return {"rank": atom} if isinstance(spanned, str) or spanned == UNKNOWN else dict.fromkeys(spanned, atom)
        tables = self.program.libraries
        targets = self.program.targets(caller, name) if depth < MAX_DEPTH else ()
        if (
            targets
            and (len(targets) == 1 or targets[0].is_sure)
            and (not axes or axes == WORLD or last.startswith(("is_", "_is_", "has_")))
        ):
            found = self.of_return(targets[0].function, depth + 1)
            ranks = {
                tag: f"{atom} ({why})" if "(" not in why else why for tag, why in found.items() if tag not in LOCAL
            }
            if axes:
                return ranks or dict.fromkeys(axes, atom)
            return dict.fromkeys(found, atom) if targets[0].is_sure else {}
        if axes:
            return dict.fromkeys(axes, atom)
        if last in tables.local_time and (name.count(".") or last in ("random",)):
            return {"time": atom}
        if last in tables.local_file:
            return {"file": atom}
        return {}

    def of_element(self, caller: int, call: str, index: int, depth: int = 0) -> Depends | None:
        """Return the dependence of one of the values that a call returns; None where they are not known one by one."""
        targets = self.program.targets(caller, call.removesuffix("()")) if depth < MAX_DEPTH else ()
        elements = self.program.functions[targets[0].function].elements if targets and targets[0].is_sure else ()
        if index >= len(elements):
            return None
        key = (targets[0].function, index)
        if key not in self._elements:
            self._elements[key] = {}
            self._elements[key] = self._of_element(*key, depth)
        return dict.fromkeys(self._elements[key], f"{call}[{index}]")

    def _of_element(self, function: int, index: int, depth: int) -> Depends:
        found: Depends = {}
        if not any(e.is_explicit for e in self.reach.of[function].values()):
            for atom in self.program.functions[function].elements[index]:
                found.update(self.of_atom(function, atom, depth + 1))
        return found

    def of_return(self, function: int, depth: int = 0) -> Depends:
        """Dependence of what a function returns; nothing where it agrees with the others first."""
        if function in self._returns:
            return self._returns[function]
        self._returns[function] = {}
        if any(e.is_explicit for e in self.reach.of[function].values()):
            return {}
        found: Depends = {}
        for atom in self.program.functions[function].returns:
            found.update(self.of_atom(function, atom, depth))
        if depth < MAX_DEPTH:
            self._returns[function] = found
        else:
            self._returns.pop(function, None)
        return found

    def of_attribute(self, file_number: int, class_name: str, name: str, depth: int = 0) -> Depends:
        """Dependence of `self.name` in a class: of all that any method assigns to it."""
        key = (file_number, class_name, name)
        if key in self._attributes:
            return self._attributes[key]
        self._attributes[key] = {}
        found: Depends = {}
        if depth < MAX_DEPTH:
            for number, class_ in self.program.lineage(file_number, class_name):
                index = next(iter(class_.methods.values()), None)
                if name not in class_.attributes or index is None:
                    continue
                inside = self.program.first[number] + index
                for atom in class_.attributes[name]:
                    if atom != f"self.{name}":
                        found.update({t: w for t, w in self.of_atom(inside, atom, depth + 1).items() if t not in LOCAL})
        self._attributes[key] = found
        return found

    def of_variable(self, caller: int, name: str, depth: int = 0) -> Depends:
        """Dependence of a variable of the module in which function `caller` is."""
        file = self.program.files[self.program.file_of[caller]]
        if depth >= MAX_DEPTH:
            return {}
        found: Depends = {}
        for atom in file.globals.get(name, ()):
            if atom != name:
                found.update(
                    {
                        t: w
                        for t, w in self.of_atom(
                            self.program.first[self.program.file_of[caller]], atom, depth + 1
                        ).items()
                        if t not in LOCAL
                    }
                )
        return found


def _chosen_group(name: str, last: str, arguments: str) -> str:
    """Text of the group whose rank a getter gives: an argument, or the receiver of `mesh["tp"].get_local_rank()`."""
    if last not in ("get_rank", "get_local_rank", "get_group_rank", "rank", "get_coordinate"):
        return ""
    if arguments:
        return arguments
    receiver = name.removesuffix(last).removesuffix(".")
    return receiver if receiver.endswith("]") else ""


def only_axes(depends: Depends) -> Axes:
    """Return the axes among the tags."""
    return frozenset(tag for tag in depends if tag not in LOCAL)

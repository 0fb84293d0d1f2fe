"""All files together: which call means which function."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, WORLD, Axes, group_axes, words
from offbeat_hanglint._libraries import Libraries, Operation, libraries
from offbeat_hanglint._program.facts import CallFact, ClassFact, FileFact, FunctionFact

# A method of a name that several classes have is looked for only up to so many definitions.
MAX_SAME_NAME: Final = 2
_COMMON_METHODS: Final = frozenset(
    (
        *(
            "get",
            "set",
            "update",
            "append",
            "add",
            "pop",
            "items",
            "keys",
            "values",
            "copy",
            "close",
            "open",
            "read",
            "write",
            "run",
            "start",
            "stop",
        ),
        *(
            "step",
            "forward",
            "backward",
            "reset",
            "load",
            "save",
            "log",
            "init",
            "build",
            "create",
            "wait",
            "join",
            "put",
            "send",
            "recv",
            "submit",
        ),
        *(
            "apply",
            "call",
            "format",
            "to",
            "size",
            "view",
            "sum",
            "mean",
            "max",
            "min",
            "all",
            "any",
            "item",
            "split",
            "next",
            "state_dict",
            "train",
        ),
        *(
            "eval",
            "parameters",
            "named_parameters",
            "load_state_dict",
            "register",
            "process",
            "encode",
            "decode",
            "generate",
            "compute",
            "result",
        ),
        *(
            "zero_grad",
            "sample",
            "clear",
            "remove",
            "index",
            "count",
            "sort",
            "insert",
            "extend",
            "info",
            "warning",
            "debug",
            "error",
            "exists",
        ),
        *(
            "from_pretrained",
            "save_pretrained",
            "remote",
            "bind",
            "execute",
            "list",
            "name",
            "shape",
            "gather",
            "reduce",
            "scatter",
            "broadcast",
        ),
    )
)


# Words of objects that stand for a group and have its collectives as methods: `get_tp_group().broadcast(...)`.
_GROUP_RECEIVERS: Final = frozenset(("group", "communicator", "comm", "coordinator"))


@dataclass(frozen=True, slots=True)
class Target:
    """A function that a call may mean. `is_sure` is False where only the method's name points to it."""

    function: int
    is_sure: bool


class Program:
    """The facts of all files, and how names lead from one to another."""

    def __init__(self, files: list[FileFact], summaries: tuple[Path, ...] = ()) -> None:
        self.files = files
        self.libraries: Libraries = libraries(summaries)
        self._interesting = _interesting(self.libraries)
        self.functions: list[FunctionFact] = []
        self.file_of: list[int] = []
        self.first: list[int] = []
        self._modules: dict[str, list[int]] = {}
        self._methods: dict[str, list[int]] = {}
        self._subclasses: dict[str, list[tuple[int, str]]] = {}
        for number, file in enumerate(files):
            self._add(number, file)
        self.has_stages = any(
            "pipeline" in name and ("first_stage" in name or "last_stage" in name)
            for file in files
            for name in file.imports.values()
        ) or any("is_pipeline_last_stage" in call.callee for function in self.functions for call in function.calls)
        self.placing_classes = frozenset(
            class_.name
            for file in files
            for class_ in file.classes.values()
            for index in class_.methods.values()
            if any(call.callee.rsplit(".", 1)[-1] == "placement_group" for call in file.functions[index].calls)
        )
        self._methods_of: dict[tuple[int, str, str], tuple[Target, ...]] = {}

    def _add(self, number: int, file: FileFact) -> None:
        self.first.append(len(self.functions))
        self.functions += file.functions
        self.file_of += [number] * len(file.functions)
        parts = file.module.split(".")
        for start in range(len(parts)):
            self._modules.setdefault(".".join(parts[start:]), []).append(number)
        for name, class_ in file.classes.items():
            for method, index in class_.methods.items():
                if method not in _COMMON_METHODS and not method.startswith("__"):
                    self._methods.setdefault(method, []).append(self.first[number] + index)
            for base in class_.bases:
                self._subclasses.setdefault(base.rsplit(".", 1)[-1], []).append((number, name))

    # Names

    def full_name(self, file: FileFact, text: str) -> str:
        """Return a dotted text with its first part replaced by what it was imported as."""
        head, dot, rest = text.partition(".")
        known = file.imports.get(head)
        return f"{known}{dot}{rest}" if known else text

    def find_module(self, name: str, near: FileFact) -> int | None:
        """Return the file of a module's dotted name; of several the one that shares most folders with `near`."""
        found = self._modules.get(name)
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        if len(found) > 50:
            return None
        return max(found, key=lambda n: _common_prefix(self.files[n].path, near.path))

    def lookup(self, file: FileFact, full: str, depth: int = 0) -> tuple[int, str] | None:
        """(file, name within it) of a full dotted name: a function, a class or `Class.method`; through re-exports."""
        if depth > 4:
            return None
        parts = full.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            number = self.find_module(".".join(parts[:cut]), file)
            if number is None:
                continue
            found, rest = self.files[number], parts[cut:]
            if rest[0] in found.classes or rest[0] in found.functions[0].nested or rest[0] in found.globals:
                return number, ".".join(rest)
            if rest[0] in found.imports and number != -1:
                return self.lookup(found, ".".join([found.imports[rest[0]], *rest[1:]]), depth + 1)
        return None

    def find_class(self, file_number: int, name: str) -> tuple[int, ClassFact] | None:
        """Return a class by the name it has in a file, own or imported."""
        file = self.files[file_number]
        if name in file.classes:
            return file_number, file.classes[name]
        found = self.lookup(file, self.full_name(file, name)) if "." in name or name in file.imports else None
        if found and found[1] in self.files[found[0]].classes:
            return found[0], self.files[found[0]].classes[found[1]]
        return None

    # Methods

    def find_method(self, file_number: int, class_name: str, method: str, depth: int = 0) -> tuple[Target, ...]:
        """Return what `self.method` may mean in a class: its own or a base's; else those of classes below it."""
        key = (file_number, class_name, method)
        if key not in self._methods_of:
            self._methods_of[key] = ()
            self._methods_of[key] = self._find_method(file_number, class_name, method, depth)
        return self._methods_of[key]

    def _find_method(self, file_number: int, class_name: str, method: str, depth: int) -> tuple[Target, ...]:
        found = self.find_class(file_number, class_name)
        if found is None or depth > 8:
            return ()
        number, class_ = found
        own: tuple[Target, ...] = ()
        if method in class_.methods:
            own = (Target(self.first[number] + class_.methods[method], True),)
        else:
            for base in class_.bases:
                inherited = self.find_method(number, base, method, depth + 1)
                if inherited:
                    own = inherited
                    break
        if depth == 0:
            below = [
                Target(self.first[n] + self.files[n].classes[c].methods[method], not own)
                for n, c in self._subclasses.get(class_.name, ())[:12]
                if method in self.files[n].classes[c].methods
            ]
            return (*own, *below[:4])
        return own

    def attribute_class(self, file_number: int, class_name: str, attribute: str) -> tuple[int, str] | None:
        """Return the class that `self.attribute` was made by."""
        for number, class_ in self.lineage(file_number, class_name):
            made_by = class_.types.get(attribute)
            if made_by:
                found = self.find_class(number, made_by)
                return (found[0], found[1].name) if found else None
        return None

    def lineage(self, file_number: int, class_name: str) -> list[tuple[int, ClassFact]]:
        """Return a class and its bases within the tree, nearest first."""
        found: list[tuple[int, ClassFact]] = []
        waiting = [(file_number, class_name)]
        while waiting and len(found) < 10:
            number, name = waiting.pop(0)
            entry = self.find_class(number, name)
            if entry and entry not in found:
                found.append(entry)
                waiting += [(entry[0], base) for base in entry[1].bases]
        return found

    # Calls

    def targets(self, caller: int, callee: str) -> tuple[Target, ...]:
        """Functions of the tree that a call in function `caller` may mean."""
        number = self.file_of[caller]
        file, function = self.files[number], self.functions[caller]
        head, _, rest = callee.partition(".")
        if head in ("self", "cls", "super()") and function.class_name and rest:
            return self._own_method(number, function, head, rest)
        if not rest:
            found = self._nested(number, caller, head)
            if found is not None:
                return (Target(found, True),)
        full = self.full_name(file, callee)
        if rest and head not in file.imports and head not in file.classes:
            return self._by_method_name(callee, function.class_name)
        place = self.lookup(file, full) if full != callee or head in file.imports else (number, callee)
        return self._at(place) if place else ()

    def _at(self, place: tuple[int, str]) -> tuple[Target, ...]:
        number, name = place
        file = self.files[number]
        first, _, method = name.partition(".")
        if first in file.classes:
            if "." in method:
                return ()
            if method == "apply" and "apply" not in file.classes[first].methods:  # of an autograd function
                return (*self.find_method(number, first, "forward"), *self.find_method(number, first, "backward"))
            return self.find_method(number, first, method or "__init__")
        index = file.functions[0].nested.get(name)
        return (Target(self.first[number] + index, True),) if index is not None else ()

    def _nested(self, number: int, caller: int, name: str) -> int | None:
        first = self.first[number]
        index = caller - first
        while index > 0:
            function = self.files[number].functions[index]
            if name in function.nested:
                return first + function.nested[name]
            index = function.parent
        return (
            first + self.files[number].functions[0].nested[name]
            if name in self.files[number].functions[0].nested
            else None
        )

    def _own_method(self, number: int, function: FunctionFact, head: str, rest: str) -> tuple[Target, ...]:
        first, _, more = rest.partition(".")
        if not more:
            if head == "super()":
                found = self.find_class(number, function.class_name)
                bases = found[1].bases if found else ()
                return next((t for base in bases if (t := self.find_method(number, base, first, 1))), ())
            own = self.find_method(number, function.class_name, first)
            made_by = None if own else self.attribute_class(number, function.class_name, first)
            return self.find_method(made_by[0], made_by[1], "forward") if made_by else own
        if "." not in more:
            made_by = self.attribute_class(number, function.class_name, first)
            if made_by:
                return self.find_method(made_by[0], made_by[1], more)
        return self._by_method_name(rest, function.class_name)

    def _by_method_name(self, callee: str, own_class: str) -> tuple[Target, ...]:
        """Find methods by a name that few classes have; not of the caller's own, which would be called on `self`."""
        found = [
            f
            for f in self._methods.get(callee.rsplit(".", 1)[-1], ())
            if not own_class or self.functions[f].class_name != own_class
        ]
        return tuple(Target(f, False) for f in found) if 0 < len(found) <= MAX_SAME_NAME else ()

    def operation(self, caller: int, callee: str) -> Operation | None:
        """Return the collective of a library that a call is, if any."""
        tables = self.libraries
        file = self.files[self.file_of[caller]]
        last = callee.rsplit(".", 1)[-1]
        if last not in self._interesting:
            return None
        full = self.full_name(file, callee)
        known = tables.functions.get(full) or tables.functions.get(
            full.replace("torch.distributed.distributed.", "torch.distributed.")
        )
        if known:
            return known
        receiver = callee[: -len(last) - 1] if "." in callee else ""
        if (
            receiver in ("dist", "torch.distributed", "torch_dist", "c10d", "tdist", "distributed", "ft_c", "funcol")
            and receiver not in file.imports
        ):
            known = tables.functions.get(f"torch.distributed.{last}")
            if known:
                return known
        receiver_words = set(words(receiver.rsplit(".", 1)[-1]))
        for receivers, operation in tables.methods.get(last, ()):
            if not receivers or receivers & receiver_words:
                return operation
        if receiver_words & _GROUP_RECEIVERS and (
            last in tables.anywhere or f"torch.distributed.{last}" in tables.functions
        ):
            return replace(Operation(last), axes=group_axes(receiver), is_sure=group_axes(receiver) != UNKNOWN)
        if last in tables.anywhere and receiver == "self" and not self.targets(caller, callee):
            return replace(Operation(last), axes=UNKNOWN, is_sure=False)
        if last in tables.anywhere and not (receiver in ("self", "cls") or not receiver):
            known = tables.functions.get(f"torch.distributed.{last}") or Operation(last)
            is_module = full != callee and words(full.rsplit(".", 2)[-2])[-1:] in (
                ("dist",),
                ("distributed",),
                ("comm",),
            )
            return known if is_module else replace(known, axes=UNKNOWN, is_sure=False)
        return None

    def group_of(self, caller: int, call: CallFact, operation: Operation) -> str:
        """Text of the group that a call of a collective names, "" for none."""
        for place, text in call.groups:
            if place in ("group", "process_group", "pg") or place == operation.group:
                return text
        if operation.group < 0 and not operation.is_every_rank:  # a method known by name, and by the group it is given
            named = (text for place, text in call.groups if isinstance(place, str) and _names_a_group(place))
            return next(named, "")
        if operation.group >= 0 and (call.num_positional > operation.group or "group" in call.keywords):
            return "group_of_unknown_name" if "group" not in call.keywords else "unknown_group"
        return ""

    def resolve_group(self, caller: int, text: str) -> Axes | str:
        """Axes of a group's expression; the name of a parameter where the caller's caller chooses it."""
        function = self.functions[caller]
        for _ in range(3):
            if text in function.parameters:
                axes = group_axes(text)
                default = group_axes(function.groups.get(text, "")) if text in function.groups else UNKNOWN
                return axes if axes != UNKNOWN else default if default not in (UNKNOWN, WORLD) else text
            axes = group_axes(text) if text else WORLD
            if axes != UNKNOWN:
                return axes
            if text.startswith("self.") and function.class_name:
                name = text[5:]
                lineage = self.lineage(self.file_of[caller], function.class_name)
                made_of = next((c.groups[name] for _, c in lineage if name in c.groups), "")
            else:
                made_of = function.groups.get(text, "")
            if not made_of or made_of == text or made_of == "None":
                return UNKNOWN
            if made_of in function.parameters or text.startswith("self."):
                return group_axes(made_of) if made_of not in ("", "None") else UNKNOWN
            text = made_of
        return UNKNOWN


def _names_a_group(keyword: str) -> bool:
    named = set(words(keyword))
    return bool(named & {"group", "groups"}) and not named & {"src", "dst", "name", "desc", "rank", "size", "num"}


def _common_prefix(first: str, second: str) -> int:
    count = 0
    for a, b in zip(first.split("/"), second.split("/"), strict=False):
        if a != b:
            break
        count += 1
    return count


def _interesting(tables: Libraries) -> frozenset[str]:
    """Last parts of every name that a library's table has: most calls are none of them."""
    return frozenset(name.rsplit(".", 1)[-1] for name in tables.functions) | tables.methods.keys() | tables.anywhere

"""On what the values of a function's expressions depend, read in the order of its statements."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, Axes, attribute_axes, rank_axes, words
from offbeat_hanglint._program.depend import LOCAL, Depends, is_data_name, is_filled_name
from offbeat_hanglint._program.expressions import (
    asks_whether_known,
    call_atom,
    dotted,
    element_of_call,
    is_passing_on,
    unpacked,
)
from offbeat_hanglint._program.view import FunctionView, Guard

Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp

MAX_EXPRESSION_DEPTH: Final = 40
# How the reason of a dependence ends that a variable has from the condition under which it was set.
UNDER: Final = ", under which it is set"
# Names whose value is the same on all ranks, whatever they are read from.
_AGREED: Final = frozenset(
    (
        *("training", "dtype", "device", "ndim", "requires_grad", "world_size", "is_initialized", "is_available"),
        "get_world_size",
    )
)
_TENSOR_TESTS: Final = frozenset(
    (
        *("all", "any", "item", "isnan", "isinf", "isfinite", "nonzero", "is_nonzero", "equal", "allclose", "tolist"),
        *("numel", "max", "min"),
    )
)
_MODAL: Final = frozenset(
    ("image", "images", "pixel", "video", "videos", "audio", "vision", "visual", "grid", "multimodal", "mm", "patches")
)


class Values:
    """Knowledge of each variable at the statement that is read now.

    Attributes:
        environment: on what a variable depends; one without an entry was not assigned here.
        agreed: variables that a collective made the same on all ranks.
    """

    def __init__(self, view: FunctionView) -> None:
        self.view = view
        self.environment: dict[str, Depends] = {}
        self.agreed: set[str] = set()
        for name in view.fact.parameters:
            if is_data_name(name):
                self.environment[name] = {"data": name}

    def assign(self, target: ast.expr, value: ast.expr, guard: Guard | None) -> None:
        """A variable or attribute gets a value, under the conditions of `guard`."""
        if isinstance(target, ast.Tuple | ast.List):
            for element, part in unpacked(target.elts, value):
                self.assign(element, part, guard)
            return
        name = dotted(target)
        if not name:
            return
        if isinstance(target, ast.Name):
            self.view.assigned.setdefault(name, []).append(value)
        depends = self.depends(value) | conditions(guard) or self._known_by_name(name, value)
        is_agreed = self.agrees(value)
        if not depends and (is_agreed or self._reads_agreed(value)):
            self.agreed.add(name)
        else:
            self.agreed.discard(name)
        is_data = isinstance(target, ast.Name) and is_data_name(name) and not isinstance(value, ast.Constant)
        if is_data and not depends and not is_agreed:
            depends = {"data": name}
        if isinstance(value, ast.ListComp) and any(generator.ifs for generator in value.generators) and not depends:
            depends = {"fill": name}
        self.environment[name] = depends

    def _known_by_name(self, name: str, value: ast.expr) -> Depends:
        """Read a rank from its name where a function outside of the tree returns it: `rank, size = get_dist_info()`."""
        if not element_of_call(value) or "rank" not in words(name)[-1:]:
            return {}
        callee = dotted(value.value.func)  # type: ignore[attr-defined]
        return {} if self.view.program.targets(self.view.index, callee) else dict.fromkeys(attribute_axes(name), name)

    def add(self, target: ast.expr, value: ast.expr, guard: Guard | None) -> None:
        """`target += value`."""
        name = dotted(target)
        self.environment[name] = self.environment.get(name, {}) | self.depends(value) | conditions(guard)

    def fill(self, name: str, guard: Guard | None) -> None:
        """`name.append(...)`: a list that takes entries under a condition may be of another length on each rank."""
        for around in guard.chain() if guard else ():
            if around.kind in ("if", "else", "rest"):
                self.environment[name] = self.environment.get(name, {}) | {"fill": name}
                return

    def iterate(self, target: ast.expr, depends: Depends) -> None:
        """The variables of a loop over something that depends so."""
        for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
            is_data = is_data_name(name)
            self.environment[name] = {"data": name} if is_data else {t: w for t, w in depends.items() if t == "data"}

    def _reads_agreed(self, node: ast.AST) -> bool:
        return bool(self.agreed) and any(isinstance(n, ast.Name) and n.id in self.agreed for n in ast.walk(node))

    def agree(self, node: ast.Call, axes: Axes) -> None:
        """After a collective its tensors hold the same on all members of its group."""
        for argument in [*node.args[:2], *(k.value for k in node.keywords)]:
            name = dotted(argument).partition("[")[0]
            if name and name in self.environment:
                self.environment[name] = (
                    {} if "world" in axes or axes == UNKNOWN else {"beyond": ",".join(sorted(axes))}
                )
            elif name:
                self.environment[name] = {}
            if name and not self.environment[name]:
                self.agreed.add(name)

    def agrees(self, value: ast.expr) -> bool:
        """Return whether a value is the result of a collective."""
        while isinstance(value, ast.Await | ast.Subscript | ast.Attribute):
            value = value.value
        if isinstance(value, ast.Call):
            event = next((e for e in reversed(self.view.events) if e.node is value), None)
            if event is not None and event.explicit:
                return True
            if isinstance(value.func, ast.Attribute):
                return self.agrees(value.func.value)
        return False

    def depends(self, node: ast.expr, depth: int = 0) -> Depends:
        """On what an expression's value depends, as far as ranks may differ in it."""
        if depth > MAX_EXPRESSION_DEPTH:
            return {}
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(node, depth)
        if isinstance(node, ast.Call):
            return self._called(node, depth)
        if isinstance(node, ast.Compare):
            return self._compare(node, depth)
        if isinstance(node, ast.Subscript):
            element = self._element(node) if element_of_call(node) else None
            if element is not None:
                return element
            found = self.view.dependence.of_atom(self.view.index, dotted(node)) if dotted(node) else {}
            chosen = {tag: why for tag, why in self.depends(node.slice, depth + 1).items() if tag not in LOCAL}
            return found or (chosen | self.depends(node.value, depth + 1))
        if isinstance(node, ast.Constant | ast.Lambda | ast.JoinedStr):
            return {}
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node, depth)
        found = {}
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                found |= self.depends(child, depth + 1)
        return found

    @contextmanager
    def inside(self, node: Comprehension, depends: Depends) -> Iterator[None]:
        """Give a comprehension's own variables their values, of what it runs over, while its entries are read."""
        names = [n.id for each in node.generators for n in ast.walk(each.target) if isinstance(n, ast.Name)]
        outer = {name: self.environment[name] for name in names if name in self.environment}
        for each in node.generators:
            self.iterate(each.target, depends)
        yield
        for name in names:
            self.environment.pop(name, None)
        self.environment |= outer

    def _comprehension(self, node: Comprehension, depth: int) -> Depends:
        """Return what the entries and tests say of ranks, and all that the iterable says."""
        found = self.depends(node.generators[0].iter, depth + 1)
        entries = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        inner: Depends = {}
        with self.inside(node, found):
            for part in (*entries, *(test for each in node.generators for test in each.ifs)):
                inner |= self.depends(part, depth + 1)
        return found | {tag: why for tag, why in inner.items() if tag not in LOCAL}

    def _element(self, node: ast.Subscript) -> Depends | None:
        """Return the dependence of one of the values of a call; None where the function has them all alike."""
        index = node.slice.value  # type: ignore[attr-defined]
        return self.view.dependence.of_element(self.view.index, dotted(node.value), index)

    def _name(self, node: ast.Name | ast.Attribute, depth: int) -> Depends:
        text = dotted(node)
        last = node.attr if isinstance(node, ast.Attribute) else node.id
        if last in _AGREED:
            return {}
        if last.isupper():
            return self._constant(node)
        if text in self.environment:
            return self.environment[text]
        found = self.view.dependence.of_atom(self.view.index, text) if text else {}
        if found:
            return found
        if isinstance(node, ast.Attribute):
            below = self.depends(node.value, depth + 1)
            if below:
                return {tag: why for tag, why in below.items() if tag in LOCAL}
            holder = dotted(node.value).rsplit(".", 1)[-1]
            if last in ("ready", "output", "pending") and is_filled_name(holder):
                return {"fill": text}
            return {"data": text} if is_data_name(last) and last in ("grad", "logits", "loss", "pixel_values") else {}
        return {"data": text} if is_data_name(last) else {}

    def _constant(self, node: ast.Name | ast.Attribute) -> Depends:
        """Find a rank that a module keeps, `RANK = int(os.environ["RANK"])`; other constants are the same everywhere.

        Its name and what it is made of must both say so: there is a rank of matrices too.
        """
        if not isinstance(node, ast.Name) or not rank_axes(node.id.lower()):
            return {}
        return self.view.dependence.of_variable(self.view.index, node.id)

    def _called(self, node: ast.Call, depth: int) -> Depends:
        name = dotted(node.func)
        last = name.rsplit(".", 1)[-1]
        if last in _AGREED or last in ("isinstance", "hasattr", "callable", "getattr", "issubclass", "type"):
            return {}
        event = next((e for e in reversed(self.view.events) if e.node is node), None)
        if event is not None and event.explicit:
            axes = event.explicit[0].axes
            if isinstance(axes, str) or "world" in axes or axes == UNKNOWN:
                return {}
            return {"beyond": ",".join(sorted(axes))}
        found = dict(self.view.dependence.of_atom(self.view.index, call_atom(node))) if name else {}
        if isinstance(node.func, ast.Attribute) and not found:
            found |= self.depends(node.func.value, depth + 1)
        passes_on = is_passing_on(node)
        for argument in [*node.args, *(k.value for k in node.keywords)]:
            given = self.depends(argument, depth + 1)
            found |= given if passes_on else {tag: reason for tag, reason in given.items() if tag in LOCAL}
        if not name:
            found |= self.depends(node.func, depth + 1)
        last = node.func.attr if isinstance(node.func, ast.Attribute) else last
        if not found and last in _TENSOR_TESTS and self._is_tensor_test(node, name):
            found = {"data": ast.unparse(node)[:60]}
        return found

    def _is_tensor_test(self, node: ast.Call, name: str) -> bool:
        """Return whether a call asks something of a tensor that no collective made equal on all: `finished.all()`."""
        if not isinstance(node.func, ast.Attribute) or name.split(".")[0] in ("np", "numpy", "math", "args", "config"):
            return False
        return not self._reads_agreed(node)

    def _compare(self, node: ast.Compare, depth: int) -> Depends:
        found = self.depends(node.left, depth + 1)
        for right in node.comparators:
            found = found | self.depends(right, depth + 1)
        right = node.comparators[0]
        if isinstance(node.ops[0], ast.In | ast.NotIn) and not found:
            text = dotted(right)
            if any(is_filled_name(part) for part in text.removesuffix("()").split(".") if part != "self"):
                return {"fill": text}
        if asks_whether_known(node):
            text = dotted(node.left)
            kept = {t: w for t, w in found.items() if t in LOCAL or UNDER in w}
            if isinstance(right, ast.Constant) and right.value is None and "data" in kept and not _may_be_missing(text):
                kept.pop("data")
            return kept
        return found


def conditions(guard: Guard | None) -> Depends:
    """Return what decides whether an assignment happens: a value set on one rank only differs between ranks."""
    found: Depends = {}
    for around in guard.chain() if guard else ():
        if around.kind in ("if", "else") and not around.is_membership:
            for tag, reason in around.depends.items():
                if tag not in ("fill", "file"):
                    found[tag] = reason if UNDER in reason else f"{reason}{UNDER}"
    return found


def _may_be_missing(text: str) -> bool:
    """Return whether a batch may lack what this name holds: images, gradients."""
    named = set(words(text.rsplit(".", 1)[-1]))
    return bool(named & _MODAL) or "grad" in named or ".get()" in text

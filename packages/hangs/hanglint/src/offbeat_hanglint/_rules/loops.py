"""Loops that ranks may run a different number of times, or in another order: HL020 to HL022."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, words
from offbeat_hanglint._program.depend import is_data_name, is_filled_name, only_axes
from offbeat_hanglint._program.expressions import dotted
from offbeat_hanglint._program.view import Event, FunctionView, Guard
from offbeat_hanglint._rules.finding import Confidence, Finding
from offbeat_hanglint._rules.report import axes_text, finding, steps_of, tags_text, what_is_called, why

_SAME_EVERYWHERE: Final = frozenset(
    ("range", "parameters", "named_parameters", "modules", "named_modules", "children", "layers")
)
_UNORDERED_CALLS: Final = frozenset(
    ("set", "frozenset", "listdir", "iterdir", "glob", "iglob", "rglob", "scandir", "named_buffers", "buffers")
)
_UNEVEN_WORDS: Final = frozenset(
    (
        "micro",
        "dynamic",
        "packed",
        "bins",
        "partitions",
        "chunks",
        "minibatches",
        "splits",
        "mbs",
        "batches",
        "groups",
        "buckets",
        "shards",
    )
)
_LOADER_WORDS: Final = frozenset(("loader", "dataloader", "iterator", "iter", "sampler", "batches", "dataset", "epoch"))
_FIXED_WORDS: Final = frozenset(
    (
        "layers",
        "modules",
        "blocks",
        "params",
        "parameters",
        "names",
        "named",
        "experts",
        "group",
        "dims",
        "axes",
        "ranks",
    )
)


def check(view: FunctionView) -> Iterator[Finding]:
    """Report each loop once."""
    seen: set[int] = set()
    for event in view.events:
        for guard in event.guards():
            if guard.kind != "loop" or id(guard.node) in seen:
                continue
            found = _judge(view, event, guard)
            if found is not None:
                seen.add(id(guard.node))
                yield found
    yield from _breaks(view)
    yield from _unordered_arguments(view)
    yield from _micro_batches(view)


def _micro_batches(view: FunctionView) -> Iterator[Finding]:
    """HL020: a schedule is given a number of micro-batches that is the length of a list of this rank's own."""
    for node, callee, _ in view.calls:
        given = next((k.value for k in node.keywords if k.arg in ("num_microbatches", "num_micro_batches")), None)
        value = view.value_of(given.id, given) if isinstance(given, ast.Name) else given
        if isinstance(value, ast.Call) and dotted(value.func) == "len" and value.args:
            yield finding(
                view, "HL020", "low", node,
                f"`{callee}` runs as many micro-batches as `{dotted(value.args[0])}` has on this rank",
                "Ranks with more micro-batches enter the schedule's collectives once more than the others.",
                "Agree on the number over the data-parallel group (all_reduce with MAX) and fill up.",
            )  # fmt: skip


def _unordered_arguments(view: FunctionView) -> Iterator[Finding]:
    """HL022: a set, or a list of one, is handed to a function that runs collectives."""
    for event in view.events:
        if event.is_direct or not event.explicit:
            continue
        for argument in [*event.node.args, *(k.value for k in event.node.keywords)]:
            unordered = _unordered(view, argument)
            if not unordered or "buffers" in unordered:
                continue
            hit = event.explicit[0]
            yield finding(
                view, "HL022", "medium" if hit.is_sure and hit.depth <= 3 else "low", event.node,
                f"{what_is_called(event)} is given {unordered}, whose order may differ between ranks",
                f"If it runs `{hit.kind}` once per entry, the n-th of one rank meets another tensor's on the others.",
                "Give it a list in an order that is the same on all ranks.",
                steps_of(view, None, event, hit),
            )  # fmt: skip
            break


def _judge(view: FunctionView, event: Event, guard: Guard) -> Finding | None:
    if isinstance(guard.node, ast.While):
        return _while(view, event, guard)
    container = guard.node.iter if isinstance(guard.node, ast.For | ast.AsyncFor) else guard.node.generators[0].iter  # type: ignore[attr-defined]
    if event.explicit:
        unordered = _unordered(view, container)
        if unordered:
            return _unordered_finding(view, event, guard, unordered)
        filled = _locally_filled(view, container)
        if filled:
            return _entry_finding(view, event, guard, filled)
    return _uneven(view, event, guard, container)


def _while(view: FunctionView, event: Event, guard: Guard) -> Finding | None:
    local = {t: w for t, w in guard.depends.items() if t in ("data", "time", "fill") or t in only_axes(guard.depends)}
    if not local or not event.explicit:
        return None
    hit = event.explicit[0]
    confidence: Confidence = "medium" if hit.is_sure and "time" in local and hit.axes != UNKNOWN else "low"
    return _uneven_finding(view, event, guard, confidence, f"the rounds depend on {tags_text(local)} ({why(local)})")


def _uneven(view: FunctionView, event: Event, guard: Guard, container: ast.expr) -> Finding | None:
    """HL020 for a container whose length depends on data: micro-batches packed by length, lists of a rank's own."""
    text = dotted(container).removesuffix("()")
    name = text.rsplit(".", 1)[-1]
    if (
        isinstance(container, ast.Call)
        and name in ("enumerate", "zip", "tqdm", "list", "iter", "trange", "reversed", "range", "len")
        and container.args
    ):
        return _uneven(view, event, guard, container.args[0])
    depends = guard.depends
    axes = only_axes(depends)
    if axes and event.explicit and event.explicit[0].is_sure:
        return _uneven_finding(
            view, event, guard, "low", f"the number of rounds depends on {tags_text(depends)} ({why(depends)})"
        )
    parts = set(words(name))
    kind = event.reached[0].kind
    if parts & _FIXED_WORDS or name in _SAME_EVERYWHERE:
        return None
    is_data = "data" in depends or parts & _UNEVEN_WORDS or is_data_name(name)
    if is_data and not parts & _LOADER_WORDS - {"batches"} and (event.explicit or kind in ("forward", "backward")):
        return _uneven_finding(
            view,
            event,
            guard,
            "low",
            f"the number of rounds is the length of `{text or 'a local container'}`, which depends on this rank's data",
        )
    is_sharing = event.explicit and event.is_direct and event.explicit[0].is_sure
    is_stepping = event.is_direct and kind in ("forward", "backward") and _is_distributed(view)
    if parts & _LOADER_WORDS and (is_sharing or is_stepping):
        return _uneven_finding(
            view, event, guard, "low", f"the number of rounds is the length of `{text}` on this rank"
        )
    return None


def _is_distributed(view: FunctionView) -> bool:
    """Return whether a file has to do with distributed training, as far as its imports show."""
    words_of = ("distributed", "fsdp", "accelerate", "deepspeed", "parallel", "dist_utils")
    return any(word in name.lower() for name in view.file.imports.values() for word in words_of)


def _uneven_finding(view: FunctionView, event: Event, guard: Guard, confidence: Confidence, reason: str) -> Finding:
    hit = event.reached[0]
    return finding(
        view, "HL020", confidence, guard.node,
        f"{what_is_called(event)} runs once per round, and {reason}",
        f"Ranks with more rounds enter `{hit.kind}` over {axes_text(hit.axes)} once more than the others.",
        "Agree on the number of rounds over the group (all_reduce with "
        "MAX) and fill up, or move the collective out of the loop.",
        steps_of(view, guard, event, hit),
    )  # fmt: skip


def _unordered(view: FunctionView, container: ast.expr, depth: int = 0) -> str:
    """Return what makes the order of a container differ between ranks, "" if nothing does."""
    if depth > 3:
        return ""
    if isinstance(container, ast.Set | ast.SetComp):
        return "a set"
    if isinstance(container, ast.Call):
        name = dotted(container.func).rsplit(".", 1)[-1]
        if name == "sorted":
            return ""
        if name in _UNORDERED_CALLS:
            return f"`{name}()`"
        if name in ("list", "enumerate", "tqdm", "tuple", "zip") and container.args:
            return _unordered(view, container.args[0], depth + 1)
        if name in ("union", "intersection", "difference", "symmetric_difference"):
            return "a set"
        if name in ("items", "keys", "values") and isinstance(container.func, ast.Attribute):
            return _unordered(view, container.func.value, depth + 1)
        return ""
    if isinstance(container, ast.BinOp) and isinstance(container.op, ast.Sub | ast.BitOr | ast.BitAnd):
        return _unordered(view, container.left, depth + 1) or _unordered(view, container.right, depth + 1)
    if isinstance(container, ast.Attribute) and dotted(container).startswith("self.") and view.fact.class_name:
        made_by = (
            c.types.get(container.attr) for _, c in view.program.lineage(_file_number(view), view.fact.class_name)
        )
        return "a set" if "set" in made_by else ""
    if isinstance(container, ast.Name) and (value := view.value_of(container.id, container)) is not None:
        return _unordered(view, value, depth + 1)
    if isinstance(container, ast.ListComp | ast.GeneratorExp | ast.DictComp):
        return _unordered(view, container.generators[0].iter, depth + 1)
    return ""


def _file_number(view: FunctionView) -> int:
    return view.program.file_of[view.index]


def _unordered_finding(view: FunctionView, event: Event, guard: Guard, unordered: str) -> Finding:
    hit = event.explicit[0]
    confidence: Confidence = (
        "low"
        if "buffers" in unordered or not hit.is_sure or hit.axes == UNKNOWN
        else "medium"
        if hit.depth > 2
        else "high"
    )
    return finding(
        view, "HL022", confidence, guard.node,
        f"{what_is_called(event)} runs once per entry of {unordered}, whose order may differ between ranks",
        f"The n-th `{hit.kind}` of one rank meets another tensor's on the others.",
        "Sort the entries by a key that is the same on all ranks.",
        steps_of(view, guard, event, hit),
    )  # fmt: skip


def _locally_filled(view: FunctionView, container: ast.expr, depth: int = 0) -> str:
    """Return the container that each rank fills by itself, "" if it is none."""
    if depth > 3:
        return ""
    text = dotted(container)
    is_entries = text.endswith((".items()", ".keys()", ".values()"))
    if (
        isinstance(container, ast.Call)
        and dotted(container.func) in ("sorted", "list", "enumerate", "tuple", "zip")
        and container.args
    ):
        return _locally_filled(view, container.args[0], depth + 1)
    if (
        isinstance(container, ast.Name)
        and not is_entries
        and (inner := view.value_of(container.id, container)) is not None
    ):
        return _locally_filled(view, inner, depth + 1) if isinstance(inner, ast.Call) else ""
    name = text.removesuffix("()").rpartition(".")[0] if is_entries else text
    last = name.rsplit(".", 1)[-1].removesuffix("()")
    if not name or set(words(last)) & _FIXED_WORDS:
        return ""
    if is_entries or is_filled_name(last) or (name.startswith("self.") and not name.endswith("()")):
        return name
    return ""


def _entry_finding(view: FunctionView, event: Event, guard: Guard, filled: str) -> Finding:
    hit = event.explicit[0]
    last = filled.rsplit(".", 1)[-1]
    is_clear = is_filled_name(last) and event.is_direct and hit.is_sure
    confidence: Confidence = "medium" if is_clear and "timer" in last else "low"
    return finding(
        view, "HL021", confidence, guard.node,
        f"{what_is_called(event)} runs once per entry of `{filled}`; "
        "ranks that have other entries call it another number of times",
        f"A rank with an entry more enters `{hit.kind}` over {axes_text(hit.axes)} alone.",
        "Agree on the keys first (all_gather_object, then their sorted union), or reduce one tensor for all.",
        steps_of(view, guard, event, hit),
    )  # fmt: skip


def _breaks(view: FunctionView) -> Iterator[Finding]:
    """HL010: a loop left where this rank's data say so, while the others proceed to the next round's collective."""
    seen: set[int] = set()
    for left in view.exits:
        if (
            left.loop is None
            or left.guard is None
            or isinstance(left.node, ast.Raise | ast.Continue)
            or id(left.loop) in seen
        ):
            continue
        depends: dict[str, str] = {}
        around: list[Guard] = []
        for guard in left.guard.chain():
            if guard.node is left.loop:
                break
            around.append(guard)
            if guard.kind in ("if", "else", "except"):
                depends |= guard.depends
        local = {
            t: w
            for t, w in depends.items()
            if t in ("data", "time", "error") or t in ("world", "dp", "cp", "tp", "pp", "ep", "node")
        }
        if not local:
            continue
        inside = [
            e
            for e in view.events
            if any(g.node is left.loop for g in e.guards())
            and (e.explicit or e.reached[0].kind in ("forward", "backward"))
        ]
        inside = [e for e in inside if e.guard not in around]
        if not inside:
            continue
        seen.add(id(left.loop))
        event = min(inside, key=lambda e: not e.explicit)
        hit = event.reached[0]
        confidence: Confidence = (
            "medium"
            if event.explicit and hit.is_sure and event.is_direct and set(local) - {"data"} and hit.axes != UNKNOWN
            else "low"
        )
        yield finding(
            view, "HL010", confidence, left.node,
            f"the loop is left by {tags_text(local)} ({why(local)}), while {what_is_called(event)} runs in every round",
            "A rank that leaves does not come to the next round's "
            f"`{hit.kind}` over {axes_text(hit.axes)}; the others wait.",
            "Leave when all ranks can: reduce the condition over the group before the test.",
            steps_of(view, None, event, hit),
        )  # fmt: skip

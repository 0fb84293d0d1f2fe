"""Sizes and dtypes that differ between the members of a collective: HL033."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import words
from offbeat_hanglint._program.expressions import dotted
from offbeat_hanglint._program.view import Event, FunctionView, simple_kind
from offbeat_hanglint._rules.finding import Confidence, Finding
from offbeat_hanglint._rules.report import finding, is_test, steps_of, what_is_called

_GATHERS: Final = frozenset(
    ("all_gather", "gather", "gather_for_metrics", "_nested_gather", "nested_gather", "all_to_all")
)
_SIZELESS: Final = frozenset(
    ("barrier", "new_group", "destroy_process_group", "broadcast_object_list", "gather_object")
)
_RAGGED_WORDS: Final = frozenset(
    (
        "logits",
        "labels",
        "ids",
        "input",
        "mask",
        "preds",
        "predictions",
        "entropies",
        "completions",
        "tokens",
        "sequences",
        "logprobs",
        "logps",
        "embeddings",
        "hidden",
    )
)


def check(view: FunctionView) -> Iterator[Finding]:
    """Report each call once per reason."""
    for event in view.events:
        yield from _uneven_heads(view, event)
        if event.is_direct:
            yield from _shapes(view, event)
    yield from _send_lists(view)
    yield from _lazy_buffers(view)
    yield from _sharded_tokens(view)
    yield from _stale_state(view)


def _shapes(view: FunctionView, event: Event) -> Iterator[Finding]:
    """HL033: what is gathered has a size of this rank's own."""
    hit = event.reached[0]
    kind = hit.kind
    if simple_kind(kind) not in _GATHERS or "object" in kind or not event.node.args:
        return
    is_torch = event.callee.startswith(("dist.", "torch.distributed."))
    arguments = event.node.args[1:2] if is_torch and len(event.node.args) > 1 else event.node.args[:1]
    for argument in arguments:
        reason, is_strong = ragged(view, argument)
        if not reason:
            continue
        yield finding(
            view, "HL033", _shape_confidence(reason, is_strong and not is_torch), event.node,
            f"`{event.callee.rsplit('.', 1)[-1]}` gathers {reason}, whose size may differ between ranks",
            "All members enter, but with other sizes; the backend reads past the end, fails on some ranks, or waits.",
            "Pad to the largest size first (pad_across_processes), gather sums and counts, or gather objects.",
            steps_of(view, None, event, hit),
        )  # fmt: skip


def _shape_confidence(reason: str, is_plain: bool) -> Confidence:
    return "high" if "chosen by a mask" in reason else "medium" if is_plain else "low"


def ragged(view: FunctionView, node: ast.expr, depth: int = 0) -> tuple[str, bool]:
    """Return why a tensor's size depends on the rank's data, and whether that is plain to see."""
    if depth > 6:
        return "", False
    if isinstance(node, ast.Call):
        name = dotted(node.func).rsplit(".", 1)[-1]
        if name in ("nonzero", "masked_select", "unique", "argwhere"):
            return f"the result of `{name}`", True
        if isinstance(node.func, ast.Attribute) and name in (
            "to",
            "cuda",
            "contiguous",
            "detach",
            "clone",
            "float",
            "long",
            "int",
            "view",
            "reshape",
            "flatten",
            "argmax",
            "cpu",
            "bool",
            "unsqueeze",
            "squeeze",
            "half",
            "double",
        ):
            inner, is_plain = ragged(view, node.func.value, depth + 1)
            return inner, is_plain and name != "argmax"
        return "", False
    if isinstance(node, ast.Subscript):
        if _is_mask(view, node.slice):
            return f"`{ast.unparse(node)[:60]}`, chosen by a mask", True
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            is_strong = node.slice.value in ("input_ids", "attention_mask", "logits")
            return (f"`{ast.unparse(node)[:60]}`", is_strong) if _is_ragged_name(node.slice.value) else ("", False)
        if isinstance(node.slice, ast.Slice | ast.Tuple):
            return ragged(view, node.value, depth + 1)
        return "", False
    if isinstance(node, ast.Name):
        value = view.value_of(node.id, node)
        if value is not None:
            if isinstance(value, ast.Name) and value.id == node.id:
                return "", False
            reason = ragged(view, value, depth + 1)
            if reason[0]:
                return reason
            return (
                (f"`{node.id}`", False)
                if isinstance(value, ast.Name | ast.Attribute | ast.Subscript) and _is_ragged_name(node.id)
                else ("", False)
            )
        return (f"`{node.id}`", False) if _is_ragged_name(node.id) else ("", False)
    if isinstance(node, ast.Attribute):
        return (f"`{dotted(node)}`", node.attr == "logits") if _is_ragged_name(node.attr) else ("", False)
    if isinstance(node, ast.Tuple | ast.List) and node.elts:
        return next((r for e in node.elts if (r := ragged(view, e, depth + 1))[0]), ("", False))
    if isinstance(node, ast.BinOp):
        first = ragged(view, node.left, depth + 1)
        return first if first[0] else ragged(view, node.right, depth + 1)
    if isinstance(node, ast.IfExp):
        return ragged(view, node.body, depth + 1)
    return "", False


def _is_mask(view: FunctionView, node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return True
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("bool", "nonzero", "flatten", "view")
    ):
        return _is_mask(view, node.func.value) or node.func.attr in ("bool", "nonzero")
    text = dotted(node)
    return "mask" in words(text.rsplit(".", 1)[-1]) or text.endswith(("keep", "valid"))


def _is_ragged_name(name: str) -> bool:
    parts = words(name)
    if not parts or {
        "num",
        "count",
        "sum",
        "mean",
        "len",
        "length",
        "lengths",
        "per",
        "avg",
        "loss",
        "size",
        "id",
        "max",
        "min",
        "norm",
    } & set(parts):
        return False
    return parts[-1] in _RAGGED_WORDS


def _send_lists(view: FunctionView) -> Iterator[Finding]:
    """HL033: a list of tensors to send that leaves some out, where the receiver posts one receive for each."""
    if "send" not in words(view.fact.name):
        return
    for statement, guard in view.statements:
        if (
            not isinstance(statement, ast.If)
            or statement.orelse
            or not any(g.kind == "loop" for g in (guard.chain() if guard else ()))
        ):
            continue
        appended = [
            dotted(n.func)
            for s in statement.body
            for n in ast.walk(s)
            if isinstance(n, ast.Call) and dotted(n.func).endswith(".append")
        ]
        if appended and len(statement.body) <= 2:
            yield finding(
                view, "HL033", "low", statement,
                f"`{appended[0].removesuffix('.append')}`, which is sent, takes an entry only where a condition holds",
                "The receiver posts a receive for each entry; for those that are left out it waits for ever.",
                "Append in both cases, or send the receiver the number of entries first.",
            )  # fmt: skip
            return


def _uneven_heads(view: FunctionView, event: Event) -> Iterator[Finding]:
    """HL033: heads are divided among ranks by a function that does not check that they divide."""
    name = event.callee.rsplit(".", 1)[-1]
    hit = next((r for r in event.reached if simple_kind(r.kind) == "all_to_all"), None)
    if hit is None or not {"head", "heads", "ulysses", "seq"} & set(words(name)) or is_test(view.file.path):
        return
    if any(isinstance(n, ast.Mod) for n in ast.walk(view.node)):
        return
    yield finding(
        view, "HL033", "low", event.node,
        f"`{name}` exchanges parts of heads or sequences by "
        f"`{hit.kind}`, and nothing here checks that they divide evenly",
        "Where the number of (key and value) heads is no multiple "
        "of the group's size, ranks send and expect other sizes.",
        "Check `num_heads % group_size == 0` before, or repeat the heads to a multiple.",
        steps_of(view, None, event, hit),
    )  # fmt: skip


def _lazy_buffers(view: FunctionView) -> Iterator[Finding]:
    """HL033: a buffer that is made where it is missing, and reduced together with those of ranks that have theirs."""
    for statement, _ in view.statements:
        if not isinstance(statement, ast.If) or not _tests_absence(statement.test):
            continue
        made = next(
            (n for s in statement.body for n in ast.walk(s) if isinstance(n, ast.Call) and _is_new_tensor(n)), None
        )
        after = next((e for e in view.events if e.explicit and e.node.lineno > statement.lineno), None)
        if made is None or after is None or simple_kind(after.explicit[0].kind) in _SIZELESS:
            continue
        yield finding(
            view, "HL033", "low", made,
            f"a tensor is made here where this rank has none, before {what_is_called(after)}",
            "If its size is not that of the ranks that have theirs, "
            "the collective posts other sizes and waits or fails.",
            "Compute the size from what all ranks share, or make the tensor at the start on every rank.",
            steps_of(view, None, after, after.explicit[0]),
        )  # fmt: skip
        return


def _tests_absence(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return any(_tests_absence(value) for value in test.values)
    if not isinstance(test, ast.Compare):
        return False
    right = test.comparators[0]
    is_none = isinstance(test.ops[0], ast.Is) and isinstance(right, ast.Constant) and right.value is None
    return is_none or isinstance(test.ops[0], ast.NotIn)


def _is_new_tensor(node: ast.Call) -> bool:
    return dotted(node.func) in ("torch.zeros", "torch.empty", "torch.ones", "torch.zeros_like", "torch.empty_like")


def _sharded_tokens(view: FunctionView) -> Iterator[Finding]:
    """HL033: a local tensor is declared a shard of an even DTensor without saying the whole shape."""
    for node, callee, _ in view.calls:
        if not callee.endswith("DTensor.from_local") or any(k.arg in ("shape", None) for k in node.keywords):
            continue
        if any(isinstance(n, ast.Call) and dotted(n.func).rsplit(".", 1)[-1] == "Shard" for n in ast.walk(node)):
            yield finding(
                view, "HL033", "low", node,
                f"`{callee}` takes the local tensor for an even shard; "
                "if its size depends on data, ranks gather other sizes",
                "A later `full_tensor` or `redistribute` posts sizes that its peers do not.",
                "Exchange the sizes and pad, or pass `shape` and `stride`.",
            )  # fmt: skip


def _stale_state(view: FunctionView) -> Iterator[Finding]:
    """HL033: a state dict is taken before parameters are cast, and handed to what broadcasts it afterwards."""
    taken: dict[str, int] = {}
    for statement, _ in view.statements:
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Call) and dotted(value.func).endswith(".state_dict"):
            taken[dotted(statement.targets[0])] = statement.lineno  # type: ignore[attr-defined]
    if not taken:
        return
    casts = [node.lineno for node, _, _ in view.calls if _is_cast(node)]
    for event in view.events:
        given = [dotted(a) for a in [*event.node.args, *(k.value for k in event.node.keywords)]]
        name = next((g for g in given if g in taken), None)
        cast_line = max((line for line in casts if line < event.node.lineno), default=0)
        if name and event.explicit and taken[name] < cast_line:
            hit = event.explicit[0]
            yield finding(
                view, "HL033", "low", event.node,
                f"`{name}` was taken before a cast (line {cast_line}) and is now shared by {what_is_called(event)}",
                "The source sends tensors of the old dtype; the others "
                "have allocated the new one, so byte counts differ.",
                "Take the state dict after the cast.",
                steps_of(view, None, event, hit),
            )  # fmt: skip


def _is_cast(node: ast.Call) -> bool:
    name = dotted(node.func).rsplit(".", 1)[-1]
    if name in ("float", "half", "bfloat16") and isinstance(node.func, ast.Attribute):
        return True
    arguments = [*node.args, *(k.value for k in node.keywords)]
    return name in ("to", "type", "upcast", "cast") and any(
        "float" in dotted(a) or "dtype" in dotted(a) for a in arguments
    )

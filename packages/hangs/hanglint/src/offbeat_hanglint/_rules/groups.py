"""Groups and sources: HL030, HL031, HL032 and HL034."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, WORLD, rank_axes, words
from offbeat_hanglint._program.depend import LOCAL, only_axes
from offbeat_hanglint._program.expressions import dotted, group_text
from offbeat_hanglint._program.reach import Reached
from offbeat_hanglint._program.view import Event, FunctionView, Guard, simple_kind
from offbeat_hanglint._rules.finding import Confidence, Finding
from offbeat_hanglint._rules.report import axes_text, finding, is_test, steps_of, tags_text

_EVERY_RANK: Final = frozenset(
    (
        *("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"),
        *("init_device_mesh", "initialize_model_parallel"),
    )
)
# Names of parameters that hold the rank of the caller, and words of those that hold another's.
_OWN_RANKS: Final = frozenset(("rank", "my_rank", "local_rank", "global_rank", "cur_rank", "current_rank", "this_rank"))
_RANKS_OF_OTHERS: Final = frozenset(
    (
        *("first", "last", "start", "end", "base", "src", "source", "dst", "target", "root", "master", "leader"),
        *("prev", "next", "peer", "other", "min", "max", "begin"),
    )
)
_SAFE_SOURCES: Final = (
    "get_global_rank",
    "get_process_group_ranks",
    "src_rank",
    "source_rank",
    "ranks",
    "global",
    "root",
    "first_rank",
    "last_rank",
    "prev_rank",
    "next_rank",
    "group_src",
)


def check(view: FunctionView) -> Iterator[Finding]:
    """Report each call once per rule."""
    for event in view.events:
        yield from _new_group(view, event)
        if event.is_direct:
            yield from _source(view, event)
            yield from _all_ranks(view, event)
    yield from _default_group(view)
    yield from _computed_source(view)


def _new_group(view: FunctionView, event: Event) -> Iterator[Finding]:
    hit = next((r for r in event.reached if r.kind in _EVERY_RANK), None)
    if hit is None or _is_of_members_alone(event.node):
        return
    for guard in event.guards():
        axes = only_axes(guard.depends)
        if guard.kind not in ("if", "else", "rest", "case") or not axes or isinstance(guard.exit, ast.Raise):
            continue
        sides = (side for side in ("if", "else", "rest", "case") if side != guard.kind)
        others = [e for side in sides for e in view.inside(guard.node, side) if e.kinds() & event.kinds()]
        if others:
            if _asks_otherwise(view, event, guard, others):
                yield _other_ranks(view, event, hit, guard, "high")
                return
            continue
        if guard.is_membership and (hit.depth > 0 or _looks_up(guard)):
            continue
        is_guess = (
            not hit.is_sure
            or hit.depth > 2
            or hit.kind == "initialize_model_parallel"
            or any("under which" in w for w in guard.depends.values())
            or view.other_half_calls(hit.kind)
        )
        yield finding(
            view, "HL030", "medium" if is_guess else "high", event.node,
            f"`{hit.kind}` is called by some ranks only: the condition around it depends on {tags_text(guard.depends)}",
            "All ranks of the default group must call it, members or not, "
            "and in the same order; those that do not are waited for.",
            "Create every group on every rank, in one order, and keep the one that this rank belongs to.",
            steps_of(view, guard, event, hit),
        )  # fmt: skip
        return
    for around in event.guards():
        if around.kind == "loop" and only_axes(around.depends) and hit.kind == "new_group":
            yield finding(
                view, "HL030", "medium", event.node,
                "`new_group` is called in a loop over what depends on the rank",
                "Ranks create other groups, or in another order, and wait for one another.",
                "Loop over all groups on every rank, in one order.",
                steps_of(view, around, event, hit),
            )  # fmt: skip
            return
    confidence = _own_ranks(view, event)
    if confidence is not None:
        yield _other_ranks(view, event, hit, None, confidence)


def _other_ranks(
    view: FunctionView, event: Event, hit: Reached, guard: Guard | None, confidence: Confidence
) -> Finding:
    return finding(
        view, "HL030", confidence, event.node,
        "`new_group` is given ranks that depend on the rank that calls it",
        "Each rank asks for another group under the same name; members of different groups meet one another, or wait.",
        "Create every group on every rank, in one order, and keep the one that this rank belongs to; "
        "or pass `use_local_synchronization=True`.",
        steps_of(view, guard, event, hit),
    )  # fmt: skip


def _is_of_members_alone(node: ast.Call) -> bool:
    given = next((k.value for k in node.keywords if k.arg == "use_local_synchronization"), None)
    return given is not None and not (isinstance(given, ast.Constant) and not given.value)


def _looks_up(guard: Guard) -> bool:
    """Return True if a test of membership asks for something other than a rank: `if members in cache`."""
    asked = [node.left for node in ast.walk(getattr(guard.node, "test", guard.node)) if isinstance(node, ast.Compare)]
    return not any(rank_axes(dotted(left).removesuffix("()").rsplit(".", 1)[-1]) for left in asked)


def _asks_otherwise(view: FunctionView, event: Event, guard: Guard, others: list[Event]) -> bool:
    """Return True for the first `new_group` under a condition whose other side lists other ranks."""
    own = [e for e in view.inside(guard.node, guard.kind) if e.kinds() & event.kinds()]
    lists = [[ast.unparse(e.ranks) for e in side if e.ranks is not None] for side in (own, others)]
    is_known = len(lists[0]) == len(own) and len(lists[1]) == len(others)
    return guard.kind == "if" and event is own[0] and is_known and lists[0] != lists[1]


def _own_ranks(view: FunctionView, event: Event) -> Confidence | None:
    """Return the confidence that each rank passes a list of its own to `new_group`, None if nothing shows it."""
    ranks = event.ranks
    if ranks is None:
        return None
    made_of = (view.value_of(ranks.id, ranks) or ranks) if isinstance(ranks, ast.Name) else ranks
    own = [reason for axis, reason in event.ranks_depend.items() if axis not in LOCAL and _is_own_rank(view, reason)]
    if not own and not _lists_own_group(view, made_of) and not _is_chosen_by_membership(view, ranks):
        return None
    if isinstance(made_of, ast.List | ast.Tuple) and len(made_of.elts) == 1:
        return "low"  # one rank alone waits for no other
    is_given = bool(own) and all(reason in view.fact.parameters for reason in own)
    return "high" if event.is_direct and not is_given else "medium"


def _is_own_rank(view: FunctionView, reason: str) -> bool:
    """Return True if a name holds the calling process's rank, not a group's first rank or one that a caller chooses."""
    if reason in view.fact.parameters:
        return reason in _OWN_RANKS
    return not _RANKS_OF_OTHERS & set(words(reason.removesuffix("()").rsplit(".", 1)[-1]))


def _lists_own_group(view: FunctionView, node: ast.expr) -> bool:
    """Return True for the members of a group that does not hold all ranks."""
    while isinstance(node, ast.Call) and dotted(node.func) in ("list", "sorted", "tuple") and node.args:
        node = node.args[0]
    if not isinstance(node, ast.Call) or not dotted(node.func).endswith("get_process_group_ranks") or not node.args:
        return False
    axes = view.program.resolve_group(view.index, group_text(node.args[0]))
    return not isinstance(axes, str) and not axes & (WORLD | UNKNOWN)


def _is_chosen_by_membership(view: FunctionView, ranks: ast.expr) -> bool:
    """Return True for a list that was assigned under a test of membership, `if rank in each`."""
    return isinstance(ranks, ast.Name) and any(
        isinstance(statement, ast.Assign)
        and any(dotted(target) == ranks.id for target in statement.targets)
        and any(each.is_membership and only_axes(each.depends) for each in (guard.chain() if guard else ()))
        for statement, guard in view.statements
    )


def _source(view: FunctionView, event: Event) -> Iterator[Finding]:
    """HL031: `src` and `dst` are ranks among all, whatever the group."""
    operation = view.program.operation(view.index, event.callee)
    hit = event.reached[0]
    if (
        operation is None
        or not event.group
        or simple_kind(hit.kind) not in ("broadcast", "reduce", "gather", "scatter")
    ):
        return
    node = event.node
    place = operation.src if operation.src >= 0 else operation.dst
    source = next((k.value for k in node.keywords if k.arg in ("src", "dst", "src_rank")), None)
    if source is None and 0 <= place < len(node.args):
        source = node.args[place]
    if source is None or hit.axes == WORLD or any(k.arg in ("group_src", "group_dst") for k in node.keywords):
        return
    verdict = _source_verdict(view, source, event)
    if verdict is None:
        return
    confidence, what = verdict
    yield finding(
        view, "HL031", confidence, node,
        f"`{hit.kind}` over {axes_text(hit.axes)} names its source as {what}, but a source is a rank among all ranks",
        "Only the group that holds that global rank works; in the others "
        "the source is no member, and they fail or wait for ever.",
        "Give `dist.get_global_rank(group, 0)` or `group_src=0`.",
        steps_of(view, None, event, hit),
    )  # fmt: skip


def _source_verdict(view: FunctionView, source: ast.expr, event: Event) -> tuple[Confidence, str] | None:
    axes = event.reached[0].axes
    if (
        isinstance(source, ast.Name)
        and source.id not in view.fact.parameters
        and isinstance(inner := view.value_of(source.id, source), ast.Constant)
    ):
        return _source_verdict(view, inner, event)
    if isinstance(source, ast.Constant) and isinstance(source.value, int):
        is_known = axes != UNKNOWN
        return ("high" if is_known and "node" not in axes else "low"), f"the literal {source.value}"
    text = dotted(source)
    last = text.removesuffix("()").rsplit(".", 1)[-1]
    if isinstance(source, ast.BinOp):
        return "low", "a computed number"
    if not text:
        return None
    if last in view.file.group_ranks:
        return "medium", f"`{text}`, which is compared with a rank within the group"
    if any(word in text for word in _SAFE_SOURCES):
        return None
    if "local" in words(last) or "group_rank" in text:
        return "medium", f"`{text}`, a rank within the group"
    if last in ("src", "src_idx", "source", "dst", "rank", "owner"):
        return "low", f"`{text}`, which nothing shows to be a global rank"
    return None


def _default_group(view: FunctionView) -> Iterator[Finding]:
    """HL032: a library's call that reduces over the default group unless one is given."""
    for node, callee, _ in view.calls:
        table = view.program.libraries.default_groups.get(callee.rsplit(".", 1)[-1])
        if (
            table is None
            or any(k.arg == table.keyword or k.arg is None for k in node.keywords)
            or len(node.args) > table.position
        ):
            continue
        yield finding(
            view, "HL032", "low", node,
            f"`{callee}` is given no `{table.keyword}`, so it reduces over all ranks",
            "Pipeline stages, or replicas, do not come to that reduction together and wait for one another.",
            f"Pass `{table.keyword}=`: the group of the ranks that run this together.",
        )  # fmt: skip


def _all_ranks(view: FunctionView, event: Event) -> Iterator[Finding]:
    """HL032: data reduced over all ranks in a program whose pipeline stages do not all have them."""
    hit = event.reached[0]
    if (
        event.group
        or hit.axes != WORLD
        or hit.kind not in ("all_reduce", "all_gather", "reduce", "all_gather_into_tensor", "reduce_scatter")
    ):
        return
    if (
        not hit.is_sure
        or not view.program.has_stages
        or is_test(view.file.path)
        or not event.callee.startswith(("dist.", "torch.distributed."))
    ):
        return
    yield finding(
        view, "HL032", "low", event.node,
        f"`{hit.kind}` spans all ranks, in a program that divides them into pipeline stages",
        "Only the ranks of the stage that has these data come here; the other stages never do.",
        "Pass the group of the ranks that have the data.",
        steps_of(view, None, event, hit),
    )  # fmt: skip


def _computed_source(view: FunctionView) -> Iterator[Finding]:
    """HL034: a source rank as a formula of the global rank."""
    is_source = {"src", "source"} & set(words(view.fact.name)) and "rank" in words(view.fact.name)
    for node, _ in view.statements:
        if isinstance(node, ast.Return):
            value, named = node.value, is_source
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Attribute):
            value, named = node.value, bool({"src", "source"} & set(words(dotted(node.targets[0]).rsplit(".", 1)[-1])))
        else:
            continue
        if value is None or not named or not _is_rank_formula(view, value):
            continue
        yield finding(
            view, "HL034", "medium" if is_source else "low", node,
            "the source rank is computed from the global rank, as if the members of the group had neighbouring numbers",
            "Under another layout of the axes (pipeline stages, experts) members "
            "compute different sources, or one outside of the group, and wait.",
            "Read it from the group: `dist.get_process_group_ranks(group)[0]` or `dist.get_global_rank(group, 0)`.",
        )  # fmt: skip
        return


def _is_rank_formula(view: FunctionView, value: ast.expr) -> bool:
    if not isinstance(value, ast.BinOp) or not isinstance(
        value.op, ast.Mod | ast.FloorDiv | ast.Mult | ast.Sub | ast.Add
    ):
        return False
    names = {
        dotted(n.func if isinstance(n, ast.Call) else n).rsplit(".", 1)[-1]
        for n in ast.walk(value)
        if isinstance(n, ast.Call | ast.Name | ast.Attribute)
    }
    return any("rank" in words(name) and not {"size", "ranks"} & set(words(name)) for name in names)

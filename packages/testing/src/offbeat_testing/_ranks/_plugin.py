"""Hooks and fixtures of the plugin. Entry point `ranks` of `pytest11`."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import pytest

from offbeat_testing._ranks._request import DEADLINE_INI, PRELOAD_INI, PerRank, parametrise, read_request

MARKS: Final = (
    "ranks(size, *more, deadline_s=…, join=True, compare=True, liveness=True): run the test body on `size` processes "
    "joined over gloo; several sizes run it once each",
    "mesh(dp=…, cp=…, tp=…, pp=…, ep=…, deadline_s=…, compare=True, liveness=True): run the test body on the processes "
    "of this mesh",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(DEADLINE_INI, "deadline of a test on several ranks, in seconds", default="30")
    parser.addini(PRELOAD_INI, "modules that ranks need: imported once, before the first rank forks", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrise(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    request = read_request(pyfuncitem)
    if request is None:
        return None
    if inspect.iscoroutinefunction(pyfuncitem.function):
        pytest.fail("a test on several ranks is a plain function: call asyncio.run(…) in its body", pytrace=False)
    try:
        from offbeat_testing._ranks._launch import run_on_ranks
    except ImportError as error:
        raise pytest.UsageError('tests on several ranks need torch: pip install "offbeat-testing[ranks]"') from error
    run_on_ranks(pyfuncitem, request)
    return True


def _per_rank(name: str, doc: str) -> Callable[..., Any]:
    def fixture(request: pytest.FixtureRequest) -> PerRank:
        if read_request(request.node) is None:
            pytest.fail(f"the fixture {name!r} needs @pytest.mark.ranks(…) or @pytest.mark.mesh(…) on the test", False)
        return PerRank(name)

    fixture.__doc__ = doc
    return pytest.fixture(name=name)(fixture)


rank = _per_rank("rank", "This process's rank, an int.")
ranks = _per_rank("ranks", "This process's place: `ranks.rank` of `ranks.size`.")
mesh = _per_rank("mesh", "The `offbeat_mesh.Mesh` of a test marked with `mesh`.")

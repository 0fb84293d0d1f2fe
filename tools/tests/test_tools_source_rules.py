"""Each rule finds what it forbids, and leaves alone what it allows."""

import pytest
from source_rules import (
    backend_branches,
    imported_modules,
    is_catch_all,
    machine_addresses,
    platform_words,
    swallowed_errors,
    too_long,
    unsafe_loading,
)

SLASH = "/"


@pytest.mark.parametrize("folder", ["work", "root", "opt"])
def test_a_machine_path_is_found(folder: str) -> None:
    assert machine_addresses(f"first\nlook in {SLASH}{folder}/wheels") == [f"line 2: {SLASH}{folder}/"]


@pytest.mark.parametrize("host", ["py" + "pi.org", "files.python" + "hosted.org", "registry.n" + "pmjs.org"])
def test_a_registry_is_found(host: str) -> None:
    assert machine_addresses(f"see {host}")


def test_an_index_of_any_host_is_found() -> None:
    assert machine_addresses(f"https://mirror.example{SLASH}simple/torch")


@pytest.mark.parametrize("text", ["the work/root of options", "https://arxiv.org/abs/2402.03300", "~/data", "a/opt/b"])
def test_an_ordinary_text_is_left_alone(text: str) -> None:
    assert machine_addresses(text) == []


@pytest.mark.parametrize(("text", "is_one"), [("torch_n" + "pu", True), ("input", False), ("ascending", False)])
def test_platform_words(text: str, is_one: bool) -> None:
    assert bool(platform_words(text)) is is_one


@pytest.mark.parametrize(("name", "is_one"), [("_utils", True), ("helpers", True), ("_mesh", False)])
def test_catch_all_names(name: str, is_one: bool) -> None:
    assert is_catch_all(name) is is_one


def test_length_limits() -> None:
    body = "    x = 1\n"
    assert too_long("def f():\n" + body * 79) == []
    assert too_long("def f():\n" + body * 80) == ["line 1: f has 81 lines, over 80"]
    assert too_long("x = 1\n" * 601) == ["the file has 601 lines, over 600"]


def test_imports_are_found_in_functions_and_relative_ones_are_not() -> None:
    source = "import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\n"
    assert imported_modules(source) == {"a", "c", "d", "i"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unsafe_loading_is_found(source: str) -> None:
    assert unsafe_loading(source)


def test_safe_loading_is_left_alone() -> None:
    assert unsafe_loading("torch.load(path, weights_only=True)\nnp.load(path)\nimport json") == []


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    ...",
        "for x in y:\n    try:\n        f()\n    except (OSError, BaseException):\n        continue",
        "with contextlib.suppress(Exception):\n    f()",
    ],
)
def test_a_swallowed_error_is_found(source: str) -> None:
    assert swallowed_errors(source)


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    f()\nexcept FileNotFoundError:\n    pass",
        "try:\n    f()\nexcept Exception as error:\n    raise Typed from error",
        "with suppress(ProcessLookupError):\n    f()",
    ],
)
def test_a_handled_error_is_left_alone(source: str) -> None:
    assert swallowed_errors(source) == []


def test_a_branch_on_a_backends_name_is_found() -> None:
    assert backend_branches("if config.backend == 'vllm':\n    pass")
    assert backend_branches("if load(config.backend) == engine:\n    pass") == []

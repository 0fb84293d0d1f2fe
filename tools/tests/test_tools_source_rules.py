"""Each rule finds what it forbids, and leaves alone what it allows."""

import pytest
from source_rules import (
    backend_branches,
    imported_modules,
    is_catch_all,
    machine_addresses,
    named_devices,
    platform_words,
    swallowed_errors,
    too_long,
    unsafe_loading,
)

SLASH = "/"


@pytest.mark.parametrize("folder", ["work", "root", "opt"])
def test_a_machine_path_is_found(folder):
    assert machine_addresses(f"first\nlook in {SLASH}{folder}/wheels") == [f"line 2: {SLASH}{folder}/"]


@pytest.mark.parametrize("host", ["py" + "pi.org", "files.python" + "hosted.org", "registry.n" + "pmjs.org"])
def test_a_registry_is_found(host):
    assert machine_addresses(f"see {host}")


def test_an_index_of_any_host_is_found():
    assert machine_addresses(f"https://mirror.example{SLASH}simple/torch")


@pytest.mark.parametrize("text", ["the work/root of options", "https://arxiv.org/abs/2402.03300", "~/data", "a/opt/b"])
def test_an_ordinary_text_is_left_alone(text):
    assert machine_addresses(text) == []


@pytest.mark.parametrize("name", ["n" + "pu", "h" + "ccl", "a" + "scend"])
@pytest.mark.parametrize("form", ["torch_{}", "{}_VISIBLE", "vllm-{}:", "{}0"])
def test_platform_words(form, name):
    for word in (name, name.capitalize(), name.upper()):
        assert platform_words("first\n" + form.format(word)) == [f"line 2: {word}"]


@pytest.mark.parametrize("word", ["Np" + "u", "NP" + "U", "NP" + "Us", "Hc" + "cl", "HC" + "CL", "Asc" + "end"])
@pytest.mark.parametrize("form", ["{}Device", "My{}", "on{}Options", "{}"])
def test_platform_words_in_names_of_classes(form, word):
    assert platform_words(form.format(word)) == [f"line 1: {word}"]


@pytest.mark.parametrize("text", ["input", "LIKE_INPUTS", "ascending", "ASCENDING", "NumInputs", "transcend"])
def test_words_of_no_platform_are_left_alone(text):
    assert platform_words(text) == []


@pytest.mark.parametrize(("name", "is_one"), [("_utils", True), ("helpers", True), ("_mesh", False)])
def test_catch_all_names(name, is_one):
    assert is_catch_all(name) is is_one


def test_length_limits():
    body = "    x = 1\n"
    assert too_long("def f():\n" + body * 79) == []
    assert too_long("def f():\n" + body * 80) == ["line 1: f has 81 lines, over 80"]
    assert too_long("x = 1\n" * 601) == ["the file has 601 lines, over 600"]


def test_imports_are_found_in_functions_and_relative_ones_are_not():
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
def test_unsafe_loading_is_found(source):
    assert unsafe_loading(source)


def test_safe_loading_is_left_alone():
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
def test_a_swallowed_error_is_found(source):
    assert swallowed_errors(source)


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    f()\nexcept FileNotFoundError:\n    pass",
        "try:\n    f()\nexcept Exception as error:\n    raise Typed from error",
        "with suppress(ProcessLookupError):\n    f()",
    ],
)
def test_a_handled_error_is_left_alone(source):
    assert swallowed_errors(source) == []


def test_a_branch_on_a_backends_name_is_found():
    assert backend_branches("if config.backend == 'vllm':\n    pass")
    assert backend_branches("if load(config.backend) == engine:\n    pass") == []


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "import torch.cuda",
        "here = torch.device('cpu')",
        "torch.device('cuda', index)",
        "torch.device(f'cuda:{index}')",
        "torch.empty(0, device='cpu')",
        "x.new_empty(0, device='cuda:1')",
        "x.to('cuda')",
        "x.cuda()",
        "fast = x.device.type == 'cuda'",
        "fast = x.is_cuda",
    ],
)
def test_a_device_that_is_named_is_found(code):
    [found] = {line.partition(":")[0] for line in named_devices(f"import torch\n{code}\n")}
    assert found == "line 2"


@pytest.mark.parametrize(
    "code",
    [
        "torch.empty(0, device=x.device)",
        "open_device('auto')",
        "x.to('cpu', copy=True)",
        "x.cpu()",
        "x.is_cpu",
        "replace(config, device='cpu')",
        "torch.device('meta')",
        "torch.device(self.kind, index)",
        "say('cuda')",
        "kind = x.device.type",
    ],
)
def test_a_device_that_is_asked_for_is_left_alone(code):
    assert named_devices(code) == []

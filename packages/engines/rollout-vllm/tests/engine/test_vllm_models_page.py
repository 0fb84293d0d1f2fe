"""The column of vLLM in docs/models.md is what the table of the installed vLLM says; OFFBEAT_RENEW=1 writes it."""

import os
import re
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offbeat_core import ModelError
from offbeat_rollout_vllm._families import served_architecture

PAGE = Path(__file__).parents[5] / "docs" / "models.md"
ROW = re.compile(r"^(\| `(\S+)` \|.*\|) (yes|–) \|$", re.MULTILINE)


def is_served(family: str) -> str:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    try:
        served_architecture({"architectures": [names] if isinstance(names, str) else names})
    except ModelError:
        return "–"
    return "yes"


def test_the_page_names_the_families_that_vllm_serves() -> None:
    page = PAGE.read_text()
    if os.environ.get("OFFBEAT_RENEW"):
        PAGE.write_text(ROW.sub(lambda row: f"{row[1]} {is_served(row[2])} |", page))
        return
    listed = {family: said for _, family, said in ROW.findall(page)}
    assert len(listed) > 100
    known = {family: said for family, said in listed.items() if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert known == {family: is_served(family) for family in known}

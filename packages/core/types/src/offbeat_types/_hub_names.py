"""Names of the Hugging Face Hub, which are not fetched yet."""

import os
import re
from typing import Final

# Source: huggingface_hub, utils/_validators.py, REPO_ID_REGEX. Here with an owner: one word alone is any folder.
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")


def download_advice(path: str, *, is_dataset: bool = False) -> str:
    """Say what to type where a missing path may be a name of the Hub, such as "Qwen/Qwen3-0.6B".

    Args:
        path: as the user wrote it.
        is_dataset: the name would be of a data set, and not of a model.

    Returns:
        A sentence; empty where the path cannot be such a name.
    """
    found = _NAME.fullmatch(path)
    if found is None or os.path.isdir(os.path.dirname(path)):
        return ""
    kind = "--repo-type dataset " if is_dataset else ""
    line = f"hf download {path} {kind}--local-dir {found[1]}"
    return f"Hub names are not fetched yet: run `{line}` and give the folder, {found[1]}"

"""The keys of each application's configuration, as a frozen list: a new key has to justify its place.

OFFBEAT_RENEW=1 writes the lists anew.
"""

import os

import pytest
from workspace import ROOT

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import sections_of
from sft_app._config import SftConfig

FOLDER = ROOT / "tests" / "contracts" / "config_keys"


@pytest.mark.parametrize(
    ("application", "root"), [("grpo-async-app", GrpoConfig), ("sft-app", SftConfig)], ids=["grpo", "sft"]
)
def test_the_keys_of_a_configuration_are_those_that_were_agreed(application: str, root: type) -> None:
    keys = [f"{section.name}.{key}" for section in sections_of(root).values() for key in section.keys]
    pinned = FOLDER / f"{application}.txt"
    if os.environ.get("OFFBEAT_RENEW"):
        pinned.write_text("".join(f"{key}\n" for key in keys))
    agreed = pinned.read_text().split()
    new, lost = sorted(set(keys) - set(agreed)), sorted(set(agreed) - set(keys))
    assert (new, lost) == ([], []), "write it in the CHANGELOG, and renew the list with OFFBEAT_RENEW=1"

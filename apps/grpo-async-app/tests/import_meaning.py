"""Checks of what an import of another framework's options has made."""

from offbeat_recipes import RecipeBuilder


def holds(draft: RecipeBuilder, expected: dict[str, object], told: dict[str, str]) -> None:
    """Keys of ours have these values, None for one that is not set, and of options this is told."""
    assert {key: draft.entries[key].value if key in draft.entries else None for key in expected} == expected
    for name, text in told.items():
        assert text in " ".join(found[name] for found in draft.told().values() if name in found)

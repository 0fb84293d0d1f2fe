"""Checks of what an import of another framework's options has made."""

from offbeat_recipes import RecipeBuilder


def holds(draft: RecipeBuilder, expected: dict[str, object], remarks: dict[str, str]) -> None:
    """Require these values of our keys, None for one that is not set, and these remarks on options."""
    assert {key: draft.entries[key].value if key in draft.entries else None for key in expected} == expected
    for name, text in remarks.items():
        assert text in " ".join(found[name] for found in draft.messages().values() if name in found)

"""The site of the documentation: links between pages that lie in many folders lead to pages of one."""

from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from docs_site import SETTINGS, rewrite_links, site_menu, site_pages
from workspace import ROOT, packages

PACKAGES = packages()
PAGES = site_pages(PACKAGES)


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[how](docs/losses.md#groups)", "[how](losses.md#groups)"),
        ("README.md", "[core](packages/core/core)", "[core](packages/core.md)"),
        ("docs/gpu.md", "[x](../packages/engines/serve/README.md)", "[x](packages/serve.md)"),
        ("packages/rl/data/README.md", "[x](../../../docs/rewards.md)", "[x](../rewards.md)"),
        ("packages/rl/data/README.md", "[x](../objectives)", "[x](objectives.md)"),
        ("docs/liveness-programs.md", "[`raises`](../tests/e2e/faults/raises.py)", "`raises`"),
        ("docs/losses.md", "![lags](lags.svg)", "![lags](lags.svg)"),
        ("docs/losses.md", "[paper](https://a.example/b) and [above](#here)", None),
        ("docs/losses.md", "```\n[x](axes.md)\n[y](../noxfile.py)\n```", None),
    ],
)
def test_a_link_leads_to_a_page_of_the_site_or_is_plain_text(source: str, text: str, expected: str | None) -> None:
    assert rewrite_links(text, source, PAGES) == (text if expected is None else expected)


def test_a_dead_link_is_named_with_its_page() -> None:
    with pytest.raises(ValueError, match=r"docs/losses\.md has a dead link: axis\.md#x"):
        rewrite_links("[x](axis.md#x)", "docs/losses.md", PAGES)


def named(menu: Any) -> list[str]:
    if isinstance(menu, str):
        return [menu]
    return [page for part in (menu.values() if isinstance(menu, dict) else menu) for page in named(part)]


def test_the_menu_names_every_page_once() -> None:
    apis = [f"api/{package.key}.md" for package in PACKAGES]
    assert sorted(named(site_menu(PACKAGES, PAGES))) == sorted([*PAGES.values(), *apis])


def test_a_site_asks_no_other_server_for_anything() -> None:
    """A page that loads fonts or scripts from elsewhere reveals its readers to other sites."""
    assert yaml.load(SETTINGS.read_text(), yaml.BaseLoader)["theme"]["font"] == "false"
    assert all(not PurePosixPath(page).is_absolute() for page in PAGES.values())
    assert (ROOT / "docs/README.md").is_file()

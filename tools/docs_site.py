"""Build the documentation as a site: the pages of docs/, READMEs, the rules of hanglint, and the API from docstrings.

    python tools/docs_site.py FOLDER

mkdocs wants all pages in one folder; here each lies beside what it describes. So they are written into a folder of
their own, with links rewritten: to a page of the site, or to plain text where a link leads to code. mkdocs is strict: a
dead link, a heading that is not there, or a page that no menu names is an error.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml
from workspace import ROOT, Package, packages

SETTINGS: Final = Path(__file__).with_suffix(".yml")
LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
BLOCK: Final = re.compile(r"(?ms)(^```.*?^```[^\n]*$)")
RULES: Final = "packages/hangs/hanglint/src/offbeat_hanglint/pages"
WINGS: Final = ("apps", "engines", "planner", "rl", "runtime", "core", "hangs", "testing")


def site_pages(found: Sequence[Package], root: Path = ROOT) -> dict[str, str]:
    """Return the page of the site for each Markdown file, both as paths from their root."""
    pages = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "docs/README.md": "contents.md"}
    for path in sorted((root / "docs").glob("*.md")):
        pages.setdefault(f"docs/{path.name}", path.name)
    for package in found:
        pages[f"{package.folder.relative_to(root).as_posix()}/README.md"] = f"packages/{package.key}.md"
    pages |= {f"{RULES}/{path.name}": f"rules/{path.name}" for path in sorted((root / RULES).glob("*.md"))}
    return pages


def rewrite_links(text: str, source: str, pages: Mapping[str, str], root: Path = ROOT) -> str:
    """Return a page with links that lead to pages of the site.

    Args:
        text: Markdown of the page.
        source: its file, as a path from the root of the repository.
        pages: page of the site for each Markdown file.
        root: of the repository.

    Raises:
        ValueError: a link leads to a file that is not there.
    """
    home = PurePosixPath(pages[source]).parent

    def rewritten(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, hash_, heading = target.partition("#")
        if "://" in target or not path:
            return match[0]
        there = os.path.normpath(PurePosixPath(source).parent / path)
        if not (root / there).exists():
            raise ValueError(f"{source} has a dead link: {target}")
        page = pages.get(there) or pages.get(f"{there}/README.md") or (there.removeprefix("docs/") if image else None)
        return f"{image}[{label}]({os.path.relpath(page, home)}{hash_}{heading})" if page else label

    parts = BLOCK.split(text)
    return "".join(part if number % 2 else LINK.sub(rewritten, part) for number, part in enumerate(parts))


def site_menu(found: Sequence[Package], pages: Mapping[str, str], root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the menu: the tables of docs/README.md in their order, packages by wing, the rules of hanglint."""
    menu: list[dict[str, Any]] = [{"Home": ["index.md", "contents.md"]}]
    named = {"index.md", "contents.md"}
    for line in (root / "docs/README.md").read_text().splitlines():
        if heading := re.fullmatch(r"\| ([^|]+) \| \|", line):
            menu.append({heading[1].capitalize(): []})
        for _, _, target in LINK.findall(line):
            page = pages.get(os.path.normpath(PurePosixPath("docs") / target.partition("#")[0]), "packages/")
            if not page.startswith("packages/") and page not in named:
                named.add(page)
                menu[-1][next(iter(menu[-1]))].append(page)
    of_wings = {wing: [package.key for package in found if package.wing == wing] for wing in WINGS}
    of_packages = [
        {wing: [page for key in keys for page in (f"packages/{key}.md", {f"{key}: API": f"api/{key}.md"})]}
        for wing, keys in of_wings.items()
    ]
    rules = [page for page in pages.values() if page.startswith("rules/")]
    return [*menu, {"Packages": of_packages}, {"Rules of hanglint": rules}]


def write_sources(folder: Path, root: Path = ROOT) -> None:
    """Write what mkdocs reads: `docs/` and `mkdocs.yml`."""
    found = packages(root)
    pages = site_pages(found, root)
    for source, page in pages.items():
        path = folder / "docs" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rewrite_links((root / source).read_text(), source, pages))
    for picture in (path for kind in ("*.svg", "*.png") for path in (root / "docs").glob(kind)):
        shutil.copy(picture, folder / "docs")
    (folder / "docs/api").mkdir()
    for package in found:
        (folder / f"docs/api/{package.key}.md").write_text(f"# {package.import_name}\n\n::: {package.import_name}\n")
    menu = yaml.safe_dump({"nav": site_menu(found, pages, root)}, sort_keys=False)
    (folder / "mkdocs.yml").write_text(SETTINGS.read_text() + menu)
    (folder / "docs/wide.css").write_text(".md-grid { max-width: 80rem }\n")  # code and tables have 120 columns


def main() -> None:
    """Build the site into a folder, which is replaced."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the site")
    target = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as sources:
        write_sources(Path(sources))
        paths = os.pathsep.join(str(package.folder / "src") for package in packages())
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={target}"]
        done = subprocess.run(
            command, cwd=sources, env={**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"}, check=False
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()

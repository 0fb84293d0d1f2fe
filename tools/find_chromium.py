"""Finds a Chromium for the tests that look at a report, and prints its path.

    export OFFBEAT_CHROMIUM=$(python tools/find_chromium.py)

On Debian, as root and with CI=true, a missing one is installed by apt; elsewhere the error says what to install.
"""

import os
import shutil
import sys
from typing import Final

from apt import install, may_install

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADVICE: Final = (
    "no Chromium found: looked at $OFFBEAT_CHROMIUM and for chromium or google-chrome on PATH; install one "
    "(Debian: apt-get install chromium; macOS: brew install --cask chromium) or set OFFBEAT_CHROMIUM to its path"
)


def on_path() -> str | None:
    """Return the path of a browser that is already installed."""
    named = os.environ.get("OFFBEAT_CHROMIUM")
    found = [shutil.which(name) for name in ((named,) if named else NAMES)]
    return next((path for path in found if path), None)


def find() -> str:
    """Return the path of a Chromium, installed first where that is allowed.

    Raises:
        FileNotFoundError: none is there and none may be installed; the text says what to install.
    """
    path = on_path()
    if path is None and may_install():
        install("chromium")
        path = on_path()
    if path is None:
        raise FileNotFoundError(ADVICE)
    return path


def find_if_required() -> str | None:
    """Return the path of a Chromium, or None outside CI, where its tests are skipped with a line on stderr.

    Raises:
        FileNotFoundError: none is there although this is CI, or not the one that $OFFBEAT_CHROMIUM names.
    """
    try:
        return find()
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true" or os.environ.get("OFFBEAT_CHROMIUM"):
            raise
        print(f"the tests that look at a report are skipped: {error}", file=sys.stderr)
        return None


def main() -> int:
    """Run the command line."""
    try:
        print(find())
    except FileNotFoundError as error:
        print(f"find_chromium: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

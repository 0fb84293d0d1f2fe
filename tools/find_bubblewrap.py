"""Finds bubblewrap (bwrap) for the tests of the sandbox that runs programs of a model, and prints its path.

On Debian, as root and with CI=true, a missing one is installed by apt; elsewhere the error says what to install.
"""

import os
import shutil
import sys
from typing import Final

from apt import install, may_install

ADVICE: Final = "no bubblewrap found: looked for bwrap on PATH; install it (Debian: apt-get install bubblewrap)"


def find() -> str:
    """Return the path of bubblewrap, installed first where that is allowed.

    Raises:
        FileNotFoundError: it is not there and may not be installed; the text says what to install.
    """
    path = shutil.which("bwrap")
    if path is None and may_install():
        install("bubblewrap")
        path = shutil.which("bwrap")
    if path is None:
        raise FileNotFoundError(ADVICE)
    return path


def find_if_required() -> str | None:
    """Return the path of bubblewrap, or None outside CI, where its tests are skipped with a line on stderr.

    Raises:
        FileNotFoundError: it is not there although this is CI.
    """
    try:
        return find()
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            raise
        print(f"the tests of the sandbox are skipped: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    print(find())

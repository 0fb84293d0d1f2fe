"""The files beside this one that pages are made of."""

import re
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def asset(name: str) -> str:
    """Return the text of a file."""
    return files("offbeat_run").joinpath("_report", name).read_text(encoding="utf-8")


def page_template(name: str) -> "Template":
    """Return a page.

    Everything that is put into it is escaped. The test `drawable` distinguishes an image's address from others.
    """
    from jinja2 import Environment, PackageLoader  # imported late: training needs none

    environment = Environment(loader=PackageLoader("offbeat_run", "_report"), autoescape=True, trim_blocks=True)
    environment.tests["drawable"] = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+").fullmatch
    return environment.get_template(name)

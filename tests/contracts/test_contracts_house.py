"""Rules that keep the house as it is: its words, its names, its size. Each bound is today's, and goes down.

The number of lines goes up only in a commit of a new capability or of comments that give reasons, by what it needs.
"""

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from doc_blocks import blocks, pages
from source_rules import first_words, imported_rooms, parsed_errors
from workspace import ROOT, committed_files, packages

SOURCES = [
    path
    for path in committed_files()
    if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in {"packages", "apps", "tools"}
    if "tests" not in path.relative_to(ROOT).parts
]
SHIPPED = [path for path in SOURCES if "src" in path.parts]
MAX_LINES = 129_458
MAX_FILES = 724
# Words with which the first line of a docstring does not begin: it says what is done, or what something is.
FORBIDDEN_FIRST = {"Of", "What", "Whether", "Who", "Whoever", "Those", "Where", "Which", "How", "Somebody", "Nobody"}
# Words that stand in no name, docstring, comment or message: say which process, rank or user it is.
FORBIDDEN = re.compile(r"nobody|somebody|whoever|stranger|(?<![a-z])seats?(?![a-z])", re.IGNORECASE)
# Verdicts, which users' tools and the tables of docs/liveness-programs.md compare word by word.
VERDICTS = ("offbeat_liveness/_diagnosis", "offbeat_liveness/_process/outside")
# Files that read the text of another project's error, for want of anything else in it.
FOREIGN_ERRORS = {
    "packages/engines/engine-torch/src/offbeat_engine_torch/_model.py": "transformers has no error for a folder",
    "packages/engines/serve/src/offbeat_serve/_requests.py": "msgspec names the type it got in the text alone",
    "packages/runtime/actors/src/offbeat_actors/ray/_cluster.py": "Ray has one error for whatever stops a node",
    "packages/testing/src/offbeat_testing/_ray_nodes.py": "the same",
    "apps/grpo-async-app/src/grpo_async_app/_scoring/trial.py": "a user's function names the variable it lacks",
}
# Classes that two packages export under one name, each pair with the reason why it stays.
SAME_NAMES = {
    "ConfigError": "hanglint stands alone: nothing of offbeat is below it",
}

# Exported names that nothing in the repository uses outside their package, and no page names, by the reason they stay.
FOR_USERS = {
    "options of a backend": {
        "MegatronEngineOptions",
        "TorchEngineOptions",
        "TorchRolloutOptions",
        "VllmRolloutOptions",
    },
    "returned or raised": {
        *("Analysis", "Unreadable", "LivenessError", "Monitor", "Party", "Suggestion", "PushError", "CommandEnded"),
        *("Renaming", "SupportedVersion", "DecodeCurve", "DecodeTime", "RunMeasures", "Scenario", "SimulationReport"),
        *("Workload", "DiskStep", "TinyFamily", "LatentAttention"),
    },
    "formulas for any trainer": {
        "gae_advantages",
        "ipo_losses",
        "kto_losses",
        "orpo_losses",
        "reward_losses",
        "simpo_losses",
        "sequence_of_tokens",
    },
    "for trackers, transports and models of one's own": {
        *("Tracker", "PeerStream", "Bucket", "TensorSlice"),
        *("Operators", "PackedBatch", "PaddedBatch", "VisionBatch", "cann_version"),
    },
}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in SOURCES
        for line, word in first_words(path.read_text())
        if word in FORBIDDEN_FIRST
    ]
    assert found == []


def test_processes_ranks_and_users_are_called_what_they_are() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in SHIPPED
        if not any(folder in path.as_posix() for folder in VERDICTS)
        for match in FORBIDDEN.finditer(path.read_text())
    ]
    assert found == []


def test_no_two_packages_export_a_class_of_one_name() -> None:
    folder = ROOT / "tests" / "contracts" / "public_names"
    counts = Counter(
        name
        for package in packages()
        for name in (folder / f"{package.import_name}.txt").read_text().split()
        if name[0].isupper() and not name.isupper()
    )
    assert sorted(name for name, count in counts.items() if count > 1 and name not in SAME_NAMES) == []


def test_examples_import_what_their_package_exports() -> None:
    folder = ROOT / "tests" / "contracts" / "public_names"
    public = {
        package.import_name: set((folder / f"{package.import_name}.txt").read_text().split()) for package in packages()
    }
    found = [
        f"{block.name}: {node.module}.{alias.name}"
        for page in pages()
        for block in blocks(page)
        if block.language == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and node.module in public
        for alias in node.names
        if alias.name not in public[node.module]
    ]
    assert found == []


def test_a_package_exports_what_others_use() -> None:
    """Another package, an application or a test of several packages; or a page names it."""
    tracked = [path for path in committed_files() if path.suffix in {".py", ".md"} and path.name != "CHANGELOG.md"]
    elsewhere = [path for path in tracked if "releases" not in path.parts and path != Path(__file__)]
    words = {path: set(re.findall(r"\w+", path.read_text())) for path in elsewhere}
    found: set[str] = set()
    for package in packages():
        names = (ROOT / "tests" / "contracts" / "public_names" / f"{package.import_name}.txt").read_text().split()
        others = [known for path, known in words.items() if path.suffix == ".md" or package.folder not in path.parents]
        found |= set(names).difference(*others)
    wanted = set().union(*FOR_USERS.values())
    assert (sorted(found - wanted), sorted(wanted - found)) == ([], [])


def test_the_text_of_our_own_errors_is_read_by_people_only() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in SHIPPED if parsed_errors(path.read_text())}
    assert found == set(FOREIGN_ERRORS), "an error that needs more detail has fields"


def test_no_name_of_a_role_is_cut_into_its_parts() -> None:
    cut = re.compile(r"""(role|name|actor)\w*\.r?partition\(["']-["']\)""")
    allowed = {"packages/core/run/src/offbeat_run/_files.py"}
    found = {path.relative_to(ROOT).as_posix() for path in SHIPPED if cut.search(path.read_text())}
    assert found - allowed == set(), "RoleName has them"


def test_the_house_does_not_grow() -> None:
    files = [path for path in SHIPPED if path.suffix == ".py"]
    lines = sum(len(Path(path).read_text().splitlines()) for path in files)
    assert len(files) <= MAX_FILES
    assert lines <= MAX_LINES, f"{lines} lines: what can go for what has come?"


def test_the_rooms_of_a_package_form_no_circle() -> None:
    for package in packages():
        arrows: dict[str, set[str]] = {}
        for path in package.source.rglob("*.py"):
            room = path.relative_to(package.source).with_suffix("").parts[0]
            targets = {target for target in imported_rooms(path.read_text(), package.import_name) if target != room}
            if room != "__init__":
                arrows[room] = arrows.get(room, set()) | targets
        tuple(TopologicalSorter(arrows).static_order())  # raises CycleError, with the circle

"""The command `hanglint`. Exit codes: 0 nothing to say, 1 findings, 2 a mistake of the user."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from offbeat_hanglint._config import CONFIDENCES, EVERY_RULE, Config, ConfigError, load_config, nearest
from offbeat_hanglint._output.printable import printable

if TYPE_CHECKING:
    from offbeat_hanglint._report.report import Report

FINDINGS: Final = 1
USER_ERROR: Final = 2
INTERRUPTED: Final = 130
MAX_JOBS: Final = 8
FORMATS: Final = ("text", "json", "sarif", "github")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when nothing is found (or notes alone), 1 when something is, 2 for something that the user can put right.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except ConfigError as error:
        _say(str(error))
        return USER_ERROR
    except BrokenPipeError:  # the reader has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINDINGS
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hanglint", description="Finds hangs of torch.distributed and Ray programs by reading their source."
    )
    add = parser.add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="files and folders, read together as one program")
    add("--format", choices=FORMATS, default="text")
    add("--output", type=Path, metavar="FILE", help="write the report there")
    add("--confidence", choices=CONFIDENCES, help="the least that is said (default: medium)")
    add("--select", type=_rules, metavar="RULES", help="rules to say, such as HL001,HL02")
    add("--ignore", type=_rules, metavar="RULES", help="rules not to say")
    add("--exclude", action="append", metavar="GLOB", help="paths not to read, beside those of the settings file")
    add("--config", type=Path, metavar="FILE", help="settings (default: the nearest hanglint.toml or [tool.hanglint])")
    add("--baseline", type=Path, metavar="FILE", help="say only what is not in it")
    add("--write-baseline", type=Path, metavar="FILE", help="write what is found now as known, and end with 0")
    add("--cache", action=argparse.BooleanOptionalAction, default=True, help="keep what was read for the next run")
    add(
        "--jobs", type=_count, default=0, metavar="N", help="processes that read files (default: one a core, at most 8)"
    )
    add("--summarise-installed", action="append", metavar="NAME", help="write what a library does, for `summaries`")
    add("--statistics", action="store_true", help="count findings by rule, too")
    add("--list-rules", action="store_true", help="show the rules, and end")
    add("--explain", metavar="RULE", help="show the page of a rule, and end")
    add("--version", action="store_true", help="show the version, and end")
    return parser


def _rules(text: str) -> tuple[str, ...]:
    return tuple(rule.strip() for rule in text.split(",") if rule.strip())


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more: got {count}")
    return count


def _run(options: argparse.Namespace) -> int:
    if options.version:
        from offbeat_hanglint._output.as_sarif import own_version

        print(f"hanglint {own_version()}")
    elif options.list_rules:
        from offbeat_hanglint._output.as_text import rule_list

        print(rule_list())
    elif options.explain is not None:
        print(_explain(options.explain), end="")
    elif options.summarise_installed:
        _summarise(options)
    elif not options.paths:
        raise ConfigError("needs at least one PATH, such as `hanglint src`; --help shows the rest")
    else:
        return _check(options)
    return 0


def _say(text: str) -> None:
    print(_escaped(f"hanglint: {text}"), file=sys.stderr)


def _escaped(text: str) -> str:
    """Lines that name files and settings, which may be of any characters."""
    return "\n".join(map(printable, text.split("\n")))


def _explain(rule: str) -> str:
    from offbeat_hanglint._rules.pages import page

    known = [each.id for each in EVERY_RULE]
    if rule.upper() not in known:
        raise ConfigError(f"--explain must name a rule: got `{rule}`{nearest(rule.upper(), known)}")
    return page(rule.upper())


def _summarise(options: argparse.Namespace) -> None:
    from offbeat_hanglint._reading.cache import default_cache_folder
    from offbeat_hanglint._summarise import summarise

    cache = default_cache_folder() if options.cache else None
    texts = [summarise(name, cache, _num_jobs(options)) for name in options.summarise_installed]
    _write("\n".join(texts), options.output)


def _num_jobs(options: argparse.Namespace) -> int:
    return int(options.jobs) or min(os.cpu_count() or 1, MAX_JOBS)


def _write(text: str, output: Path | None) -> None:
    """Print it, or write it where it is asked for."""
    if output is None:
        print(text, end="", flush=True)
        return
    try:
        output.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--output must be writable: got {output} ({error.strerror})") from error


def _check(options: argparse.Namespace) -> int:
    """Read the program and say what is found."""
    config = _config(options)
    report = _analyse(options, config)
    for unread in report.unreadable:
        _say(f"not read: {unread.path}: {unread.why}")
    for warning in report.warnings:
        _say(f"{warning}")
    if options.write_baseline is not None:
        from offbeat_hanglint._report.baseline import write_baseline

        write_baseline(options.write_baseline, [(said.finding, said.fingerprint) for said in report.said])
        _say(f"{options.write_baseline} holds {len(report.said)} findings")
        return 0
    _show(report, options, config)
    return FINDINGS if report.has_failed else 0


def _config(options: argparse.Namespace) -> Config:
    """Return the settings file's, and what the command line says instead."""
    config = load_config(options.paths, options.config)
    config = config.with_options(
        confidence=options.confidence,
        select=options.select,
        ignore=options.ignore,
        exclude=(*config.exclude, *options.exclude) if options.exclude else None,
        baseline=options.baseline,
    )
    _check_summaries(config)
    return replace(config, baseline=None) if options.write_baseline is not None else config


def _check_summaries(config: Config) -> None:
    if not config.summaries:
        return
    from offbeat_hanglint._libraries import libraries

    try:
        libraries(config.summaries)
    except OSError as error:
        raise ConfigError(f"`summaries` must name readable files: got {error.filename} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        files = ", ".join(map(str, config.summaries))
        raise ConfigError(
            f"`summaries` must have the form of hanglint's own `_libraries`: {files}: {error!r}"
        ) from error


def _analyse(options: argparse.Namespace, config: Config) -> "Report":
    """Read the program, and sift what is found."""
    from offbeat_hanglint._analyse import analyse
    from offbeat_hanglint._reading.cache import default_cache_folder, tidy
    from offbeat_hanglint._reading.files import find_files
    from offbeat_hanglint._report.report import FindingFilter
    from offbeat_hanglint._settings import Settings

    cache = default_cache_folder() if options.cache else None
    settings = Settings(
        exclude=config.exclude,
        rules=config.rules,
        root=config.root,
        summaries=config.summaries,
        cache_folder=cache,
        num_jobs=_num_jobs(options),
    )
    analysis = analyse(options.paths, settings)
    if cache is not None:
        tidy(cache)
    files, _ = find_files(options.paths, config.root, config.exclude)
    return FindingFilter(config, files).report(analysis)


def _show(report: "Report", options: argparse.Namespace, config: Config) -> None:
    """Print the report, or write it where it is asked for and print a line."""
    from offbeat_hanglint._output.as_text import statistics, summary

    text = _formatted(report, options, config)
    _write(text, options.output)
    if options.output is not None:
        _say(f"{summary(report)}; written to {options.output}")
    if options.statistics:
        print(_escaped(statistics(report)), file=sys.stderr)


def _formatted(report: "Report", options: argparse.Namespace, config: Config) -> str:
    match options.format:
        case "json":
            from offbeat_hanglint._output.as_json import as_json

            return as_json(report)
        case "sarif":
            from offbeat_hanglint._output.as_sarif import as_sarif

            return as_sarif(report, config)
        case "github":
            from offbeat_hanglint._output.as_github import as_github

            return as_github(report)
    from offbeat_hanglint._output.as_text import as_text

    is_terminal = options.output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return as_text(report, is_coloured=is_terminal)

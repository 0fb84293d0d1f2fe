"""The latest metrics of a run for Prometheus, over HTTP during the run.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/, text format 0.0.4.
"""

import hmac
import math
import os
import re
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from offbeat_core import ConfigError
from offbeat_http import Page, PageServer, is_loopback, listen
from offbeat_run._metrics.names import METRIC_NAMES

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TOKEN_VARIABLE: Final = "OFFBEAT_METRICS_TOKEN"
_SHORTEST_TOKEN: Final = 16
_PREFIX: Final = "offbeat_"


def exposition(step: int, values: Mapping[str, float], run: str) -> str:
    """Metrics in Prometheus' text format, each a gauge with the label `run`.

    Args:
        step: updates done.
        values: the latest of each metric by name; `train/reward` becomes `offbeat_train_reward`.
        run: name of the run.
    """
    label = f'{{run="{_escaped(run, quotes=True)}"}}'
    known = {"offbeat_updates": ("Updates done.", float(step))}
    for name, value in values.items():
        metric = METRIC_NAMES.get(name)
        about = f"{name}: {metric.doc}{f' In {metric.unit}.' if metric.unit else ''}" if metric else name
        known.setdefault(_PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name), (about, value))
    return "".join(
        f"# HELP {name} {_escaped(about)}\n# TYPE {name} gauge\n{name}{label} {_number(value)}\n"
        for name, (about, value) in known.items()
    )


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class PrometheusServer:
    """Answers GET /metrics in a thread of its own. Use it in a `with` block.

    Args:
        port: 0 for a free one.
        host: to listen on. Any other than this machine's own needs a token, in OFFBEAT_METRICS_TOKEN. Where there is
            one, every request must bring it as `Authorization: Bearer ...`.
        run: name of the run.

    Attributes:
        url: of the metrics.
        access: description of the clients that are answered.
    """

    def __init__(self, port: int, host: str, run: str) -> None:
        self._token = metrics_token(host)
        self._run, self._step = run, 0
        self._values: dict[str, float] = {}
        self._changing = threading.Lock()
        try:
            listener = listen(host, port)
        except OSError as error:
            reason = f"cannot be used: {error.strerror or error}; choose another"
            raise ConfigError(f"log.prometheus_port = {port} on log.prometheus_host = {host!r} {reason}") from error
        self._server = PageServer(listener, self._answer, name="prometheus")
        self.url = f"{self._server.url}/metrics"
        port = listener.getsockname()[1]
        self._names = {f"{name}:{port}" for name in ("localhost", "127.0.0.1", "[::1]", host)}
        alone = f"every user of this machine; {TOKEN_VARIABLE} makes it ask for a token"
        self.access = f"clients that send the token of {TOKEN_VARIABLE}" if self._token else alone

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step; those that it does not have keep their last value."""
        with self._changing:
            self._step = max(self._step, step)
            self._values |= values

    def text(self) -> str:
        """Return what is answered now."""
        with self._changing:
            return exposition(self._step, self._values, self._run)

    def close(self) -> None:
        """Answer no more."""
        self._server.close()

    def __enter__(self) -> "PrometheusServer":
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _answer(self, path: str, headers: Mapping[str, str]) -> Page:
        if status := self._refusal(headers):
            return Page.refuse(status, status.phrase)
        if path != "/metrics":
            return Page.refuse(HTTPStatus.NOT_FOUND, "only /metrics is here")
        return Page(body=self.text().encode(), content_type=CONTENT_TYPE)

    def _refusal(self, headers: Mapping[str, str]) -> HTTPStatus | None:
        """Return why a request is refused: it lacks the token, or a web page may have sent a browser here."""
        if self._token:
            given = headers.get("authorization", "").encode(errors="replace")
            return None if hmac.compare_digest(given, f"Bearer {self._token}".encode()) else HTTPStatus.UNAUTHORIZED
        return None if headers.get("host") in self._names else HTTPStatus.FORBIDDEN


def metrics_token(host: str) -> str:
    """Return the token that requests must bring; empty where none is set and only this machine is answered.

    Raises:
        ConfigError: others are to be answered and there is none, or it is short.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise ConfigError(f"{TOKEN_VARIABLE} must have {_SHORTEST_TOKEN} printable ASCII characters or more")
    if not token and not is_loopback(host):
        raise ConfigError(
            f"log.prometheus_host = {host!r} is not this machine alone: set {TOKEN_VARIABLE} to a secret that "
            "Prometheus sends as a bearer token, or leave it at 127.0.0.1"
        )
    return token

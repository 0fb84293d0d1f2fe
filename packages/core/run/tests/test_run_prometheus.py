"""Prometheus reads the latest metrics: in its own format, from this machine, or with a token."""

import http.client
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import ConfigError
from offbeat_run import LogConfig, RunFolder, RunLog
from offbeat_run._metrics.prometheus import CONTENT_TYPE, TOKEN_VARIABLE, PrometheusServer, exposition

TOKEN = "a-secret-of-many-letters"


def parsed(text):
    """Return value and labels by name, from Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        sample.name: (sample.value, sample.labels)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def get(url, path="/metrics", **headers):
    address = url.removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(st.dictionaries(NAMES, st.floats(), max_size=5), NAMES)
def test_any_metric_of_any_run_is_read_by_prometheus_own_parser(values, run):
    read = parsed(exposition(3, values, run))
    assert read["offbeat_updates"] == (3.0, {"run": run})
    assert {labels["run"] for _, labels in read.values()} == {run}
    for value, _ in read.values():
        assert any(value == other or (math.isnan(value) and math.isnan(other)) for other in (3.0, *values.values()))


def test_a_run_answers_with_its_latest_numbers_until_it_ends(tmp_path, capsys):
    log = LogConfig(prometheus_port=0, tensorboard=False)
    with RunFolder.create(tmp_path / "my run") as run:
        with RunLog(run, log, 10, None) as written:
            url = capsys.readouterr().out.partition("Prometheus: ")[2].split()[0]
            assert url.startswith("http://127.0.0.1:")
            written.write(1, {"train/reward": 0.25, "train/loss": 2.0, "async/lag_histogram": [1, 2]})
            written.write(2, {"train/reward": math.inf})
            written.write_validation(1, {"eval/reward": 0.5}, {})  # has ended after an update that it ran beside
            status, headers, text = get(url)
            assert (status, headers["Content-Type"]) == (200, CONTENT_TYPE)
            read = parsed(text)
            assert read["offbeat_train_reward"] == (math.inf, {"run": "my run"})
            assert read["offbeat_train_loss"][0] == read["offbeat_updates"][0] == 2.0
            assert read["offbeat_eval_reward"][0] == 0.5
            assert "# HELP offbeat_train_loss train/loss: Mean loss" in text
            assert get(url, "/")[0] == 404
            assert get(url, Host="evil.example:1")[0] == 403
        with pytest.raises(OSError):
            get(url)


def test_nothing_listens_unless_it_is_asked_for(tmp_path, capsys):
    with RunFolder.create(tmp_path / "run") as run, RunLog(run, LogConfig(tensorboard=False), 1, None):
        assert "Prometheus" not in capsys.readouterr().out


def test_others_than_this_machine_need_a_token_which_is_never_shown(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"is not this machine alone: set {TOKEN_VARIABLE}"):
        PrometheusServer(0, "0.0.0.0", "run")
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="16 printable") as caught:
        PrometheusServer(0, "0.0.0.0", "run")
    assert "short" not in str(caught.value)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with PrometheusServer(0, "0.0.0.0", "run") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert get(url)[0] == 401
        assert get(url, Authorization="Bearer another-secret-of-letters")[0] == 401
        status, _, text = get(url, Authorization=f"Bearer {TOKEN}")
        assert status == 200
        assert TOKEN not in text


def test_a_port_in_use_is_one_line():
    with PrometheusServer(0, "127.0.0.1", "run") as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match=f"log.prometheus_port = {port} on .* cannot be used"):
            PrometheusServer(port, "127.0.0.1", "run")

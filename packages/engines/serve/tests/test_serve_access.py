"""Which clients are answered: this machine without a token, any with it, no other; and the token is never revealed."""

import logging

import pytest

from offbeat_core import ConfigError
from offbeat_data import load_tokenizer
from offbeat_serve import TOKEN_VARIABLE, RolloutServer, ServedModel, ServeSettings
from offbeat_serve._settings import read_token
from offbeat_testing import FakeRolloutEngine

TOKEN = "a-token-for-tests-only"


@pytest.fixture
def engine():
    return FakeRolloutEngine(lambda *_: [1])


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/openapi.json", "/nowhere", "/v1/completions"])
async def test_without_the_token_nothing_is_told(serving, engine, token_file, path, caplog):
    caplog.set_level(logging.DEBUG)
    async with serving(engine=engine, token=TOKEN, token_file=str(token_file)) as served:
        refused = [
            await served.http.get(path, headers={"Authorization": given})
            for given in ("", "Bearer", "Bearer a-token-for-tests-onlx", f"Basic {TOKEN}", TOKEN, b"Bearer \xfc")
        ]
        let_in = await served.http.get(path)
    assert [answer.status_code for answer in refused] == [401] * 6
    assert all(answer.headers["WWW-Authenticate"] == "Bearer" for answer in refused)
    assert let_in.status_code != 401
    assert TOKEN not in caplog.text + "".join(answer.text for answer in refused)


@pytest.mark.asyncio
async def test_openai_s_client_brings_the_token_as_its_key(serving, token_file):
    async with serving(token=TOKEN, token_file=str(token_file)) as served:
        answer = await served.complete(prompt="a", max_tokens=1)
    assert answer.choices


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200), ("evil.example", 403), ("127.0.0.1.evil.io", 403)],
)
async def test_without_a_token_another_site_s_name_is_no_way_in(serving, engine, host, status):
    async with serving(engine=engine) as served:
        answer = await served.http.get("/health", headers={"Host": host})
    assert answer.status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_any_other_address_needs_a_token(host, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"{host} with no {TOKEN_VARIABLE}: a server that can be reached"):
        read_token(ServeSettings(host=host))
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_token(ServeSettings(host=host)) == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_none(host, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(ServeSettings(host=host)) == ""


@pytest.mark.parametrize("content", ["", "short", "sixteen characters with blanks", "ümlaut-in-a-long-token"])
def test_a_token_that_protects_nothing_is_refused_and_not_shown(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(ConfigError, match="16") as refused:
        read_token(ServeSettings(token_file=str(path)))
    assert not content or content not in str(refused.value)


def test_a_token_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"token file .* cannot be read"):
        read_token(ServeSettings(token_file=str(tmp_path / "none")))


@pytest.mark.asyncio
async def test_a_port_in_use_is_told(serving, engine, model):
    async with serving(engine=engine) as served:
        port = int(served.server.url.rpartition(":")[2])
        small = ServedModel(name="m", max_model_len=8, vocab_size=8)
        other = RolloutServer(engine, load_tokenizer(model), small, ServeSettings(port=port))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
            await other.start()


@pytest.mark.asyncio
async def test_ipv6_loopback_is_served(serving, engine):
    async with serving(engine=engine, host="::1") as served:
        assert served.server.url.startswith("http://[::1]:")
        assert (await served.http.get("/health")).status_code == 200

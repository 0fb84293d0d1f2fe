"""No secret of the environment is written down."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat_core import ConfigError, drop_secrets, dump_config, hide_secrets, parse_config, secret_variables, setting


@dataclass(frozen=True, kw_only=True)
class Data:
    path: str = setting("", "Where.")
    options: dict[str, Any] = setting({}, "More.")


@dataclass(frozen=True, kw_only=True)
class Config:
    data: Data = field(default_factory=Data)


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "ab~/cd$ef-0123456789")
    return "ab~/cd$ef-0123456789"


def test_secrets_are_taken_out_of_the_environment_but_for_those_that_are_kept(monkeypatch):
    for name in ("HF_TOKEN", "JUDGE_API_KEY", "AWS_SECRET_ACCESS_KEY", "KEYBOARD"):
        monkeypatch.setenv(name, "value")
    assert {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} <= set(secret_variables(["JUDGE_API_KEY"]))
    drop_secrets(["JUDGE_API_KEY"])
    assert "HF_TOKEN" not in os.environ
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
    assert os.environ["JUDGE_API_KEY"] == os.environ["KEYBOARD"] == "value"


def test_the_resolved_configuration_names_a_secret_and_does_not_hold_it(secret):
    text = '[data]\npath = "~/x?${WANDB_API_KEY}&${WANDB_API_KEY}$${x}"\noptions = {api_key = "${WANDB_API_KEY}"}'
    config = parse_config(text, Config)
    assert secret in config.data.path
    dumped = dump_config(config)
    assert secret not in dumped
    assert dumped.count("${WANDB_API_KEY}") == 3
    assert parse_config(dumped, Config) == config


def test_a_secret_written_into_the_configuration_itself_is_refused():
    with pytest.raises(ConfigError, match=r"data\.options\.server\.api_key looks like a secret.*\$\{API_KEY\}"):
        dump_config(Config(data=Data(options={"server": {"api_key": "sk-0123456789"}})))
    dump_config(Config(data=Data(options={"max_tokens": 12345678, "key": "a long name", "token": "short"})))


SECRETS = [
    "OPENAI_API_KEY",
    "OPENAI_APIKEY",
    "OPENAIAPIKEY",
    "APIKEY",
    "HF_TOKEN",
    "GITHUB_TOKEN_2",
    "GH_PAT",
    "GITLAB_PAT",
    "DB_PASS",
    "MYSQL_PWD",
    "SMTP_PASSWORD",
    "PGPASSWORD",
    "BASIC_AUTH",
    "REDIS_AUTH",
    "PROXY_AUTHORIZATION",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "SSH_PASSPHRASE",
    "DOCKER_CREDS",
    "GOOGLE_CREDENTIALS",
    "WANDB_API_KEY",
    "clientSecret",
    "accessToken",
    "OFFBEAT_LIVENESS_SECRET",
    "JUDGE_KEY",
    "HUBTOKEN",
    "VAULT_PASSCODE",
    "JWT_SECRET",
]
INNOCENT = [
    "PATH",
    "PWD",
    "OLDPWD",
    "HOME",
    "AUTHOR",
    "GIT_AUTHOR_NAME",
    "NUM_PASSES",
    "PASSES",
    "PASS_AT_K",
    "PAD_TOKEN",
    "EOS_TOKEN",
    "padToken",
    "image_token",
    "MAX_TOKENS",
    "MONKEY",
    "KEYBOARD",
    "TOKENIZERS_PARALLELISM",
    "SSH_AUTH_SOCK",
    "XAUTHORITY",
    "AUTH_URL",
    "PATTERN",
    "COMPAT",
    "PASSTHROUGH",
    "FIRST_PASS",
    "SORT_KEY",
    "prompt_key",
    "RAY_AUTH_TOKEN_PATH",
    "SSL_KEY_FILE",
    "HOSTPATH",
    "BYPASS",
    "PATCH",
    "SECRETARY",
    "DONKEY",
    "TURKEY",
    "COMPASS",
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_variable_that_is_named_like_a_secret_is_hidden(name, monkeypatch):
    monkeypatch.setenv(name, "hunter2-hunter2")
    assert hide_secrets("it is hunter2-hunter2.") == f"it is ${{{name}}}."


@pytest.mark.parametrize("name", INNOCENT)
def test_a_variable_that_is_not_is_shown(name, monkeypatch):
    for known in os.environ:
        monkeypatch.delenv(known)
    monkeypatch.setenv(name, "a-long-value")
    assert hide_secrets("it is a-long-value.") == "it is a-long-value."

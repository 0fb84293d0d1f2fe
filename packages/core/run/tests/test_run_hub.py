"""Hub names in a configuration: pinned, fetched before anything looks at a model, and the same when a run goes on."""

from dataclasses import dataclass, field

import pytest

from offbeat_core import REQUIRED, ModelError, RunFolderError, setting
from offbeat_run import HubModels, RunFolder, fetch_models, has_hub_model
from offbeat_testing import HubServer

pytest.importorskip("huggingface_hub")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = setting(REQUIRED, "A model.", hub="model")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = setting("", "Data.", hub="dataset")
    note: str = setting("Qwen/Tiny", "A text.")


@dataclass(frozen=True, kw_only=True)
class Teachers:
    named: dict[str, ModelConfig] = setting({}, "More models.")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    teachers: Teachers = field(default_factory=Teachers)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with HubServer() as server:
        server.use_in_this_process(monkeypatch, tmp_path / "cache")
        server.model, server.data = server.add("Qwen/Tiny", folder), server.add("my/rows", folder, "dataset")
        yield server


def test_models_become_folders_and_names_get_a_commit(hub):
    named = {"one": ModelConfig(path="Qwen/Tiny@main"), "own": ModelConfig(path="/nowhere")}
    config = Config(
        model=ModelConfig(path="Qwen/Tiny"), data=DataConfig(path="my/rows:a/b"), teachers=Teachers(named=named)
    )
    assert has_hub_model(config)
    here, models = fetch_models(config)
    assert here.model.path.endswith(f"/models--Qwen--Tiny/snapshots/{hub.model.commit}")
    assert here.teachers.named == {"one": here.model, "own": named["own"]}
    assert here.data == DataConfig(path=f"hub:my/rows:a/b@{hub.data.commit}")
    pinned = f"hub:Qwen/Tiny@{hub.model.commit}"
    written = models.name_in(here)
    assert (written.model.path, written.teachers.named["one"].path, written.data) == (pinned, pinned, here.data)
    assert list(models.digests) == [pinned]
    assert fetch_models(written) == (here, models)
    local = Config(model=ModelConfig(path="/nowhere"))
    assert fetch_models(local) == (local, HubModels())
    assert not has_hub_model(local)


def test_an_error_begins_with_the_key(hub):
    config = Config(
        model=ModelConfig(path="Qwen/Tiny"), teachers=Teachers(named={"one": ModelConfig(path="Qwen/None")})
    )
    with pytest.raises(ModelError, match=r"teachers\.named\.one\.path: Qwen/None: there is no such model on the Hub"):
        fetch_models(config)


def test_a_run_goes_on_with_the_files_that_it_was_begun_with(hub, tmp_path):
    config, models = fetch_models(Config(model=ModelConfig(path="Qwen/Tiny")))
    with RunFolder.create(tmp_path / "run") as run:
        run.write_config(config, hub_digests=models.digests)
        run.write_config(config, hub_digests=models.digests)
        changed = {name: dict.fromkeys(files, "0" * 40) for name, files in models.digests.items()}
        with pytest.raises(RunFolderError, match=r"hub:Qwen/Tiny@.*: config\.json is not the one that this run was"):
            run.write_config(config, hub_digests=changed)

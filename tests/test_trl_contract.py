"""What is taken for granted about TRL and transformers: a release that changes it is noticed when a trainer is made."""

from importlib.metadata import version

import pytest
from trl import GRPOTrainer

import tiny
from lze_trl import trl_contract
from lze_trl.trl_contract import NEWEST, STATE, changes, check_releases


@pytest.fixture(autouse=True)
def unchecked():
    check_releases.cache_clear()
    yield
    check_releases.cache_clear()


def release(monkeypatch, **versions):
    monkeypatch.setattr(trl_contract, "version", lambda name: versions.get(name) or version(name))


def test_the_installed_releases_are_as_expected(tmp_path):
    assert list(changes()) == []
    trainer = tiny.make(tmp_path, GRPOTrainer)
    later = {"_last_loaded_step", "_environment_pool"}  # with vLLM, or an environment
    assert [name for name in STATE.keys() - later if not hasattr(trainer, name)] == []
    assert set(trainer._logs) == {"images", "prompt", "completion", "rewards", "advantages", "extra"}


def test_a_newer_release_with_the_same_forms_is_used_with_one_warning(tmp_path, monkeypatch, caplog):
    release(monkeypatch, trl="1.99.0", transformers=NEWEST["transformers"])
    for _ in range(2):
        tiny.make(tmp_path)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "lze_trl.trl_contract"]
    assert "trl 1.99.0" in warning and f"tested with (trl {NEWEST['trl']})" in warning


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (lambda self, prompts, images=None: None, None),
        (lambda self, prompts, images: None, r"`_generate` takes \(prompts, images\), and took \(prompts\)"),
        (lambda self, batch: None, r"`_generate` takes \(batch\), and took \(prompts\)"),
        (None, "`_generate` is gone"),
    ],
)
def test_a_release_that_has_changed_a_method_is_refused(tmp_path, monkeypatch, method, told):
    release(monkeypatch, trl="1.99.0")
    monkeypatch.setattr(GRPOTrainer, "_generate", method)
    if told is None:
        assert list(changes()) == []
        return
    with pytest.raises(ImportError, match=rf"trl 1.99.0 .* has changed: {told}.* pip install 'trl=={NEWEST['trl']}"):
        tiny.make(tmp_path)


def test_a_release_without_an_attribute_is_refused(monkeypatch):
    def without(cls, names=trl_contract._names_in_code):
        return names(cls) - {"_metrics"}

    monkeypatch.setattr(trl_contract, "_names_in_code", without)
    with pytest.raises(ImportError, match="the attribute `_metrics` is gone"):
        check_releases()

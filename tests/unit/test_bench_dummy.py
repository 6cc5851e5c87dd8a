"""Random weights in place of a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from thor_spec.bench import chat, dummy
from thor_spec.bench.arms import Arm
from thor_spec.cli import starting
from thor_spec.cli.main import main
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import seam


def test_random_weights_are_those_of_every_arm_and_are_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pretended acceptance belongs to arms that draft, and to no other."""
    seen: dict[str, dict[str, Any]] = {}

    def run(arms: list[Arm], source: Any, options: chat.Options) -> Any:
        for arm in arms:
            source(arm)
            seen[arm.name] = flags.pop()
        assert not options.judged
        raise ConfigError("far enough")

    flags: list[dict[str, Any]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starting, "planned", lambda given, _profile: flags.append(given))
    monkeypatch.setattr(seam, "has_gpu_build", lambda: True)
    monkeypatch.setattr(chat, "run", run)
    dummies = ["bench", "chat", "--dummy", "small", "--synthetic-acceptance", "3"]
    with pytest.raises(SystemExit):
        main([*dummies, "--arms", "plain:draft=none", "--arms", "drafts:draft_tokens=7"])
    assert all(of["dummy_weights"] and of["model"].endswith("small/target") for of in seen.values())
    assert {name: of["synthetic_acceptance"] for name, of in seen.items()} == {"plain": None, "drafts": 3.0}


@pytest.mark.parametrize(
    "asked", [["--quality"], ["--arms", "a:model=nano-hybrid"], ["--arms", "a:url=http://localhost:1"], ["nano-hybrid"]]
)
def test_random_weights_take_the_place_of_every_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chat, "run", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "--dummy", "small", "--draft", "none", *asked])
    assert ended.value.code == 2


def test_dummies_have_whole_vocabularies(tmp_path: Path) -> None:
    assert dummy.names() == ["qwen3.5-35b-a3b", "small"]
    target, drafter = dummy.make("small", tmp_path)
    config = json.loads((target / "config.json").read_text())
    content = json.loads((target / "tokenizer.json").read_text())
    ids = {*content["model"]["vocab"].values(), *(entry["id"] for entry in content["added_tokens"])}
    assert ids == set(range(config["vocab_size"]))
    assert (drafter / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="no dimensions of 'x'"):
        dummy.make("x", tmp_path)

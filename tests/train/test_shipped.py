"""What comes with the package: whole where it is, and no one's default where it is not."""

import json
from pathlib import Path

import pytest
import torch

from thor_spec.config import DEFAULT_MODEL
from thor_spec.errors import ConfigError
from thor_spec.nano import shipped
from thor_spec.serve.locate import locate
from tools.train_nano import ship


def trained(folder: Path, *, smoke: bool = False, names: tuple[str, ...] = shipped.NAMES) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.json").write_text(json.dumps({"smoke": smoke}))
        for file in ("config.json", "model.safetensors", "README.md"):
            (folder / name / file).write_text(f"{name} {file}")
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "package")
    return tmp_path / "package"


def test_what_is_shipped_is_found_and_served_by_default(package: Path, tmp_path: Path) -> None:
    assert shipped.default_model(DEFAULT_MODEL) == DEFAULT_MODEL
    ship.ship(trained(tmp_path / "out"), package)
    assert shipped.default_model(DEFAULT_MODEL) == "nano-hybrid"
    assert shipped.drafter_of("nano-hybrid") == "nano-dflash"
    assert locate("nano-llada") == package / "nano-llada"
    assert not (package / "nano-hybrid" / "metrics.json").exists()
    assert shipped.damaged() == []
    (package / "nano-dflash" / "config.json").write_text("other")
    assert shipped.damaged() == ["nano-dflash/config.json"]


def test_a_target_without_its_drafter_is_no_default(package: Path, tmp_path: Path) -> None:
    ship.ship(trained(tmp_path / "out", names=("nano-hybrid",)), package)
    assert shipped.default_model(DEFAULT_MODEL) == DEFAULT_MODEL
    with pytest.raises(ConfigError, match="did not come with this installation"):
        locate("nano-dflash")


def test_smoke_sizes_and_heavy_files_are_not_shipped(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="smoke"):
        ship.ship(trained(tmp_path / "smoke", smoke=True), package)
    monkeypatch.setattr(ship, "LIMIT", 10)
    with pytest.raises(SystemExit, match="allowed"):
        ship.ship(trained(tmp_path / "out"), package)
    assert not package.exists()


def test_the_drafters_card_says_once_what_serving_measured(package: Path, tmp_path: Path) -> None:
    setting = {"tau": 3.25, "at_least": [0.75, 0.5]}
    record = {
        "provenance": {"packages": {"vllm": "0.33.0"}},
        "new_tokens": 256,
        "prompts": {"code": 64, "chat": 60},
        "runs": {"no drafts": {"code, T=0": {}}, "K=7": {"chat, T=0.7": setting, "code, T=0": setting}},
    }
    (measured := tmp_path / "record.json").write_text(json.dumps(record))
    (out := trained(tmp_path / "out")).joinpath("nano-dflash", "README.md").write_text("# A card\n\n## Data\n\nText.\n")
    ship.ship(out, package, measured)
    card = (package / "nano-dflash" / "README.md").read_text()
    assert "The same by vllm 0.33.0, 256 tokens after each of 64 prompts of code, 60 prompts of chat." in card
    assert card.index("| code | K=7, T=0 | 3.25 | 0.75 0.50 |") < card.index("| chat | K=7, T=0.7 | 3.25 |")
    assert card.endswith("\n\n## Data\n\nText.\n")
    (out / "nano-dflash" / "README.md").write_text(card)
    ship.ship(out, package, measured)
    assert (package / "nano-dflash" / "README.md").read_text() == card
    assert shipped.damaged() == []
    with pytest.raises(SystemExit, match="about a drafter"):
        ship.ship(trained(tmp_path / "less", names=("nano-hybrid",)), package, measured)


def test_nothing_in_this_tree_is_damaged() -> None:
    assert shipped.damaged() == []


def test_the_shipped_target_writes_what_it_wrote_when_it_was_shipped() -> None:
    folder = shipped.find("nano-hybrid")
    if folder is None:
        pytest.skip("not run: nano-hybrid is not in this tree")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    entries = json.loads((shipped.FOLDER / shipped.MANIFEST).read_text())["greedy"]
    assert sum(len(entry["tokens"]) for entry in entries) > 20
    for entry in entries:
        ids, new = torch.tensor([entry["prompt"]]), len(entry["tokens"])
        if new:
            out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            assert out[0, ids.shape[1] :].tolist() == entry["tokens"]


def test_what_is_noted_of_a_target_is_what_transformers_writes(mini: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from thor_spec.train import data, hybrid, language
    from thor_spec.train.shapes import HybridShape

    torch.manual_seed(1)
    corpus = data.load(mini)
    model = hybrid.Hybrid(HybridShape(vocabulary=corpus.vocabulary, **language.SMOKE_SHAPE))
    model.save(tmp_path, corpus.marks())
    corpus.copy_tokenizer(tmp_path)
    entries = ship.greedy(tmp_path)
    assert any(entry["tokens"] for entry in entries)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for entry in entries:
        if entry["tokens"]:
            ids, new = torch.tensor([entry["prompt"]]), len(entry["tokens"])
            out = theirs.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            assert out[0, ids.shape[1] :].tolist() == entry["tokens"]

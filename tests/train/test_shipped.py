"""What comes with the package: whole where it is, and no one's default where it is not."""

import json
from pathlib import Path

import pytest

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


def test_nothing_in_this_tree_is_damaged() -> None:
    assert shipped.damaged() == []

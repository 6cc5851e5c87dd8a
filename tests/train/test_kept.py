"""What a training goes on from: whole, or told with what to do."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from thor_spec.errors import ConfigError
from thor_spec.train import kept


@contextmanager
def at_most(room: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes: what a full disk does to a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    kept.write({"a": torch.arange(5)}, tmp_path / "training.state")
    assert kept.read(tmp_path / "training.state")["a"].tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["training.state"]


@pytest.mark.parametrize("room", [0, 2_000, 400_500, 401_000])
def test_a_full_disk_is_told_and_leaves_what_was_kept(tmp_path: Path, room: int) -> None:
    file = tmp_path / "training.state"
    kept.write({"a": torch.arange(5)}, file)
    with (
        at_most(room),
        pytest.raises(
            ConfigError, match=r"training.state cannot be written, with .* MiB free there. Make room"
        ) as told,
    ):
        kept.write({"a": torch.zeros(100_000)}, file)
    assert "\n" not in str(told.value)
    assert kept.read(file)["a"].tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["training.state"]


@pytest.mark.parametrize("share", [0, 0.001, 0.5])
def test_what_is_cut_off_is_told_with_what_to_do(tmp_path: Path, share: float) -> None:
    file = tmp_path / "training.pool"
    kept.write(torch.zeros(1000), file)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ConfigError, match=r"training.pool is not whole \(\w+\). Remove it") as told:
        kept.read(file)
    assert "\n" not in str(told.value)

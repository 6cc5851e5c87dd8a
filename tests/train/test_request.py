"""What ``thor-spec train drafter`` refuses, before anything heavy is imported and without asking the network."""

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thor_spec.cli.main import main
from thor_spec.errors import ConfigError
from thor_spec.train import drafting
from thor_spec.train.request import Request


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "t.txt").write_text("text")
    return tmp_path / "t.txt"


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", "drafter", *argv])
    err = capsys.readouterr().err
    assert ended.value.code == 2, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("target", ["./nope", "/nowhere", "nobody/nothing", "nope"])
def test_a_target_that_is_not_here_is_told_at_once(
    target: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_args: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setitem(sys.modules, "thor_spec.train.user", None)  # its import takes seconds
    said = refusal(capsys, target, "--text", str(text), "--out", str(tmp_path / "o"))
    assert "No checkpoint at" in said or "hf download" in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("out", ["/proc/x/y", "file"])
def test_a_folder_that_cannot_be_written_is_told_at_once(
    out: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(sys.modules, "thor_spec.train.user", None)
    said = refusal(capsys, "tiny-hybrid", "--text", str(text), "--out", str(tmp_path / out))
    assert "cannot be written" in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(({name: 0}, f"--{name} 0 must be above 0") for name in ("minutes", "steps", "layers", "sequences")),
        ({"minutes": -1.0}, "--minutes -1"),
        ({"minutes": float("nan")}, "--minutes nan"),
        ({"minutes": float("inf")}, "--minutes inf"),
        *(({"block": block}, "at least 4") for block in (0, 1, 2, 3)),
        ({"new_tokens": 16}, "--new-tokens 16 must be above --block 16"),
        ({"new_tokens": 0}, "--new-tokens 0"),
        ({"block": 320}, "--new-tokens 320 must be above --block 320"),
        ({"device": "tpu"}, "--device tpu"),
    ],
)
def test_sizes_that_nothing_can_be_trained_with(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Request(target=Path("x"), text=Path("x"), out=Path("x"), **changes)


def test_the_least_sizes_are_taken() -> None:
    Request(target=Path("x"), text=Path("x"), out=Path("x"), block=4, new_tokens=5, steps=1, layers=1, sequences=1)


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    from thor_spec.train import user

    with pytest.raises(ConfigError, match="tokenizer"):
        user._tokenizer(tmp_path)


@pytest.mark.parametrize("vocabulary", [50, 1000])
def test_the_evaluation_makes_no_more_logits_at_once_than_a_step(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, drafts, new = 3, 7, 100
    ids = torch.randint(0, 3, (rows, 8 + new), generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []

    def logits(_target: Any, _drafter: Any, ids: Any, _features: Any, anchors: torch.Tensor, block: int) -> Any:
        places = anchors[..., None] + torch.arange(1, block)
        guesses = torch.where(places % 5 > 0, ids.gather(1, places.flatten(1)).view(places.shape), 4)
        sizes.append(guesses.numel() * vocabulary)
        return torch.nn.functional.one_hot(guesses, vocabulary)

    monkeypatch.setattr(drafting, "draft_logits", logits)
    target: Any = SimpleNamespace(features=lambda *_args: None)
    drafter: Any = SimpleNamespace(shape=SimpleNamespace(vocabulary=vocabulary, target_layer_ids=()))
    starts = torch.full((rows,), 8)
    found = []
    for most in (3e8, 30_000):
        sizes.clear()
        monkeypatch.setattr(drafting, "LOGITS", most)
        found.append(drafting.acceptance(target, drafter, ids, starts, new=new, drafts=drafts))
        assert max(sizes) <= most
    assert found[0] == found[1]
    assert found[0]["tau"] > 1

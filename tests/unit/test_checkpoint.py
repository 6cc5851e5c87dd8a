import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import DRAFTER, HYBRID, MakeCheckpoint
from thor_spec.cli.main import main
from thor_spec.dflash.drafter import Drafter
from thor_spec.errors import ConfigError
from thor_spec.serve.checkpoint import open_checkpoint
from thor_spec.serve.locate import locate


def test_facts(target: Path) -> None:
    checkpoint = open_checkpoint("t", target)
    assert (checkpoint.architecture, checkpoint.context, checkpoint.is_hybrid) == ("Qwen3NextForCausalLM", 8192, True)
    assert checkpoint.target_shape().num_layers == 4


def test_multimodal_config_is_read_from_its_text_part(make_checkpoint: MakeCheckpoint) -> None:
    nested = {k: v for k, v in HYBRID.items() if k != "architectures"}
    path = make_checkpoint("m", {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": nested})
    assert open_checkpoint("m", path).target_shape().hidden_size == 128


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No checkpoint at"):
        open_checkpoint("x", tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read as JSON"),
        ("{}", "names no architectures"),
        ("[]", "names no architectures"),
        ('{"architectures": []}', "names no architectures"),
    ],
)
def test_bad_config(target: Path, content: str | None, says: str) -> None:
    file = target / "config.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        open_checkpoint("x", target)


def test_every_truncation_of_the_weights_is_seen(target: Path) -> None:
    file = target / "model.safetensors"
    whole = file.read_bytes()
    open_checkpoint("x", target)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"is truncated|cannot be read"):
            open_checkpoint("x", target)


def test_missing_weights(target: Path) -> None:
    (target / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        open_checkpoint("x", target)


def test_missing_shard_is_named(target: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors is missing"):
        open_checkpoint("x", target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "."])
def test_what_is_closed_to_this_user_need_not_be_downloaded_again(
    target: Path, name: str, shut: Callable[[Path], None]
) -> None:
    if "index" in name:
        (target / name).write_text('{"weight_map": {"x": "model.safetensors"}}')
    open_checkpoint("x", target)
    shut(target / name)
    with pytest.raises(ConfigError, match=r"may not be read by you.*chmod.*chown") as told:
        open_checkpoint("x", locate(str(target)))
    assert "ownload" not in str(told.value)


def test_a_folder_that_may_be_entered_and_not_listed_is_not_empty(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(ConfigError, match="may not be read by you"):
        open_checkpoint("x", target)


@pytest.mark.parametrize("name", ["config.json", "."])
def test_a_plan_tells_what_is_closed(
    target: Path, name: str, shut: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    shut(target / name)
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(target)])
    assert ended.value.code == 2
    assert "may not be read by you" in capsys.readouterr().err


def refuse(path: object, *_args: object, **_more: object) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return what closes a file, or a folder and all in it, to this process, which root's own mode bits would not."""

    def shut(closed: Path) -> None:
        for module, name in ((io, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")):
            real = getattr(module, name)

            def guarded(path: Any = ".", *args: Any, real: Any = real, name: str = name, **more: Any) -> Any:
                inside = not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(closed)
                return refuse(path) if inside and (name == "open" or closed.suffix == "") else real(path, *args, **more)

            monkeypatch.setattr(module, name, guarded)

    return shut


def parsed(**changes: object) -> Drafter:
    return Drafter.parse("d", {**DRAFTER, **changes})


def test_a_fitting_drafter_passes(target: Path) -> None:
    parsed().require_fit(open_checkpoint("t", target).target_shape(), 15)


@pytest.mark.parametrize(
    ("changes", "draft_tokens", "says"),
    [
        ({"vocab_size": 321}, 7, "vocabulary of 321"),
        ({"hidden_size": 64}, 7, "size 64"),
        ({"dflash_config": {"mask_token_id": 261, "target_layer_ids": [1, 4]}}, 7, r"layers \[4\]"),
        ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1]}}, 7, "mask token 320"),
        ({}, 16, "at most 15"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    target: Path, changes: dict[str, object], draft_tokens: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        parsed(**changes).require_fit(open_checkpoint("t", target).target_shape(), draft_tokens)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dflash_config": None}, "is not a DFlash drafter"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids"),
        ({"block_size": None}, "lacks or garbles"),
        ({"vocab_size": "many"}, "lacks or garbles"),
    ],
)
def test_a_config_that_is_no_drafter(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parsed(**changes)

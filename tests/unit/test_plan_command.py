"""``thor-spec plan`` as it is typed: what it takes, prints, and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.shapes import DRAFTER_35B, QWEN35_35B
from thor_spec.cli.main import main
from thor_spec.device import cuda
from thor_spec.device.cuda import Gpu
from thor_spec.errors import CapacityError, ConfigError
from thor_spec.nano import shipped

GIB = 1 << 30
H200 = int(139.8 * GIB)


def _plan(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *argv, "--json"])
    assert ended.value.code in (0, None)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_plan_from_a_folder_with_nothing_but_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": QWEN35_35B, "architectures": ["X"]}))
    draft = tmp_path / "drafter.json"
    draft.write_text(json.dumps(DRAFTER_35B))
    argv = (str(tmp_path), "--draft", str(draft), "--memory", str(H200), "--utilization", "0.75", "--max-seqs", "256")
    argv += ("--context", "32768", "--state", "snapshot")
    found = _plan(capsys, *argv, "--what-if", "K=3", "--what-if", "state=reconstruct")
    assert found["kv_cache_tokens"] == pytest.approx(324_720, rel=0.03)  # K by the drafter's block size
    assert found["request"]["draft_tokens"] == 15
    counts = [found["what_if"][text]["sequences"] for text in ("K=3", "state=reconstruct")]
    assert all(count > found["sequences"] for count in counts)


@pytest.mark.parametrize("name", [shipped.TARGET, "nano-llada"])
def test_what_is_no_drafter_is_not_planned_as_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", shipped.TARGET, "--draft", name])
    assert ended.value.code == 2
    assert f"{name} is not a DFlash drafter" in capsys.readouterr().err


def test_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "qwen3.6-35b-a3b", "--memory", "118GiB", "--what-if", "K=3"])
    out = capsys.readouterr().out
    for part in ("weights", "KV cache", "█", "floor", "KV per token", "20.0 KiB", "262,144", "K=3", "(estimate)"):
        assert part in out


def test_a_bundled_model_is_planned_with_the_drafter_that_it_brings(capsys: pytest.CaptureFixture[str]) -> None:
    """As serve starts it: without a GPU 7 drafts, else as many as its block has."""
    here, board = _plan(capsys, "nano-hybrid"), _plan(capsys, "nano-hybrid", "--memory", "64GiB")
    assert [found["request"]["draft_tokens"] for found in (here, board)] == [7 if cuda.probe() is None else 15, 15]
    assert _plan(capsys, "nano-hybrid", "--draft", "none")["request"]["draft_tokens"] == 0


def test_trees_are_planned_by_their_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    chain, tree = (_plan(capsys, "nano-hybrid", "--memory", "64GiB", *argv) for argv in ((), ("--tree", "63")))
    assert tree["request"]["draft_tokens"] == 63
    scratch = [next(i["bytes"] for i in found["items"] if i["name"] == "scratch") for found in (chain, tree)]
    assert scratch[1] == 4 * scratch[0]
    with pytest.raises(SystemExit):
        main(["plan", "nano-hybrid", "--memory", "64GiB", "--tree", "auto"])
    assert ", trees of 32, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--draft-tokens", "16"), "--draft-tokens 16 is more than the drafter nano-dflash can propose"),
        (("--what-if", "K=99"), "--draft-tokens 99 is more than"),
        (("--tree", "63", "--draft-tokens", "7"), "--tree says how many are drafted"),
        (("--tree", "30,20"), "--tree wants paths of 20 drafts; the drafter drafts 15"),
        (("--draft", "none", "--tree", "4"), "--tree needs a drafter"),
    ],
)
def test_what_serve_refuses_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "nano-hybrid", *argv])
    assert ended.value.code == ConfigError.exit_code
    assert says in capsys.readouterr().err


def test_plan_exits_12_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "qwen3.5-122b-a10b", "--memory", "64GiB"])
    assert ended.value.code == CapacityError.exit_code
    assert "of cache" in capsys.readouterr().err


def test_the_bundled_model_s_capacity_is_exact(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines on a CPU reported it, with 1 GiB of cache."""
    monkeypatch.setattr(cuda, "probe", lambda: None)
    assert _plan(capsys, "tiny", "--kv-cache-memory", "1GiB")["kv_cache_tokens"] == 250_406
    assert _plan(capsys, "tiny", "--kv-cache-memory", "1GiB", "--state", "snapshot")["kv_cache_tokens"] == 190_650
    without = _plan(capsys, "tiny", "--kv-cache-memory", "1GiB", "--draft", "none")  # prefixes are cached then
    assert (without["kv_cache_tokens"], without["sequences"]) == (441_505, 53.89)


def test_the_trained_pair_s_profile_is_planned_as_its_folders_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "probe", lambda: None)
    target, drafter = (str(shipped.find(name)) for name in (shipped.TARGET, shipped.DRAFTER))
    named = _plan(capsys, "nano", "--kv-cache-memory", "1GiB")
    folders = _plan(capsys, target, "--draft", drafter, "--draft-tokens", "7", "--kv-cache-memory", "1GiB")
    for what in ("kv_cache_tokens", "sequences"):
        assert named[what] == folders[what]


@pytest.mark.skipif(shipped.find(shipped.DIFFUSION) is None, reason="nano-llada is not shipped here")
def test_a_block_diffusion_model_s_capacity_is_exact(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What READY reported with 1 GiB of cache on a CPU; the blocks are of 32 tokens everywhere."""
    monkeypatch.setattr(cuda, "probe", lambda: None)
    found = _plan(capsys, str(shipped.find(shipped.DIFFUSION)), "--kv-cache-memory", "1GiB")
    assert found["kv_cache_tokens"] == 419_424


@pytest.mark.parametrize(
    ("gpu", "utilization"),
    [
        (Gpu(name="NVIDIA H200", capability=(9, 0), count=1, total_bytes=H200), 0.92),
        (Gpu(name="NVIDIA Thor", capability=(11, 0), count=1, total_bytes=1 << 30), None),  # shares: its own total lies
        (Gpu(name="another", capability=(8, 9), count=1, total_bytes=1 << 30, integrated=True), None),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else "",
)
def test_whose_memory_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: Gpu, utilization: float | None
) -> None:
    monkeypatch.setattr(cuda, "probe", lambda: gpu)
    request = _plan(capsys, "tiny", "--kv-cache-memory", "1GiB")["request"]
    assert (request["engine"], request["utilization"]) == ("cuda", utilization)
    assert (request["memory"] == gpu.total_bytes) is (utilization is not None)
    assert (request["floor"] > 0) is (utilization is None)

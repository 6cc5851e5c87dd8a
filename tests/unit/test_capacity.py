"""The memory plan against published figures, against vLLM's own reports, and against itself."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.shapes import DRAFTER_35B, QWEN35_35B, QWEN35_397B
from thor_spec.capacity import plan
from thor_spec.capacity.plan import Request, make
from thor_spec.capacity.shape import ModelShape
from thor_spec.capacity.weights import Component, Scheme, components, parse_scheme, weight_bytes
from thor_spec.cli.main import main
from thor_spec.device import cuda
from thor_spec.device.cuda import Gpu
from thor_spec.errors import CapacityError, ConfigError
from thor_spec.nano import shipped
from thor_spec.sizes import parse_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
H200 = int(139.8 * GIB)
EVIDENCE = Path(__file__).parents[2] / "evidence"
TARGET = ModelShape.parse("35B", QWEN35_35B)
DRAFTER = ModelShape.parse("drafter", DRAFTER_35B)
BASE = Request(memory=H200, utilization=0.75, context=32768, max_seqs=256, state="snapshot")


@pytest.mark.parametrize(
    ("config", "kv", "state", "held"),
    [(QWEN35_35B, 20 * KIB, 30 * MIB, 120 * MIB), (QWEN35_397B, 30 * KIB, 90 * MIB, 360 * MIB)],
    ids=["35B", "397B"],
)
def test_the_paper_s_figures(config: dict[str, Any], kv: int, state: int, held: int) -> None:
    """arXiv:2608.20961, section 2, with 2 bytes per element and K = 3."""
    request = Request(memory=10 * H200, context=32768, draft_tokens=3, state_dtype="bfloat16", state="snapshot")
    facts = make(request, ModelShape.parse("model", config), DRAFTER).facts
    assert facts["kv_bytes_per_token"] == kv
    assert facts["state_bytes_per_sequence"] == state
    assert facts["held_state_bytes_per_sequence"] == held
    rebuilt = make(replace(request, state="reconstruct"), ModelShape.parse("model", config), DRAFTER).facts
    assert rebuilt["held_state_bytes_per_sequence"] == state


@pytest.mark.parametrize(("config", "billions"), [(QWEN35_35B, 34.66), (QWEN35_397B, 396.35)], ids=["35B", "397B"])
def test_parameters(config: dict[str, Any], billions: float) -> None:
    total = sum(component.total for component in components(ModelShape.parse("model", config)))
    assert total / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("drafts", "blocks", "tokens", "sequences"), [(0, 1820, 1_703_936, 52.00), (15, 1536, 324_720, 9.91)]
)
def test_blocks_are_vllm_s(drafts: int, blocks: int, tokens: int, sequences: float) -> None:
    """The figures that vLLM 0.33 reported on an H200; the number of blocks is the only one that gives them."""
    layout = make(replace(BASE, draft_tokens=drafts), TARGET, DRAFTER if drafts else None).layout
    kv = blocks * layout.block_bytes
    assert layout.tokens(kv, 32768) == tokens
    assert round(layout.sequences(kv, 32768), 2) == sequences
    assert layout.tokens(kv - 1, 32768) < tokens


@pytest.mark.parametrize(("drafts", "tokens", "sequences"), [(0, 1_703_936, 52.00), (15, 324_720, 9.91)])
def test_capacity_within_3_percent_of_what_was_measured(drafts: int, tokens: int, sequences: float) -> None:
    found = make(replace(BASE, draft_tokens=drafts), TARGET, DRAFTER if drafts else None)
    assert found.tokens == pytest.approx(tokens, rel=0.03)
    assert found.sequences == pytest.approx(sequences, rel=0.03)


@pytest.mark.parametrize("run", ["none", "snapshot K=15 wide", "reconstruct K=15 wide"])
def test_capacity_within_3_percent_of_what_engines_reported(run: str) -> None:
    """One state per sequence too; the record of engines on an H200, 256 places, utilization 0.75."""
    record = json.loads((EVIDENCE / "20261130T124851-state" / "record.json").read_text())
    drafts = 0 if run == "none" else 15
    request = replace(BASE, draft_tokens=drafts, state="reconstruct" if "reconstruct" in run else "snapshot")
    found = make(replace(request, state_dtype="float32"), TARGET, DRAFTER if drafts else None)
    assert found.sequences == pytest.approx(record["runs"][run]["sequences"], rel=0.03)


@pytest.mark.parametrize("places", [256, 64])
def test_a_drafter_s_window_within_3_percent_of_what_an_engine_reported(places: int) -> None:
    record = json.loads((EVIDENCE / "20261130T152250-state" / "record.json").read_text())
    reported = record["runs"]["reconstruct K=15 wide"]["sequences_at"][f"0.75, {places} places"]
    request = replace(BASE, draft_tokens=15, state="reconstruct", state_dtype="float32")
    found = make(replace(request, drafter_window=864, max_seqs=places), TARGET, DRAFTER)
    assert found.sequences == pytest.approx(reported, rel=0.03)


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


def test_reconstructing_holds_more_sequences_and_costs_its_records() -> None:
    request = replace(BASE, draft_tokens=15)
    snapshot, rebuilt = (make(replace(request, state=kind), TARGET, DRAFTER) for kind in ("snapshot", "reconstruct"))
    assert rebuilt.sequences > 2 * snapshot.sequences
    scratch = next(item for item in rebuilt.items if item.name == "scratch")
    assert scratch.bytes == rebuilt.facts["record_bytes_per_node"] * 16 * 256
    assert not any(item.name == "scratch" for item in snapshot.items)


def test_a_drafter_s_cache_is_spared() -> None:
    """Blocks of the target's bytes with one state, and a window; figures of docs/design/one_state.md."""
    common = replace(BASE, memory=parse_size("139.8GiB"), draft_tokens=15, max_seqs=64, batched_tokens=2048)
    found = {
        name: make(replace(common, **changes), TARGET, DRAFTER)
        for name, changes in {
            "snapshot": {},
            "pages": {"state": "reconstruct"},
            "cached": {"state": "reconstruct", "prefix_caching": True},
            "2048": {"state": "reconstruct", "drafter_window": 2048},
            "864": {"state": "reconstruct", "drafter_window": 864},
            "vLLM's 864": {"state": "snapshot", "drafter_window": 864},
        }.items()
    }
    assert {name: round(plan.sequences, 2) for name, plan in found.items()} == {
        "snapshot": 10.40, "pages": 26.03, "cached": 22.78, "2048": 45.55, "864": 47.42, "vLLM's 864": 12.21,
    }  # fmt: skip
    pages = found["pages"].layout
    assert [group.block_tokens for group in pages.groups] == [1056, 1056, 528, *[None] * 6]
    assert pages.page_bytes * 2 == found["cached"].layout.page_bytes
    held, theirs = found["864"].layout.groups[2], found["vLLM's 864"].layout.groups[2]
    assert held.blocks(32768) == math.ceil((863 + 128 + 4 * 16) / 528) + 1 == 3
    assert theirs.blocks(32768) == math.ceil((863 + 2 * 2048) / theirs.block_tokens) + 1
    assert held.blocks(600) == 3
    with pytest.raises(ConfigError, match="needs a drafter"):
        make(replace(BASE, drafter_window=1024), TARGET)
    sliding = ModelShape.parse("slides", {**DRAFTER_35B, "dflash_config": {"use_swa": True, "swa_window_size": 512}})
    with pytest.raises(ConfigError, match="slides by itself"):
        make(replace(BASE, draft_tokens=15, drafter_window=1024), TARGET, sliding)


def test_a_drafter_that_slides_by_itself_is_planned_as_with_a_window() -> None:
    own = {**DRAFTER_35B, "dflash_config": {**DRAFTER_35B["dflash_config"], "use_swa": True, "swa_window_size": 1024}}
    asked = replace(BASE, draft_tokens=15, context=32768)
    by_itself = make(asked, TARGET, ModelShape.parse("slides", own))
    assert by_itself.layout == make(replace(asked, drafter_window=1024), TARGET, DRAFTER).layout
    assert by_itself.layout != make(asked, TARGET, DRAFTER).layout
    with pytest.raises(ConfigError, match="how far they see"):
        ModelShape.parse("slides", {**own, "dflash_config": {"use_swa": True}})


def test_items_and_cache_add_up_to_the_memory() -> None:
    for request in (BASE, replace(BASE, utilization=None, floor=4 * GIB), replace(BASE, draft_tokens=7)):
        found = make(request, TARGET, DRAFTER)
        assert sum(item.bytes for item in found.items) + found.kv_bytes == request.memory


def test_prefix_caching_takes_a_state_more() -> None:
    plain, cached = (make(replace(BASE, prefix_caching=flag), TARGET) for flag in (False, True))
    assert cached.facts["states_per_sequence"] == plain.facts["states_per_sequence"] + 1
    assert cached.layout.blocks_per_sequence(32768) == plain.layout.blocks_per_sequence(32768) + 3


def test_an_fp8_cache_halves_the_token() -> None:
    assert make(replace(BASE, kv_dtype="fp8"), TARGET).facts["kv_bytes_per_token"] == 10 * KIB


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.125),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            4.5,
        ),
    ],
    ids=lambda value: str(value.get("quant_algo") or value["quant_method"]) if isinstance(value, dict) else "",
)
def test_quantization(config: dict[str, Any], bits: float) -> None:
    scheme = parse_scheme("model", config)
    assert scheme is not None
    assert scheme.bits(Component("lm_head", 1), 16) == bits


@pytest.mark.parametrize(
    ("entry", "bits"),
    [
        ("lm_head", 4),
        ("re:.*linear_attn.*", 16),
        ("*linear_attn*", 16),
        ("model.layers.0.linear_attn.in_proj_qkv", 10),  # one of two layers
        ("model.language_model.layers.2.linear_attn", 10),
        ("model.layers.1.linear_attn", 4),
        ("model.layers.0.linear_attn.in_proj_q", 4),
        ("re:[", 4),
    ],
)
def test_ignored_modules_keep_their_dtype(entry: str, bits: float) -> None:
    scheme = Scheme(name="x", groups=((("Linear",), 4),), ignore=(entry,))
    assert scheme.bits(Component("model.layers.{}.linear_attn.in_proj_qkv", 1, (0, 2)), 16) == bits


def test_groups_of_a_scheme_have_their_own_bits() -> None:
    groups = {
        "experts": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
        "attention": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
    }
    scheme = parse_scheme("m", {"quant_method": "compressed-tensors", "config_groups": groups})
    assert scheme is not None
    names = ("mlp.experts.0.gate_proj", "self_attn.q_proj", "linear_attn.out_proj")
    assert [scheme.bits(Component(f"model.layers.{{}}.{name}", 1, (3,)), 16) for name in names] == [4.5, 8, 16]


def test_quantized_weights_shrink_but_for_what_is_ignored() -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8"}
    whole = weight_bytes(ModelShape.parse("m", {**QWEN35_35B, "quantization_config": scheme}))
    kept = weight_bytes(ModelShape.parse("m", {**QWEN35_35B, "quantization_config": {**scheme, "ignore": ["lm_head"]}}))
    assert kept - whole == 248320 * 2048
    assert whole < 0.52 * weight_bytes(TARGET)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_hidden_layers": "40"}, "num_hidden_layers = '40'"),
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"quantization_config": {"quant_method": "quip"}}, "--weights"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}, "--weights"),
    ],
)
def test_a_config_that_says_too_little(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(BASE, ModelShape.parse("model", {**QWEN35_35B, **change}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("K", "not NAME=VALUE"),
        ("colour=red", "not NAME=VALUE"),
        ("context=long", "does not fit context"),
        ("state=some", "--state some is not one of"),
        ("max-seqs=0", "--max-seqs 0 must be positive"),
        ("utilization=2", r"must lie in \(0, 1\]"),
        ("graphs=perhaps", "does not fit graphs"),
    ],
)
def test_what_if_refuses_in_short(change: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BASE.changed(change)


def test_every_value_but_the_engine_can_be_asked_about() -> None:
    text = {
        "state": "reconstruct",
        "kv_dtype": "fp8",
        "state_dtype": "bfloat16",
        "prefix_caching": "on",
        "graphs": "off",
    }
    for field in fields(Request):
        if field.name != "engine":
            wanted = text.get(field.name, "1" if field.name == "utilization" else "7")
            assert BASE.changed(f"{field.name}={wanted}") != BASE


def test_what_if_changes_one_value() -> None:
    assert BASE.changed("K=3").draft_tokens == 3
    assert BASE.changed("memory=1.5GiB").memory == 3 * GIB // 2
    assert BASE.changed("prefix-caching=on").prefix_caching is True


def test_a_cache_that_was_asked_for_is_had_whole_or_refused() -> None:
    left = make(BASE, TARGET).kv_bytes
    make(replace(BASE, kv_cache_memory=left), TARGET).require_fit()
    for asked in (left + 1, 500 << 30):
        found = make(replace(BASE, kv_cache_memory=asked), TARGET)
        assert not found.fits
        with pytest.raises(CapacityError, match=r"--kv-cache-memory .* GiB does not fit: .* are left"):
            found.require_fit()


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(CapacityError, match=r"needs .* GiB of cache, and -"):
        make(replace(BASE, memory=60 * GIB), TARGET).require_fit()


@pytest.mark.parametrize(("text", "size"), [("1024", 1024), ("80GiB", 80 * GIB), ("1.5 GB", 1_500_000_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 XB", "-1", "1e3"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


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


def test_plan_exits_12_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "qwen3.5-122b-a10b", "--memory", "64GiB"])
    assert ended.value.code == CapacityError.exit_code
    assert "of cache" in capsys.readouterr().err


def test_estimates_are_marked() -> None:
    found = make(replace(BASE, draft_tokens=15), TARGET, DRAFTER)
    assert {item.name for item in found.items if item.estimated} == {"activations", "graphs", "runtime"}
    assert plan.RUNTIME_BYTES > 0

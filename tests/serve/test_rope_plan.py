"""What --rope sets, and what it refuses before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import DRAFTER, HYBRID, MakeCheckpoint
from thor_spec.config import resolve
from thor_spec.errors import ConfigError
from thor_spec.serve import preflight
from thor_spec.serve.plan import Plan, make_plan

from .conftest import Make

ROPE = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}


@pytest.fixture
def make(make_checkpoint: MakeCheckpoint, drafter: Path) -> Make:
    target = make_checkpoint("roped", HYBRID, head_dim=64, rope_parameters=ROPE)

    def made(**flags: Any) -> Plan:
        return make_plan(resolve({"model": str(target), "draft": str(drafter), **flags}))

    return made


@pytest.fixture
def nested(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(preflight, "require_packages", lambda _: None)
    text = {
        **HYBRID,
        "head_dim": 256,
        "rope_parameters": {**ROPE, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }
    return make_checkpoint(
        "nested",
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text},
    )


def value(plan: Plan, flag: str) -> Any:
    return json.loads(plan.argv[plan.argv.index(flag) + 1])


def test_a_stretched_start(make: Make) -> None:
    plan = make(rope="yarn", rope_factor=4.0)
    assert plan.context == 32768  # all that the table holds
    assert plan.argv[plan.argv.index("--max-model-len") + 1] == "32768"
    assert value(plan, "--additional-config")["thor_spec"]["rope"] == {"type": "yarn", "native": 8192, "factor": 4.0}
    assert value(plan, "--hf-overrides") == {"max_position_embeddings": 32768, "rope_parameters": ROPE}
    assert plan.as_dict()["rope"] == {"type": "yarn", "native": 8192, "factor": 4.0}


def test_without_the_option_nothing_is_set(make: Make) -> None:
    single = ("--hf-overrides.tie_word_embeddings", "false")
    assert make(vllm_args=single).argv[-2:] == single
    plan = make()
    assert plan.rope is None
    assert "--hf-overrides" not in plan.argv
    assert "rope" not in value(plan, "--additional-config")["thor_spec"]


def test_nested_configurations_are_overridden_where_they_are_read(nested: Path) -> None:
    args = ("--hf-overrides", '{"text_config": {"pad_token_id": 3}, "tie_word_embeddings": false}')
    plan = make_plan(
        resolve({"model": str(nested), "draft": "none", "rope": "drope", "rope_factor": 2.0, "vllm_args": args})
    )
    assert plan.argv.count("--hf-overrides") == 1
    overrides = value(plan, "--hf-overrides")
    assert set(overrides) == {"text_config", "tie_word_embeddings"}
    assert overrides["text_config"]["max_position_embeddings"] == 16384
    assert overrides["text_config"]["pad_token_id"] == 3
    assert overrides["text_config"]["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert plan.rope is not None
    assert plan.rope.type == "identity_beyond_native"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"rope_factor": 2.0}, "--rope-factor needs a type"),
        ({"rope": "ntk"}, "not one of"),
        ({"rope": "yarn", "rope_factor": 2.0, "context": 16385}, "beyond the table"),
        ({"context": 8193}, "more than the 8192 tokens"),
        ({"rope": "yarn", "rope_native": 8193}, "more than the 8192 tokens"),
        ({"rope": "yarn", "rope_drafter": "none"}, "not one of same, default"),
        ({"rope": "yarn", "vllm_args": ("--hf-overrides", '{"rope_theta": 7}')}, "sets rope_theta, and --rope"),
        ({"rope": "yarn", "vllm_args": ("--hf-overrides.rope_theta", "7")}, "as one JSON object"),
        ({"rope": "yarn", "vllm_args": ("--hf-overrides", "{")}, "needs JSON"),
    ],
)
def test_what_is_refused(make: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


@pytest.mark.parametrize("rope", [{}, {"rope": "yarn"}])
def test_overrides_beside_a_nested_configuration_would_be_ignored(nested: Path, rope: dict[str, str]) -> None:
    args = ("--hf-overrides", '{"rope_parameters": {"rope_type": "yarn", "factor": 4}}')
    with pytest.raises(ConfigError, match=r"beside the text_config.*would be ignored"):
        make_plan(resolve({"model": str(nested), "draft": "none", "vllm_args": args, **rope}))


@pytest.mark.parametrize(
    ("rope", "says"), [({}, "tables for 4096 positions"), ({"rope": "yarn"}, "fewer than the native")]
)
def test_short_drafters_are_refused(
    make: Make, make_checkpoint: MakeCheckpoint, rope: dict[str, str], says: str
) -> None:
    short = make_checkpoint("short", DRAFTER, max_position_embeddings=4096)
    with pytest.raises(ConfigError, match=says):
        make(draft=str(short), **rope)
    assert make(draft=str(short), context=4096).context == 4096


@pytest.mark.parametrize("count", [15, 17, 64])
def test_factors_of_the_wrong_length_are_refused(make: Make, tmp_path: Path, count: int) -> None:
    file = tmp_path / "factors.json"
    file.write_text(json.dumps([1.0] * count))
    with pytest.raises(ConfigError, match=f"list of {count} LongRoPE factors does not fit: 16 pairs"):
        make(rope="longrope", rope_factor=2.0, rope_factors=file)
    file.write_text(json.dumps({"long_factor": [2.0] * 16}))
    plan = make(rope="longrope", rope_factor=2.0, rope_factors=file)
    assert plan.rope is not None
    assert plan.rope.long_factor == (2.0,) * 16


def test_an_unknown_native_window_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    stretched = {**ROPE, "rope_type": "yarn", "factor": 4.0}
    target = make_checkpoint("stretched", HYBRID, head_dim=64, rope_parameters=stretched)
    flags = {"model": str(target), "draft": "none", "rope": "linear"}
    with pytest.raises(ConfigError, match="native window is unknown"):
        make_plan(resolve(flags))
    assert make_plan(resolve({**flags, "rope_native": 2048})).context == 2048
    told = make_checkpoint(
        "told", HYBRID, head_dim=64, rope_parameters={**stretched, "original_max_position_embeddings": 2048}
    )
    plan = make_plan(resolve({**flags, "model": str(told), "rope_factor": 2.0}))
    assert plan.context == 4096
    assert value(plan, "--hf-overrides")["rope_parameters"] == ROPE  # the checkpoint's own stretching is gone

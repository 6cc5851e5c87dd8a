"""What drafts a start, which tokens are taken, and what the plugin is told of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import DRAFTER, HYBRID, MakeCheckpoint
from thor_spec.dflash.drafter import require_window
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.options import PluginOptions

from .conftest import Make, value


def test_adaptive_drafts(make: Make, gpu: bool) -> None:
    """vLLM captures graphs of the numbers that its schedule holds for some batch; the choice is ours."""
    plan = make(adaptive_drafts=True, max_seqs=4)
    schedule = json.loads(value(plan, "--speculative-config"))["num_speculative_tokens_per_batch_size"]
    assert schedule == ([[1, 1, 0], [2, 2, 3], [3, 3, 7], [4, 4, 15]] if gpu else [[1, 1, 0], [2, 2, 3], [3, 4, 7]])
    assert json.loads(value(plan, "--additional-config"))["thor_spec"]["adaptive_drafts"] is True
    assert plan.draft_tokens == (15 if gpu else 7)
    few = make(adaptive_drafts=True, max_seqs=2)
    schedule = json.loads(value(few, "--speculative-config"))["num_speculative_tokens_per_batch_size"]
    assert [length for _, _, length in schedule] == ([0, 15] if gpu else [0, 3, 7])
    if gpu:
        with pytest.raises(ConfigError, match="needs --max-seqs 2 or more, not 1"):
            make(adaptive_drafts=True, max_seqs=1)
    with pytest.raises(ConfigError, match="does not go with --adaptive-drafts"):
        make(adaptive_drafts=True, tree="16")
    with pytest.raises(ConfigError, match="needs a drafter"):
        make(adaptive_drafts=True, draft=None)


def test_without_speculation(make: Make) -> None:
    plan = make(draft="none")
    assert (plan.drafter, plan.draft_tokens) == (None, 0)
    assert "--speculative-config" not in plan.argv
    assert "--no-enable-prefix-caching" not in plan.argv


def test_a_target_as_its_own_drafter(make: Make, target: Path) -> None:
    with pytest.raises(ConfigError, match="is not a DFlash drafter"):
        make(draft=str(target))


def test_a_drafter_of_another_model(make: Make, make_checkpoint: MakeCheckpoint) -> None:
    other = make_checkpoint("other", DRAFTER, hidden_size=64)
    with pytest.raises(ConfigError, match="size 64"):
        make(draft=str(other))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"accept": "loose"}, "accept='loose' is not one of"),
        ({"accept": "typical", "accept_eps": 3.0}, "accept_eps=3.0 must be a number of at most 1"),
        ({"draft": "none", "accept": "typical"}, "--accept needs drafts"),
        ({"draft": "none", "accept_eps": 0.1}, "--accept-eps needs drafts"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(make: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


def test_a_rule_reaches_the_plugin_and_the_front_door(make: Make) -> None:
    plan = make(accept="typical", accept_eps=0.2)
    additional = json.loads(plan.argv[plan.argv.index("--additional-config") + 1])
    assert PluginOptions.parse(additional).acceptance == plan.acceptance
    assert plan.acceptance.described == "typical eps=0.2 delta=0.3"
    assert plan.argv[plan.argv.index("--middleware") + 1].endswith("front_door.FrontDoor")
    assert not any(arg.endswith("front_door.FrontDoor") for arg in make(draft="none").argv)


def test_acceptance_is_pretended_only_with_dummy_weights(make: Make) -> None:
    plan = make(synthetic_acceptance=2.5, dummy_weights=True)
    assert value(plan, "--load-format") == "dummy"
    assert "--load-format" not in make().argv
    speculation = json.loads(value(plan, "--speculative-config"))
    assert speculation["rejection_sample_method"] == "synthetic"
    assert speculation["synthetic_acceptance_length"] == 2.5
    with pytest.raises(ConfigError, match="needs dummy_weights"):
        make(synthetic_acceptance=2.0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"state": "both"}, "--state both is not one of reconstruct, snapshot"),
        ({"gdn_kernel": "fast"}, "--gdn-kernel fast is not one of auto, replay, wy"),
        ({"state": "snapshot", "gdn_kernel": "wy"}, "no meaning with --state snapshot"),
        ({"draft": "none", "state": "reconstruct"}, "--state needs drafts"),
        ({"draft": "none", "gdn_kernel": "wy"}, "--gdn-kernel needs drafts"),
    ],
)
def test_a_state_that_cannot_be_is_refused(make: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


def test_state_needs_recurrent_layers(make: Make, make_checkpoint: MakeCheckpoint) -> None:
    dense = make_checkpoint("dense", HYBRID, architectures=["Qwen3ForCausalLM"], layer_types=["full_attention"] * 4)
    with pytest.raises(ConfigError, match="is about recurrent state"):
        make(model=str(dense), state="snapshot")


def test_the_state_reaches_the_plugin(make: Make) -> None:
    options = PluginOptions.parse(json.loads(value(make(state="reconstruct", gdn_kernel="wy"), "--additional-config")))
    assert (options.state, options.gdn_kernel) == ("reconstruct", "wy")
    assert PluginOptions.parse(json.loads(value(make(), "--additional-config"))).state == "auto"
    # Drafts that are asked for after ``--`` count, too: MTP has no drafter to name.
    mtp = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
    plan = make(draft="none", state="snapshot", vllm_args=mtp)
    assert PluginOptions.parse(json.loads(value(plan, "--additional-config"))).state == "snapshot"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"draft": "none", "drafter_window": 64}, "--drafter-window needs drafts"),
        ({"drafter_window": 15}, "--drafter-window 15 is too short.*Take 16"),
        ({"drafter_window": 19, "tree": "20"}, "--drafter-window 19 is too short.*Take 21"),
        ({"drafter_window": 0}, "Take 16"),
    ],
)
def test_a_window_that_cannot_be_is_refused(make: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


@pytest.mark.parametrize("own", [{"layer_types": ["sliding_attention", "full_attention"]}, {"use_swa": True}])
def test_a_drafter_that_slides_has_its_own_window(own: dict[str, Any]) -> None:
    require_window(64, 15, {"layer_types": ["full_attention"] * 2, "dflash_config": {"use_swa": False}})
    with pytest.raises(ConfigError, match="sliding layers of its own"):
        require_window(64, 15, own if "layer_types" in own else {"dflash_config": own})


def test_the_window_reaches_the_plugin(make: Make) -> None:
    def options(**flags: Any) -> PluginOptions:
        return PluginOptions.parse(json.loads(value(make(**flags), "--additional-config")))

    assert options(drafter_window=64).drafter_window == 64
    assert options().drafter_window is None
    with pytest.raises(ConfigError, match="too short"):
        PluginOptions(drafter_window=8)

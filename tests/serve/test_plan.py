"""What would be started, decided without starting anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import DRAFTER, HYBRID, MakeCheckpoint
from thor_spec.config import resolve
from thor_spec.errors import ConfigError, PlatformError
from thor_spec.serve import plan as planning
from thor_spec.serve.plan import Plan, make_plan
from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.options import PluginOptions


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(planning, "has_gpu_build", lambda: request.param)
    return bool(request.param)


@pytest.fixture
def make(target: Path, drafter: Path) -> Callable[..., Plan]:
    def made(**flags: Any) -> Plan:
        return make_plan(resolve({"model": str(target), "draft": str(drafter), **flags}))

    return made


def value(plan: Plan, flag: str) -> str:
    return plan.argv[plan.argv.index(flag) + 1]


def test_argv_and_environment(make: Callable[..., Plan], gpu: bool, target: Path, drafter: Path) -> None:
    plan = make(port=9000, context=1024, max_seqs=4)
    assert value(plan, "--model") == str(target)
    assert (value(plan, "--port"), value(plan, "--max-model-len"), value(plan, "--max-num-seqs")) == (
        "9000",
        "1024",
        "4",
    )
    speculation = json.loads(value(plan, "--speculative-config"))
    k = 15 if gpu else 7
    assert speculation == {"method": "dflash", "model": str(drafter), "num_speculative_tokens": k}
    assert plan.draft_tokens == k
    additional = json.loads(value(plan, "--additional-config"))
    assert additional["thor_spec"] == ({} if gpu else {"runner_kernels": "torch"})
    assert additional.get("gdn_prefill_backend") == ("triton" if gpu else None)  # cutlass is not installed here
    assert plan.environment["VLLM_PLUGINS"] == "thor_spec"
    assert plan.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert ("TRITON_INTERPRET" in plan.environment) is not gpu
    assert ("--enforce-eager" in plan.argv) is not gpu
    assert ("--kv-cache-memory-bytes" in plan.argv) is not gpu
    assert "--no-enable-prefix-caching" in plan.argv


def test_the_shell_line_is_the_argv(make: Callable[..., Plan]) -> None:
    import shlex

    plan = make()
    words = shlex.split(plan.as_shell())
    assert tuple(words[len(plan.environment) :]) == plan.argv
    assert dict(word.split("=", 1) for word in words[: len(plan.environment)]) == plan.environment


def test_without_speculation(make: Callable[..., Plan]) -> None:
    plan = make(draft="none")
    assert (plan.drafter, plan.draft_tokens) == (None, 0)
    assert "--speculative-config" not in plan.argv
    assert "--no-enable-prefix-caching" not in plan.argv


def test_passed_arguments_replace_defaults_but_not_options(make: Callable[..., Plan]) -> None:
    args = ("--enable-prefix-caching", "--tool-call-parser", "qwen3_coder", "--enable-auto-tool-choice", "--seed", "3")
    plan = make(vllm_args=args)
    assert plan.argv[-len(args) :] == args
    assert "--no-enable-prefix-caching" not in plan.argv
    assert plan.argv.count("--tool-call-parser") == 1
    with pytest.raises(ConfigError, match="Use --context instead"):
        make(vllm_args=("--max-model-len", "77"))


def test_passed_additional_config_is_kept(make: Callable[..., Plan]) -> None:
    plan = make(vllm_args=("--additional-config", '{"gdn_prefill_backend": "triton"}'))
    assert json.loads(value(plan, "--additional-config"))["gdn_prefill_backend"] == "triton"
    assert plan.argv.count("--additional-config") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"context": 8193}, "more than the 8192 tokens"),
        ({"draft_tokens": 16}, "at most 15"),
        ({"model": "/nowhere/model"}, "No checkpoint at /nowhere/model"),
        ({"model": "some-org/some-model"}, "hf download some-org/some-model"),
        ({"draft": "/nowhere/drafter"}, "No checkpoint at /nowhere/drafter"),
        ({"draft": None, "draft_tokens": 3}, "needs a drafter"),
        ({"vllm_args": ("--compilation-config", "{")}, "needs JSON"),
    ],
)
def test_what_cannot_work(make: Callable[..., Plan], flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


def test_a_target_as_its_own_drafter(make: Callable[..., Plan], target: Path) -> None:
    with pytest.raises(ConfigError, match="is not a DFlash drafter"):
        make(draft=str(target))


def test_an_architecture_that_is_not_served(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint("llama", HYBRID, architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"is a LlamaForCausalLM.*Qwen3NextForCausalLM"):
        make_plan(resolve({"model": str(path)}))


def test_a_drafter_of_another_model(make: Callable[..., Plan], make_checkpoint: MakeCheckpoint) -> None:
    other = make_checkpoint("other", DRAFTER, hidden_size=64)
    with pytest.raises(ConfigError, match="size 64"):
        make(draft=str(other))


def test_a_plugin_that_is_not_installed(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "PLUGIN_GROUP", "no.such.group")
    with pytest.raises(PlatformError, match="not registered"):
        make()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"accept": "loose"}, "accept='loose' is not one of"),
        ({"accept": "typical", "accept_eps": 3.0}, "accept_eps=3.0 must be a number of at most 1"),
        ({"draft": "none", "accept": "typical"}, "--accept needs drafts"),
        ({"draft": "none", "accept_eps": 0.1}, "--accept-eps needs drafts"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(make: Callable[..., Plan], flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


def test_a_rule_reaches_the_plugin_and_the_front_door(make: Callable[..., Plan]) -> None:
    plan = make(accept="typical", accept_eps=0.2)
    additional = json.loads(plan.argv[plan.argv.index("--additional-config") + 1])
    assert PluginOptions.parse(additional).acceptance == plan.acceptance
    assert plan.acceptance.described == "typical eps=0.2 delta=0.3"
    assert plan.argv[plan.argv.index("--middleware") + 1].endswith("front_door.FrontDoor")
    assert "--middleware" not in make(draft="none").argv


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
def test_a_state_that_cannot_be_is_refused(make: Callable[..., Plan], flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


def test_state_needs_recurrent_layers(make: Callable[..., Plan], make_checkpoint: MakeCheckpoint) -> None:
    dense = make_checkpoint("dense", HYBRID, architectures=["Qwen3ForCausalLM"], layer_types=["full_attention"] * 4)
    with pytest.raises(ConfigError, match="is about recurrent state"):
        make(model=str(dense), state="snapshot")


def test_the_state_reaches_the_plugin(make: Callable[..., Plan]) -> None:
    options = PluginOptions.parse(json.loads(value(make(state="reconstruct", gdn_kernel="wy"), "--additional-config")))
    assert (options.state, options.gdn_kernel) == ("reconstruct", "wy")
    assert PluginOptions.parse(json.loads(value(make(), "--additional-config"))).state == "auto"
    # Drafts that are asked for after ``--`` count, too: MTP has no drafter to name.
    mtp = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
    plan = make(draft="none", state="snapshot", vllm_args=mtp)
    assert PluginOptions.parse(json.loads(value(plan, "--additional-config"))).state == "snapshot"

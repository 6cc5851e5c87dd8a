"""What would be started, decided without starting anything."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoints import DRAFTER, HYBRID, MakeCheckpoint
from thor_spec.config import ServeConfig, resolve
from thor_spec.dflash.drafter import require_window
from thor_spec.errors import ConfigError, EngineStartError, PlatformError
from thor_spec.serve import command, prefix_caching, preflight
from thor_spec.serve import plan as planning
from thor_spec.serve.checkpoint import open_checkpoint
from thor_spec.serve.plan import Plan, make_plan
from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.options import PluginOptions


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(planning, "has_gpu_build", lambda: request.param)
    for name in ("TRITON_CACHE_DIR", command.START_METHOD):
        monkeypatch.delenv(name, raising=False)
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
    assert ("TRITON_CACHE_DIR" in plan.environment) is gpu
    assert ("--enforce-eager" in plan.argv) is not gpu
    assert ("--kv-cache-memory-bytes" in plan.argv) is not gpu
    assert "--no-enable-prefix-caching" in plan.argv


def test_a_cache_of_given_size_does_not_ask_for_most_of_the_memory_to_be_free(
    make: Callable[..., Plan], gpu: bool
) -> None:
    plan = make(kv_cache_memory=1 << 30)
    assert value(plan, "--kv-cache-memory-bytes") == str(1 << 30)
    assert ("--gpu-memory-utilization" in plan.argv) is gpu
    assert "--gpu-memory-utilization" not in make().argv
    told = make(kv_cache_memory=1 << 30, vllm_args=("--gpu-memory-utilization", "0.8")).argv
    assert told.count("--gpu-memory-utilization") == 1


def test_compiled_kernels_stay_where_the_caller_keeps_them(
    make: Callable[..., Plan], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kept/elsewhere")
    assert make().environment.get("TRITON_CACHE_DIR") == ("/kept/elsewhere" if gpu else None)
    profile = {"TRITON_CACHE_DIR": "/kept/by/the/profile"}
    assert make(environment=profile).environment["TRITON_CACHE_DIR"] == "/kept/by/the/profile"


def test_the_engine_of_one_gpu_is_forked_unless_somebody_says_otherwise(
    make: Callable[..., Plan], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make().environment.get(command.START_METHOD) == ("fork" if gpu else None)
    profile = {command.START_METHOD: "spawn"}
    assert make(environment=profile).environment[command.START_METHOD] == "spawn"
    monkeypatch.setenv(command.START_METHOD, "spawn")
    assert make().environment.get(command.START_METHOD) == ("spawn" if gpu else None)
    monkeypatch.delenv(command.START_METHOD)
    if gpu:
        assert command.START_METHOD not in make(tensor_parallel=2).environment  # not tried with workers


def test_the_shell_line_is_the_argv(make: Callable[..., Plan]) -> None:
    import shlex

    plan = make()
    words = shlex.split(plan.as_shell())
    assert tuple(words[len(plan.environment) :]) == plan.argv
    assert dict(word.split("=", 1) for word in words[: len(plan.environment)]) == plan.environment


def test_adaptive_drafts(make: Callable[..., Plan], gpu: bool) -> None:
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


def test_without_speculation(make: Callable[..., Plan]) -> None:
    plan = make(draft="none")
    assert (plan.drafter, plan.draft_tokens) == (None, 0)
    assert "--speculative-config" not in plan.argv
    assert "--no-enable-prefix-caching" not in plan.argv


CHANGES_NUMBERS: dict[str, Any] = {
    "draft_tokens": 3,
    "tree": "7,3",
    "adaptive_drafts": True,
    "state": "snapshot",
    "gdn_kernel": "replay",
    "drafter_window": 64,
    "rope": "yarn",
    "environment": {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"},
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "data_parallel": 2,
    "vllm_args": ("--max-num-batched-tokens", "96"),
}
WITH_ANOTHER = {"rope_native", "rope_factor", "rope_factors", "rope_drafter", "nnodes", "node_rank", "master_addr"}
OF_DIFFUSION = {"mode", "threshold", "edit_threshold", "max_denoise_steps"}
"""Models without drafts, whose caching vLLM decides."""
CHANGES_NO_NUMBER = {
    "host", "port", "api_key", "api_key_file", "insecure", "max_request_bytes", "context", "max_seqs",
    "kv_cache_memory", "memory_floor", "accept", "accept_eps", "accept_delta", "canary", "dummy_weights",
    "synthetic_acceptance", "acceptance_floor", "golden", "allow_controls", "record", "record_contents", "log_file",
    "wait", "executor",
}  # fmt: skip
"""Among them what only says which tokens are taken, or how much fits."""


@pytest.mark.parametrize("option", CHANGES_NUMBERS)
def test_a_green_gate_is_no_word_about_another_start(
    option: str, make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sorted_out = {*CHANGES_NUMBERS, *WITH_ANOTHER, *OF_DIFFUSION, *CHANGES_NO_NUMBER, "model", "draft"}
    assert sorted_out == {field.name for field in fields(ServeConfig)}
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", str(tmp_path))
    plan = make()
    assert plan.drafter
    prefix_caching.remember(
        plan.resolved.config, plan.target, plan.drafter, plan.draft_tokens, passed=True, utc="2026-01-02"
    )
    assert make().prefix_caching.on
    config = replace(plan.resolved.config, **{option: CHANGES_NUMBERS[option]})
    assert not prefix_caching.decide(
        config, plan.target, plan.drafter, 3 if option == "draft_tokens" else plan.draft_tokens
    ).on


def test_prefixes_are_cached_after_the_gate_was_green(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", str(tmp_path))
    plan = make()
    assert not plan.prefix_caching.on
    assert "not checked here" in plan.prefix_caching.why
    assert "--no-enable-prefix-caching" in plan.argv

    def remember(*, passed: bool) -> None:
        assert plan.drafter
        prefix_caching.remember(
            plan.resolved.config, plan.target, plan.drafter, plan.draft_tokens, passed=passed, utc="2026-01-02"
        )

    remember(passed=True)
    assert make().prefix_caching.described == "on (`verify prefix-cache` was green on 2026-01-02)"
    assert "--enable-prefix-caching" in make().argv
    assert value(make(), "--prefix-cache-retention-interval") == "0"
    assert make(port=9000, max_seqs=2, vllm_args=("--seed", "3")).prefix_caching.on
    assert not make(allow_controls=True).prefix_caching.on
    declined = make(vllm_args=("--no-enable-prefix-caching",))
    assert (declined.prefix_caching.why, declined.argv.count("--no-enable-prefix-caching")) == ("declined", 1)
    remember(passed=False)
    assert make().prefix_caching.described == "off (`verify prefix-cache` was red on 2026-01-02)"


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
    assert not any(arg.endswith("front_door.FrontDoor") for arg in make(draft="none").argv)


def test_a_combination_that_is_known_not_to_work_is_refused(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "version", lambda: "0.28.1")
    with pytest.raises(PlatformError, match=r"prefix-cache-0.28: corrupt answers.*issues/53912.*Leave --enable"):
        make(vllm_args=("--enable-prefix-caching",))
    make()  # without it nothing is known against it


def test_a_method_of_vllm_s_own_is_judged_too(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(method: str) -> Plan:
        passed = ("--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3}))
        return make_plan(resolve({"model": str(target), "draft": "none", "vllm_args": passed}))

    with pytest.raises(PlatformError, match="ngram-hybrid: the recurrent state is corrupted"):
        plan("ngram")
    plan("mtp")
    monkeypatch.setattr(preflight.board, "detect", lambda *_: SimpleNamespace(kind="thor"))
    with pytest.raises(PlatformError, match="gdn-mtp-decode"):
        plan("mtp")
    monkeypatch.setenv("VLLM_GDN_DECODE_KERNEL", "triton")
    plan("mtp")


def test_what_is_likely_to_fail_is_told(target: Path, drafter: Path) -> None:
    told: list[str] = []
    flags = {"model": str(target), "draft": str(drafter), "vllm_args": ("--enable-prefix-caching",)}
    make_plan(resolve(flags), note=told.append)
    assert len(told) == 1
    assert told[0].startswith("warning: prefix-cache-drafts: an open report")


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (None, "none"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "nvfp4",
        ),
        ({"quant_method": "awq", "bits": 4}, "awq"),
    ],
)
def test_facts_of_a_start(make_checkpoint: MakeCheckpoint, quantization: dict[str, Any] | None, name: str) -> None:
    target = open_checkpoint("t", make_checkpoint("q", HYBRID, quantization_config=quantization))
    passed = ("--kv-cache-dtype", "fp8_e4m3", "--enforce-eager", "--moe-backend=marlin")
    found = preflight.facts(target, drafter=True, context=9, vllm="0.33.0", passed=passed, variables={})
    assert found["weights"] == name
    assert (found["kv_dtype"], found["graphs"], found["moe_backend"], found["hybrid"]) == ("fp8", False, True, True)


def test_several_devices_are_passed_through(make: Callable[..., Plan]) -> None:
    plan = make(tensor_parallel=2, pipeline_parallel=2, executor="ray")
    assert value(plan, "--tensor-parallel-size") == "2"
    assert value(plan, "--pipeline-parallel-size") == "2"
    assert value(plan, "--distributed-executor-backend") == "ray"
    assert "--nnodes" not in plan.argv
    with pytest.raises(ConfigError, match="Use --tensor-parallel instead"):
        make(tensor_parallel=2, vllm_args=("--tensor-parallel-size", "4"))


def test_the_other_nodes_are_headless(make: Callable[..., Plan], target: Path) -> None:
    nodes = {"tensor_parallel": 2, "nnodes": 2, "master_addr": "10.0.0.1"}
    first, second = make(**nodes), make(**nodes, node_rank=1)
    assert first.argv[2] == "thor_spec.vllm_plugin.server"
    assert second.argv[2:6] == ("vllm.entrypoints.cli.main", "serve", str(target), "--headless")
    assert "--model" not in second.argv
    for plan in (first, second):
        assert (value(plan, "--nnodes"), value(plan, "--master-addr")) == ("2", "10.0.0.1")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"executor": "threads"}, "not one of mp, ray"),
        ({"nnodes": 2}, "needs --master-addr"),
        ({"nnodes": 2, "master_addr": "a"}, "1 workers .* over 2 nodes"),
        ({"nnodes": 2, "master_addr": "a", "tensor_parallel": 2, "node_rank": 2}, r"must lie in 0\.\.1"),
        ({"nnodes": 2, "master_addr": "a", "executor": "ray"}, "the cluster knows its nodes"),
        ({"tensor_parallel": 0}, "--tensor-parallel 0 must be positive"),
    ],
)
def test_devices_that_cannot_work(make: Callable[..., Plan], flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


def test_becoming_the_engine(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(planning.os, "execve", lambda *args: called.extend(args))
    monkeypatch.setenv("INHERITED", "1")
    plan = make(api_key="0123456789abcdef", environment={"MINE": "2"})
    plan.become()
    program, argv, environment = called
    assert (program, argv) == (plan.argv[0], plan.argv)
    assert environment["VLLM_API_KEY"] == "0123456789abcdef"
    assert (environment["INHERITED"], environment["MINE"], environment["VLLM_PLUGINS"]) == ("1", "2", "thor_spec")


def test_an_engine_that_cannot_be_become(make: Callable[..., Plan]) -> None:
    from dataclasses import replace

    with pytest.raises(EngineStartError, match="/nowhere/python cannot be run: No such file"):
        replace(make(), argv=("/nowhere/python",)).become()


def test_stock_vllm_has_nothing_of_ours(gpu: bool, target: Path, drafter: Path) -> None:
    resolved = resolve({"model": str(target), "draft": str(drafter)})
    if not gpu:
        with pytest.raises(PlatformError, match="Stock DFlash needs a GPU"):
            make_plan(resolved, stock=True)
        return
    plan = make_plan(resolved, stock=True)
    assert plan.environment["VLLM_PLUGINS"] == ""
    assert "thor_spec" not in json.loads(value(plan, "--additional-config"))
    assert "--middleware" not in plan.argv
    assert value(plan, "--speculative-config") == value(make_plan(resolved), "--speculative-config")


def test_corruption_is_allowed_only_by_name(make: Callable[..., Plan]) -> None:
    for allowed in (False, True):
        additional = json.loads(value(make(allow_controls=allowed), "--additional-config"))
        assert PluginOptions.parse(additional).controls is allowed


def test_acceptance_is_pretended_only_with_dummy_weights(make: Callable[..., Plan]) -> None:
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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"draft": "none", "drafter_window": 64}, "--drafter-window needs drafts"),
        ({"drafter_window": 15}, "--drafter-window 15 is too short.*Take 16"),
        ({"drafter_window": 19, "tree": "20"}, "--drafter-window 19 is too short.*Take 21"),
        ({"drafter_window": 0}, "Take 16"),
    ],
)
def test_a_window_that_cannot_be_is_refused(make: Callable[..., Plan], flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


@pytest.mark.parametrize("own", [{"layer_types": ["sliding_attention", "full_attention"]}, {"use_swa": True}])
def test_a_drafter_that_slides_has_its_own_window(own: dict[str, Any]) -> None:
    require_window(64, 15, {"layer_types": ["full_attention"] * 2, "dflash_config": {"use_swa": False}})
    with pytest.raises(ConfigError, match="sliding layers of its own"):
        require_window(64, 15, own if "layer_types" in own else {"dflash_config": own})


def test_the_window_reaches_the_plugin(make: Callable[..., Plan]) -> None:
    def options(**flags: Any) -> PluginOptions:
        return PluginOptions.parse(json.loads(value(make(**flags), "--additional-config")))

    assert options(drafter_window=64).drafter_window == 64
    assert options().drafter_window is None
    with pytest.raises(ConfigError, match="too short"):
        PluginOptions(drafter_window=8)


@pytest.fixture
def blocks(make_checkpoint: MakeCheckpoint) -> Path:
    config = {"architectures": ["LLaDA2MoeModelLM"], "max_position_embeddings": 2048}
    return make_checkpoint("llada", config)


def test_a_block_diffusion_model_is_served_by_its_settings(blocks: Path, gpu: bool) -> None:
    plan = make_plan(resolve({"model": str(blocks), "mode": "speed", "edit_threshold": 0.4}))
    options = json.loads(value(plan, "--additional-config"))["thor_spec"]
    assert options["denoise"] == {"mode": "speed", "edit_threshold": 0.4}
    assert PluginOptions.parse({"thor_spec": options}).denoising == plan.denoising
    assert plan.denoising is not None
    assert plan.denoising.described == "threshold=0.5 edit_threshold=0.4"
    assert command.FRONT_DOOR in plan.argv
    assert "--speculative-config" not in plan.argv
    assert not plan.may_call_tools


@pytest.mark.parametrize(
    "flags",
    [{"draft": "x"}, {"draft_tokens": 3}, {"accept": "typical"}, {"accept_eps": 0.1}, {"acceptance_floor": 2.0}],
    ids=str,
)
def test_drafting_options_are_refused_to_a_block_diffusion_model(blocks: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags)).replace("_", "-")):
        make_plan(resolve({"model": str(blocks), **flags}))


@pytest.mark.parametrize("flags", [{"mode": "fast"}, {"threshold": 1.5}, {"max_denoise_steps": 0}], ids=str)
def test_settings_that_mean_nothing_are_refused(blocks: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        make_plan(resolve({"model": str(blocks), **flags}))


@pytest.mark.parametrize("flags", [{"mode": "speed"}, {"threshold": 0.5}, {"edit_threshold": 0.5}], ids=str)
def test_settings_of_blocks_are_refused_to_other_models(target: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not a block-diffusion model"):
        make_plan(resolve({"model": str(target), "draft": "none", **flags}))


def test_quantized_weights_of_a_block_diffusion_model_are_said_to_save_memory_only(
    make_checkpoint: MakeCheckpoint,
) -> None:
    config = {"architectures": ["LLaDA2MoeModelLM"], "max_position_embeddings": 2048}
    quantized = make_checkpoint("nvfp4", {**config, "quantization_config": {"quant_algo": "NVFP4"}})
    said: list[str] = []
    make_plan(resolve({"model": str(quantized)}), note=said.append)
    assert any("save memory here, not time" in line for line in said)


@pytest.mark.parametrize(
    ("flags", "profile", "says"),
    [
        ({"model": "qwen3.6-35b-a3b"}, {}, r"There is a profile of that name: --profile qwen3\.6-35b-a3b"),
        ({}, {"model": "./Named"}, r"No checkpoint at Named\. .* The profile names \./Named, .* give MODEL"),
        ({}, {"model": "who/Named"}, r"neither a folder .* The profile names who/Named, .* give MODEL"),
        ({"model": "tiny-hybrid"}, {"draft": "./Named"}, r"The profile names \./Named, .* give --draft"),
        ({"model": "./Named"}, {"model": "./Other"}, r"No checkpoint at Named\. Pass the folder .* config\.json\.$"),
    ],
)
def test_a_name_without_a_checkpoint_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], profile: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        make_plan(resolve(flags, profile))

"""What would be started, decided without starting anything."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import HYBRID, MakeCheckpoint
from thor_spec.config import resolve
from thor_spec.errors import ConfigError, EngineStartError, PlatformError
from thor_spec.serve import command
from thor_spec.serve import plan as planning
from thor_spec.serve.plan import make_plan
from thor_spec.vllm_plugin.options import PluginOptions

from .conftest import Make, value


def test_argv_and_environment(make: Make, gpu: bool, target: Path, drafter: Path) -> None:
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


def test_a_cache_of_given_size_does_not_ask_for_most_of_the_memory_to_be_free(make: Make, gpu: bool) -> None:
    plan = make(kv_cache_memory=1 << 30)
    assert value(plan, "--kv-cache-memory-bytes") == str(1 << 30)
    assert ("--gpu-memory-utilization" in plan.argv) is gpu
    assert "--gpu-memory-utilization" not in make().argv
    told = make(kv_cache_memory=1 << 30, vllm_args=("--gpu-memory-utilization", "0.8")).argv
    assert told.count("--gpu-memory-utilization") == 1


def test_compiled_kernels_stay_where_the_caller_keeps_them(
    make: Make, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kept/elsewhere")
    assert make().environment.get("TRITON_CACHE_DIR") == ("/kept/elsewhere" if gpu else None)
    profile = {"TRITON_CACHE_DIR": "/kept/by/the/profile"}
    assert make(environment=profile).environment["TRITON_CACHE_DIR"] == "/kept/by/the/profile"


def test_the_engine_of_one_gpu_is_forked_unless_somebody_says_otherwise(
    make: Make, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make().environment.get(command.START_METHOD) == ("fork" if gpu else None)
    profile = {command.START_METHOD: "spawn"}
    assert make(environment=profile).environment[command.START_METHOD] == "spawn"
    monkeypatch.setenv(command.START_METHOD, "spawn")
    assert make().environment.get(command.START_METHOD) == ("spawn" if gpu else None)
    monkeypatch.delenv(command.START_METHOD)
    if gpu:
        assert command.START_METHOD not in make(tensor_parallel=2).environment  # not tried with workers


def test_the_shell_line_is_the_argv(make: Make) -> None:
    import shlex

    plan = make()
    words = shlex.split(plan.as_shell())
    assert tuple(words[len(plan.environment) :]) == plan.argv
    assert dict(word.split("=", 1) for word in words[: len(plan.environment)]) == plan.environment


def test_passed_arguments_replace_defaults_but_not_options(make: Make) -> None:
    args = ("--enable-prefix-caching", "--tool-call-parser", "qwen3_coder", "--enable-auto-tool-choice", "--seed", "3")
    plan = make(vllm_args=args)
    assert plan.argv[-len(args) :] == args
    assert "--no-enable-prefix-caching" not in plan.argv
    assert plan.argv.count("--tool-call-parser") == 1
    with pytest.raises(ConfigError, match="Use --context instead"):
        make(vllm_args=("--max-model-len", "77"))


def test_passed_additional_config_is_kept(make: Make) -> None:
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
def test_what_cannot_work(make: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)


def test_an_architecture_that_is_not_served(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint("llama", HYBRID, architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"is a LlamaForCausalLM.*Qwen3NextForCausalLM"):
        make_plan(resolve({"model": str(path)}))


def test_becoming_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(planning.os, "execve", lambda *args: called.extend(args))
    monkeypatch.setenv("INHERITED", "1")
    plan = make(api_key="0123456789abcdef", environment={"MINE": "2"})
    plan.become()
    program, argv, environment = called
    assert (program, argv) == (plan.argv[0], plan.argv)
    assert environment["VLLM_API_KEY"] == "0123456789abcdef"
    assert (environment["INHERITED"], environment["MINE"], environment["VLLM_PLUGINS"]) == ("1", "2", "thor_spec")


def test_an_engine_that_cannot_be_become(make: Make) -> None:

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


def test_corruption_is_allowed_only_by_name(make: Make) -> None:
    for allowed in (False, True):
        additional = json.loads(value(make(allow_controls=allowed), "--additional-config"))
        assert PluginOptions.parse(additional).controls is allowed


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

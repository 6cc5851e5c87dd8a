"""The command line and the environment of an engine."""

import importlib.util
import json
import sys

from thor_spec import env
from thor_spec.config import ServeConfig
from thor_spec.errors import ConfigError
from thor_spec.rope.scheme import Scheme
from thor_spec.serve import api_key, parallel, passthrough, plugin_options, prefix_caching, rope, speculation
from thor_spec.serve.checkpoint import Checkpoint
from thor_spec.serve.prefix_caching import Decision
from thor_spec.vllm_plugin import compat, interpreter
from thor_spec.vllm_plugin.options import NAME as PLUGIN

_OPTIONS = {
    "--model": "MODEL",
    "--served-model-name": "MODEL",
    "--host": "--host",
    "--port": "--port",
    "--max-model-len": "--context",
    "--max-num-seqs": "--max-seqs",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--speculative-config": "--draft and --draft-tokens",
    **{flag: f"--{name.replace('_', '-')}" for name, flag in parallel.FLAGS.items()},
}
_TOOL_PARSERS = {"Qwen3_5ForConditionalGeneration": "qwen3_xml", "Qwen3_5MoeForConditionalGeneration": "qwen3_xml"}
_CPU_KV_CACHE_BYTES = 1 << 30
FRONT_DOOR = "thor_spec.vllm_plugin.front_door.FrontDoor"
GATE = "thor_spec.vllm_plugin.gate.Gate"
SERVER = "thor_spec.vllm_plugin.server"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_SHARE, _LEAST_SHARE = "--gpu-memory-utilization", "0.05"


def argv(
    config: ServeConfig,
    target: Checkpoint,
    drafter: Checkpoint | None,
    draft_tokens: int,
    context: int,
    scheme: Scheme | None,
    caching: Decision,
    *,
    gpu: bool,
    stock: bool,
) -> tuple[str, ...]:
    """Return the engine's command line. Raises: ConfigError, for arguments that cannot work."""
    ours = {
        "--model": str(target.path),
        "--served-model-name": config.model,
        "--host": config.host,
        "--port": str(config.port),
        "--max-model-len": str(context),
        "--max-num-seqs": str(config.max_seqs),
    }
    ours |= parallel.arguments(config)
    kv_cache_memory = config.kv_cache_memory or (None if gpu else _CPU_KV_CACHE_BYTES)
    if kv_cache_memory is not None:
        ours["--kv-cache-memory-bytes"] = str(kv_cache_memory)
    if drafter:
        ours["--speculative-config"] = json.dumps(
            speculation.argument(config, drafter, draft_tokens, gpu=gpu, stock=stock)
        )
    options = plugin_options.make(config, target, drafter, draft_tokens, scheme, gpu=gpu)
    mine = {} if stock else {PLUGIN: options}
    overrides, passed = rope.overrides(scheme, target, config.vllm_args)
    additional, passed = passthrough.merged_additional_config(mine, passed)
    if gpu and importlib.util.find_spec("cutlass") is None:
        # On Hopper vLLM prefers FlashInfer's prefill, which dies at the first prompt without nvidia-cutlass-dsl.
        additional.setdefault("gdn_prefill_backend", "triton")
    passthrough.require_no_contradiction(ours, passed, _OPTIONS)
    api_key.require_discreet(config, {flag for flag, _ in passthrough.flags(passed)})
    ours["--additional-config"] = json.dumps(additional)
    defaults: list[str] = []
    if not passthrough.mentions(passed, "--enable-auto-tool-choice", "--tool-call-parser"):
        parser = _TOOL_PARSERS.get(target.architecture, "hermes")
        defaults += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    defaults += prefix_caching.arguments(caching, passed, hybrid=target.is_hybrid)
    if not stock:  # the last one stands first
        told = drafter is not None or target.is_diffusion or config.record is not None
        defaults += [*(("--middleware", FRONT_DOOR) if told else ()), "--middleware", GATE]
    if config.dummy_weights:
        ours["--load-format"] = "dummy"
    if gpu and kv_cache_memory is not None and not passthrough.mentions(passed, _SHARE):
        # vLLM wants its share of all memory to be free at the start, whatever the size that it was given.
        defaults += [_SHARE, _LEAST_SHARE]
    if not gpu and not passthrough.mentions(passed, "--enforce-eager"):
        defaults.append("--enforce-eager")  # compiling the tiny models takes longer than serving them
    program: tuple[str, ...] = (compat.API_SERVER if stock else SERVER,)
    if parallel.is_headless(config):  # a worker of node 0, which the API server's own module cannot be
        program = (compat.COMMAND_LINE, "serve", ours.pop("--model"), "--headless")
    flags = [part for flag, value in ours.items() for part in (flag, value)]
    return (sys.executable, "-m", *program, *flags, *overrides, *defaults, *passed)


def environment(config: ServeConfig, *, gpu: bool, stock: bool) -> dict[str, str]:
    """Return what is added to the caller's environment. Raises: ConfigError, where a profile sets it too."""
    variables = {
        "VLLM_PLUGINS": "" if stock else PLUGIN,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    defaults: dict[str, str] = {}
    if gpu:
        # By itself vLLM keeps tuned kernels per configuration: another context or batch would tune the same ones anew.
        defaults["TRITON_CACHE_DIR"] = str(env.triton_cache_dir())
        # By itself its server spawns the engine, which imports everything once more: 20 s. It has not touched the GPU
        # by then; where something has, or processes are bound to memory, vLLM spawns whatever is said here.
        if parallel.workers(config) == 1:
            defaults[START_METHOD] = env.engine_variable(START_METHOD) or "fork"
    else:
        variables |= interpreter.environment(env.python_path())
    if clash := sorted(set(config.environment) & set(variables)):
        raise ConfigError(f"The profile sets {', '.join(clash)}, which thor-spec sets itself. Leave it out.")
    return {**defaults, **variables, **config.environment}

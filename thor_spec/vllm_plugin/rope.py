"""Rope types in vLLM: each model gets a rotary module of its own, of the same class, with the scheme's table in it.

The class stays, because vLLM chooses fused kernels by it; the table is in place before anything is compiled or
captured, and its address never changes. vLLM shares one module among all models with equal settings, hence the copy.
"""

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thor_spec.errors import ConfigError
from thor_spec.rope import cache
from thor_spec.rope.scheme import Scheme
from thor_spec.vllm_plugin.options import PluginOptions

_PLAIN = ("RotaryEmbedding", "MRotaryEmbedding")


@dataclass(frozen=True, slots=True)
class _Placed:
    """What was put into one model."""

    role: str
    layers: Any
    """The engine's layers by name, shared by target and drafter of one engine."""
    scheme: Scheme
    context: int
    least_rows: int
    modules: dict[int, Any]
    """Our rotary modules by ``id`` of the attention that holds them."""


_placed: WeakKeyDictionary[Any, _Placed] = WeakKeyDictionary()


def place(model: Any, vllm_config: Any, role: str) -> None:
    """Give a model that was just built its scheme's tables; nothing where no scheme is asked for.

    Args:
        role: ``target`` or ``drafter``.

    Raises: ConfigError: no rotary module, or one that the checkpoint's own configuration scales.
    """
    scheme = scheme_of(vllm_config, role)
    if scheme is None:
        return
    layers = vllm_config.compilation_config.static_forward_context
    context = vllm_config.model_config.max_model_len
    speculation = vllm_config.speculative_config
    # A verify step, and a block of the drafter, reach past the last token by as many as are drafted.
    least = context + (1 + speculation.num_speculative_tokens if speculation else 0)
    attentions = [module for module in model.modules() if _is_attention(module, layers)]
    if not attentions:
        raise ConfigError(f"The {role} {type(model).__name__} has no rotary attention, so --rope would do nothing.")
    ours: dict[int, Any] = {}
    for attention in attentions:
        stock = attention.rotary_emb
        if not hasattr(stock, "thor_spec_scheme"):  # else: a model within this one came first
            if id(stock) not in ours:
                ours[id(stock)] = _with_table(stock, scheme, context, least, role)
            attention.rotary_emb = ours[id(stock)]
    modules = {id(attention): attention.rotary_emb for attention in attentions}
    _placed[model] = _Placed(role, layers, scheme, context, least, modules)


def scheme_of(vllm_config: Any, role: str) -> Scheme | None:
    """Return the scheme of a target or drafter, or None where vLLM's own tables stay."""
    return PluginOptions.parse(vllm_config.additional_config).scheme(role)


def effective(vllm_config: Any) -> dict[str, dict[str, Any]]:
    """Read back what the models of a loaded engine rotate by; return it by role, JSON-ready.

    Raises: ConfigError, if a table is missing, too short, in another dtype, of other values, or not the one in use.
    """
    layers = vllm_config.compilation_config.static_forward_context
    roles = ["target", *(["drafter"] if vllm_config.speculative_config else [])]
    found: dict[str, dict[str, Any]] = {}
    for role in roles:
        wanted = scheme_of(vllm_config, role)
        if wanted is None:
            continue
        mine = [(m, p) for m, p in _placed.items() if p.layers is layers and p.role == role]
        if not mine and role == "drafter" and vllm_config.parallel_config.pipeline_parallel_size > 1:
            continue  # it is built in the last stage alone
        if not mine:
            raise ConfigError(
                f"--rope {wanted.type} did not reach the {role}: thor-spec did not build that model. "
                + ("Serve without it: --draft none." if role == "drafter" else "It knows Qwen3, Qwen3-Next, Qwen3.5.")
            )
        for model, placed in mine:
            found[role] = _read_back(model, placed)
    return found


def _read_back(model: Any, placed: _Placed) -> dict[str, Any]:
    attentions = [module for module in model.modules() if _is_attention(module, placed.layers)]
    if any(placed.modules.get(id(attention)) is not attention.rotary_emb for attention in attentions):
        raise ConfigError(f"--rope: a rotary module of the {placed.role} was replaced after it was set.")
    facts: dict[str, Any] = {}
    for module in {id(m): m for m in placed.modules.values()}.values():
        table = module.cos_sin_cache
        if len(table) < placed.least_rows:
            raise ConfigError(
                f"The {placed.role}'s rope table has {len(table)} positions, and {placed.least_rows} may be used. "
                "Lower --context."
            )
        off = cache.excess(table, placed.scheme, module.base, placed.context)
        if off > 0:
            raise ConfigError(
                f"The {placed.role}'s rope table is not that of {placed.scheme.described}: it is off by {off:.2g} more "
                "than rounding. Something else changes it; leave --hf-overrides and other plugins out."
            )
        _try_out(module, table, placed)
        facts = {
            **placed.scheme.as_dict(),
            "rows": len(table),
            "rotary_dim": module.rotary_dim,
            "theta": module.base,
            "module": type(module).__name__,
            "layers": len(attentions),
        }
    fused = getattr(getattr(model, "model", None), "_rope_cos_sin_cache", None)
    if fused is not None and all(fused is not module.cos_sin_cache for module in placed.modules.values()):
        raise ConfigError("--rope: the drafter writes its context keys with another table than it reads them with.")
    return facts


def _try_out(module: Any, table: torch.Tensor, placed: _Placed) -> None:
    """Rotate known vectors at a few positions: a module may keep and use another table than the one it shows."""
    last, native = placed.least_rows - 1, placed.scheme.native
    spread = {min(max(p, 0), last) for p in (0, 1, native // 2, native - 1, native, native + 1, last - 1, last)}
    positions = torch.tensor(sorted(spread), device=table.device)
    half = module.rotary_dim // 2
    vectors = torch.zeros(len(spread), module.head_size, dtype=table.dtype, device=table.device)
    vectors[:, :half] = 1.0  # (1, 0) in each pair, which a rotation takes to (cos, sin)
    query, _ = module(positions, vectors.clone(), vectors.clone())
    rotated = query.view(len(spread), -1)[:, : 2 * half]
    if not torch.equal(rotated, table[positions]):
        raise ConfigError(f"--rope: the {placed.role} does not rotate by the table that was set.")


def _is_attention(module: Any, layers: Any) -> bool:
    inner = getattr(module, "attn", None)
    return hasattr(module, "rotary_emb") and any(inner is layer for layer in layers.values())


def _with_table(stock: Any, scheme: Scheme, context: int, least_rows: int, role: str) -> Any:
    if type(stock).__name__ not in _PLAIN or getattr(stock, "scaling_factor", None) is not None:
        raise ConfigError(
            f"--rope {scheme.type}: the {role} still has a {type(stock).__name__} of its checkpoint's own scaling, so "
            "its configuration was not overridden. Leave --hf-overrides out."
        )
    if not stock.is_neox_style:
        raise ConfigError(f"--rope: the {role} rotates adjacent dimensions, and only split halves are supported.")
    count = max(len(stock.cos_sin_cache), scheme.rows, least_rows)
    device, dtype = stock.cos_sin_cache.device, stock.cos_sin_cache.dtype
    table = torch.empty(count, stock.rotary_dim, dtype=dtype, device=device)
    # Copied with everything but its table, which may be large.
    ours = copy.deepcopy(stock, {id(stock.cos_sin_cache): table})
    ours.max_position_embeddings = count
    with torch.device(device):
        default = ours._compute_cos_sin_cache().to(dtype) if scheme.keeps_native else None  # noqa: SLF001
    cache.fill(table, scheme, ours.base, context, default)
    ours.thor_spec_scheme = scheme
    return ours

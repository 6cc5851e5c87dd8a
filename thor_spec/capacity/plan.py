"""The memory of one engine, item by item, and how many sequences are left room for.

Weights, cache and state follow from the configuration. Three items cannot: they are estimates, and say so. Their two
constants are set so that two measured starts of vLLM 0.33 on an H200 come out (docs/plan.md); on another machine they
may be a GiB off.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from thor_spec.capacity import blocks
from thor_spec.capacity.blocks import BlockLayout, StateKind
from thor_spec.capacity.shape import DTYPE_BYTES, ModelShape
from thor_spec.capacity.weights import weight_bytes
from thor_spec.errors import CapacityError, ConfigError
from thor_spec.sizes import parse_size

GIB = 1 << 30
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)

RUNTIME_BYTES = GIB * 5 // 4  # CUDA context, library workspaces, what the allocator cannot give back
GRAPH_BYTES = GIB  # of each model that is captured
_SAMPLING_BYTES = 2 + 4 + 4 + 8  # of a logit: as it comes, in fp32, sorted, and the order
_CPU_BLOCK_TOKENS, _CPU_LEAST_BLOCK_TOKENS = 128, 32
_BATCHES: dict[str, int] = {"cuda": 2, "cpu": 1}  # under way at once: vLLM schedules asynchronously, but on a CPU
_DENOISED_TOKENS = {"LLaDA2MoeModelLM": 32}
"""Tokens of a block that is denoised as a whole; serve takes KV blocks of the same length."""

Engine = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked to fit. Sizes in bytes, contexts in tokens."""

    memory: int
    """What may be used, the floor included: MemAvailable on a board, the whole device beside one."""
    floor: int = 0
    """What must be left: MemAvailable below which the guard kills the engine."""
    utilization: float | None = None
    """vLLM's share of ``memory``; the rest is left then, instead of the floor."""
    kv_cache_memory: int | None = None
    """Bytes of cache; None gives it what nothing else takes."""
    context: int
    max_seqs: int = 8
    draft_tokens: int = 0
    """K; 0 without a drafter."""
    batched_tokens: int = 8192
    drafter_window: int | None = None
    """Tokens that the drafter attends to; None: all."""
    state: StateKind = "reconstruct"
    kv_dtype: str = "auto"
    state_dtype: str = "auto"
    prefix_caching: bool = False
    graphs: bool = True
    weights: int | None = None
    """Bytes of the target's weights, where its quantization is not known here."""
    engine: Engine = "cuda"

    def __post_init__(self) -> None:
        sizes = ("memory", "context", "max_seqs", "batched_tokens", "kv_cache_memory", "weights")
        for name in (*sizes, "drafter_window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{_option(name)} {value} must be positive.")
        for name in ("floor", "draft_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_option(name)} {getattr(self, name)} must not be negative.")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise ConfigError(f"--utilization {self.utilization:g} must lie in (0, 1].")
        if self.state not in get_args(StateKind):
            raise ConfigError(f"--state {self.state} is not one of {', '.join(get_args(StateKind))}.")
        for name in ("kv_dtype", "state_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ConfigError(f"{_option(name)} {getattr(self, name)} is not one of {', '.join(DTYPE_BYTES)}.")

    def changed(self, text: str) -> "Request":
        """Return the request with one ``name=value`` changed. Raises: ConfigError."""
        name, has_value, value = text.partition("=")
        name = {"k": "draft_tokens"}.get(name.strip().lower(), name.strip().lower().replace("-", "_"))
        parse = _PARSERS.get(name)
        if parse is None or not has_value:
            known = ", ".join(["K", *(other.replace("_", "-") for other in _PARSERS)])
            raise ConfigError(f"--what-if {text} is not NAME=VALUE with a name of {known}.")
        try:
            changes: dict[str, Any] = {name: parse(value.strip())}
        except ValueError as error:
            raise ConfigError(f"--what-if {text}: {value!r} does not fit {name.replace('_', '-')}.") from error
        return replace(self, **changes)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(text: str) -> bool:
    try:
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[text.lower()]
    except KeyError as error:
        raise ValueError(text) from error


_PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("context", "max_seqs", "draft_tokens", "batched_tokens", "drafter_window"), int),
    **dict.fromkeys(("memory", "floor", "kv_cache_memory", "weights"), parse_size),
    **dict.fromkeys(("state", "kv_dtype", "state_dtype"), str),
    **dict.fromkeys(("prefix_caching", "graphs"), _flag),
    "utilization": float,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One use of memory. ``estimated`` says that it does not follow from the configuration."""

    name: str
    bytes: int
    detail: str
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes."""

    request: Request
    items: tuple[Item, ...]
    """Everything but the cache, the floor last."""
    kv_bytes: int
    """What the cache gets; negative where the rest alone does not fit, and what is left where more was asked for."""
    layout: BlockLayout
    facts: Mapping[str, int]
    """The model's own figures, in bytes: per token, per sequence, per verified draft."""

    @property
    def tokens(self) -> int:
        """Return what vLLM will report as the size of its KV cache."""
        return self.layout.tokens(self.kv_bytes, self.request.context)

    @property
    def sequences(self) -> float:
        """Return what vLLM will report as its maximum concurrency at the context."""
        return self.layout.sequences(self.kv_bytes, self.request.context)

    @property
    def fits(self) -> bool:
        """Return whether one sequence of the context fits; vLLM refuses to start otherwise."""
        return self.kv_bytes > 0 and self.sequences >= 1 and self.kv_bytes >= (self.request.kv_cache_memory or 0)

    def require_fit(self) -> None:
        """Raise CapacityError, with the numbers, where not even one sequence fits."""
        if self.fits:
            return
        asked = self.request.kv_cache_memory
        if asked is not None and self.kv_bytes < asked:
            raise CapacityError(
                f"--kv-cache-memory {asked / GIB:.2f} GiB does not fit: {max(0, self.kv_bytes) / GIB:.2f} GiB of "
                f"{self.request.memory / GIB:.2f} GiB are left beside everything else. Lower it, or free memory."
            )
        least = self.layout.blocks_per_sequence(self.request.context) * self.layout.block_bytes
        raise CapacityError(
            f"One sequence of {self.request.context} tokens needs {least / GIB:.2f} GiB of cache, and "
            f"{self.kv_bytes / GIB:.2f} GiB are left. Lower --context, --draft-tokens or --max-seqs, take "
            "--state reconstruct, or free memory."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan, JSON-ready."""
        return {
            "schema": 1,
            "request": asdict(self.request),
            "items": [asdict(item) for item in self.items],
            "kv_cache_bytes": self.kv_bytes,
            "kv_cache_tokens": self.tokens,
            "sequences": round(self.sequences, 2),
            "fits": self.fits,
            "block_bytes": self.layout.block_bytes,
            "block_tokens": next((g.block_tokens for g in self.layout.groups if g.block_tokens), None),
            "blocks_per_sequence": self.layout.blocks_per_sequence(self.request.context),
            **self.facts,
        }


def _block_tokens(request: Request, target: ModelShape) -> int:
    own = _CPU_BLOCK_TOKENS if request.engine == "cpu" else blocks.KERNEL_BLOCK_TOKENS
    return _DENOISED_TOKENS.get(target.architecture, own)


def make(request: Request, target: ModelShape, drafter: ModelShape | None = None) -> MemoryPlan:
    """Return the plan. Raises: ConfigError (K without a drafter, context, quantization)."""
    if request.draft_tokens and drafter is None:
        raise ConfigError("K tokens per step need a drafter. Name it with --draft, or leave --draft-tokens out.")
    if request.drafter_window is not None and drafter is None:
        raise ConfigError("--drafter-window needs a drafter. Name it with --draft, or leave the option out.")
    if request.drafter_window is not None and drafter is not None and drafter.sliding_layers:
        raise ConfigError(f"--drafter-window does not go with {drafter.name}, which slides by itself. Leave it out.")
    if request.context > target.context:
        raise ConfigError(f"--context {request.context} is more than the {target.context} tokens of {target.name}.")
    drafter = drafter if request.draft_tokens else None
    state_dtype = _state_dtype(request, target)
    items = tuple(_items(request, target, drafter))
    if request.utilization is None:
        left = Item(name="floor", bytes=request.floor, detail="must stay available")
    else:
        unused = request.memory - int(request.memory * request.utilization)
        left = Item(name="unused", bytes=unused, detail=f"above the utilization of {request.utilization:g}")
    rest = request.memory - left.bytes - sum(item.bytes for item in items)
    return MemoryPlan(
        request=request,
        items=(*items, left),
        kv_bytes=rest if request.kv_cache_memory is None else min(rest, request.kv_cache_memory),
        layout=blocks.layout(
            target,
            drafter,
            drafts=request.draft_tokens,
            kind=request.state,
            kv_dtype=request.kv_dtype,
            state_dtype=state_dtype,
            prefix_caching=request.prefix_caching,
            kernel_block_tokens=_block_tokens(request, target),
            least_block_tokens=_CPU_LEAST_BLOCK_TOKENS if request.engine == "cpu" else blocks.KERNEL_BLOCK_TOKENS,
            drafter_window=request.drafter_window,
            batches=_BATCHES[request.engine],
            batched_tokens=request.batched_tokens,
        ),
        facts=_facts(request, target, drafter, state_dtype),
    )


def _state_dtype(request: Request, target: ModelShape) -> str:
    if request.engine == "cpu":
        return "float32"  # the only one that vLLM's CPU operators know
    return target.state_dtype if request.state_dtype == "auto" else request.state_dtype


def _facts(request: Request, target: ModelShape, drafter: ModelShape | None, state_dtype: str) -> dict[str, int]:
    kv = DTYPE_BYTES[request.kv_dtype]
    facts = {
        "kv_bytes_per_token": target.attention.layers * target.attention.bytes_per_token(kv),
        "drafter_kv_bytes_per_token": drafter.attention.layers * drafter.attention.bytes_per_token(kv)
        if drafter
        else 0,
    }
    if delta := target.delta_net:
        state = delta.layers * delta.state_bytes(DTYPE_BYTES[state_dtype])
        states = blocks.states_per_sequence(request.state, request.draft_tokens, prefix_caching=request.prefix_caching)
        facts |= {
            "state_bytes_per_sequence": state,
            "conv_bytes_per_sequence": delta.layers * delta.conv_bytes(target.element_bytes),
            "states_per_sequence": states,
            "held_state_bytes_per_sequence": states * state,
            "record_bytes_per_node": delta.layers * delta.record_bytes(target.element_bytes),
        }
    return facts


def _items(request: Request, target: ModelShape, drafter: ModelShape | None) -> list[Item]:
    size = request.weights or weight_bytes(target)
    method = target.quantization.get("quant_method") if target.quantization else None
    found = [Item(name="weights", bytes=size, detail=str(method or f"{8 * target.element_bytes}-bit"))]
    if drafter:
        found.append(Item(name="drafter", bytes=weight_bytes(drafter), detail=f"K = {request.draft_tokens}"))
    if drafter and (delta := target.delta_net) and request.state == "reconstruct":
        nodes = request.draft_tokens + 1
        kind, each = "records", delta.record_bytes(target.element_bytes)
        if request.engine == "cpu":  # vLLM's CPU operators know only how to write a state per token
            kind, each = "states", delta.state_bytes(4) + delta.conv_bytes(target.element_bytes) // (delta.taps - 1)
        found.append(
            Item(
                name="scratch",
                bytes=delta.layers * each * nodes * request.max_seqs,
                detail=f"{kind} of {nodes} tokens of {request.max_seqs} sequences",
            )
        )
    peak, detail = _activations(request, target, drafter)
    found.append(Item(name="activations", bytes=peak, detail=detail, estimated=True))
    if request.graphs and request.engine == "cuda":
        captured = 2 if drafter else 1
        found.append(Item(name="graphs", bytes=GRAPH_BYTES * captured, detail=f"{captured} captured", estimated=True))
    found.append(Item(name="runtime", bytes=RUNTIME_BYTES, detail="context, libraries, allocator", estimated=True))
    return found


def _activations(request: Request, target: ModelShape, drafter: ModelShape | None) -> tuple[int, str]:
    """Return the largest of what vLLM's profile run passes through, and its name."""
    width, tokens = target.element_bytes, request.batched_tokens
    mlp = 3 * target.intermediate
    if experts := target.experts:
        mlp = max(mlp, experts.active * (2 * experts.intermediate + target.hidden))
    attention = target.attention
    mixer = attention.heads * attention.head_dim * (3 if attention.gated else 2)
    if delta := target.delta_net:
        mixer = max(mixer, 2 * delta.channels + 4 * delta.value_heads * delta.value_dim)
    found = {
        "forward pass": tokens * (4 * target.hidden + max(mlp, mixer)) * width,
        "sampling": request.max_seqs * target.vocab * _SAMPLING_BYTES,
    }
    if drafter:
        features = 2 * tokens * drafter.feature_layers * target.hidden * width  # the layers' outputs, and their staging
        found = {name: size + features for name, size in found.items()}
        found["drafting"] = request.max_seqs * request.draft_tokens * target.vocab * width + features
    name = max(found, key=lambda key: found[key])
    return found[name], f"{name}, {request.max_seqs} sequences, {tokens} tokens"

"""Looks at every committed state of an engine: its bits, a sequential recurrence beside it, and blocks of nobody.

Shapes: D channels, H key heads, HV value heads, K key dim, V value dim.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

BOUND = 2e-2  # prompts: vLLM's chunked operators multiply in bfloat16
TIGHT = 2e-4
MOST_WATCHED = 24


def gdn_layers(runner: Any) -> list[Any]:
    from thor_spec.vllm_plugin import compat

    return [layer for layer in runner.model.modules() if isinstance(layer, compat.GDN_LAYER.resolve())]


class Committed:
    """Finds the state and window that a request's next token starts from, with one state per sequence or several."""

    def __init__(self, runner: Any) -> None:
        self.layers = gdn_layers(runner)
        self._state = runner.model_state
        groups = runner.kv_cache_config.kv_cache_groups
        self._tables = {
            name: runner.block_tables.block_tables[g].gpu
            for g, group in enumerate(groups)
            for name in group.layer_names
        }

    def of(self, layer: Any, slot: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return window [D, taps - 1], state, and the state's block."""
        column = int(self._state._mamba_state_idx_gpu[slot]) if self._state._align_mode else 0
        bias = int(self._state.num_accepted_tokens_gpu[slot]) - 1
        table = self._tables[layer.prefix][slot]
        window = layer.kv_cache[0][table[column]].T
        block = int(table[column + bias])
        return window[:, bias : bias + layer.conv_kernel_size - 1], layer.kv_cache[1][block], block

    def at_boundary(self, layer: Any, slot: int, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return window and state in a full block of a request."""
        block = int(self._tables[layer.prefix][slot][column])
        return layer.kv_cache[0][block].T[:, : layer.conv_kernel_size - 1], layer.kv_cache[1][block]


@dataclass
class Digests:
    """A digest of every committed state, by request and length."""

    runner: Any
    found: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._committed = Committed(self.runner)
        state, stock = self.runner.model_state, self.runner.model_state.postprocess_state

        def postprocess(idx_mapping: Any, num_sampled: Any, computed: Any = None) -> None:
            stock(idx_mapping, num_sampled, computed)
            names = {index: name for name, index in self.runner.req_states.req_id_to_index.items()}
            for slot in idx_mapping.tolist():
                digest = hashlib.sha256()
                for layer in self._committed.layers:
                    window, kept, _ = self._committed.of(layer, slot)
                    digest.update(window.contiguous().view(torch.uint8).cpu().numpy().tobytes())
                    digest.update(kept.contiguous().view(torch.uint8).cpu().numpy().tobytes())
                self.found[f"{names[slot].partition('-')[0]}@{int(computed[slot])}"] = digest.hexdigest()

        state.postprocess_state = postprocess


class Recurrence:
    """Advances a state of its own, token by token, over what the layers were given, and compares after every step.

    A request that starts from a cached block starts from the recurrence's own state for that prefix.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.counts: Counter[str] = Counter()
        self.worst = {"prompt": 0.0, "decode": 0.0}
        self._committed = Committed(runner)
        self._given: dict[str, tuple[torch.Tensor, ...]] = {}
        self._by_prefix: dict[tuple[str, tuple[int, ...]], list[tuple[torch.Tensor, torch.Tensor, str]]] = {}
        self._own: dict[tuple[str, str], tuple[int, torch.Tensor, torch.Tensor]] = {}
        self._tap_layers()
        self._tap_steps()

    def _tap_layers(self) -> None:
        for layer in self._committed.layers:

            def forward(x: Any, b: Any, a: Any, out: Any, layer: Any = layer, stock: Any = layer._forward_core) -> None:
                self._given[layer.prefix] = (x.clone(), b.clone(), a.clone())
                stock(x, b, a, out)

            layer._forward_core = lambda mixed_qkv, b, a, core_attn_out, f=forward: f(mixed_qkv, b, a, core_attn_out)

    def _tap_steps(self) -> None:
        state = self.runner.model_state
        prepare, postprocess = state.prepare_attn, state.postprocess_state

        def prepare_attn(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = batch
            self._starts = batch.query_start_loc.tolist()
            self._ends = batch.seq_lens.tolist()
            return prepare(batch, *args, **kwargs)

        def postprocess_state(idx_mapping: Any, num_sampled: Any, computed: Any = None) -> None:
            postprocess(idx_mapping, num_sampled, computed)
            names = {index: name for name, index in self.runner.req_states.req_id_to_index.items()}
            for row, slot in enumerate(idx_mapping.tolist()):
                first, last = self._starts[row : row + 2]
                before = self._ends[row] - (last - first)
                self._check(names[slot], slot, first, before, int(computed[slot]))

        state.prepare_attn, state.postprocess_state = prepare_attn, postprocess_state

    def _check(self, name: str, slot: int, first: int, before: int, after: int) -> None:
        tokens = self.runner.req_states.all_token_ids.gpu[slot, :after].tolist()
        prompt = int(self.runner.req_states.prefill_len.gpu[slot])
        for layer in self._committed.layers:
            x, b, a = self._given[layer.prefix]
            window, state = self._start(layer, name, slot, before, tokens)
            passed = []
            for token in range(after - before):
                at = first + token
                window, state = advance(layer, window, state, x[at], b[at], a[at])
                if self._block_size and (before + token + 1) % self._block_size == 0:
                    passed.append((before + token + 1, window, state))
            got_window, got, _ = self._committed.of(layer, slot)
            got = value_first(layer, got).clone()
            assert torch.equal(window, got_window), f"{name} after {after} tokens: window of {layer.prefix}"
            error = distance(got, state)
            bound = BOUND if before < prompt else TIGHT if layer_keeps_key_first(layer) else 10 * TIGHT
            self.worst["prompt" if before < prompt else "decode"] = max(
                error, self.worst["prompt" if before < prompt else "decode"]
            )
            assert error < bound, f"{name} after {after} tokens: state of {layer.prefix} is off by {error:.4f}"
            if before < prompt:
                state = got  # prompts go through chunked operators; what follows is followed from what they left
            self._own[layer.prefix, name] = after, window, state
            for length, window_then, state_then in passed:
                how = "prompt" if length <= prompt else "end of a step" if length == after else "within a step"
                key = layer.prefix, tuple(tokens[:length])
                kept = window_then, state if length == after else state_then, how
                if before >= prompt:  # whether or not the scheduler will keep the block
                    saved_window, saved = self._committed.at_boundary(layer, slot, length // self._block_size - 1)
                    right = (
                        torch.equal(saved_window, window_then) and distance(value_first(layer, saved), kept[1]) < TIGHT
                    )
                    assert right, f"{name}: {layer.prefix} did not save the state at {length} of {after} tokens"
                    self.counts[f"saved, {how}"] += 1
                self._by_prefix.setdefault(key, []).append(kept)
            self.counts["states"] += 1

    @property
    def _block_size(self) -> int:
        config = self.runner.vllm_config.cache_config
        return int(config.mamba_block_size) if self.runner.model_state._align_mode else 0

    def _start(
        self, layer: Any, name: str, slot: int, before: int, tokens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length, window, state = self._own.get((layer.prefix, name), (-1, None, None))
        if length == before:
            return window, state
        if before == 0:  # new, or preempted
            channels = layer.conv_dim // layer.tp_size
            heads = layer.num_v_heads // layer.tp_size
            window = torch.zeros(channels, layer.conv_kernel_size - 1, dtype=torch.bfloat16)
            return window, torch.zeros(heads, layer.head_v_dim, layer.head_k_dim)
        # A cached block: it must be what one of those had there that came by this prefix.
        window, state = self._committed.at_boundary(layer, slot, before // self._block_size - 1)
        state = value_first(layer, state).clone()
        known = self._by_prefix[layer.prefix, tuple(tokens[:before])]
        bounds = {"prompt": BOUND}
        found = next(
            (
                how
                for own_window, own_state, how in sorted(known, key=lambda entry: entry[2] == "prompt")
                if torch.equal(own_window, window) and distance(state, own_state) < bounds.get(how, TIGHT)
            ),
            None,
        )
        assert found, f"{name} starts from {before} tokens: the cached state of {layer.prefix} is not theirs"
        self.counts[f"restored, {found}"] += 1
        return window.clone(), state


def value_first(layer: Any, state: torch.Tensor) -> torch.Tensor:
    """Return a state as [HV, V, K]."""
    if not layer_keeps_key_first(layer):
        return state
    heads, v, k = state.shape
    return state.reshape(heads, k, v).transpose(1, 2)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-6))


def layer_keeps_key_first(layer: Any) -> bool:
    return getattr(layer, "variant", "native") == "native"


def advance(
    layer: Any, window: torch.Tensor, state: torch.Tensor, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return window [D, taps - 1] and state [HV, V, K] after one token with inputs ``x`` [D], gates [HV]."""
    taken = torch.cat([window, x[:, None]], dim=1)
    mixed = convolved(layer, taken).float()
    keys, values = layer.key_dim, layer.value_dim
    _, k, v = mixed.split([keys, keys, values])
    group = layer.num_v_heads // layer.num_k_heads
    k = k.view(-1, layer.head_k_dim)
    k = (k * torch.rsqrt(k.square().sum(1, keepdim=True) + 1e-6)).repeat_interleave(group, dim=0)
    v = v.view(-1, layer.head_v_dim)
    decay = torch.exp(-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float()))
    state = state * decay[:, None, None]
    u = torch.sigmoid(b.float())[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
    return taken[:, 1:], state + u[:, :, None] * k[:, None, :]


def convolved(layer: Any, taken: torch.Tensor) -> torch.Tensor:
    """Return the activated convolution [D] of ``taken`` [D, taps], rounded as what is followed rounds it."""
    from thor_spec.vllm_plugin.one_state import cpu

    weight = cpu.conv_weight(layer.conv1d)
    if not layer_keeps_key_first(layer):  # vLLM's kernels, like ours, round the products
        return F.silu((taken * weight).float().sum(1)).bfloat16()
    if not torch.cpu._is_amx_tile_supported():  # and its CPU operators before the activation
        return F.silu((taken.float() * weight.float()).sum(1).bfloat16()).bfloat16()
    from vllm import _custom_ops  # that for AMX has an exponential of its own: one element in 400 rounds the other way

    found: torch.Tensor = _custom_ops.causal_conv1d_update_cpu(
        x=taken[None, :, -1].contiguous(),
        conv_states=taken[:, :-1].T.contiguous()[None].transpose(1, 2),
        weight=layer.conv1d.weight,
        bias=None,
        silu_activation=True,
        conv_state_indices=torch.zeros(1, dtype=torch.int32),
        is_weight_packed=True,
    )[0]
    return found


class Poison:
    """Fills the states of blocks that nobody owns with NaN, and sees that they stay so."""

    def __init__(self, runner: Any, scheduler: Any) -> None:
        self._layers = gdn_layers(runner)
        self._pool = scheduler.kv_cache_manager.block_pool
        self._free: set[int] = set()
        self._recent: list[int] = []
        self._taken: set[int] = set()  # and perhaps given back, within one step
        take = self._pool.get_new_blocks

        def get_new_blocks(count: int) -> list[Any]:
            blocks: list[Any] = take(count)
            self._taken.update(block.block_id for block in blocks)
            return blocks

        self._pool.get_new_blocks = get_new_blocks
        self.counts: Counter[str] = Counter()

    def __call__(self) -> None:
        free = {b.block_id for b in self._pool.blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null}
        # All of them are poisoned; those that were freed last are looked at, which somebody may still think are his.
        self._free -= self._taken
        recent = [block for block in self._recent if block in free & self._free][-MOST_WATCHED:]
        fresh = sorted(free - self._free)
        self._taken.clear()
        for layer in self._layers:
            for cache in layer.kv_cache:
                assert cache[recent].isnan().all(), f"{layer.prefix}: a block of nobody was written"
                cache[fresh] = torch.nan
        self.counts["watched"] += len(recent)
        self._free, self._recent = free, recent + fresh

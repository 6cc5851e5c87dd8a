"""Tables in vLLM's own rotary modules: partial rotation, interleaved M-RoPE, and the drafter's second reference."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thor_spec.errors import ConfigError
from thor_spec.rope import cache
from thor_spec.rope.scheme import Scheme
from thor_spec.vllm_plugin import rope

NATIVE, HEAD, DIM, THETA, SECTIONS = 256, 128, 64, 1e7, [12, 10, 10]


@pytest.fixture
def vllm() -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        yield get_rope


class Attention(torch.nn.Module):
    def __init__(self, rotary: Any, layer: Any) -> None:
        super().__init__()
        self.rotary_emb, self.attn = rotary, layer


class Model(torch.nn.Module):
    def __init__(self, rotary: Any, layers: dict[str, Any]) -> None:
        super().__init__()
        mine = [torch.nn.Identity() for _ in range(2)]
        layers |= {f"layer.{len(layers)}.{i}": layer for i, layer in enumerate(mine)}
        self.layers = torch.nn.ModuleList(Attention(rotary, layer) for layer in mine)
        self.vision = torch.nn.Module()
        self.vision.rotary_emb = rotary  # no layer of the engine belongs to it


def rotary(vllm: Any, kind: str, positions: int = 2 * NATIVE, **changes: Any) -> Any:
    parameters = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": DIM / HEAD, **changes}
    if kind == "mrope":
        parameters |= {"mrope_section": SECTIONS, "mrope_interleaved": True}
    return vllm(HEAD, max_position=positions, rope_parameters=parameters, dtype=torch.float32, mrope_positions_factor=1)


def config(
    rope: dict[str, Any] | None, layers: dict[str, Any], drafts: int = 0, context: int = 512, **more: Any
) -> Any:
    return SimpleNamespace(
        additional_config={"thor_spec": {"rope": rope, **more} if rope else {}},
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(max_model_len=context),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
    )


def rotated(x: torch.Tensor, axes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Rotate [T, heads * HEAD] in double precision; pair i turns by the position on axis 0, 1 or 2."""
    x = x.double().view(len(x), -1, HEAD).clone()
    table = cache.rows(scheme, 0, 2 * NATIVE, DIM, THETA, 2 * NATIVE)
    half = DIM // 2
    for pair in range(half):
        axis = 1 if pair % 3 == 1 and pair < 3 * SECTIONS[1] else 2 if pair % 3 == 2 and pair < 3 * SECTIONS[2] else 0
        row = table[axes[axis]]
        cos, sin = row[:, pair, None], row[:, half + pair, None]
        a, b = x[..., pair].clone(), x[..., half + pair].clone()
        x[..., pair], x[..., half + pair] = a * cos - b * sin, b * cos + a * sin
    return x.view(len(x), -1)


TYPES = ["default", "linear", "yarn", "longrope", "identity_beyond_native", "nope"]


@pytest.mark.parametrize("kind", ["plain", "mrope"])
@pytest.mark.parametrize("name", TYPES)
def test_modules_rotate_by_the_scheme(vllm: Any, kind: str, name: str) -> None:
    layers: dict[str, Any] = {}
    stock = rotary(vllm, kind)
    kept = stock.cos_sin_cache.clone()
    model = Model(stock, layers)
    scheme = {"type": name, "native": NATIVE, "factor": 2.0}
    rope.place(model, setting := config(scheme, layers), "target")
    ours = model.layers[0].rotary_emb
    assert ours is model.layers[1].rotary_emb is not stock
    assert type(ours) is type(stock)
    assert torch.equal(stock.cos_sin_cache, kept)
    assert model.vision.rotary_emb is stock
    found = rope.effective(setting)["target"]
    assert (found["type"], found["rows"], found["layers"], found["rotary_dim"]) == (name, 2 * NATIVE, 2, DIM)
    generator = torch.Generator().manual_seed(0)
    tokens = 24
    axes = torch.randint(0, 2 * NATIVE, (3, tokens), generator=generator)
    if kind == "plain":
        axes = axes[:1].expand(3, -1)
    query, key = (torch.randn(tokens, heads * HEAD, generator=generator) for heads in (4, 2))
    q, k = ours(axes if kind == "mrope" else axes[0], query.clone(), key.clone())
    for got, given in ((q, query), (k, key)):
        assert torch.allclose(got.double(), rotated(given, axes, Scheme.parse(scheme)), atol=2e-4)
    if Scheme.parse(scheme).keeps_native:
        assert torch.equal(ours.cos_sin_cache[:NATIVE], kept[:NATIVE])


def test_tables_reach_as_far_as_drafts_do(vllm: Any) -> None:
    layers: dict[str, Any] = {}
    model, drafter = Model(rotary(vllm, "mrope"), layers), Model(rotary(vllm, "plain", NATIVE), layers)
    setting = config({"type": "yarn", "native": NATIVE, "factor": 2.0}, layers, drafts=7, rope_drafter="default")
    rope.place(model, setting, "target")
    with pytest.raises(ConfigError, match="did not reach the drafter"):
        rope.effective(setting)
    rope.place(drafter, setting, "drafter")
    found = rope.effective(setting)
    assert found["target"]["rows"] == found["drafter"]["rows"] == 512 + 8
    assert (found["target"]["type"], found["drafter"]["type"]) == ("yarn", "default")
    inner = SimpleNamespace(_rope_cos_sin_cache=rotary(vllm, "plain", NATIVE).cos_sin_cache)
    object.__setattr__(drafter, "model", inner)
    with pytest.raises(ConfigError, match="another table than it reads"):
        rope.effective(setting)
    inner._rope_cos_sin_cache = drafter.layers[0].rotary_emb.cos_sin_cache
    assert rope.effective(setting) == found


def test_default_is_longer_bit_by_bit(vllm: Any) -> None:
    layers: dict[str, Any] = {}
    drafter = Model(rotary(vllm, "plain", NATIVE), layers)
    rope.place(drafter, config({"type": "default", "native": NATIVE, "factor": 2.0}, layers), "drafter")
    assert torch.equal(drafter.layers[0].rotary_emb.cos_sin_cache, rotary(vllm, "plain", 2 * NATIVE).cos_sin_cache)


def test_nothing_changes_without_a_scheme(vllm: Any) -> None:
    layers: dict[str, Any] = {}
    model = Model(stock := rotary(vllm, "plain"), layers)
    rope.place(model, setting := config(None, layers), "target")
    assert model.layers[0].rotary_emb is stock
    assert rope.effective(setting) == {}


def test_a_checkpoint_that_scales_is_refused(vllm: Any) -> None:
    layers: dict[str, Any] = {}
    own = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": NATIVE}
    for kind in ("plain", "mrope"):
        model = Model(rotary(vllm, kind, **own), layers)
        with pytest.raises(ConfigError, match="own scaling"):
            rope.place(model, config({"type": "linear", "native": NATIVE}, layers), "target")
    with pytest.raises(ConfigError, match="no rotary attention"):
        rope.place(torch.nn.Linear(1, 1), config({"type": "linear", "native": NATIVE}, layers), "target")

"""Every type's table against formulas written a second time, and what of it must not differ by a bit."""

import math

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from thor_spec.errors import ConfigError
from thor_spec.rope import cache, tables
from thor_spec.rope.scheme import Scheme

# Rotated dimensions, theta, native context: Qwen3.5, a Qwen3, and nano-hybrid.
SHAPES = [(64, 1e7, 262144), (128, 1e6, 40960), (32, 1e5, 8192)]
TYPES = ["default", "linear", "yarn", "longrope", "identity_beyond_native", "nope"]


def independent(scheme: Scheme, position: int, pair: int, dim: int, theta: float) -> tuple[float, float]:
    """One cosine and sine, from the papers' formulas, without the code under test."""
    frequency, scale, s, native = theta ** (-2 * pair / dim), 1.0, scheme.factor, scheme.native
    if scheme.type == "nope" or (scheme.type == "identity_beyond_native" and position >= native):
        return 1.0, 0.0
    if scheme.type == "linear":
        position = position / s  # type: ignore[assignment]
    if scheme.type == "yarn":
        turns = native * frequency / (2 * math.pi)

        def index(beta: float) -> float:
            return dim * math.log(native / (beta * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), dim - 1)
        keep = 1 - min(max((pair - low) / (high - low), 0), 1)
        assert (turns > 40) <= (keep > 0.5)  # what turns often keeps its frequency
        frequency, scale = frequency * keep + frequency / s * (1 - keep), 1 + 0.1 * math.log(s)
    if scheme.type == "longrope":
        frequency /= scheme.long_factor[pair]
        scale = math.sqrt(1 + math.log(s) / math.log(native))
    return scale * math.cos(position * frequency), scale * math.sin(position * frequency)


@pytest.mark.parametrize(("dim", "theta", "native"), SHAPES)
@pytest.mark.parametrize("kind", TYPES)
def test_tables_equal_independent_formulas(kind: str, dim: int, theta: float, native: int) -> None:
    lists = {"long_factor": tuple(1 + i / 7 for i in range(dim // 2))} if kind == "longrope" else {}
    scheme = Scheme(type=kind, native=native, factor=4.0, **lists)  # type: ignore[arg-type]
    for position in (0, 1, 17, native - 1, native, native + 1, scheme.rows - 1):
        (row,) = cache.rows(scheme, position, position + 1, dim, theta, scheme.rows)
        for pair in range(dim // 2):
            cosine, sine = independent(scheme, position, pair, dim, theta)
            assert row[pair].item() == pytest.approx(cosine, abs=1e-6)
            assert row[dim // 2 + pair].item() == pytest.approx(sine, abs=1e-6)


@pytest.mark.parametrize(("dim", "theta", "native"), SHAPES)
@pytest.mark.parametrize("long", [False, True])
def test_longrope_equals_transformers(dim: int, theta: float, native: int, long: bool) -> None:
    short, stretched = [1.0 + i / 50 for i in range(dim // 2)], [1.0 + i for i in range(dim // 2)]
    parameters = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": short,
        "long_factor": stretched,
        "factor": 4.0,
        "original_max_position_embeddings": native,
    }
    config = Qwen3Config(
        head_dim=dim, max_position_embeddings=4 * native, rope_parameters=parameters, num_attention_heads=1
    )
    length = 4 * native if long else native
    inverse, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
    scheme = Scheme(type="longrope", native=native, factor=4.0, short_factor=tuple(short), long_factor=tuple(stretched))
    ours = scheme.frequencies(dim, theta, length)
    assert ours.inverse == pytest.approx(inverse.double().tolist(), rel=1e-6)
    assert ours.scale == pytest.approx(scale, abs=1e-12)


def test_the_step_of_a_model_without_searched_factors() -> None:
    factors = tables.stepped(64, 1e7, 4.0, 262144)
    assert factors == (1.0,) * 22 + (4.0,) * 10


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_filled_table_is_found_right_and_a_changed_one_wrong(kind: str, dtype: torch.dtype) -> None:
    scheme = Scheme(type=kind, native=512, factor=4.0)  # type: ignore[arg-type]
    stock = cache.rows(Scheme(native=512), 0, scheme.rows, 32, 1e5, scheme.rows).to(dtype)
    table = torch.full((scheme.rows, 32), torch.nan, dtype=dtype)
    cache.fill(table, scheme, 1e5, scheme.rows, stock)
    assert cache.excess(table, scheme, 1e5, scheme.rows) <= 0
    for other in TYPES:
        if other != kind:
            assert cache.excess(table, Scheme(type=other, native=512, factor=4.0), 1e5, scheme.rows) > 0.01  # type: ignore[arg-type]
    table[700, 5] += 0.02
    assert cache.excess(table, scheme, 1e5, scheme.rows) > 0
    table[700, 5] = torch.nan
    assert cache.excess(table, scheme, 1e5, scheme.rows) == math.inf


def test_what_keeps_native_takes_over_every_bit() -> None:
    stock = torch.randn(4096, 32).bfloat16()
    table = torch.empty_like(stock)
    scheme = Scheme.parse({"type": "drope", "native": 1024, "factor": 4})
    cache.fill(table, scheme, 1e5, 4096, stock)
    assert torch.equal(table[:1024], stock[:1024])
    assert torch.equal(table[1024:], torch.cat((torch.ones(3072, 16), torch.zeros(3072, 16)), 1).bfloat16())


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Scheme(type="yarn", native=128, factor=2.0)
    whole, parts = torch.empty(256, 8), torch.empty(256, 8)
    cache.fill(whole, scheme, 1e4, 256)
    monkeypatch.setattr(cache, "CHUNK_ROWS", 37)
    cache.fill(parts, scheme, 1e4, 256)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"type": "ntk", "native": 8}, "not one of"),
        ({"type": "yarn", "native": 0}, "own context"),
        ({"type": "yarn", "native": 8, "factor": 0.5}, "at least 1"),
        ({"type": "yarn", "native": 8, "long_factor": [1.0]}, "belong to --rope longrope"),
        ({"type": "yarn", "nativ": 8}, "unknown fields nativ"),
        ({"type": "yarn", "native": 8, "factor": "much"}, "malformed"),
    ],
)
def test_what_is_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scheme.parse(values)


def test_lists_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="list of 3 LongRoPE factors does not fit: 16 pairs"):
        Scheme(type="longrope", native=512, factor=2.0, long_factor=(1.0, 2.0, 3.0)).frequencies(32, 1e4, 1024)


def test_a_scheme_survives_its_journey() -> None:
    scheme = Scheme(type="longrope", native=512, factor=2.0, long_factor=(1.0, 2.0))
    assert Scheme.parse(scheme.as_dict()) == scheme

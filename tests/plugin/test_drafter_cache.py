"""What a drafter is told before it is built, and which blocks its layers ask for; engines run in ``tests/state``."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import drafter_cache
from thor_spec.vllm_plugin.drafter_cache import fitting_block


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def engine(window: int | None = None, drafts: int = 7, **config: Any) -> Any:
    return SimpleNamespace(
        additional_config={"thor_spec": {"drafter_window": window} if window else {}},
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, draft_model_config=SimpleNamespace(hf_config=Config(**config))
        ),
    )


def test_a_window_is_put_into_the_drafter_s_configuration() -> None:
    shared = {"mask_token_id": 3}
    asked = engine(64, dflash_config=shared)
    for _ in range(2):  # a model may be built again
        drafter_cache.narrow(asked)
    config = asked.speculative_config.draft_model_config.hf_config
    assert config.dflash_config == {"mask_token_id": 3, "use_swa": True, "swa_window_size": 64}
    assert shared == {"mask_token_id": 3}
    left = engine(dflash_config=shared)
    drafter_cache.narrow(left)
    assert left.speculative_config.draft_model_config.hf_config.dflash_config is shared
    with pytest.raises(ConfigError, match="Take 21"):
        drafter_cache.narrow(engine(20, drafts=20, dflash_config=shared))
    with pytest.raises(ConfigError, match="of its own"):
        drafter_cache.narrow(engine(64, dflash_config=shared, layer_types=["sliding_attention"]))


def test_vllm_slides_all_layers_of_it() -> None:
    from vllm.model_executor.models import qwen3_dflash

    asked = engine(64, dflash_config={}, layer_types=["full_attention"] * 2, num_hidden_layers=2)
    config = asked.speculative_config.draft_model_config.hf_config
    assert [qwen3_dflash._resolve_layer_attention(config, i) for i in (0, 1)] == [(None, False)] * 2
    drafter_cache.narrow(asked)
    assert [qwen3_dflash._resolve_layer_attention(config, i) for i in (0, 1)] == [(64, False)] * 2


@pytest.mark.parametrize(
    ("block", "own", "page", "fits"),
    [
        (1056, 4, 2, 528),
        (1056, 8, 2, 264),
        (1056, 2, 2, None),  # as wide as the target
        (1056, 1, 2, None),  # narrower: vLLM gives it more tokens itself
        (1056, 3, 2, None),  # no whole number of times
        (1055, 4, 2, None),
        (1056, 4, 0, None),
    ],
)
def test_which_block_fits(block: int, own: int, page: int, fits: int | None) -> None:
    assert fitting_block(block, own * block, page * block) == fits


@dataclass(frozen=True)
class Spec:
    block_size: int
    token_bytes: int

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.token_bytes


class Layer:
    def __init__(self, name: str, token_bytes: int) -> None:
        self.layer_name = name
        self.token_bytes = token_bytes
        self.attn_backend = SimpleNamespace(supports_block_size=lambda block: block % 16 == 0)

    def get_kv_cache_spec(self, vllm_config: Any) -> Spec:
        return Spec(vllm_config.cache_config.block_size, self.token_bytes)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, 528),
        ({"caching": True}, 1056),
        ({"hybrid": False}, 1056),
        ({"state": "snapshot"}, 1056),
        ({"block": 1040}, 520 * 2),  # a kernel would have no such block
    ],
)
def test_layers_ask_for_it(changes: dict[str, Any], fits: int) -> None:
    from tests.plugin.test_one_state import config

    asked = {"caching": False, "hybrid": True, "state": None, "block": 1056, **changes}
    layers = [Layer("target.0", 2), Layer("draft.0", 4), Layer("draft.1", 4)]
    vllm_config = config(
        state=asked["state"],
        model_config=SimpleNamespace(is_hybrid=asked["hybrid"]),
        cache_config=SimpleNamespace(enable_prefix_caching=asked["caching"], block_size=asked["block"]),
        compilation_config=SimpleNamespace(
            static_forward_context={**{layer.layer_name: layer for layer in layers}, "experts": object()}
        ),
    )
    drafter_cache.fit_pages(SimpleNamespace(modules=lambda: [object(), *layers[1:]]))
    target, *draft = [layer.get_kv_cache_spec(vllm_config) for layer in layers]
    assert target == Spec(asked["block"], 2)
    assert draft == [replace(target, block_size=fits, token_bytes=4)] * 2

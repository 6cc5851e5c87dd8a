"""The walk and the layout against their plain definitions, on random trees; what is refused with trees."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thor_spec.ddtree.tree import Tree
from thor_spec.ddtree.walk import walk as definition
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_paths import reference as tree_paths
from thor_spec.vllm_plugin import front_door
from thor_spec.vllm_plugin.tree import choice
from thor_spec.vllm_plugin.tree.topology import lay_out


def random_tree(rng: random.Random, nodes: int) -> Tree:
    parents, tokens, taken = [-1], [0], set[tuple[int, int]]()
    while len(parents) < nodes:
        edge = rng.randrange(len(parents)), rng.randrange(4)
        if edge not in taken:
            taken.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return Tree(tokens=tuple(tokens), parents=tuple(parents))


@pytest.mark.parametrize("width", [1, 2, 9, 64])
def test_walk(width: int) -> None:
    from thor_spec.vllm_plugin.tree.sampler import walk

    rng = random.Random(width)
    trees = [random_tree(rng, rng.randint(1, width)) for _ in range(40)]
    choices = [[rng.randrange(4) for _ in tree.tokens] for tree in trees]
    padding = [width - len(tree.tokens) for tree in trees]
    parents = torch.tensor([[*t.parents, *[-1] * p] for t, p in zip(trees, padding, strict=True)], dtype=torch.int32)
    depths = torch.tensor([[*t.depths(), *[0] * p] for t, p in zip(trees, padding, strict=True)], dtype=torch.int32)
    tokens = torch.tensor([[*t.tokens, *[1] * p] for t, p in zip(trees, padding, strict=True)])
    chosen = torch.tensor([[*c, *[1] * p] for c, p in zip(choices, padding, strict=True)])
    path, accepted = walk(parents, depths, tokens, chosen)
    for r, tree in enumerate(trees):
        assert tuple(path[r, : accepted[r]].tolist()) == definition(tree, choices[r])
    tokens[:, 1:] = -1  # placeholders, and what a grammar forbids
    assert walk(parents, depths, tokens, chosen)[1].tolist() == [1] * 40


def test_layout() -> None:
    rng = random.Random(0)
    trees = [random_tree(rng, rng.randint(1, 64)) for _ in range(30)]
    counts = [rng.randint(1, len(tree.tokens)) for tree in trees]  # as a scheduler cuts
    parents = torch.tensor([[*t.parents, *[-1] * (64 - len(t.parents))] for t in trees], dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    want = tree_paths.tree_paths(parents, starts)
    got = tree_paths.allocate(30, 64, "cpu")
    lay_out(parents, starts, got)
    assert torch.equal(got.masks, want.masks)
    assert torch.equal(got.leaves, want.leaves)


def config(**changes: Any) -> Any:
    speculation = {
        "method": "dflash",
        "num_speculative_tokens": 9,
        "draft_model_config": SimpleNamespace(hf_config=SimpleNamespace(block_size=8)),
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    options = {"tree": "9", **changes.pop("options", {})}
    for name in list(changes):
        for part in (speculation, parallel):
            if name in part:
                part[name] = changes.pop(name)
    rest = {"lora_config": None, "kv_transfer_config": None, "cache_config": SimpleNamespace(cache_dtype="auto")}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**speculation),
        parallel_config=SimpleNamespace(**parallel),
        additional_config={"thor_spec": options},
        model_config=SimpleNamespace(is_hybrid=False),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        **{**rest, **changes},
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": "mtp"}, "DFlash"),
        ({"num_speculative_tokens": 7}, "num_speculative_tokens=9"),
        ({"options": {"tree": "9,8"}}, "drafts 7"),
        ({"options": {"accept": "typical"}}, "accept typical"),
        ({"options": {"state": "snapshot"}}, "snapshot"),
        ({"draft_sample_method": "probabilistic"}, "probabilistic"),
        ({"rejection_sample_method": "block"}, "block"),
        ({"lora_config": object()}, "LoRA"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "8-bit"),
    ],
)
def test_what_does_not_go_with_trees_is_refused(changes: dict[str, Any], why: str) -> None:
    given = config()
    shape = choice.shape(given)
    assert shape is not None
    choice.require(given, shape)
    broken = config(**changes)
    shape = choice.shape(broken)
    assert shape is not None
    with pytest.raises(ConfigError, match=why):
        choice.require(broken, shape)


def test_a_request_may_draft_a_chain_but_not_relax() -> None:
    exact = Acceptance()
    body, _ = front_door.rewritten(b'{"thor_spec": {"tree": "chain"}}', exact, trees=True)
    assert b'"thor_spec_tree": "chain"' in body
    assert b"thor_spec_tree" not in front_door.rewritten(b'{"thor_spec": {"tree": "on"}}', exact, trees=True)[0]
    with pytest.raises(ConfigError, match="tree="):
        front_door.rewritten(b'{"thor_spec": {"tree": 3}}', exact, trees=True)
    with pytest.raises(ConfigError, match="exact only"):
        front_door.rewritten(b'{"thor_spec": {"accept": "typical"}}', exact, trees=True)
    front_door.rewritten(b'{"thor_spec": {"accept": "typical"}}', exact, trees=False)

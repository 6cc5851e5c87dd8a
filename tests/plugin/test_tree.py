"""Relaxed rules on trees, the layout against its plain definition, and what is refused with trees."""

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cases import random_tree
from thor_spec.ddtree.shape import TreeShape
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_paths import reference as tree_paths
from thor_spec.kernels.tree_walk.reference import Trees
from thor_spec.vllm_plugin import front_door
from thor_spec.vllm_plugin.tree import choice
from thor_spec.vllm_plugin.tree.topology import Topology, lay_out


def test_what_is_likely_enough_and_how_it_is_counted() -> None:
    """Each request by its own rule: exact, a threshold, and one that falls with the entropy."""
    from thor_spec.vllm_plugin.tree.sampler import TreeRejectionSampler

    rules = [Acceptance(), Acceptance(rule="threshold", eps=0.2), Acceptance(rule="typical", eps=0.3, delta=0.5)]
    eps, delta = (torch.tensor(x) for x in zip(*(rule.numbers for rule in rules), strict=True))
    parents = torch.tensor([[-1, 0, 0, 1]] * 3, dtype=torch.int32)
    depths = torch.tensor([[0, 1, 1, 2]] * 3, dtype=torch.int32)
    tokens = torch.tensor([0, 0, 1, 2] * 3)
    logits = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 4] = -torch.inf
    counts = torch.zeros(3, 4, 3, dtype=torch.int64)
    walked: Any = SimpleNamespace(parents=parents, depths=depths)
    sampler: Any = SimpleNamespace(
        _rules=SimpleNamespace(on_device=lambda: (eps, delta, torch.arange(3))),
        _walked=walked,
        _count=SimpleNamespace(counts=counts, publish=lambda: None),
    )
    starts, slots = torch.tensor([0, 4, 8, 12], dtype=torch.int32), torch.arange(3)
    likely = TreeRejectionSampler._likely(sampler, logits, tokens, starts, slots)
    for r, rule in enumerate(rules):
        for node in range(1, 4):
            row = logits[4 * r + parents[r, node]].softmax(0)
            entropy = -float((row[row > 0] * row[row > 0].log()).sum())
            threshold = min(rule.eps, rule.delta * math.exp(-entropy)) if rule.rule == "typical" else rule.eps
            p = float(row[tokens[4 * r + node]])
            assert likely[r, node] == pytest.approx(p if not rule.is_exact and p >= threshold else 0.0)
    walked.path = torch.tensor([[0, 1, 3, 3], [0, 1, 2, 3], [0, 1, 2, 3]], dtype=torch.int32)
    walked.accepted = torch.tensor([3, 2, 1], dtype=torch.int32)
    found: Any = SimpleNamespace(tokens=torch.tensor([[0, 2, 3, 0], [0, 3, 0, 0], [3, 0, 0, 0]]))
    choices = torch.tensor([0, 2, 9, 3, 1, 3, 9, 9, 3, 9, 9, 9])  # the second request's first draft was but likely
    TreeRejectionSampler._settle(sampler, walked, found, choices, starts, slots)
    assert counts[0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert counts[1].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert counts[2].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_a_batch_that_comes_in_parts_is_walked_row_by_row() -> None:
    """vLLM verifies very large batches in parts; paths lie by row of the whole batch."""
    from thor_spec.vllm_plugin.tree.sampler import TreeRejectionSampler

    numbers = torch.arange(8)
    walked = Trees(parents=numbers, depths=numbers, path=numbers[:, None], accepted=numbers, counts=numbers)
    sampler: Any = SimpleNamespace(_walked=walked, _rows_done=0)
    batch = SimpleNamespace(num_reqs=7)
    for rows, first in ((2, 0), (4, 2), (1, 6), (3, 0), (4, 3), (7, 0), (5, 0)):
        found = TreeRejectionSampler._of_rows(sampler, rows, batch if rows + first <= 7 else None)
        assert (int(found.path[0, 0]), int(found.accepted[0])) == (first, first)
    assert len(TreeRejectionSampler._of_rows(sampler, 2, batch).path) == 3


def test_layout() -> None:
    rng = random.Random(0)
    trees = [random_tree(rng.randint(1, 64), seed) for seed in range(30)]
    counts = [rng.randint(1, len(tree)) for tree in trees]  # as a scheduler cuts
    parents = torch.tensor([[*t, *[-1] * (64 - len(t))] for t in trees], dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    want = tree_paths.tree_paths(parents, starts)
    got = tree_paths.allocate(30, 64, "cpu")
    lay_out(parents, starts, got)
    assert torch.equal(got.masks, want.masks)
    assert torch.equal(got.leaves, want.leaves)


def test_no_position_lies_before_the_first() -> None:
    """Whatever trees a slot held before: dummy rows have no context, and captures read what was left."""
    topology = Topology(TreeShape.parse("9"), 3, 40, torch.device("cpu"))
    topology.parents.copy_(torch.tensor([-1, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
    topology.depths.copy_(torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    batch = SimpleNamespace(
        idx_mapping=torch.arange(3), num_reqs=3, query_start_loc=torch.tensor([0, 10, 20, 30]),
        seq_lens=torch.full((3,), 10), positions=torch.zeros(40, dtype=torch.int64), num_tokens_after_padding=40,
    )  # fmt: skip
    topology.prepare(batch, np.ones(3, dtype=bool))
    assert topology.positions.min() == 0
    assert (batch.positions + topology.offsets).min() == 0  # of models with several positions per token
    batch.positions[:30] = torch.arange(7, 17).repeat(3)
    topology.prepare(batch, np.ones(3, dtype=bool))
    assert topology.positions[:10].tolist() == [7, *[8] * 9]
    topology.forget()
    assert not topology.positions.any()
    assert not topology.offsets.any()


def config(**changes: Any) -> Any:
    speculation = {
        "method": "dflash",
        "num_speculative_tokens": 9,
        "draft_model_config": SimpleNamespace(hf_config=SimpleNamespace(block_size=8)),
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1}
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
        ({"options": {"tree": "auto,9"}, "tensor_parallel_size": 2}, "several devices"),
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


def test_a_request_may_draft_a_chain() -> None:
    exact = Acceptance()
    body, _ = front_door.rewritten(b'{"thor_spec": {"tree": "chain"}}', exact)
    assert b'"thor_spec_tree": "chain"' in body
    assert b"thor_spec_tree" not in front_door.rewritten(b'{"thor_spec": {"tree": "on"}}', exact)[0]
    with pytest.raises(ConfigError, match="tree="):
        front_door.rewritten(b'{"thor_spec": {"tree": 3}}', exact)

"""The decoding of blocks: the definition by hand, and what steps many of them at once against it."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thor_spec.diffusion import batched, layout
from thor_spec.diffusion.decoding import Block, decode, greedy
from thor_spec.diffusion.settings import MAX_QUIET_STEPS, MODES, Denoising
from thor_spec.errors import ConfigError

M = 9
"""The mask of a vocabulary of ten."""
SURE = Denoising(threshold=0.7, edit_threshold=0.5)


def stepped(tokens: list[int], choices: list[int], sure: list[float], settings: Denoising = SURE, **kw: int) -> Block:
    block = Block(tokens, kw.pop("prompt", 0), M, **kw)
    block.step(choices, sure, settings)
    return block


def test_masks_are_filled_above_the_threshold_and_no_other() -> None:
    assert stepped([M, M, M], [1, 2, 3], [0.71, 0.7, 0.2]).tokens == [1, M, M]


def test_where_none_is_sure_the_surest_is_filled_and_of_equals_the_first() -> None:
    assert stepped([M, M, M], [1, 2, 3], [0.1, 0.3, 0.3]).tokens == [M, 2, M]


def test_tokens_are_edited_above_their_threshold_and_the_prompt_never() -> None:
    block = stepped([4, 4, 4, M], [1, 2, 3, 5], [0.9, 0.6, 0.5, 0.9], prompt=1)
    assert block.tokens == [4, 2, 4, 5]
    assert block.edits == 1


def test_a_step_without_masks_and_edits_stops_and_has_stored() -> None:
    block = stepped([4, 4], [4, 2], [0.9, 0.4])
    assert block.stopped
    assert block.stored


def test_the_step_that_fills_the_last_mask_does_not_stop() -> None:
    assert not stepped([M, 4], [1, 4], [0.9, 0.9]).stopped


def test_editing_ends_after_its_last_quiet_step_and_what_it_wrote_is_yet_to_be_stored() -> None:
    block = stepped([4], [5], [0.9], quiet=MAX_QUIET_STEPS - 1)
    assert not block.stopped
    block.step([4], [0.9], SURE)
    assert block.tokens == [4]
    assert block.stopped
    assert not block.stored


def test_the_last_step_fills_everything() -> None:
    block = stepped([M, M, 4], [1, 2, 3], [0.1, 0.1, 0.1], Denoising(max_steps=3), steps=2)
    assert block.tokens == [1, 2, 4]
    assert block.stopped


class Told:
    """A model that says what it was told to, whatever it is asked; position by position over the whole text."""

    def __init__(self, text: Sequence[int], sure: float = 6.0) -> None:
        self.text, self.sure, self.settled, self.asked = text, sure, 0, 0
        self.last: Sequence[int] = ()

    def __call__(self, block: Sequence[int]) -> Tensor:
        self.asked, self.last = self.asked + 1, list(block)
        logits = torch.zeros(len(block), M + 1)
        for i in range(len(block)):
            logits[i, self.text[self.settled + i]] = self.sure
        return logits

    def keep(self) -> None:
        assert M not in self.last
        self.settled += len(self.last)


@pytest.mark.parametrize("prompt", range(10))
def test_a_prompt_s_end_shares_the_first_block(prompt: int) -> None:
    text = [i % 8 for i in range(40)]
    model = Told(text)
    found = decode(model, text[:prompt], most=9, block=4, mask=M)
    assert found.tokens == text[prompt : prompt + 9]
    assert found.blocks == -(-(prompt % 4 + 9) // 4)
    assert found.forwards == 2 * found.blocks  # one fills everything, the next finds nothing to change
    assert model.asked == found.forwards + prompt // 4


def test_a_text_ends_with_the_first_end_of_a_settled_block() -> None:
    found = decode(Told([1, 8, 2, 8, 3, 3, 3, 3]), [], most=8, block=4, mask=M, ends={8})
    assert found.tokens == [1, 8]


def test_the_mask_is_never_chosen() -> None:
    logits = torch.zeros(2, M + 1)
    logits[:, M] = 9.0
    logits[:, 3] = 1.0
    assert greedy(logits, M)[0] == [3, 3]


@given(st.integers(0, 10**6))
def test_many_blocks_at_once_step_as_each_alone(seed: int) -> None:
    dice = random.Random(seed)
    rows, size = dice.randint(1, 4), 6
    settings = [
        Denoising(
            threshold=dice.choice([0.0, 0.4, 0.7, 1.0]),
            edit_threshold=dice.choice([None, 0.0, 0.5, 1.0]),
            max_steps=dice.choice([1, 3, 30, 64]),
        )
        for _ in range(rows)
    ]
    prompts = [dice.randint(0, 3) for _ in range(rows)]
    alone = [Block([dice.randrange(M)] * p + [M] * (size - p), p, M) for p in prompts]
    blocks = batched.Blocks(
        tokens=torch.tensor([b.tokens for b in alone]),
        prompt=torch.tensor(prompts),
        steps=torch.zeros(rows, dtype=torch.int32),
        quiet=torch.zeros(rows, dtype=torch.int32),
        stopped=torch.zeros(rows, dtype=torch.bool),
    )
    rules = batched.Rules(
        torch.tensor([s.threshold for s in settings], dtype=torch.float64),
        torch.tensor([s.edit_bound for s in settings], dtype=torch.float64),
        torch.tensor([s.max_steps for s in settings]),
    )
    settled = [False] * rows
    for _ in range(90):
        choices = [[dice.randrange(3) for _ in range(size)] for _ in range(rows)]
        sure = [[dice.choice([0.1, 0.4, 0.45, 0.7, 0.8, 1.0]) for _ in range(size)] for _ in range(rows)]
        was_stopped = [b.stopped for b in alone]
        for i, block in enumerate(alone):
            if not block.stopped:
                block.step(choices[i], sure[i], settings[i])
        done = batched.step(blocks, torch.tensor(choices), torch.tensor(sure, dtype=torch.float64), rules, M)
        expected = [was or (b.stopped and b.stored) for was, b in zip(was_stopped, alone, strict=True)]
        live = [i for i in range(rows) if not settled[i]]
        assert [done.settled[i].item() for i in live] == [expected[i] for i in live]
        assert [done.blocks.tokens[i].tolist() for i in live] == [alone[i].tokens for i in live]
        settled = [a or b for a, b in zip(settled, expected, strict=True)]
        blocks = done.blocks
        if all(settled):
            return
    pytest.fail("a block was never settled")


def test_likeliest_is_what_greedy_says() -> None:
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, 32] = -torch.inf
    choices, sure = batched.likeliest(logits)
    wanted, chances = greedy(logits, 32)
    assert choices.tolist() == wanted
    torch.testing.assert_close(sure, torch.tensor(chances))


@pytest.mark.parametrize("mode", MODES)
def test_a_request_s_own_threshold_wins_over_its_mode(mode: str) -> None:
    threshold, edit = MODES[mode]
    assert Denoising().of_request({"mode": mode}) == Denoising(threshold=threshold, edit_threshold=edit)
    assert Denoising().of_request({"mode": mode, "threshold": 0.33}).threshold == 0.33
    assert Denoising().of_request({"mode": mode, "edit_threshold": 0.1}).edit_threshold == 0.1


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "fast"},
        {"mode": 2.0},
        {"mode": None},
        {"threshold": 1.1},
        {"threshold": None},
        {"threshold": True},
        {"threshold": "0.5"},
        {"edit_threshold": -0.1},
        {"max_denoise_steps": 0},
        {"max_denoise_steps": 65},
        {"max_denoise_steps": 2.5},
        {"accept": "exact"},
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(given)))):
        Denoising().of_request(given)


MINI = {
    "vocab_size": 157184, "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "first_k_dense_replace": 1, "intermediate_size": 5120,
    "num_experts": 256, "moe_intermediate_size": 512, "num_shared_experts": 1,
}  # fmt: skip


def test_the_layout_accounts_for_llada2_1_mini() -> None:
    size = sum(2 * torch.Size(shape).numel() for _, shape in layout.tensor_shapes(MINI))
    assert abs(size - 32.5e9) < 0.05e9  # what the published checkpoint takes in bf16


TINY = {
    **MINI, "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2, "num_experts": 2, "moe_intermediate_size": 2,
    "intermediate_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
}  # fmt: skip
TENSORS = {name: torch.zeros(shape) for name, shape in layout.tensor_shapes(TINY)}
GATE = "model.layers.1.mlp.gate.expert_bias"


def test_a_whole_checkpoint_passes_once() -> None:
    assert dict(layout.checked(TENSORS.items(), TINY)).keys() == TENSORS.keys()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([item for item in TENSORS.items() if item[0] != GATE], f"lacks {GATE}"),
        ([*TENSORS.items(), ("model.other.weight", torch.zeros(1))], "model.other.weight, which LLaDA2 does not have"),
        ([*TENSORS.items(), (GATE, TENSORS[GATE])], f"{GATE} twice"),
        ({**TENSORS, GATE: torch.zeros(3)}.items(), f"{GATE} has the shape \\(3,\\)"),
    ],
    ids=["missing", "unknown", "doubled", "misshapen"],
)
def test_a_wrong_checkpoint_is_refused_by_name(tensors: list[tuple[str, Tensor]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        list(layout.checked(tensors, TINY))

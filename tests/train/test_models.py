"""The trained modules are the published architectures: transformers agrees, files round-trip, caches agree."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from thor_spec.dflash.drafter import Drafter as DrafterFacts
from thor_spec.nano import drafter as nano_drafter
from thor_spec.train import diffusion, drafting, hybrid, noise, targets
from thor_spec.train.layers import rotary_angles, rotate
from thor_spec.train.shapes import DiffusionShape, HybridShape, Marks

MARKS = Marks(end=314, turn_end=316, mask=319)
SHAPE = HybridShape(
    vocabulary=320, hidden=64, layers=4, linear_head_dim=32, heads=4, kv_heads=2, head_dim=32, experts=4,
    experts_per_token=2, expert_intermediate=16, shared_intermediate=24,
)  # fmt: skip
DIFFUSION = DiffusionShape(
    vocabulary=320, hidden=64, layers=3, intermediate=48, heads=4, kv_heads=2, head_dim=32, experts=8,
    experts_per_token=2, expert_intermediate=16, groups=4, groups_per_token=2, block=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(1)
    model = hybrid.Hybrid(SHAPE)
    with torch.no_grad():  # away from the start, where norms are one and steps alike
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save(folder, MARKS)
    return folder


@torch.no_grad()
def test_transformers_computes_the_same_logits(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 320, (2, 150), generator=torch.Generator().manual_seed(2))
    want = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()(ids).logits
    got = hybrid.load(saved).logits(ids)
    assert (want - got).abs().max() < 2e-5 * want.abs().max()


def test_the_files_are_bf16_and_hold_what_was_trained(saved: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(saved / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    again = hybrid.load(saved).export()
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name].to(torch.bfloat16)) for name in stored)
    assert HybridShape.from_config(json.loads((saved / "config.json").read_text())) == SHAPE


def test_a_checkpoint_that_lacks_a_tensor_is_refused(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.0.linear_attn.A_log"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="A_log"):
        hybrid.load(tmp_path)


@torch.no_grad()
def test_writing_from_caches_is_writing_from_scratch(saved: Path) -> None:
    target = targets.HybridTarget(hybrid.load(saved))
    prompts = torch.randint(0, 320, (3, 70), generator=torch.Generator().manual_seed(3))
    written = target.write(prompts, 12, 0.0, 0)
    again = target.logits(written).argmax(dim=-1)
    assert torch.equal(written[:, 70:], again[:, 69:-1])


@torch.no_grad()
def test_rows_of_different_lengths_are_written_as_each_alone(saved: Path) -> None:
    target = targets.HybridTarget(hybrid.load(saved))
    rows = [list(range(10, 10 + length)) for length in (5, 71, 30)]
    together = target.write_rows(rows, 9, 0.0, 0)
    for row, written in zip(rows, together, strict=True):
        alone = target.write(torch.tensor([row]), 9, 0.0, 0)[0]
        assert torch.equal(written[: len(alone)], alone)


def test_samples_follow_their_distribution_and_seed() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]]).repeat(20_000, 1)
    drawn = targets.choose(logits, 0.7, torch.Generator().manual_seed(4))
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    assert torch.allclose(shares, (logits[0] / 0.7).softmax(dim=-1), atol=0.015)
    assert torch.equal(drawn, targets.choose(logits, 0.7, torch.Generator().manual_seed(4)))


def test_the_shipped_sizes_fit_their_budget() -> None:
    counted = {
        "hybrid": sum(p.numel() for p in hybrid.Hybrid(HybridShape(vocabulary=3840)).parameters()),
        "llada": sum(p.numel() for p in diffusion.Diffusion(DiffusionShape(vocabulary=3840)).parameters()),
        "dflash": sum(p.numel() for p in nano_drafter.Drafter(full_drafter()).parameters()),
    }
    assert 2 * sum(counted.values()) < 23_500_000, counted
    target = HybridShape(vocabulary=3840).products_per_token()
    assert drafting.products_per_slot(full_drafter()) <= target / 5


def full_drafter() -> nano_drafter.DrafterShape:
    full = hybrid.Hybrid(HybridShape(vocabulary=3840))
    return drafting.shape_for(targets.HybridTarget(full), drafting.DraftRecipe(), mask_token_id=3839, max_length=8192)


def test_the_drafter_reads_layers_up_to_the_last_and_is_what_an_engine_reads(tmp_path: Path) -> None:
    shape = full_drafter()
    assert shape.target_layer_ids == (1, 3, 5, 7)
    nano_drafter.Drafter(shape).save(tmp_path)
    facts = DrafterFacts.parse("nano-dflash", json.loads((tmp_path / "config.json").read_text()))
    assert (facts.block_size, facts.target_hidden_size, facts.vocab_size) == (16, 256, 3840)
    assert nano_drafter.load(tmp_path).shape == shape


# Diffusion


@pytest.mark.parametrize("block", [4, 8])
def test_who_sees_whom(block: int) -> None:
    length = 16
    both, clean = noise.two_copy_mask(length, block), noise.block_causal_mask(length, block)
    for i in range(length):
        for j in range(length):
            assert clean[i, j] == (j // block <= i // block)
            assert both[i, j] == (i // block == j // block)  # damaged sees damaged: its own block
            assert both[i, length + j] == (j // block < i // block)  # damaged sees clean: earlier blocks
            assert not both[length + i, j]  # clean sees nothing damaged
            assert both[length + i, length + j] == clean[i, j]


def test_a_damaged_block_sees_what_decoding_shows_it() -> None:
    """Two copies give each block the logits that it has after the clean blocks before it, alone."""
    torch.manual_seed(5)
    model = diffusion.Diffusion(DIFFUSION).double().eval()
    clean = torch.randint(0, 319, (1, 24))
    damaged = clean.clone()
    damaged[0, torch.rand(24) < 0.5] = MARKS.mask
    both = model(torch.cat([damaged, clean], dim=1), torch.arange(24).repeat(2), noise.two_copy_mask(24, 8), count=24)
    for begin in range(0, 24, 8):
        shown = torch.cat([clean[:, :begin], damaged[:, begin : begin + 8]], dim=1)
        alone = model(shown, torch.arange(begin + 8), noise.block_causal_mask(begin + 8, 8))
        assert torch.allclose(both[:, begin : begin + 8], alone[:, begin:], atol=1e-5)


def naive_gate(gate: diffusion.Gate, x: Tensor) -> Tensor:
    """Return the weights of one token, group by group and expert by expert."""
    shape = gate.shape
    scores = torch.sigmoid(gate.weight @ x)
    biased = (scores + gate.expert_bias).tolist()
    size = shape.experts // shape.groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(shape.groups)]
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
    allowed = [e for group in groups[: shape.groups_per_token] for e in group]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: shape.experts_per_token]
    weights = torch.zeros(shape.experts)
    weights[chosen] = scores[chosen] / scores[chosen].sum() * shape.routed_scale
    return weights


@torch.no_grad()
def test_experts_are_chosen_within_groups_and_weighed_without_the_bias() -> None:
    torch.manual_seed(6)
    gate = diffusion.Gate(DIFFUSION).eval()
    gate.weight.normal_()
    gate.expert_bias.uniform_(-0.5, 0.5)
    x = torch.randn(1, 40, 64)
    want = torch.stack([naive_gate(gate, token) for token in x[0]])
    assert torch.allclose(gate(x)[0], want, atol=1e-6)


@torch.no_grad()
def test_the_bias_moves_towards_experts_chosen_too_seldom() -> None:
    torch.manual_seed(7)
    gate = diffusion.Gate(DIFFUSION).train()
    gate.weight.normal_()
    gate(torch.randn(4, 50, 64))
    load = gate.load.clone()
    gate.rebalance(0.1)
    assert gate.expert_bias[load.argmin()] > gate.expert_bias[load.argmax()]
    assert gate.load.sum() == 0


def test_the_published_names_are_complete(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(8)
    model = diffusion.Diffusion(DIFFUSION)
    model.save(tmp_path, MARKS)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1."
    expected = {"model.word_embeddings.weight", "lm_head.weight", "model.norm.weight"}
    expected |= {layer + name + ".weight" for name in (
        "attention.query_key_value", "attention.dense", "attention.query_layernorm", "attention.key_layernorm",
        "input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj", "mlp.experts.7.gate_proj",
        "mlp.experts.0.up_proj", "mlp.experts.3.down_proj",
    )}  # fmt: skip
    expected |= {layer + "mlp.gate.expert_bias", "model.layers.0.mlp.gate_proj.weight"}
    assert expected <= stored.keys()
    assert len(stored) == 3 + 3 * 6 + 3 + 2 * (2 + 3 + 8 * 3)
    again = diffusion.load(tmp_path)
    assert again.shape == DIFFUSION
    assert all(
        torch.equal(stored[name].float(), tensor.to(stored[name].dtype).float())
        for name, tensor in again.export().items()
    )


def test_experts_at_once_are_experts_one_by_one() -> None:
    torch.manual_seed(9)
    model = diffusion.Diffusion(DIFFUSION).eval()
    mlp: Any = model.layers[1].mlp
    x = torch.randn(1, 5, 64)
    weights, tensors = mlp.gate(x), mlp.experts.export("")
    want = mlp.shared_experts(x)
    for expert in range(8):
        gate, up, down = (tensors[f"{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        want = want + weights[..., expert, None] * (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert torch.allclose(mlp(x), want, atol=1e-5)


def test_partial_rotation_leaves_the_rest() -> None:
    x = torch.randn(1, 3, 2, 8)
    turned = rotate(x, *rotary_angles(torch.arange(3), 4, 1e4))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.allclose(turned[..., :4], nano_drafter.rotate(x[..., :4], torch.arange(3)[None], 1e4))


def test_noise_masks_at_its_rate_and_is_fixed_by_its_seed() -> None:
    clean = torch.randint(0, 300, (64, 128))
    wanted = noise.Noise(lowest=0.3, highest=0.3, edited_rows=0.5, wrong=0.4)
    damaged = noise.damage(clean, 8, 319, wanted, torch.Generator().manual_seed(1))
    again = noise.damage(clean, 8, 319, wanted, torch.Generator().manual_seed(1))
    assert torch.equal(damaged.ids, again.ids)
    assert abs(damaged.masked.float().mean() - 0.3) < 0.02
    assert torch.equal(damaged.ids == 319, damaged.masked)
    assert not (damaged.masked & damaged.edited).any()
    changed = (damaged.ids != clean) & ~damaged.masked
    assert not (changed & ~damaged.edited).any()
    assert 0.1 < changed[damaged.edited].float().mean() < 0.3  # up to 0.4, uniformly


def test_guesses_fill_masks_and_are_to_be_edited() -> None:
    clean = torch.randint(0, 300, (4, 32))
    damaged = noise.damage(clean, 8, 319, noise.Noise(), torch.Generator().manual_seed(2))
    filled = noise.refill(damaged, clean + 1, torch.full((4, 1), 0.5), torch.Generator().manual_seed(3))
    now = damaged.masked & ~filled.masked
    assert now.any()
    assert filled.masked.any()
    assert torch.equal(filled.ids[now], (clean + 1)[now])
    assert (filled.edited | ~now).all()


def test_the_masked_loss_is_weighted_by_the_rate() -> None:
    """With t drawn uniformly, the expectation over masks is the mean entropy: here all logits are equal."""
    clean = torch.randint(0, 10, (400, 64))
    damaged = noise.damage(clean, 8, 10, noise.Noise(lowest=0.2, edited_rows=0.0), torch.Generator().manual_seed(4))
    masked, shown = noise.denoising_losses(torch.zeros(400, 64, 11), clean, damaged)
    assert masked.item() == pytest.approx(torch.tensor(11.0).log().item(), rel=0.02)
    assert shown.item() == 0

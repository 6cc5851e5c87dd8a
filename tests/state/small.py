"""A hybrid and a drafter smaller than the tiny ones: heads of 16 or 32 let states be interpreted, and blocks be short."""

from pathlib import Path

LAYERS = 4


def make(folder: Path, head_dim: int) -> tuple[Path, Path]:
    """Write both into ``folder``, with fresh weights: nothing is trained, so drafts must be accepted by chance."""
    import torch

    from thor_spec.nano import drafter, fit, target, tokenizer
    from thor_spec.nano.recipes import TargetRecipe

    recipe = TargetRecipe(
        hybrid=True, layers=LAYERS, seed=5, head_dim=64, heads=2, kv_heads=1, key_heads=1, value_heads=2,
        linear_head_dim=head_dim, gdn_strength=0.8,
    )  # fmt: skip
    at = folder / f"target-{head_dim}", folder / f"drafter-{head_dim}"
    for path in at:
        path.mkdir()
    target.save(at[0], recipe)
    target.load(at[0]).to(torch.bfloat16).save_pretrained(at[0])
    target.save_settings(at[0], recipe)
    shape = drafter.DrafterShape(
        vocabulary=tokenizer.VOCABULARY, hidden=recipe.hidden, target_layers=LAYERS, target_layer_ids=(0, 2, 3),
        mask_token_id=tokenizer.MARK_IDS[tokenizer.MASK], heads=2, kv_heads=1, head_dim=64,
        max_length=recipe.max_length, rope_theta=recipe.rope_theta, epsilon=recipe.epsilon,
    )  # fmt: skip
    with fit.reproducible(5):
        drafter.Drafter(shape).save(at[1])
    return at

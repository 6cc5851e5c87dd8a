"""A hybrid and a drafter smaller than the tiny ones, so that states can be interpreted."""

import json
from pathlib import Path


def make(folder: Path, head_dim: int, layers: int = 4) -> tuple[Path, Path]:
    """Write both into ``folder``, with fresh weights: nothing is trained, so drafts must be accepted by chance.

    Every fourth layer of a target is attention, and the last one.
    """
    import torch

    from thor_spec.nano import drafter, fit, target, tokenizer
    from thor_spec.nano.recipes import TargetRecipe

    class Recipe(TargetRecipe):
        def layer_types(self) -> list[str]:
            return [*super().layer_types()[:-1], "full_attention"]

    recipe = Recipe(
        hybrid=True, layers=layers, seed=5, head_dim=64, heads=2, kv_heads=1, key_heads=1, value_heads=2,
        linear_head_dim=head_dim, gdn_strength=0.8,
    )  # fmt: skip
    at = folder / f"target-{head_dim}", folder / f"drafter-{head_dim}"
    for path in at:
        path.mkdir()
    target.save(at[0], recipe)
    target.load(at[0]).to(torch.bfloat16).save_pretrained(at[0])
    target.save_settings(at[0], recipe)
    shape = drafter.DrafterShape(
        vocabulary=tokenizer.VOCABULARY, hidden=recipe.hidden, target_layers=layers, target_layer_ids=(0, layers - 1),
        mask_token_id=tokenizer.MARK_IDS[tokenizer.MASK], heads=2, kv_heads=1, head_dim=64,
        max_length=recipe.max_length, rope_theta=recipe.rope_theta, epsilon=recipe.epsilon,
    )  # fmt: skip
    with fit.reproducible(5):
        drafter.Drafter(shape).save(at[1])
    add_mtp_head(at[0], layers)
    return at


def add_mtp_head(target: Path, layers: int) -> None:
    """Give ``target`` one MTP layer, a copy of its last one, so that it may draft for itself."""
    import torch
    from safetensors.torch import load_file, save_file

    file = target / "model.safetensors"
    weights = load_file(file)
    last, own = f"model.layers.{layers - 1}.", {}
    for name, tensor in weights.items():
        if name.startswith(last):
            own[f"mtp.layers.0.{name.removeprefix(last)}"] = tensor.clone()
    hidden = weights["model.norm.weight"].numel()
    unit = torch.eye(hidden, dtype=torch.bfloat16)
    own |= {"mtp.fc.weight": torch.cat([unit, unit], dim=1).contiguous(), "mtp.norm.weight": weights["model.norm.weight"].clone()}
    own |= {f"mtp.pre_fc_norm_{part}.weight": torch.zeros(hidden, dtype=torch.bfloat16) for part in ("embedding", "hidden")}
    save_file({**weights, **own}, file, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))

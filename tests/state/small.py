"""A hybrid and a drafter smaller than the tiny ones, so that states can be interpreted."""

import json
from pathlib import Path


def make(folder: Path, head_dim: int, layers: int = 4, ranks: int = 1) -> tuple[Path, Path]:
    """Write both into ``folder``, with fresh weights: nothing is trained, so drafts must be accepted by chance.

    Every fourth layer of a target is attention, and the last one. It has an MTP head, too, and as many heads of each
    kind as ``ranks`` need.
    """
    import torch

    from thor_spec.nano import drafter, fit, target, tokenizer
    from thor_spec.nano.recipes import TargetRecipe

    class Recipe(TargetRecipe):
        def layer_types(self) -> list[str]:
            return [*super().layer_types()[:-1], "full_attention"]

    recipe = Recipe(
        hybrid=True, layers=layers, seed=5, head_dim=64, heads=2, kv_heads=ranks, key_heads=ranks,
        value_heads=2 * ranks, linear_head_dim=head_dim, gdn_strength=0.8,
    )  # fmt: skip
    at = folder / f"target-{head_dim}", folder / f"drafter-{head_dim}"
    for path in at:
        path.mkdir()
    target.save(at[0], recipe)
    target.load(at[0]).to(torch.bfloat16).save_pretrained(at[0])
    target.save_settings(at[0], recipe)
    add_mtp_head(at[0], layers)
    shape = drafter.DrafterShape(
        vocabulary=tokenizer.VOCABULARY, hidden=recipe.hidden, target_layers=layers, target_layer_ids=(0, layers - 1),
        mask_token_id=tokenizer.MARK_IDS[tokenizer.MASK], heads=2, kv_heads=ranks, head_dim=64,
        max_length=recipe.max_length, rope_theta=recipe.rope_theta, epsilon=recipe.epsilon,
    )  # fmt: skip
    with fit.reproducible(5):
        drafter.Drafter(shape).save(at[1])
    return at


def add_mtp_head(target: Path, layers: int) -> None:
    """Give ``target`` one MTP layer, a copy of its last one, so that it may draft for itself."""
    import torch
    from safetensors.torch import load_file, save_file

    file = target / "model.safetensors"
    weights = load_file(file)
    last = f"model.layers.{layers - 1}."
    head = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in weights.items() if name.startswith(last)}
    head["mtp.norm.weight"] = weights["model.norm.weight"]
    unit = torch.eye(len(head["mtp.norm.weight"]), dtype=torch.bfloat16)
    head["mtp.fc.weight"] = torch.cat([unit, unit], dim=1)
    for part in ("embedding", "hidden"):
        head[f"mtp.pre_fc_norm_{part}.weight"] = torch.zeros_like(head["mtp.norm.weight"])
    save_file({**weights, **{name: tensor.clone() for name, tensor in head.items()}}, file, metadata={"format": "pt"})
    config = target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))

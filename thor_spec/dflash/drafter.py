"""What a DFlash drafter is by its configuration, and whether it fits a target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thor_spec.errors import ConfigError

MIN_WINDOW = 16


def require_window(window: int, draft_tokens: int = 0, config: Mapping[str, Any] | None = None) -> None:
    """Check a window of ``window`` tokens for K drafts and the drafter's own ``config.json``. Raises: ConfigError."""
    least = max(MIN_WINDOW, draft_tokens + 1)
    if window < least:
        raise ConfigError(
            f"--drafter-window {window} is too short: a block of {draft_tokens + 1} tokens, and at least {MIN_WINDOW}, "
            f"must see itself. Take {least} or more."
        )
    dflash = (config or {}).get("dflash_config") or {}
    if "sliding_attention" in ((config or {}).get("layer_types") or ()) or dflash.get("use_swa"):
        raise ConfigError(
            "--drafter-window does not go with this drafter: it was trained with sliding layers of its own. "
            "Leave the option out."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """The facts about a target that a drafter is bound to."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A DFlash drafter (arXiv:2602.06036), as its ``config.json`` describes it.

    One block holds the last emitted token and ``block_size - 1`` masks, so at most that many tokens are drafted. It
    reads the outputs of the target's layers ``target_layer_ids`` and shares the target's embedding and output head,
    hence the equal sizes.
    """

    name: str
    block_size: int
    vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int

    @property
    def max_draft_tokens(self) -> int:
        """Return the most tokens that one block can propose."""
        return self.block_size - 1

    @classmethod
    def parse(cls, name: str, config: Mapping[str, Any]) -> "Drafter":
        """Read ``config``, the content of a drafter's ``config.json``. Raises: ConfigError, naming the field."""
        dflash = config.get("dflash_config")
        if not isinstance(dflash, Mapping):
            raise ConfigError(
                f"{name} is not a DFlash drafter: its config.json has no dflash_config. Pass a DFlash checkpoint with "
                "--draft, or --draft none."
            )
        try:
            return cls(
                name=name,
                block_size=int(config.get("block_size", dflash.get("block_size"))),
                vocab_size=int(config["vocab_size"]),
                target_hidden_size=int(config.get("target_hidden_size") or config["hidden_size"]),
                target_layer_ids=tuple(int(i) for i in dflash["target_layer_ids"]),
                mask_token_id=int(dflash["mask_token_id"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"The config.json of the drafter {name} lacks or garbles a field that DFlash needs ({error}). "
                "Take the drafter from its publisher again."
            ) from error

    def require_fit(self, target: TargetShape, draft_tokens: int) -> None:
        """Check this drafter against ``target`` and K. Raises: ConfigError, with both numbers."""
        remedy = f"Use the drafter that was trained for {target.name}."
        if self.vocab_size != target.vocab_size:
            raise ConfigError(
                f"The drafter {self.name} has a vocabulary of {self.vocab_size}, the target {target.name} of "
                f"{target.vocab_size}: drafted ids would name other tokens. {remedy}"
            )
        if self.target_hidden_size != target.hidden_size:
            raise ConfigError(
                f"The drafter {self.name} reads hidden states of size {self.target_hidden_size}, the target "
                f"{target.name} has {target.hidden_size}. {remedy}"
            )
        if outside := [i for i in self.target_layer_ids if not 0 <= i < target.num_layers]:
            raise ConfigError(
                f"The drafter {self.name} reads target layers {outside}, but {target.name} has layers "
                f"0..{target.num_layers - 1}. {remedy}"
            )
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise ConfigError(
                f"The drafter {self.name} uses mask token {self.mask_token_id}, outside the vocabulary of "
                f"{target.vocab_size}. {remedy}"
            )
        require_draft_tokens(self.name, self.block_size, draft_tokens)


def require_draft_tokens(name: str, block_size: int, draft_tokens: int) -> None:
    """Raise ConfigError, where the block of a drafter is shorter than that."""
    if draft_tokens >= block_size:
        raise ConfigError(
            f"--draft-tokens {draft_tokens} is more than the drafter {name} can propose: its block of {block_size} "
            f"holds the last token and {block_size - 1} drafts. Take at most {block_size - 1}."
        )

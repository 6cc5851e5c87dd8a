"""A byte-level tokenizer with its own vocabulary, saved in the layout that transformers and vLLM load.

Ids 0..255 are the bytes themselves; the special tokens follow; the rest pads the vocabulary to a multiple of 64.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"
MASK = "<|mask|>"

# In the order of their ids. The tool-call marks are not "special": a decoder that skips special tokens must keep them,
# since a tool parser reads them from the text.
MARKS = (END_OF_TEXT, IM_START, IM_END, TOOL_CALL, TOOL_CALL_END, MASK)
SPECIAL = frozenset(MARKS) - {TOOL_CALL, TOOL_CALL_END}
MARK_IDS = {mark: 256 + index for index, mark in enumerate(MARKS)}
VOCABULARY = 320


def _byte_symbols() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def build() -> Any:
    """Return a ``tokenizers.Tokenizer``; it encodes a text to its UTF-8 bytes, and marks to one id each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, special=mark in SPECIAL, normalized=False) for mark in MARKS])
    return tokenizer


def chat_template() -> str:
    """Return the ChatML template; tools and tool calls are rendered the way a Hermes tool parser reads them."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")


def save(directory: Path, *, max_length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    build().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "additional_special_tokens": [IM_START],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")

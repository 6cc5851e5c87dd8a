"""The byte-pair vocabulary of the nano checkpoints: learnt from the corpus, any byte can be written."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from thor_spec.nano import tokenizer as tiny

VOCABULARY = 3840
# Words with a blank or a sign before them, single digits, runs of signs, line ends, indentation: a merge never crosses
# these pieces, so indentation and names keep tokens of their own.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def learn(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Any:
    """Return a trained ``tokenizers.Tokenizer``; the marks have the last ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(tiny.MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    built.train_from_iterator(texts, trainer)
    # Small texts give fewer merges; the marks come last all the same, and the model's vocabulary is padded.
    built.add_tokens([AddedToken(mark, special=mark in tiny.SPECIAL, normalized=False) for mark in tiny.MARKS])
    return built


def save(built: Any, directory: Path, max_length: int = 8192) -> None:
    """Write the tokenizer's three files as transformers and vLLM load them."""
    tiny.save(directory, max_length=max_length)  # settings and chat template are the tiny checkpoints'
    text = built.to_str(pretty=False)
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(text), ensure_ascii=False), encoding="utf-8")

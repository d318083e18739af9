"""Chat examples on disk: token shards, with two flags in the upper bits of every token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.trainer.data.chat import Conversation, read_conversations
from shardwise.trainer.data.chat_template import TEMPLATE_FILES, Example, load_template
from shardwise.trainer.data.shards import INDEX, Tokens, TokenShards, write_shards
from shardwise.trainer.data.tokenize import cache_name, find_files

# Flag of an example's first token, flag of a token that counts for the loss, and mask of the id.
FIRST, COUNTS, ID = 1 << 30, 1 << 31, (1 << 30) - 1
_BATCH_EXAMPLES = 512


def examples_folder(data: DataSettings) -> Path:
    """The cache folder of the tokenized chat examples, named after files and settings."""
    files = find_files(data.path)
    template = [Path(data.tokenizer) / name for name in TEMPLATE_FILES]
    settings = f"chat-2/{data.tokenizer}/{data.loss_on}"
    return Path(data.cache) / cache_name(data, [*files, *template], settings)


def tokenized_examples(data: DataSettings) -> TokenShards:
    """The chat examples of `data.path` as flagged tokens: from the cache, or tokenized now."""
    folder = examples_folder(data)
    if not (folder / INDEX).exists():
        template = load_template(data)
        files = find_files(data.path)
        about = {"files": [file.name for file in files], "vocab": template.vocab}
        chunks = (
            _flagged(example, data.loss_on == "all")
            for file in files
            for batch in _batches(read_conversations(file))
            for example in template.encode(batch)
        )
        write_shards(folder, chunks, about)
    shards = TokenShards(folder)
    if not len(shards):
        raise SpecError(f"data.path: {', '.join(data.path)} has no examples")
    return shards


def example_starts(shards: TokenShards, read_tokens: int = 2**22) -> npt.NDArray[np.int64]:
    """The position of the first token of every example.

    `read_tokens` tokens are read at a time.
    """
    return np.concatenate(list(_starts(shards, read_tokens)))


def _starts(shards: TokenShards, read_tokens: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the positions of first tokens in each part that is read."""
    for first in range(0, len(shards), read_tokens):
        tokens = shards.read(first, min(read_tokens, len(shards) - first))
        yield first + np.flatnonzero(tokens & FIRST)


def _batches(conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    """Yield lists of at most _BATCH_EXAMPLES conversations."""
    while batch := list(islice(conversations, _BATCH_EXAMPLES)):
        yield batch


def _flagged(example: Example, counts_all: bool) -> Tokens:
    """The token ids of an example, with the flags FIRST and COUNTS in their upper bits.

    With `counts_all`, all tokens but the first count for the loss; otherwise those of answers.
    """
    tokens = example.ids.astype(np.uint32)
    tokens[example.answers | counts_all] |= COUNTS
    # Nothing predicts the first token.
    tokens[:1] = (tokens[:1] & ID) | FIRST
    return tokens

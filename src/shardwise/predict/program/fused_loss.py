"""Sizes of head and loss in a fused kernel, as the packages compute them on GPUs.

Liger's fused linear cross entropy (liger-kernel 0.8.1) takes one chunk of tokens after the other,
in the model's forward: it computes the logits of a chunk, replaces them by their gradient, and
multiplies that into the gradient of the hidden states and into that of the head's weights. Between
forward and backward these two gradients are alive, and no logits.

Cut Cross-Entropy (cut-cross-entropy 25.1) writes no logits to memory. Its forward keeps a few
numbers per token and per word of the vocabulary, and its backward computes the logits again, tile
by tile.
"""

from __future__ import annotations

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.predict.program.sizes import Sizes

FP32 = 4
# Liger's loss of each token, in fp32.
LIGER_TOKEN_BYTES = 4.0
# Cut Cross-Entropy keeps the logarithm of a token's sum of exponentials and the mean logit of a
# word, in fp32. Its backward adds a lock for each token, the order of the words and their locks.
CUT_FORWARD = (4.0, 4.0)
CUT_BACKWARD = (8.0, 12.0)


def liger_chunk_tokens(tokens: Floats, vocabulary: float, width: float) -> Floats:
    """Tokens of each of Liger's chunks; the last one has the rest.

    The logits of one chunk have about as many elements as the hidden states of all tokens.
    """
    parts = np.ceil(vocabulary / width)
    rows = np.ceil(tokens / parts)
    chunk: Floats = np.minimum(2.0 ** np.ceil(np.log2(rows)), tokens)
    return chunk


class FusedLoss:
    """Bytes of the fused kernels by row."""

    def __init__(self, sizes: Sizes) -> None:
        stage = sizes.units.root.stage
        self.s, self.c = sizes, sizes.c
        self.vocabulary = max(stage.logits, 1.0)
        # Elements of the head's weights: the root's only product multiplies by each once.
        self.weights = stage.matmul_flops / 2.0
        width = max(1.0, self.weights / self.vocabulary)
        self.chunk_tokens = liger_chunk_tokens(sizes.tokens, self.vocabulary, width)
        self.chunks: Floats = np.ceil(sizes.tokens / self.chunk_tokens)
        # Under autocast Liger adds into an fp32 gradient and casts the weights for each product.
        self._autocast = ~self.c.sharded & (self.c.param_bytes < self.c.master_bytes)
        self._low = self.c.param_bytes < FP32

    @property
    def chunk_logits(self) -> Floats:
        """Bytes of the logits of one chunk, or of their gradient, which replaces them."""
        chunk: Floats = self.chunk_tokens * self.vocabulary * self.c.param_bytes
        return chunk

    @property
    def product_bytes(self) -> Floats:
        """Bytes of a chunk's gradient of the head's weights while it is added to the sum.

        In 16 bits a copy in fp32 is alive too.
        """
        trained = min(self.s.head_elements, self.weights)
        each = np.where(self._low, self.c.param_bytes + FP32, self.c.param_bytes)
        return trained * np.where(self._autocast, 0.0, each)

    @property
    def moved_bytes(self) -> Floats:
        """Bytes that all chunks of Liger's kernel read and write beside the products' operands.

        Each logit is read twice and written once. Each chunk reads the weights twice, and makes,
        casts and adds their gradient.
        """
        size = self.c.param_bytes
        logits = 3.0 * size * self.vocabulary * self.s.tokens
        trained = self.s.head_elements > 0
        read = np.where(self._autocast, 2.0 * (FP32 + 2.0 * size), 2.0 * size)
        added = np.where(self._low, 4.0 * size + 2.0 * FP32, 4.0 * size)
        added = np.where(self._autocast, 2.0 * FP32, added) * trained
        moved: Floats = logits + self.chunks * self.weights * (read + added)
        return moved

    def cut_bytes(self, per_token_and_word: tuple[float, float]) -> Floats:
        """Bytes of what Cut Cross-Entropy keeps for tokens and words."""
        token, word = per_token_and_word
        kept: Floats = token * self.s.tokens + word * self.vocabulary
        return kept

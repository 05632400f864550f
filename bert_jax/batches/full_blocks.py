"""RoBERTa's full blocks: sequences `[CLS] text [SEP]` of consecutive text, all of full length."""

import dataclasses

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.shuffle import ORDER, SHIFT, keyed_generator, permute
from bert_jax.text.store import TokenStore
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class FullBlocks:
    """Sequences of `length` tokens of consecutive text, with a [SEP] between documents.

    Source: RoBERTa (Liu et al. 2019), section 4.2, FULL-SENTENCES, but split at tokens instead of
    sentences, so that there is no padding. Each [SEP] inside a block replaces a token at its end.
    """

    store: TokenStore
    tokenizer: Tokenizer
    length: int
    seed: int

    @property
    def sequences_per_epoch(self) -> int:
        """Number of sequences in one pass over the text."""
        # Nearly a block less than there is, so that an epoch can start at any token of the first.
        budget = self.length - 2
        return max(1, (len(self.store.tokens) - budget + 1) // budget)

    def batch(self, number: int, size: int, indices: np.ndarray | None = None) -> Batch:
        """Return the sequences at some indices of a batch: `SentencePairs.batch` without labels."""
        indices = np.arange(size) if indices is None else indices
        budget, per_epoch = self.length - 2, self.sequences_per_epoch
        epochs, blocks = np.divmod(number * size + indices.astype(np.int64), per_epoch)
        spare = max(0, len(self.store.tokens) - per_epoch * budget)
        first = np.empty(len(indices), np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            order = permute(blocks[in_epoch], per_epoch, (self.seed, ORDER, epoch))
            shift = int(keyed_generator(self.seed, SHIFT, epoch).random() * (spare + 1))
            first[in_epoch] = order * budget + shift
        return {**self._assemble(first), "index": indices.astype(np.int32)}

    def _assemble(self, first: np.ndarray) -> Batch:
        """Return the text from each first token on, [n], with [SEP] where a document ends."""
        tokens, budget = self.store.tokens, self.length - 2
        offsets = first[:, None] + np.arange(budget + 1)
        sentences = np.searchsorted(self.store.sentences, offsets, "right") - 1
        documents = np.searchsorted(self.store.documents, sentences, "right")
        # Of each token, after [CLS]: one further for each document that has ended before it.
        columns = np.arange(budget + 1) + documents - documents[:, :1]
        # The text ends a column before the one that the token after it would have.
        counts = np.where(offsets < len(tokens), budget, np.minimum(columns - 1, budget)).min(1)
        position = np.arange(self.length)
        mask = position <= counts[:, None] + 1
        ids = np.where(mask, self.tokenizer.sep_id, self.tokenizer.pad_id).astype(np.int32)
        ids[:, 0] = self.tokenizer.cls_id
        rows, inside = np.nonzero((columns < budget) & (offsets < len(tokens)))
        ids[rows, 1 + columns[rows, inside]] = tokens[offsets[rows, inside]]
        return {
            "input_ids": ids,
            "token_type_ids": np.zeros_like(ids),
            "attention_mask": mask.astype(np.int32),
        }

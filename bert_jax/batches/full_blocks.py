"""Full blocks: sequences `[CLS] text [SEP]` of consecutive text (Liu et al. 2019, section 4.2)."""

import dataclasses

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.shuffle import ORDER, SHIFT, keyed_generator, permute
from bert_jax.text.store import TokenStore
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class FullBlocks:
    """Consecutive text, [SEP] between documents: Liu et al. 2019, section 4.2, split at tokens."""

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

    @property
    def is_full(self) -> bool:
        """Whether no sequence has padding: of a text of at least one block."""
        return len(self.store.tokens) >= self.length - 2

    @property
    def padding(self) -> float:
        """The share of padding in each sequence: of a text shorter than a block, which all have."""
        if self.is_full:
            return 0.0
        mask = self.assemble(np.zeros(1, np.int64))["attention_mask"]
        return 1.0 - float(mask.mean())

    def batch(
        self, number: int, size: int, indices: np.ndarray | None = None, skipped: int = 0
    ) -> Batch:
        """Return the sequences at some indices of a batch: `SentencePairs.batch` without labels."""
        indices = np.arange(size) if indices is None else indices
        batch = self.assemble(self.draw(number, size, indices, skipped))
        return {**batch, "index": indices.astype(np.int32)}

    def draw(self, number: int, size: int, indices: np.ndarray, skipped: int = 0) -> np.ndarray:
        """Return the first token of the sequences at some indices of a batch."""
        budget, per_epoch = self.length - 2, self.sequences_per_epoch
        epochs, blocks = np.divmod(skipped + number * size + indices.astype(np.int64), per_epoch)
        spare = max(0, len(self.store.tokens) - per_epoch * budget)
        first = np.empty(len(indices), np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            order = permute(blocks[in_epoch], per_epoch, (self.seed, ORDER, epoch))
            shift = int(keyed_generator(self.seed, SHIFT, epoch).random() * (spare + 1))
            first[in_epoch] = order * budget + shift
        return first

    def assemble(self, first: np.ndarray) -> Batch:
        """Return the text from each first token on, [n], with [SEP] where a document ends."""
        sentences, documents = self.store.sentences, self.store.documents
        column = np.arange(self.length - 2)
        ends = np.searchsorted(sentences, [first, first + len(column)], "right") - 1
        ends = np.searchsorted(documents, ends, "right")
        # The documents that end in each block, at most, and the columns after their last tokens.
        document = ends[0][:, None] + np.arange((ends[1] - ends[0]).max())
        boundary = sentences[documents[np.minimum(document, self.store.num_documents)]]
        boundary = boundary - first[:, None] + np.arange(document.shape[1])
        boundary[document >= self.store.num_documents] = self.length  # no [SEP] after the text
        is_separator = np.zeros((len(first), len(column)), bool)
        rows, which = np.nonzero(boundary < len(column))
        is_separator[rows, boundary[rows, which]] = True
        separators = is_separator.cumsum(axis=1) - is_separator  # before each column
        offset = first[:, None] + column - separators
        inside = (offset < len(self.store.tokens)) & ~is_separator
        ids = np.full((len(first), self.length), self.tokenizer.pad_id, np.int32)
        ids[:, 0] = self.tokenizer.cls_id
        ids[:, 1:-1][inside] = self.store.tokens[offset[inside]]
        ids[:, 1:-1][is_separator] = self.tokenizer.sep_id
        last = 1 + (inside | is_separator).sum(axis=1)
        ids[np.arange(len(first)), last] = self.tokenizer.sep_id
        mask = np.arange(self.length) <= last[:, None]
        return {
            "input_ids": ids,
            "token_type_ids": np.zeros_like(ids),
            "attention_mask": mask.astype(np.int32),
        }

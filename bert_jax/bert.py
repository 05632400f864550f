"""The user's view of a model: `bert = bert_jax.load(CHECKPOINT)` and what it can do."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from tqdm import tqdm

from bert_jax import console
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.config.fields import Dtype
from bert_jax.convert.export import export
from bert_jax.convert.huggingface import Exported
from bert_jax.errors import UserError, renamed
from bert_jax.inference.hidden_states import encoder_output
from bert_jax.inference.index import TextIndex
from bert_jax.inference.loading import LoadedModel, load_model
from bert_jax.inference.masked_lm import Guess, fill_masks
from bert_jax.inference.predictions import Predictions, predict
from bert_jax.inference.task_vectors import text_encoder
from bert_jax.inference.tokenization import check_prompt, text_list, tokenize, warn_truncated
from bert_jax.models.encoder import EncoderOutput
from bert_jax.models.heads import TaskModel
from bert_jax.retrieval.search import normalize
from bert_jax.storage.paths import AnyPath
from bert_jax.storage.replacement import replacing
from bert_jax.tasks.foreign import UnknownColumns
from bert_jax.text.memory import chunks
from bert_jax.training import checkpoint
from bert_jax.viewer.patterns import Patterns, survey
from bert_jax.viewer.view import AttentionView, WordComparison, compare, view


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Bert(LoadedModel):
    """A pretrained or fine-tuned model with its tokenizer.

    Attributes:
      config: the model's config, in the names of BERT's own `config.json`.
      params: nested dictionaries of the float32 parameters of `model`. Give others with
        `dataclasses.replace(bert, params=...)`; what is changed within them may go unseen.
      tokenizer: the tokenizer that the model was trained with.
      model: the Flax module: the encoder with pretraining heads, or with the head of a task.
      unused: names of tensors of a foreign checkpoint that the model has no place for.
      task: the task that the model was fine-tuned for; None for a pretrained model.
      data: how the task's examples were read: their columns, and the longest sequence.
      source: the checkpoint that it is, a folder or the name of a model of the hub; None for none.

    >>> bert = getfixture("tiny_bert")
    >>> bert
    Bert(bert, 2 layers of 16, 2 heads, 6,722 parameters, wordpiece of 64 tokens)
    >>> bert.config.num_hidden_layers
    2
    """

    def __repr__(self) -> str:
        c, size = self.config, sum(x.size for x in jax.tree.leaves(self.params))
        count = len(self.task.labels) if self.task else 0
        labels = f" of {console.counted(count, 'label')}" if count else ""
        task = f", {self.task.kind}{labels}" if self.task else ""
        layers = console.counted(c.num_hidden_layers, "layer")
        heads = console.counted(c.num_attention_heads, "head")
        return (
            f"Bert({c.model_type}, {layers} of {c.hidden_size}, {heads}, {size:,} parameters, "
            f"{self.tokenizer.kind} of {self.tokenizer.vocab_size:,} tokens{task})"
        )

    def tokenize(
        self,
        texts: str | Iterable[str],
        text_pairs: str | Iterable[str] | None = None,
        max_length: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Return texts as padded arrays of tokens, with [CLS] and [SEP].

        Args:
          texts: one text or several.
          text_pairs: the second text of each, if there is one.
          max_length: tokens of a sequence, at most; the model's positions where it is None. What
            exceeds it is truncated, the longer text of a pair first; where it is None, with a
            warning.

        Returns:
          `input_ids`, `token_type_ids` and `attention_mask`, [N, L] int32, L the longest sequence.

        Raises:
          UserError: there are no texts, one is no str, there are not as many pairs, or `max_length`
            is out of range.

        >>> arrays = getfixture("tiny_bert").tokenize(["A bank.", "A river bank."])
        >>> arrays["input_ids"].shape == arrays["attention_mask"].shape
        True
        """
        sequences = tokenize(self, texts, text_pairs, max_length)
        return sequences.all(int(sequences.lengths.max()))

    def __call__(
        self,
        texts: str | Iterable[str],
        text_pairs: str | Iterable[str] | None = None,
        *,
        max_length: int | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        """Run the encoder on texts, all in one batch; `tokenize` says which are refused.

        Each new number of texts is compiled, and each of some lengths. `encode` divides any number
        of texts into batches.

        Args:
          texts, text_pairs, max_length: as in `tokenize`.
          output_hidden_states: return the embeddings and the output of every layer, [N, L, D].
          output_attentions: return the attention map of every layer, [N, H, L, L].

        >>> output = getfixture("tiny_bert")("A river bank.", output_attentions=True)
        >>> len(output.attentions), output.last_hidden_state.shape[-1]
        (2, 16)
        """
        return encoder_output(
            self,
            tokenize(self, texts, text_pairs, max_length),
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )

    def encode(
        self,
        texts: str | Iterable[str],
        layer: int | Sequence[int] | None = None,
        pooling: str | None = None,
        prompt: str = "",
        *,
        batch_size: int | None = None,
        normalize_embeddings: bool = False,
        show_progress_bar: bool = False,
    ) -> Any:
        """Return embeddings of texts.

        With neither `layer` nor `pooling`, a model that was trained for embeddings uses its own
        pooling, dense layer, normalization and maximum length; any other, the last layer's mean.

        Args:
          texts: one text or several; what exceeds the model's positions, or its maximum length, is
            truncated, with a warning.
          layer: 0 for the embeddings, i for layer i, -1 for the last; or several, which are added.
          pooling: "mean", "max" or "cls" for a vector of each text; "tokens" or "words" for one of
            each token but [CLS] and [SEP], or each word, NaN for one without tokens or truncated.
          prompt: "query" or "passage", for the model's prompt of that name before each text, as
            part of it; late interaction encodes a query in another way than a passage.
          batch_size: texts of a batch at most, over all devices; None for as many as have about
            4,096 tokens. The embeddings depend on it by rounding alone.
          normalize_embeddings: make every vector one of unit length.
          show_progress_bar: show on a terminal how far it is.

        Returns:
          [N, D] float32 for N texts, D the vocabulary's size for sparse vectors; or a list of N
          arrays, [n, D], by token or word.

        Raises:
          UserError: there is no such layer, pooling or prompt, or a text is no str.

        >>> getfixture("tiny_bert").encode(["A river bank.", "A bank."]).shape
        (2, 16)
        """
        texts = text_list(texts)
        layers = layer if layer is None or isinstance(layer, Sequence) else [layer]
        check_prompt(self, prompt)
        encoder = text_encoder(self, layers, pooling, prompt, batch_size)
        embeddings = []
        with tqdm(total=len(texts), desc="Texts", disable=not show_progress_bar) as bar:
            for chunk in chunks(texts):
                embeddings += encoder.encode_chunk(chunk)
                bar.update(len(chunk))
        truncated = sum(embedding.is_truncated for embedding in embeddings)
        warn_truncated(truncated, len(texts), encoder.max_length)
        scaled = normalize if normalize_embeddings else np.asarray
        vectors = [scaled(each.vectors) for each in embeddings]
        if encoder.is_by_token:
            return vectors
        return np.array(vectors, np.float32).reshape(len(texts), encoder.size)

    @overload
    def fill_mask(self, text: str, top_k: int = 5) -> list[Guess]: ...  # pyright: ignore
    @overload
    def fill_mask(self, text: Iterable[str], top_k: int = 5) -> list[list[Guess]]: ...
    def fill_mask(self, text: str | Iterable[str], top_k: int = 5) -> Any:
        """Return the most probable tokens for each "[MASK]" of a text.

        Args:
          text: one text or several.
          top_k: guesses for each mask.

        Returns:
          The guesses for a text, by mask, the best first; a list of such for several texts.

        Raises:
          UserError: a text has no "[MASK]" or is too long, or the model has no masked LM head.

        >>> guesses = getfixture("tiny_bert").fill_mask("The [MASK] bank.", top_k=3)
        >>> len(guesses), guesses[0].position
        (3, 2)
        """
        if not isinstance(text, str):
            return [self.fill_mask(each, top_k) for each in text_list(text, "text")]
        ids = self.tokenizer.encode_with_masks(*text_list(text, "text"))
        if self.tokenizer.mask_id not in ids:
            raise UserError(f"the text has no [MASK]: {text[:60]!r}; put one where a token belongs")
        return fill_masks(self, ids, top_k)

    def attention(self, text: str, text_pair: str | None = None) -> AttentionView:
        """Return what the model computes for a text: attention maps, queries, keys, guesses.

        Args:
          text: may have "[MASK]"s, whose guesses are then in the view.
          text_pair: a second text. What exceeds the model's positions is truncated, the longer text
            first, with a warning.

        Raises:
          UserError: the text is empty; it has a mask, and the model has no masked LM head; or the
            page would be too large for a browser.

        >>> view = getfixture("tiny_bert").attention("The [MASK] bank.")
        >>> view.maps.shape == (2, 2, len(view.tokens), len(view.tokens))
        True
        >>> len(view.guesses[2])  # of the embeddings and of each layer
        3
        """
        texts = text_list([text], "text")
        texts += [] if text_pair is None else text_list([text_pair], "text_pair")
        return view(self, texts)

    def attention_patterns(self, texts: Iterable[str | tuple[str, str]]) -> Patterns:
        """Return where each attention head looks, over texts: the next token, [SEP], and so on.

        Args:
          texts: texts and pairs of texts, any number of them: some thousands are in memory at once.
            Those without tokens are skipped. What exceeds the model's positions is truncated, the
            longer text of a pair first, with a warning.

        Raises:
          UserError: there is no text with tokens.

        >>> texts = ["A river bank.", ("The bank reads.", "A river.")]
        >>> getfixture("tiny_bert").attention_patterns(texts).num_texts
        2
        """
        return survey(self, texts)

    def compare(self, texts: Sequence[str], word: str) -> WordComparison:
        """Return how alike the model makes a word of several texts, layer by layer.

        Args:
          texts: two or more, each with the word.
          word: in any case; its first occurrence as a word of its own counts, or else its first.

        Raises:
          UserError: there is one text alone, one without the word, with it beyond the model's
            positions, or with a [MASK]; or the page would be too large for a browser.

        >>> bert = getfixture("tiny_bert")
        >>> bert.compare(["A river bank.", "The bank reads."], "bank").cosines.shape
        (3, 2, 2)
        """
        return compare(self, text_list(texts), word)

    def predict(
        self,
        examples: Iterable[Any] | Path,
        *,
        text: str | None = None,
        label: str | None = None,
        batch_size: int = 32,
    ) -> Predictions:
        """Apply a fine-tuned model to examples of its task.

        Args:
          examples: plain values: a str for a text, two for a pair, a list of words; dictionaries
            such as {"question": ..., "context": ...}; or the `Path` of a file, as for fine-tuning.
            A str or a dictionary is one example; a pair alone is [("a", "b")].
          text: column of a file's texts, where it is not that of the training data.
          label: column of a file's labels, where it is not that of the training data.
          batch_size: examples at a time, on each device.

        Returns:
          A sequence of dictionaries, one an example, with what its task predicts.

        Raises:
          UserError: the model has no head of a task, or an example does not fit it.

        >>> predictions = getfixture("tiny_classifier").predict(["A river bank.", "A bank."])
        >>> len(predictions), sorted(predictions[0])
        (2, ['label', 'probabilities', 'probability'])
        """
        try:
            return predict(self, examples, text=text, label=label, batch_size=batch_size)
        except UserError as error:
            error.args = (renamed(str(error), {"data.text": "text", "data.label": "label"}),)
            raise

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write a self-contained checkpoint, of this model's dtype, which `load` reads.

        Args:
          path: the folder, which must not exist.
          force: whether to replace a checkpoint that is there, and nothing else.

        Raises:
          UserError: `path` exists or cannot be written.

        >>> path = getfixture("tmp_path") / "checkpoint"
        >>> getfixture("tiny_bert").save(path)
        >>> import bert_jax
        >>> bert_jax.load(path).config.hidden_size
        16
        """
        run = TrainConfig(model=self.config, objective=self.objective)
        if self.task and isinstance(self.model, TaskModel):
            data, probe = UnknownColumns.written(self.data), self.model.probe
            run = FinetuneConfig(model=self.config, task=self.task, data=data, probe=probe)
        with replacing(path, checkpoint.is_checkpoint if force else None) as new:
            checkpoint.write_params(new, self.params, dataclasses.asdict(run), self.tokenizer)

    def export(
        self,
        path: str | Path,
        head: str | None = None,
        *,
        force: bool = False,
        private: bool = False,
    ) -> Exported:
        """Write a directory that Hugging Face's `transformers` loads, all of it or nothing.

        Args:
          path: the directory, which must not exist; or "hf:OWNER/NAME", a new model of the hub.
          head: "pretraining", "masked-lm" or "none" for the encoder alone; None for all heads.
          force: whether to replace an earlier export that is there, and nothing else; of the hub,
            the files of any model, which stay in its history.
          private: whether a new model of the hub is for its owner alone.

        Returns:
          The class of `transformers` that it is, and what that class has no place for.

        Raises:
          UserError: `transformers` has no such model, `path` exists or cannot be written, or it is
            a directory and `private` is set.

        >>> path = getfixture("tmp_path") / "exported"
        >>> getfixture("tiny_bert").export(path).architecture
        'BertForPreTraining'
        """
        if isinstance(self.model, TaskModel) and self.model.probe and head != "none":
            raise UserError(
                f"the checkpoint is a probe of {self.model.probe!r}, and no class of transformers "
                "has such a head; export its encoder with --head=none (head='none'), or fine-tune "
                "without a probe"
            )
        return export(path, self, head=head, force=force, private=private)


@console.working("loading the model", says_end=False)
def load(path: str | AnyPath, *, dtype: Dtype | None = None) -> Bert:
    """Load a checkpoint.

    Args:
      path: a workdir (its latest checkpoint, the best of a fine-tuning), one of its checkpoints, a
        Hugging Face or Google checkpoint directory, or "hf:OWNER/NAME", downloaded from the hub.
      dtype: of activations and matmuls; "auto" is bfloat16 where the device has it. None is that of
        training, and float32 for a Hugging Face or Google checkpoint. Parameters stay float32.

    Raises:
      UserError: there is no checkpoint, or it is damaged, or of another architecture.

    >>> load(getfixture("tiny_run").checkpoint)
    Bert(bert, 2 layers of 16, 2 heads, 6,722 parameters, wordpiece of 64 tokens)
    """
    return Bert(**vars(load_model(path, dtype)))


class Index(TextIndex):
    """Texts, to be searched by the meaning that a model gives them.

    Attributes:
      vectors: [N, D] float16 of unit length, memory-mapped; or as `retrieval.vectors` has them.
      num_truncated: how many of the texts are longer than what the model reads.

    >>> folder, bert = getfixture("tmp_path"), getfixture("tiny_bert")
    >>> texts = ["The river bank.", "A model reads."]
    >>> index = Index.build(bert, output=folder / "my.index", texts=texts)
    >>> index
    Index(my.index, 2 texts, vectors of 16)
    >>> index.search("The river bank.", top_k=1)
    [Hit(1.000, texts:1, 'The river bank.')]
    """

    _load = staticmethod(load)

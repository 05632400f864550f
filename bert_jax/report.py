"""What a person reads at the start and at the end of a run."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batches import Batch
from bert_jax.batches.buckets import Batcher, BucketedBatches
from bert_jax.batches.loader import TrainBatches
from bert_jax.bert import Bert
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.convert.names import module_names
from bert_jax.distributed import hosts
from bert_jax.tasks.datasets import Datasets
from bert_jax.tasks.results import Table
from bert_jax.text.store import Corpus
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint
from bert_jax.training.metrics import unigram_entropy
from bert_jax.training.step import TrainState

_EXAMPLES = 3


def start(
    config: TrainConfig,
    corpus: Corpus,
    mesh: Mesh,
    state: TrainState,
    batches: TrainBatches,
    workdir: Path,
) -> None:
    """Prints what is about to be trained, on what, and where."""
    if not hosts.is_main():
        return
    device = mesh.devices.flat[0]
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    size = sum(x.size for x in jax.tree.leaves(state.params))
    c = config.model
    step = int(state.step)
    on_hosts = f" on {hosts.count()} hosts" if hosts.count() > 1 else ""
    print(
        f"devices    {mesh.size} × {device.device_kind} ({device.platform}){on_hosts}, "
        f"{config.parallel.mode} ({axes})\n"
        f"model      {size:,} parameters: {c.num_hidden_layers} layers of {c.hidden_size}, "
        f"{c.num_attention_heads} heads, {c.dtype}\n"
        f"tokenizer  {corpus.tokenizer.kind}, {corpus.tokenizer.vocab_size:,} pieces\n"
        f"text       {len(corpus.train.tokens):,} pieces in {corpus.train.num_documents:,} "
        f"documents; held out {len(corpus.eval.tokens):,} in {corpus.eval.num_documents:,}\n"
        f"padding    {_padding(config, batches)}\n"
        f"steps      {config.steps:,}, which is {batches.epochs():.1f} epochs"
        + (f"; going on from step {step:,}" if step else "")
        + f"\nworkdir    {workdir}",
        flush=True,
    )


def _padding(config: TrainConfig, batches: TrainBatches) -> str:
    """Returns the share of padding for each length, and what packing makes of it."""
    found = []
    for length, (alone, packed) in batches.padding().items():
        if config.data.packing:
            found.append(f"{packed:.1%} at length {length}, {alone:.1%} without packing")
        else:
            found.append(f"{alone:.1%} at length {length}, {packed:.1%} with data.packing")
    return "; ".join(found) or "none: rows are full"


def begun_with(name: str | None, params: Any, given: Any) -> None:
    """Prints what of a model was begun with another's parameters, and what was not."""
    ours, theirs = module_names(params), module_names(given)
    anew, left_out = (", ".join(sorted(names)) for names in (ours - theirs, theirs - ours))
    hosts.print_on_main(
        f"weights    {name}; anew: {anew or 'none'}; left out: {left_out or 'none'}"
    )


def end(
    held_out: Mapping[str, float],
    batches: Iterable[Batch],
    corpus: Corpus,
    pairs: str,
    bert: Bert | None,
    workdir: Path,
) -> None:
    """Prints the held-out results beside their baselines, masks filled in, and where things lie.

    Args:
      held_out: means over the held-out rows.
      batches: of all of these rows.
      corpus: the text.
      pairs: what the second segment of a row is.
      bert: fills the masks, if it is at hand.
      workdir: of the run.
    """
    counts = corpus.eval.token_counts(corpus.tokenizer.vocab_size)
    rows = [
        (
            "MLM loss (nats)",
            f"{held_out['mlm_loss']:.3f}",
            f"{unigram_entropy(counts):.3f}",
            "unigram entropy",
        ),
        (
            "MLM accuracy",
            f"{held_out['mlm_accuracy']:.1%}",
            f"{counts.max() / counts.sum():.1%}",
            "most frequent piece",
        ),
    ]
    if "nsp_accuracy" in held_out:
        share = _share_of_random(batches)
        rows.append(
            (
                f"{pairs.upper()} accuracy",
                f"{held_out['nsp_accuracy']:.1%}",
                f"{max(share, 1 - share):.1%}",
                "majority class",
            )
        )
    print(f"\n{'held-out text':<18}{'model':>8}{'baseline':>10}")
    for name, value, baseline, what in rows:
        print(f"{name:<18}{value:>8}{baseline:>10}  {what}")
    if bert:
        print()
        for ids, answer in examples(corpus, bert.config.max_position_embeddings - 2):
            guesses = bert.fill_masked_pieces(ids, 3)[0]
            best = ", ".join(f"{guess.token} {guess.probability:.0%}" for guess in guesses)
            print(f"{bert.text(ids)}\n    [MASK] = {best} (was {answer})")
    latest = checkpoint.find(workdir)
    print(
        f"\ncheckpoint {latest}\nmetrics    {workdir / 'metrics.jsonl'}, {workdir / 'curves.png'}, "
        f"{workdir / 'tensorboard'}\n"
        f'try        bert-jax fill-mask {workdir} "The [MASK] of the function is a string."',
        flush=True,
    )


def _share_of_random(batches: Iterable[Batch]) -> float:
    """Returns the share of pairs with label 1, among rows that are not padding."""
    labels = [b["next_sentence_label"][b["attention_mask"][:, 0] > 0] for b in batches]
    return float(np.concatenate(labels).mean())


def examples(corpus: Corpus, longest: int) -> list[tuple[list[int], str]]:
    """Returns held-out sentences of middling length with a word masked, as pieces, and the word.

    They are spread over the text; the word is a single piece, as near to the middle as there is.
    """
    store, tokenizer = corpus.eval, corpus.tokenizer
    sizes = np.diff(store.sentences)
    found: list[tuple[list[int], str]] = []
    candidates = np.flatnonzero((sizes >= 8) & (sizes <= min(24, longest)))
    for part in np.array_split(candidates, _EXAMPLES):
        for index in part.tolist():
            ids = store.tokens[store.sentences[index] : store.sentences[index + 1]].tolist()
            place = _whole_word(ids, tokenizer)
            if place is not None:
                masked = [*ids[:place], tokenizer.mask_id, *ids[place + 1 :]]
                found.append((masked, tokenizer.id_to_token(ids[place])))
                break
    return found


def _whole_word(ids: list[int], tokenizer: Tokenizer) -> int | None:
    """Returns the place of a word of one piece and three letters or more, nearest to the middle."""
    for place in sorted(range(1, len(ids) - 1), key=lambda i: abs(i - len(ids) // 2)):
        alone = (
            not tokenizer.is_continuation[ids[place]]
            and not tokenizer.is_continuation[ids[place + 1]]
        )
        word = tokenizer.id_to_token(ids[place]).lstrip("▁Ġ")
        if alone and len(word) >= 3 and word.isalpha():
            return place
    return None


def start_finetuning(
    config: FinetuneConfig,
    sets: Datasets,
    train: Batcher,
    batches: BucketedBatches,
    mesh: Mesh,
    workdir: Path,
) -> None:
    """Prints what is about to be learned, from what, and how its rows are padded."""
    if not hosts.is_main():
        return
    device = mesh.devices.flat[0]
    task = config.task
    names = ", ".join(task.labels[:12]) + (", …" if len(task.labels) > 12 else "")
    counts = {"train": sets.train, **sets.evals, **sets.tests}
    padding = (
        f"{train.padding:.0%} at length {config.data.max_length}; {batches.padding:.0%} "
        f"with lengths {', '.join(map(str, batches.lengths))}"
    )
    print(
        f"devices    {mesh.size} × {device.device_kind} ({device.platform}), "
        f"{config.parallel.mode}\n"
        f"task       {task.kind}"
        + (f": {len(task.labels)} labels: {names}" if names else "")
        + "\n"
        "examples   " + ", ".join(f"{name} {len(found):,}" for name, found in counts.items()) + "\n"
        f"padding    {padding}\n"
        f"steps      {len(batches):,} of {config.data.batch_size} rows, {config.epochs:g} epochs\n"
        f"workdir    {workdir}",
        flush=True,
    )
    if train.features.truncated:
        print(f"cut        {train.features.truncated:,} texts to {config.data.max_length} pieces")
    if train.features.skipped:
        print(
            f"skipped    {len(train.features.skipped):,} training examples, all in results.json; "
            f"the first: {train.features.skipped[0]}"
        )
    for source, count in sets.skipped.items():
        print(f"skipped    {count:,} records of {source}, as the format's own readers do")


def end_finetuning(
    table: Table,
    scores: Mapping[str, Mapping[str, float]],
    cut: Mapping[str, int],
    workdir: Path,
) -> None:
    """Prints the scores beside what they are compared with, and where things lie."""
    print(f"\n{table}\n")
    for name, values in list(scores.items())[1:]:
        shown = (f"{key} {value:.4f}" for key, value in values.items() if key in table.names)
        print(f"{name:<10} {', '.join(shown) or 'predicted; not every example has a label'}")
    for name, count in cut.items():
        if count:
            print(f"cut        {count:,} texts of {name} to data.max_length pieces")
    print(
        f"results    {workdir / 'results.json'}, {workdir / 'predictions'}.*\n"
        f"checkpoint {workdir / 'best'}\n"
        f"try        bert-jax predict {workdir} FILE",
        flush=True,
    )

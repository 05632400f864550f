"""Human-readable summaries that a run prints at its start and at its end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from scipy import special

from bert_jax import console
from bert_jax.batches import loader
from bert_jax.batches.buckets import Batcher, BucketedBatches
from bert_jax.batches.loader import TrainBatches
from bert_jax.bert import Bert
from bert_jax.config import FinetuneConfig, TrainConfig, phases
from bert_jax.convert.names import module_names
from bert_jax.distributed import hosts
from bert_jax.distributed.hosts import print_on_main
from bert_jax.tasks.datasets import Datasets
from bert_jax.tasks.results import as_text
from bert_jax.text.store import Corpus
from bert_jax.training.step import TrainState

_NUM_EXAMPLES = 3


def pretraining_start(
    config: TrainConfig,
    corpus: Corpus,
    mesh: Mesh,
    state: TrainState,
    batches: TrainBatches,
    workdir: Path,
) -> None:
    """Print what is about to be trained, on what, and where."""
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    size = corpus.tokenizer.vocab_size
    c, step = config.model, int(state.step)
    padding = f" of model.vocab_size {c.vocab_size:,}" if size < c.vocab_size else ""
    resumes = f"; resuming from step {step:,}" if step else ""
    print_on_main(
        f"devices    {_devices(mesh)}, {config.parallel.mode} ({axes})\n"
        f"model      {num_params:,} parameters: {c.num_hidden_layers} layers of {c.hidden_size}, "
        f"{c.num_attention_heads} heads, {c.dtype}\n"
        f"tokenizer  {corpus.tokenizer.kind}, {size:,} tokens{padding}\n"
        f"text       {len(corpus.train.tokens):,} tokens in {corpus.train.num_documents:,} "
        f"documents; held out {len(corpus.eval.tokens):,} in {corpus.eval.num_documents:,}; "
        f"{corpus.unknown:.2%} of the characters unknown\n"
        f"{corpus.warning}"
        f"padding    {_padding(config, batches)}\n"
        f"steps      {config.steps:,}, which is {batches.epochs():.1f} epochs{resumes}\n"
        f"workdir    {workdir}"
    )


def _devices(mesh: Mesh) -> str:
    device = mesh.devices.flat[0]
    on_hosts = f" on {hosts.count()} hosts" if hosts.count() > 1 else ""
    return f"{mesh.size} × {device.device_kind} ({device.platform}){on_hosts}"


def _padding(config: TrainConfig, batches: TrainBatches) -> str:
    """Return the share of padding at each length, with packing and without."""
    form = "{0:.1%} at length {2}, {1:.1%} with data.packing"
    if config.data.packing:
        form = "{1:.1%} at length {2}, {0:.1%} without packing"
    shares = (form.format(*pair, length) for length, pair in batches.padding().items())
    return "; ".join(shares) or "none: blocks are full"


def initialized_from(name: str, params: Any, source: Any) -> None:
    """Print which modules of a model come from a checkpoint, and which do not."""
    target, source = module_names(params), module_names(source)
    new, dropped = (", ".join(sorted(names)) for names in (target - source, source - target))
    print_on_main(
        f"weights    {name}; randomly initialized: {new or 'none'}; dropped: {dropped or 'none'}"
    )


def baselines(corpus: Corpus, config: TrainConfig) -> dict[str, float]:
    """Return the scores on the held-out text without a model, as in `PretrainingResult`."""
    counts = np.bincount(corpus.eval.tokens, minlength=corpus.tokenizer.vocab_size)
    shares = counts / counts.sum()
    scores = {
        "mlm_loss": float(special.entr(shares).sum()),
        "mlm_accuracy": float(shares.max()),
    }
    if config.data.pairs != "none":
        last = phases(config)[-1][1]
        labels = [
            batch["next_sentence_label"][batch["attention_mask"][:, 0] > 0]
            for batch in loader.eval_batches(corpus, config, last)
        ]
        share = float(np.concatenate(labels).mean())
        scores["nsp_accuracy"] = max(share, 1 - share)
    return scores


def pretraining_end(
    scores: Mapping[str, float],
    baselines: Mapping[str, float],
    config: TrainConfig,
    corpus: Corpus,
    bert: Bert | None,
    workdir: Path,
    checkpoint: Path,
) -> None:
    """Print the held-out scores beside their baselines, some filled masks, and the files."""
    lines = [("MLM loss (nats)", "mlm_loss", ".3f", "unigram entropy")]
    lines += [("MLM accuracy", "mlm_accuracy", ".1%", "most frequent token")]
    if "nsp_accuracy" in scores:
        name = f"{config.data.pairs.upper()} accuracy"
        lines += [(name, "nsp_accuracy", ".1%", "majority class")]
    print_on_main(f"\n{'held-out text':<18}{'model':>8}{'baseline':>10}")
    for title, name, form, baseline in lines:
        value, other = format(scores[name], form), format(baselines[name], form)
        print_on_main(f"{title:<18}{value:>8}{other:>10}  {baseline}")
    if bert and not console.is_quiet():
        print_on_main("")
        for ids, answer in masked_examples(corpus, config.model.max_position_embeddings - 2):
            guesses = bert.fill_masked_tokens(ids, 3)
            listed = ", ".join(f"{guess.token} {guess.probability:.0%}" for guess in guesses)
            print_on_main(f"{bert.text(ids)}\n    [MASK] = {listed} (was {answer})")
    print_on_main(
        f"\ncheckpoint {checkpoint}\n"
        f"metrics    {workdir / 'metrics.jsonl'}, {workdir / 'curves.png'}, "
        f"{workdir / 'tensorboard'}\n"
        f'try        bert-jax fill-mask {workdir} "The [MASK] of the function is a string."'
    )


def masked_examples(corpus: Corpus, longest: int) -> list[tuple[list[int], str]]:
    """Return held-out sentences with a word masked, as tokens, and the word.

    The sentences are of medium length and spread over the text. The word is in the middle, a single
    token of three letters or more.
    """
    store, tokenizer = corpus.eval, corpus.tokenizer
    lengths = np.diff(store.sentences)
    examples: list[tuple[list[int], str]] = []
    candidates = np.flatnonzero((lengths >= 8) & (lengths <= min(24, longest)))
    for part in np.array_split(candidates, _NUM_EXAMPLES):
        for index in part.tolist():
            ids = store.tokens[store.sentences[index] : store.sentences[index + 1]].tolist()
            middle = len(ids) // 2
            token = tokenizer.id_to_token(ids[middle])
            word = token.lstrip("▁Ġ")
            is_whole = not tokenizer.is_continuation[ids[middle : middle + 2]].any()
            if is_whole and len(word) >= 3 and word.isalpha():
                ids[middle] = tokenizer.mask_id
                examples.append((ids, token))
                break
    return examples


def finetuning_start(
    config: FinetuneConfig,
    sets: Datasets,
    train: Batcher,
    batches: BucketedBatches,
    mesh: Mesh,
    workdir: Path,
) -> None:
    """Print what is about to be learned, from which examples, and how they are padded."""
    task, length = config.task, config.data.max_length
    names = ", ".join(task.labels[:12]) + (", …" if len(task.labels) > 12 else "")
    counts = {"train": sets.train, **sets.evals, **sets.tests}
    listed = ", ".join(f"{name} {len(examples):,}" for name, examples in counts.items())
    print_on_main(
        f"devices    {_devices(mesh)}, {config.parallel.mode}\n"
        f"task       {task.kind}"
        + (f": {len(task.labels)} labels: {names}\n" if names else "\n")
        + f"examples   {listed}\n"
        f"padding    {train.padding:.0%} at length {length}; {batches.padding:.0%} with lengths "
        f"{', '.join(map(str, batches.lengths))}\n"
        f"steps      {len(batches):,} of {config.data.batch_size} examples, "
        f"{config.epochs:g} epochs\n"
        f"workdir    {workdir}"
    )
    if train.features.truncated:
        print_on_main(f"truncated  {train.features.truncated:,} texts to {length} tokens")
    if train.features.skipped:
        print_on_main(
            f"skipped    {len(train.features.skipped):,} training examples, all in results.json; "
            f"the first: {train.features.skipped[0]}"
        )
    for source, count in sets.skipped.items():
        print_on_main(f"skipped    {count:,} records of {source}, as the format's own readers do")


def finetuning_end(
    comparison: Sequence[Mapping[str, Any]],
    scores: Mapping[str, Mapping[str, float]],
    truncated: Mapping[str, int],
    workdir: Path,
) -> None:
    """Print the scores beside their baselines, and the files."""
    print_on_main(f"\n{as_text(comparison)}\n")
    for name, values in list(scores.items())[1:]:
        names = [name for name in comparison[0]["scores"] if name in values]
        listed = [f"{name} {values[name]:.4f}" for name in names]
        print_on_main(f"{name:<10} {', '.join(listed) or 'predicted; some labels are missing'}")
    for name, count in truncated.items():
        if count:
            print_on_main(f"truncated  {count:,} texts of {name} to data.max_length tokens")
    print_on_main(
        f"results    {workdir / 'results.json'}, {workdir / 'predictions'}.*\n"
        f"checkpoint {workdir / 'best'}\n"
        f"try        bert-jax predict {workdir} FILE"
    )

"""Human-readable summaries that a run prints at its start and at its end."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax import console
from bert_jax.batches.buckets import BucketedBatches
from bert_jax.batches.loader import TrainBatches
from bert_jax.batches.packing import PairStatistics
from bert_jax.bert import Bert
from bert_jax.config import TaskConfig, TrainConfig
from bert_jax.config.schedule import Schedule, Stage
from bert_jax.console import Level, counted
from bert_jax.convert.names import module_names
from bert_jax.distributed import devices
from bert_jax.distributed.hosts import print_on_main, warn_on_main
from bert_jax.inference.masked_lm import fill_masks
from bert_jax.inference.tokenization import UNKNOWN_TOKENS
from bert_jax.runs import header
from bert_jax.runs.origin import Origin
from bert_jax.runs.pretraining_run import Run as PretrainingRun
from bert_jax.runs.task_run import Run as TaskRun
from bert_jax.tasks.base import Task
from bert_jax.tasks.results import as_text, is_worthless, no_better
from bert_jax.tasks.sequences import longest_sequence
from bert_jax.text.masked_sentences import NUM_SENTENCES, masked_sentences
from bert_jax.text.store import Corpus, TokenStore
from bert_jax.training.optimizer import rate_by_step
from bert_jax.training.step import TrainState

_MANY_EPOCHS = 100  # beyond which a text has nothing new to teach
_SHOWN = 3  # sentences with a filled mask
_ENOUGH_EPOCHS = 40  # as BERT's (Devlin et al. 2019, appendix A.2)


def sizes(stores: Iterable[TokenStore]) -> tuple[int, int]:
    """Return the numbers of tokens and of documents."""
    counts = np.array([(len(store.tokens), store.num_documents) for store in stores])
    tokens, documents = counts.sum(0).tolist()
    return tokens, documents


def pretraining_start(run: PretrainingRun, state: TrainState, batches: TrainBatches) -> None:
    """Print what is about to be trained, on what, and where."""
    config, corpus, objective = run.config, run.corpus, run.objective
    mesh, stages = run.setup.layout.mesh, run.schedule.stages
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    size, pairs = corpus.tokenizer.vocab_size, batches.statistics()
    c, step = config.model, int(state.step)
    beside = [(name, e) for name, e in objective.encoders.items() if e != c]
    others = "".join(f"; a {name} of {encoder.hidden_size}" for name, encoder in beside)
    case = header.case(corpus.tokenizer)
    unused = f" of model.vocab_size {c.vocab_size:,}" if size < c.vocab_size else ""
    resumes = f"; resuming from step {step:,}" if 0 < step < config.steps else ""
    train, held_out = sizes(p.train for p in corpus.parts), sizes(p.eval for p in corpus.parts)
    sources = (
        f"source     {part.name}: {100 * part.weight:.3g}% of the sequences, {count:,}, which is "
        f"{console.epochs(epochs)} of {len(part.train.tokens):,} tokens\n"
        for part, count, epochs in batches.progress_of_parts(config.steps)
    )
    print_on_main(
        f"bert-jax   {header.versions()}\n"
        f"config     {run.recipe or 'given from Python'}, seed {config.seed}\n"
        f"workdir    {run.workdir.address}\n"
        f"devices    {header.devices(mesh)}, {config.parallel.mode} ({axes})\n"
        f"model      {num_params:,} parameters: {counted(c.num_hidden_layers, 'layer')} of "
        f"{c.hidden_size}, {counted(c.num_attention_heads, 'head')}, {c.dtype}{others}\n"
        f"attention  {header.attention(c, mesh, stages, packed=config.data.packing)}\n"
        f"tokenizer  {corpus.tokenizer.kind}, {size:,} tokens{unused}{case}\n"
        f"text       {train[0]:,} tokens in {train[1]:,} documents; held out {held_out[0]:,} in "
        f"{held_out[1]:,}; {corpus.unknown:.2%} of the characters unknown\n"
        f"{''.join(sources)}"
        f"padding    {_padding(config, pairs, batches.block_padding())}\n"
        f"batch      {header.batch(stages, config.optimizer.microbatches)}\n"
        f"steps      {config.steps:,}, which is {console.epochs(batches.epochs())}{resumes}\n"
        f"rate       {header.rate(run.schedule.rate, config.optimizer)}"
    )
    if corpus.warning:
        warn_on_main(corpus.warning)
    most_epochs = max([batches.epochs(), *(e for *_, e in batches.progress_of_parts(config.steps))])
    if most_epochs > _MANY_EPOCHS:
        enough = max(1, int(config.steps * _ENOUGH_EPOCHS / most_epochs))
        fewer = f", or --config.steps={enough}, which reads it {_ENOUGH_EPOCHS} times"
        warn_on_main(
            f"the run reads its text {most_epochs:,.0f} times, which it then knows by rote; give "
            f"more text{fewer if enough > step else ', in another --workdir'}"
        )
    for warning in objective.text_warnings(corpus, pairs):
        warn_on_main(warning)


def finished(done: str, *remedies: str) -> None:
    """Print at once that a run has nothing left to train, and what can be done with it."""
    print_on_main(f"finished   {'; '.join([f'{done}, so nothing is trained', *remedies])}")


def new_schedule(before: Schedule, now: Schedule, step: int) -> None:
    """Print how the schedule of a run differs from what it was, and whether its rate jumps."""
    if before == now:
        return
    steps, decay = now.steps, now.rate.decay
    later = (stage for stage in now.stages if stage.first_step >= step)
    starts = (f"; length {stage.max_length} from step {stage.first_step:,}" for stage in later)
    ends = {
        "constant": f"stays constant to step {steps:,}",
        "wsd": f"falls from step {steps - decay:,} to 0 at step {steps:,}",
    }
    end = ends.get(now.rate.kind, f"falls to 0 at step {steps:,}")
    was = f"; it was {before.steps:,}" if before.steps != steps else ""
    if before.rate.kind == "constant" != now.rate.kind:  # it fell at no step
        was = f"; it was constant to step {before.steps:,}"
    print_on_main(f"schedule   the rate now {end}{was}{''.join(starts)}")
    old, new = (np.asarray(rate_by_step(each.rate)(step)) for each in (before, now))
    same_peak = before.stage_of(step + 1).learning_rate == now.stage_of(step + 1).learning_rate
    if old == new or not same_peak:
        return
    change = f"at step {step:,} from {old:.3g} to {new:.3g}"
    if old < new:
        why = "it had decayed for the earlier end"
        if step < before.rate.warmup:
            why = "its warm-up is shorter"
        elif before.rate.kind != now.rate.kind:
            why = f"its schedule is {now.rate.kind} now"
        elif before.steps == steps:
            why = "its warm-up and decay are others now"
        warn_on_main(f"the learning rate jumps {change}, as {why}")
    elif step < now.rate.warmup:
        warn_on_main(f"the learning rate falls {change}, as its warm-up is longer now")
    elif now.rate.kind == "wsd" and 0 < steps - decay < step:
        enough = -(-step * steps // (steps - decay))  # also where the decay is a share of them
        warn_on_main(
            f"the learning rate falls {change}, as its decay begins at step {steps - decay:,}; "
            f"with --config.steps={enough} it begins later"
        )
    else:
        is_kind = before.rate.kind == now.rate.kind
        why = "it decays for an earlier end" if is_kind else f"its schedule is {now.rate.kind} now"
        warn_on_main(f"the learning rate falls {change}, as {why}")


def _padding(
    config: TrainConfig, pairs: Mapping[int, PairStatistics], blocks: Mapping[int, float]
) -> str:
    form = "{0:.1%} at length {length}, {1:.1%} with data.packing"
    if config.data.packing:
        form = "{1:.1%} at length {length}, {0:.1%} without packing"
    shares = [form.format(*pair, length=length) for length, pair in pairs.items()]
    why = "for which a text is too short"
    shares += [f"{share:.1%} at length {length}, {why}" for length, share in blocks.items()]
    return "; ".join(shares) or "none, as every sequence is full"


def origin(origin: Origin, init_name: str, step: int, state: TrainState) -> None:
    """Print what a run begins with."""
    if origin.fork:
        print_on_main(f"forked     {origin.fork}: its whole state, at step {step:,}")
    elif origin.bert and step:
        print_on_main(f"resuming from step {step:,}; --init is not used again")
    elif origin.bert:
        initialized_from(init_name, state.params, origin.bert.params)


def initialized_from(name: str, params: Any, source: Any) -> None:
    """Print which modules of a model come from a checkpoint, and which do not."""
    target, source = module_names(params), module_names(source)
    new, dropped = (", ".join(sorted(n)) or "none" for n in (target - source, source - target))
    print_on_main(f"weights    {name}; randomly initialized: {new}; dropped: {dropped}")


def pretraining_end(
    run: PretrainingRun,
    batches: TrainBatches,
    scores: Mapping[str, float],
    baselines: Mapping[str, float],
    bert: Bert | None,
) -> None:
    """Print the held-out scores beside their baselines, some filled masks, and the files."""
    objective, corpus, workdir = run.objective, run.corpus, run.workdir.address
    print_on_main(f"\n{'held-out text':<18}{'model':>8}{'baseline':>10}", Level.RESULTS)
    for figure in objective.figures:
        score, baseline = scores.get(figure.name), baselines.get(figure.name)
        if score is None or baseline is None:
            continue
        value, other = format(score, figure.form), format(baseline, figure.form)
        is_better = score < baseline if figure.name.endswith("_loss") else score > baseline
        mark = "" if is_better and value != other else f": {no_better()}"
        print_on_main(
            f"{figure.heading:<18}{value:>8}{other:>10}  {figure.baseline}{mark}", Level.RESULTS
        )
    main = objective.figures[0]
    rows = [("source", "share", "sequences", "epochs", main.title)]
    for part, count, epochs in batches.progress_of_parts(run.config.steps):
        numbers = (f"{100 * part.weight:.3g}%", f"{count:,}", console.epochs(epochs).split()[0])
        score = scores.get(f"{main.name}/{part.name}")  # none where nothing was predicted
        rows.append((part.name, *numbers, "-" if score is None else f"{score:.3f}"))
    if len(rows) > 1:
        lines = ("{:18}{:>8}{:>14}{:>10}{:>10}".format(*row) for row in rows)
        print_on_main("\n" + "\n".join(lines), Level.RESULTS)
    longest = objective.config.model.max_position_embeddings - 2
    of_parts = zip(*(masked_sentences(part, longest) for part in corpus.parts), strict=False)
    sentences = list(itertools.chain.from_iterable(of_parts))[:NUM_SENTENCES]
    fills_masks = hasattr(objective.model, "mask_head")
    examples = []
    if bert and fills_masks and console.shows(Level.PROGRESS):
        examples = _fill_some(bert, sentences)
        for _, lines in examples:
            print_on_main(f"\n{lines}")
    shown = [ids for ids, _ in examples or sentences]
    print_on_main(
        f"\ncheckpoint {run.last_checkpoint}\n"
        f"metrics    {workdir / 'metrics.jsonl'}, {workdir / 'curves.png'}, "
        f"{workdir / 'tensorboard'}",
        Level.RESULTS,
    )
    command = f"embed {console.quoted(workdir)} FILE"
    if fills_masks:
        command = f"fill-mask {console.quoted(workdir)} {_example(corpus, shown)}"
    print_on_main(f"{_cost()}\ntry        bert-jax {command}")


def _fill_some(
    bert: Bert, sentences: Iterable[tuple[list[int], str]]
) -> list[tuple[list[int], str]]:
    """Return sentences whose word the model knows, then one that it misses, as far as there are.

    Each has its token ids, with the mask, and the lines that show what is filled in. The words that
    the model guesses least often come first: "the" is right in many places.
    """
    right, missed, guessed = [], [], Counter[str]()
    with console.working("filling masks", says_end=False):
        for ids, answer in sentences:
            guesses = fill_masks(bert, ids, 3)
            listed = ", ".join(f"{_word(g.token)} {g.probability:.0%}" for g in guesses)
            text = bert.tokenizer.decode_with_masks(ids)
            lines, guess = f"{text}\n    [MASK] = {listed} (was {_word(answer)})", guesses[0].token
            guessed[guess] += 1
            (right if guess == answer else missed).append((guess, ids, lines))
    right.sort(key=lambda filled: guessed[filled[0]])
    right = right[: _SHOWN - 1] if missed else right[:_SHOWN]
    return [(ids, lines) for _, ids, lines in (*right, *missed[: _SHOWN - len(right)])]


def _word(token: str) -> str:
    """Return a token without the mark of a space before it."""
    return token.lstrip("▁Ġ") or token


def _cost() -> str:
    """Return the time and the memory that a run took, in lines."""
    peak = devices.peak_memory(jax.local_devices())
    memory = f"\nmemory     {peak / 2**30:,.2f} GiB at its peak" if peak else ""
    return f"time       {console.time_spent()}{memory}"


def _example(corpus: Corpus, examples: Iterable[list[int]]) -> str:
    """Return a masked text to paste, the first that has the tokens of an example if any has."""
    tokenizer = corpus.tokenizer
    texts = [(tokenizer.decode_with_masks(ids), ids) for ids in examples]
    texts = [(text, ids) for text, ids in texts if not text.startswith("-")]  # as a flag does
    same = [text for text, ids in texts if tokenizer.encode_with_masks(text) == ids]
    return next((console.quoted(text) for text in (*same, *(text for text, _ in texts))), "TEXT")


def finetuning_start(run: TaskRun, batches: BucketedBatches) -> None:
    """Print what is about to be learned, from which examples, and how they are padded."""
    config, mesh = run.config, run.program.setup.layout.mesh
    sets, train = run.examples.datasets, run.examples.train
    task, length = config.task, longest_sequence(config.model, config.data.max_length)
    names = ", ".join(task.labels[:12]) + (", …" if len(task.labels) > 12 else "")
    labels = f": {counted(len(task.labels), 'label')}: {names}" if names else ""
    counts = {"train": sets.train, **sets.evals, **sets.tests}
    listed = ", ".join(f"{name} {len(examples):,}" for name, examples in counts.items())
    seeds = f"seed {config.seed}"
    if config.seeds > 1:
        seeds = f"seeds {config.seed} to {config.seed + config.seeds - 1}"
    count, choices = batches.per_sequence, train.features.choices
    packed = train.features.is_packed
    longest = Stage(max_length=count * train.longest, batch_size=config.data.batch_size // count)
    held = "sequences" if count == 1 else f"sequences, of {count} examples each,"
    if choices > 1 and not packed:
        held = f"examples, of {choices} sequences each,"
    print_on_main(
        f"bert-jax   {header.versions()}\n"
        f"config     {run.recipe or 'given from Python'}, {seeds}\n"
        f"workdir    {run.workdir.path}\n"
        f"devices    {header.devices(mesh)}, {config.parallel.mode}\n"
        f"attention  {header.attention(config.model, mesh, [longest], packed=packed)}\n"
        f"task       {task.kind}{labels}\n"
        f"examples   {listed}\n"
        f"padding    {train.padding:.0%} at length {length}; {batches.padding:.0%} with lengths "
        f"{', '.join(map(str, batches.lengths))}\n"
        f"batch      {longest.batch_size} {held} of at most {longest.max_length} tokens\n"
        f"steps      {len(batches):,}, which is "
        f"{console.epochs(len(batches) / run.steps_per_epoch)}\n"
        f"rate       {header.rate(run.rate, config.optimizer)}"
    )
    unknown, tokens = train.unknown
    if 100 * unknown > tokens:
        warn_on_main(f"{unknown / tokens:.1%} {UNKNOWN_TOKENS}")
    if train.features.truncated:
        print_on_main(f"truncated  {run.task.truncation(train.features.truncated, config.data)}")
    if train.features.windowed:
        print_on_main(
            f"windows    {counted(train.features.windowed, 'text')} of more than {length} tokens, "
            f"read in windows: {len(train.features):,} sequences with those of all other texts"
        )
    if train.features.skipped:
        skipped = train.features.skipped
        of = f"{len(skipped):,} of {len(sets.train):,} training examples"
        print_on_main(f"skipped    {of}, all in results.json; the first: {skipped[0]}")
        if 10 * len(skipped) > len(sets.train):
            warn_on_main(f"the labels of {of} cannot be used, so that nothing is learned from them")


def rate_found(
    best: float, tried: Sequence[Mapping[str, Any]], task: Task, num_scored: int
) -> None:
    """Print how good each learning rate was that was tried, and which is the best."""
    finite = [each for each in tried if "scores" in each]
    scores = [(each["learning_rate"], task.mean_score(each["scores"])) for each in finite]
    listed = ", ".join(f"{rate:g} {score:.3f}" for rate, score in scores)
    names = " and ".join(task.metrics)
    print_on_main(
        f"\nrate       {best:g} is the best: {listed} ({names} of {num_scored:,} examples)"
    )
    if all(each["degenerate"] for each in finite):
        warn_on_main(
            "no learning rate is better than a constant prediction, so that the best is not known; "
            "give others, or more examples, and another --workdir"
        )
        return
    rates = [each["learning_rate"] for each in tried]
    if best in (min(rates), max(rates)):
        side = "smaller" if best == min(rates) else "larger"
        print_on_main(f"           it is the {side[:-1]}st; a {side} one may be better still")


def tuned(
    before: TaskConfig,
    after: TaskConfig,
    scores_before: Mapping[str, float],
    scores_after: Mapping[str, float],
) -> None:
    """Print what was chosen on the held-out examples, if that changed their scores."""
    values, chosen = dataclasses.asdict(before), dataclasses.asdict(after)
    changed = [
        f"{score} {scores_before[score]:z.4f} to {number:z.4f}"
        for score, number in scores_after.items()
        if number != scores_before[score]
    ]
    for name, value in chosen.items():
        if changed and value != values[name]:
            number = f" {value:.6g}" if isinstance(value, float) else ""  # else one a label
            print_on_main(f"tuned      task.{name}{number}: {', '.join(changed)}", Level.RESULTS)


def finetuning_end(
    comparison: Sequence[Mapping[str, Any]],
    scores: Mapping[str, Mapping[str, float]],
    truncated: Mapping[str, str],
    workdir: Path,
) -> None:
    """Print the scores beside their baselines, and the files."""
    print_on_main(f"\n{as_text(comparison)}\n", Level.RESULTS)
    for name, values in list(scores.items())[1:]:
        names = [name for name in comparison[0]["scores"] if name in values]
        listed = [f"{name} {values[name]:z.4f}" for name in names]
        listed = ", ".join(listed) or "predicted; some labels are missing, or they give no scores"
        print_on_main(f"{name:<10} {listed}", Level.RESULTS)
    for name, what in truncated.items():
        print_on_main(f"truncated  of {name}: {what}")
    print_on_main(
        f"results    {workdir / 'results.json'}, {workdir / 'predictions'}.*\n"
        f"checkpoint {workdir / 'best'}",
        Level.RESULTS,
    )
    print_on_main(_cost())
    if is_worthless(comparison):
        warn_on_main(
            "the model is no better than a constant prediction, so its own are worth nothing yet; "
            "try another --config.optimizer.learning_rate, a larger --config.epochs, more examples "
            "or another --init, in another --workdir"
        )
        return
    print_on_main(f"try        bert-jax predict {console.quoted(workdir)} FILE")

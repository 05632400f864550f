"""The `bert-jax` command, and how every command of the project reads its flags and ends."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from bert_jax.commands.flags import run
from bert_jax.config import DataConfig, ModelConfig, TokenizerConfig, TrainConfig, validate
from bert_jax.errors import UserError


def _prepare(args: argparse.Namespace) -> None:
    from bert_jax.text import prepare as prepare_lib
    from bert_jax.text import tokenizer as tokenizer_lib

    lowercase = not args.cased
    is_path = args.tokenizer not in ("sentencepiece", "wordpiece", "byte_bpe")
    kind = TokenizerConfig.kind if is_path else args.tokenizer
    tokenizer = TokenizerConfig(kind=kind, model_type=args.model_type, lowercase=lowercase)
    data = DataConfig(
        source=args.source,
        eval_source=args.eval_source,
        eval_fraction=args.eval_fraction,
        text_field=args.text_field,
        sentences=args.sentences,
    )
    model = ModelConfig(vocab_size=args.vocab_size)
    validate(TrainConfig(data=data, tokenizer=tokenizer, model=model))
    given = tokenizer
    if is_path and Path(args.tokenizer).is_file():
        given = tokenizer_lib.load(args.tokenizer, lowercase=lowercase)
    elif is_path:
        from bert_jax import bert as pretrained  # whose imports take a second

        given = pretrained.load_tokenizer(args.tokenizer, lowercase=lowercase)
    prepared = prepare_lib.prepare(data, given, args.vocab_size, Path(args.store))
    for name, split in (("training", prepared.train), ("held out", prepared.eval)):
        print(
            f"{name}: {len(split.tokens):,} pieces, {split.num_sentences:,} sentences, "
            f"{split.num_documents:,} documents"
        )
    source = shlex.quote(f"--config.data.source={args.store}")
    command = f"python train.py --config=configs/tiny.py {source} --config.model.vocab_size=0"
    print(f"train on it with: {command}")


def _fill_mask(args: argparse.Namespace) -> None:
    from bert_jax.bert import load
    from bert_jax.commands import process as programs

    programs.keep()
    for number, guesses in enumerate(load(args.checkpoint).fill_mask(args.text, args.top_k)):
        lines = (f"{guess.probability:6.1%}  {guess.token:<16}  {guess.text}" for guess in guesses)
        print("\n" * (number > 0) + "\n".join(lines))


def _import(args: argparse.Namespace) -> None:
    import jax

    from bert_jax import bert as pretrained
    from bert_jax.commands.process import return_host_memory
    from bert_jax.convert import names

    return_host_memory()
    bert = pretrained.load(args.source)
    pretrained.save(bert, args.destination)
    c, size = bert.config, sum(x.size for x in jax.tree.leaves(bert.params))
    print(
        f"{size:,} parameters: {c.model_type}, {c.num_hidden_layers} layers of {c.hidden_size}, "
        f"{c.hidden_act}; {', '.join(sorted(names.module_names(bert.params))) or 'no heads'}; "
        f"{bert.tokenizer.kind}, {bert.tokenizer.vocab_size:,} pieces"
    )
    _print_task(bert)
    if bert.unused:
        print(f"left out, as the model has no place for them: {', '.join(bert.unused)}")


def _export(args: argparse.Namespace) -> None:
    from bert_jax import bert as pretrained
    from bert_jax.commands.process import return_host_memory

    return_host_memory()
    bert = pretrained.load(args.checkpoint)
    made = pretrained.export(bert, args.destination, args.head)
    name = made.architecture
    print(f"{name}; load it with transformers.{name}.from_pretrained({args.destination!r})")
    if "classifier" not in made.dropped:
        _print_task(bert)
    if made.dropped:
        print(f"dropped, as {made.architecture} has no such modules: {', '.join(made.dropped)}")
    if made.newly_initialized:
        print(f"newly initialized by transformers: {', '.join(made.newly_initialized)}")


def _print_task(bert: Any) -> None:
    if bert.task:
        labels = bert.task.labels
        shown = ", ".join(labels[:12]) + (", …" if len(labels) > 12 else "")
        print(bert.task.kind + (f"; {len(labels)} labels: {shown}" if labels else ""))


def _embed(args: argparse.Namespace) -> None:
    import numpy as np
    from tqdm import tqdm

    from bert_jax import bert as pretrained
    from bert_jax import embeddings as features
    from bert_jax.commands import process as programs
    from bert_jax.commands.process import keep_host_memory
    from bert_jax.text import sources as text_lib

    try:
        layers = tuple(int(layer) for layer in args.layer.split(","))
    except ValueError as error:
        raise UserError(f"--layer {args.layer}: numbers are wanted, such as -2 or -1,-2") from error
    path, output = Path(args.file), Path(args.output)
    if not path.is_file():
        raise UserError(f"{path} is no file; give one with a text a line")
    if output.suffix != ".npz" or output.is_dir():
        raise UserError(f"--output {output}: give a file that ends in .npz")
    if not os.access(output.absolute().parent, os.W_OK):
        raise UserError(f"--output {output} cannot be written there; make the folder first")
    keep_host_memory()
    programs.keep()
    encoder = pretrained.load(args.checkpoint).encoder(layers, args.pooling)
    lines = text_lib.read_lines(path)
    number = cut = end = 0
    bar = tqdm(total=path.stat().st_size, unit="B", unit_scale=True, disable=None, leave=False)
    with bar, features.NpzWriter(output) as writer:
        for chunk in features.chunks(lines, lambda line: len(line[0])):
            found = encoder.chunk([text for text, _ in chunk])
            if found[0].spans is None:
                writer.append("vectors", np.stack([text.vectors for text in found]))
            else:
                spans = [text.spans for text in found if text.spans is not None]
                ends = end + np.cumsum([len(of_text) for of_text in spans])
                end = int(ends[-1])
                writer.append("vectors", np.concatenate([text.vectors for text in found]))
                writer.append("spans", np.concatenate(spans))
                writer.append("ends", ends)
            number += len(found)
            cut += sum(text.is_truncated for text in found)
            bar.update(chunk[-1][1] - bar.n)
        if not number:
            raise UserError(f"{path} has no lines; give a text a line")
    print(f"{output}: {number:,} texts")
    if cut:
        print(f"{cut:,} of them are longer than the model's positions; their ends were left out")


def _predict(args: argparse.Namespace) -> None:
    import dataclasses

    import jax

    from bert_jax import bert as pretrained
    from bert_jax.batches.buckets import Batcher
    from bert_jax.commands import process as programs
    from bert_jax.commands.process import keep_host_memory
    from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
    from bert_jax.tasks import datasets, make_task
    from bert_jax.training import evaluation as prediction
    from bert_jax.training.objectives import TaskObjective
    from bert_jax.training.step import make_predict_step

    keep_host_memory()
    programs.keep()
    bert = pretrained.load(args.checkpoint)
    if bert.task is None:
        raise UserError(f"{args.checkpoint} has no head of a task; fine-tune it with finetune.py")
    if not os.access(Path(args.output).absolute().parent, os.W_OK):
        raise UserError(f"--output {args.output} cannot be written there; make the folder first")
    given = {"text": args.text, "label": args.label}
    data = dataclasses.replace(bert.data, **{k: v for k, v in given.items() if v})
    of_columns = {} if not (args.text or args.label) else {"glue": ""}  # named by the user
    task = make_task(dataclasses.replace(bert.task, **of_columns))
    examples, skipped = datasets.read_examples(task, args.file, data, labelled=False)
    if not task.labels:  # of multiple choice from elsewhere, whose choices have no names
        task = type(task)(task.config, task.label_names(examples))
    datasets.check_labels(task, examples)
    rows = task.features(examples, bert.tokenizer, bert.config, data.max_length)
    batcher = Batcher(rows, bert.tokenizer, bert.config.type_vocab_size, data.max_length)
    mesh = make_mesh()
    layout = replicated_layout(mesh)
    step = compile_step(
        make_predict_step(TaskObjective(bert.model, is_regression=bert.task.kind == "regression")),
        "mesh",
        layout,
        layout.params,
        outputs=("per_example", "metrics"),
    )
    params, size = jax.device_put(bert.params, layout.params), 32 * mesh.size
    found, values = prediction.predict(step, params, task, examples, batcher, size)
    paths = prediction.write(task, examples, found, Path(args.output))
    print(f"{len(examples):,} examples: {', '.join(map(str, paths))}")
    if skipped:
        print(f"skipped {skipped:,} records, as the format's own readers do")
    if rows.truncated:
        print(f"cut {rows.truncated:,} texts to {data.max_length} pieces")
    shown = (f"{name} {value:.4f}" for name, value in values.items() if "second" not in name)
    print(", ".join(shown) or "no scores: not every example has a label")


def _plan(words: list[str]) -> None:
    from bert_jax.commands import plan as command

    command.run(words)


def _benchmark(words: list[str]) -> None:
    from bert_jax.commands import benchmark as command

    command.run(words)


_CHECKPOINT = "a workdir, a checkpoint of it, or a directory of Hugging Face's or Google's"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bert-jax", description="Tools around BERT in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    defaults = DataConfig()

    prepare = commands.add_parser(
        "prepare",
        help="tokenize text into a store that train.py reads",
        description="Tokenizes text into a store, once. Run it again after an interruption: it "
        "goes on where it was. Then: python train.py --config.data.source=STORE",
    )
    prepare.add_argument(
        "source",
        metavar="SOURCE",
        help="text files or globs, comma separated (plain text, .gz, .xz, .jsonl), tfds:NAME or "
        "builtin",
    )
    prepare.add_argument("store", metavar="STORE", help="the folder to write")
    prepare.add_argument(
        "--tokenizer",
        default="sentencepiece",
        help="sentencepiece, wordpiece or byte_bpe to train one on the text, or the path of a "
        "SentencePiece .model, a BERT vocab.txt, a tokenizer.json, the folder of one, or a "
        "CHECKPOINT (default: sentencepiece)",
    )
    prepare.add_argument(
        "--vocab-size", type=int, default=32000, help="pieces of a tokenizer trained here (32000)"
    )
    prepare.add_argument(
        "--model-type", choices=("unigram", "bpe"), default="unigram", help="of a SentencePiece"
    )
    prepare.add_argument("--cased", action="store_true", help="keep upper case")
    prepare.add_argument("--eval-source", default="", metavar="SOURCE", help="held-out text")
    prepare.add_argument(
        "--eval-fraction",
        type=float,
        default=defaults.eval_fraction,
        help="the share of documents held out where there is no --eval-source (0.05)",
    )
    prepare.add_argument(
        "--text-field", default=defaults.text_field, help="of JSON lines and TFDS (text)"
    )
    prepare.add_argument(
        "--sentences",
        choices=("auto", "lines", "split"),
        default=defaults.sentences,
        help="lines: one sentence a line, a blank line between documents; split: paragraphs, split "
        "into sentences; auto: see which it is",
    )
    prepare.set_defaults(run=_prepare)

    fill_mask = commands.add_parser(
        "fill-mask",
        help="guess the masked words of a sentence",
        description="Prints the most probable pieces for each [MASK] of a text.",
    )
    fill_mask.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    fill_mask.add_argument("text", metavar="TEXT", help='such as "The [MASK] statement"')
    fill_mask.add_argument("--top-k", type=int, default=5, help="guesses a mask (5)")
    fill_mask.set_defaults(run=_fill_mask)

    embed = commands.add_parser(
        "embed",
        help="write embeddings of texts",
        description="Embeds every line of a text file with the frozen encoder and writes them to "
        "an .npz: `vectors`, one row a line; for tokens and words one row each, with `spans`, "
        "where each begins and ends in its line (without the space around it), and `ends`, the "
        "row at which each line's end.",
    )
    embed.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    embed.add_argument("file", metavar="FILE", help="a text a line; plain, .gz or .xz")
    embed.add_argument("--output", required=True, metavar="OUT.npz", help="the file to write")
    embed.add_argument(
        "--layer",
        default="-1",
        help="0 for the embeddings, 1 for the first layer, -1 for the last; several are added up: "
        "--layer=-1,-2 (-1)",
    )
    embed.add_argument(
        "--pooling",
        choices=("mean", "cls", "max", "tokens", "words"),
        default="mean",
        help="one vector a text: the mean or maximum of all pieces, or the first ([CLS]); or one "
        "for each token (piece) or word (mean)",
    )
    embed.set_defaults(run=_embed)

    predict = commands.add_parser(
        "predict",
        help="apply a fine-tuned model to new data",
        description="Writes the model's predictions for a file of its task: JSON lines; CoNLL "
        "columns for words; SQuAD's JSON for questions. Prints the scores where all have labels.",
    )
    predict.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    predict.add_argument("file", metavar="FILE", help="as finetune.py takes it, or tfds:NAME@SPLIT")
    predict.add_argument(
        "--output", default="predictions", help="the file, without its ending (predictions)"
    )
    predict.add_argument("--text", metavar="COLUMNS", help="of the text (as in fine-tuning)")
    predict.add_argument("--label", metavar="COLUMN", help="of the label (as in fine-tuning)")
    predict.set_defaults(run=_predict)

    importer = commands.add_parser(
        "import",
        help="make a checkpoint of a Hugging Face or Google directory",
        description="Writes a checkpoint of this package's own. Every command takes the foreign "
        "directories as they are, too; a checkpoint loads faster and is complete by itself.",
    )
    importer.add_argument("source", metavar="SRC", help=_CHECKPOINT)
    importer.add_argument("destination", metavar="DST", help="the checkpoint to write")
    importer.set_defaults(run=_import)

    exporter = commands.add_parser(
        "export",
        help="make a Hugging Face directory of a checkpoint",
        description="Writes a directory that transformers loads: config, model.safetensors and "
        "tokenizer.",
    )
    exporter.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    exporter.add_argument("destination", metavar="DST", help="the directory to write")
    exporter.add_argument(
        "--head",
        choices=("pretraining", "masked-lm", "none"),
        help="which heads go with the encoder: both, the masked LM's, or the pooler alone "
        "(default: all that the checkpoint has)",
    )
    exporter.set_defaults(run=_export)

    # These take fields of a config besides, and read their words themselves.
    whats = {
        _plan: ("plan", "what a training step will cost on devices that are not here"),
        _benchmark: ("benchmark", "how fast the training step of a config is here"),
    }
    for command, (name, what) in whats.items():
        commands.add_parser(name, help=what, add_help=False).set_defaults(run_words=command)
    return parser


def main() -> None:
    """Runs `bert-jax`."""
    parser = _parser()
    args, rest = parser.parse_known_args()
    if "run_words" in args:
        run(lambda: args.run_words(rest))
        return
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run(lambda: args.run(args))


if __name__ == "__main__":
    main()

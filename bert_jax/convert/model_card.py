"""The card of an exported model, README.md: what it is, how it was trained, how to load it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from bert_jax.config import DataFiles, FinetuneConfig, TrainConfig, settings
from bert_jax.config.fields import MODEL_TYPES
from bert_jax.console import code_span, counted, epochs
from bert_jax.convert.huggingface import Exportable, Exported
from bert_jax.convert.sentence_transformers import LIBRARY
from bert_jax.objectives import make_objective
from bert_jax.storage import json_files, paths
from bert_jax.storage.paths import AnyPath, file_name
from bert_jax.text.records import is_dataset
from bert_jax.training import checkpoint

_FILES = ("source", "eval_source", "path", "train", "eval", "test")  # fields that name files
# Of the header: fields that an export sets or leaves out, and all tags that one may have.
FIELDS = ("library_name", "pipeline_tag", "base_model")
_TAGS, _TAGS_OF_LIBRARY = ("bert-jax", "jax"), (LIBRARY, "feature-extraction")
TAGS = (*_TAGS, *_TAGS_OF_LIBRARY, *MODEL_TYPES)
_GUESSES = ("BertForPreTraining", "ForMaskedLM")  # ends of architectures that fill masks
_MAX_LABELS = 20
_REMEDY = "move it away"  # what to do with damaged results


def write(folder: Path, name: str, model: Exportable, exported: Exported, max_length: int) -> None:
    """Write the card of a model that was exported to a folder."""
    from huggingface_hub import ModelCard, ModelCardData

    config, tokenizer, data, source = model.config, model.tokenizer, model.data, model.source
    run, results, path = _records(source)
    origin = str(results.get("init") or (source if isinstance(source, str) else ""))
    task, guesses = exported.task, exported.architecture.endswith(_GUESSES)
    pipeline = "fill-mask" if guesses else "feature-extraction"
    tags = [*_TAGS, config.model_type]
    if exported.library == LIBRARY:
        tags += _TAGS_OF_LIBRARY
    header = ModelCardData(
        library_name=exported.library,
        pipeline_tag=(task.pipeline_tag if task else pipeline) or None,
        base_model=_repository(origin) if paths.is_on_hub(origin) else None,
        tags=tags,
    )
    layers = counted(config.num_hidden_layers, "layer")
    about = (
        f"An encoder of type `{config.model_type}` of {layers}, hidden size "
        f"{config.hidden_size:,}, with {exported.num_parameters:,} parameters "
        f"(`{exported.architecture}`). It reads up to {max_length:,} tokens; its tokenizer is a "
        f"{tokenizer.kind} of {tokenizer.vocab_size:,} tokens. Written by bert-jax, which trains "
        "encoders in JAX."
    )
    if task and not task.num_outputs:
        rest = len(task.labels) - _MAX_LABELS
        labels = ", ".join(code_span(label) for label in task.labels[:_MAX_LABELS])
        about += f" Its labels are {labels}{f' and {rest:,} more' if rest > 0 else ''}."
    parts = [f"# {name}", about, task.description(config) if task else ""]
    if run:
        with json_files.refusing_malformed(path, _REMEDY):
            parts += _scores(source, run, results, exported.dropped)
            parts += ["## Training", *_training(source, run, results, origin), _settings(run)]
    parts += ["## Use", "With bert-jax:", _python(_ours(name, exported, data))]
    parts += [f"With `{exported.library}`:", _python(_theirs(name, exported, data))]
    body = "\n\n".join(filter(None, parts))
    comment = "# Add the license and the language, such as `license: mit` and `language: en`."
    ModelCard(f"---\n{comment}\n{header.to_yaml()}\n---\n\n{body}\n").save(folder / "README.md")


def _records(
    source: str | AnyPath | None,
) -> tuple[TrainConfig | FinetuneConfig | None, Any, AnyPath]:
    """Return the config and the results of the run that wrote a checkpoint, and their file.

    Without a run None, nothing and a file that is not there.
    """
    folder = Path() if source is None or isinstance(source, str) else source
    is_step = folder.name.isdecimal() and folder.parent.name == "checkpoints"
    workdir = folder.parents[1] if is_step else folder.parent
    path = workdir / "results.json"
    is_best = folder.name.startswith("best") and path.exists()
    if not (is_step or is_best) or not (folder / "config").exists():  # or it is there no more
        return None, {}, path
    run = checkpoint.read_config(folder)
    if isinstance(run, TrainConfig) and not is_step:  # a model that was saved beside the run
        return None, {}, path
    results = json_files.read_json(path, _REMEDY) if path.exists() else {}
    return run, results, path


def _scores(source: Any, run: Any, results: Mapping[str, Any], dropped: Sequence[str]) -> list[str]:
    """Return a table of held-out scores beside their baselines, as far as they are recorded."""
    if isinstance(run, TrainConfig):
        scores, objective = checkpoint.read_scores(source), make_objective(run)
        if scores is None and str(results.get("step")) == source.name:
            scores = results.get("scores")
        baselines = results.get("baselines", {}) | objective.moving_baselines(scores or {})
        rows = []
        for figure in objective.figures:
            name, form = figure.name, figure.form
            if scores and name in scores and figure.baseline:
                other = f"{baselines[name]:{form}} ({figure.baseline})" if name in baselines else ""
                rows.append((figure.heading, f"{scores[name]:{form}}", other))
        columns = ("held-out text", "this model", "baseline")
    else:
        summary = results.get("summary", [])
        columns = ("", *summary[0]["scores"]) if summary else ()
        scored = {f"this model, on {code_span(k)}": v for k, v in results.get("scores", {}).items()}
        if scored and _is_tuned(next(iter(scored.values())), summary):
            first = next(iter(scored))
            scored = {f"{first}, on which it was tuned": scored.pop(first), **scored}
        # The runs of single seeds are this model, or no better.
        scored |= {r["name"]: r["scores"] for r in summary if not r["name"].startswith("seed ")}
        rows = [
            (title, *(f"{scores[key]:z.4f}" if key in scores else "" for key in columns[1:]))
            for title, scores in scored.items()
            if scores  # a test set without labels has none
        ]
    if not rows:
        return []
    note = f"Measured with heads that are not in this repository: {', '.join(dropped)}."
    lines = [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]
    return ["## Scores on held-out examples", note if dropped else "", "\n".join(lines)]


def _is_tuned(scores: Mapping[str, float], summary: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the scores on the first held-out set are those of no run as it was trained."""
    return not any(
        all(abs(scores.get(name, value) - value) < 1e-4 for name, value in row["scores"].items())
        for row in summary
    )


def _training(source: Any, run: Any, results: Any, origin: str) -> list[str]:
    """Return what a model started from, its data and how long it was trained."""
    if paths.is_on_hub(origin):
        repository = _repository(origin)
        start = f"[{repository}](https://huggingface.co/{repository})"
    else:
        folder = PurePath(origin)  # of a step, that of the run says more
        folder = folder.parents[1] if folder.parent.name == "checkpoints" else folder
        start = code_span(folder.name) if origin else "random weights"
    lines = [f"Started from {start}."] if origin or "init" in results else []
    if isinstance(run, FinetuneConfig):
        # Without a file, GLUE's task has data of its own.
        name = _short(run.data.train) or run.task.glue
        examples = code_span(name) if name else "examples in memory"
        lines.append(
            f"Fine-tuned for {run.task.kind} on {examples}: the best evaluation of at most "
            f"{epochs(run.epochs)}."
        )
        if run.data.eval:
            held_out = code_span(_short(run.data.eval))
            lines.append(f"Its held-out examples are those of {held_out}.")
    else:
        text, step = code_span(_short(run.data.source)), int(source.name)
        if counts := results.get("text"):
            text += ", {tokens:,} tokens in {documents:,} documents".format(**counts)
        lines.append(f"Pretrained on {text}; {step:,} of {run.steps:,} steps.")
    return lines


def _settings(run: TrainConfig | FinetuneConfig) -> str:
    """Return the fields that are not the defaults, but for the model's, which config.json has."""
    defaults, lines = settings.defaults(run), []
    for name, value in settings.flatten(run).items():
        if value != defaults[name] and not name.startswith(("model.", "task.labels", "parallel.")):
            is_file = name.rpartition(".")[2] in _FILES
            lines.append(f"{name} = {(_short(value) if is_file else value)!r}")
    block = "\n".join(lines).replace("`", "'")
    title = "<summary>Settings that are not the defaults of bert-jax</summary>"
    return f"<details>{title}\n\n```text\n{block}\n```\n\n</details>" if lines else ""


def _ours(name: str, exported: Exported, data: DataFiles) -> str:
    """Return code that loads and uses the model with this package."""
    use = 'print(bert.encode(["A text."]).shape)  # one embedding a text'
    if exported.task:
        use = exported.task.python_code(data)
    elif exported.architecture.endswith(_GUESSES):
        use = 'for guess in bert.fill_mask("A text with a [MASK] in it."):\n'
        use += "    print(guess.token, guess.probability)"
    address = json.dumps(f"hf:{name}" if "/" in name else name)
    return f"import bert_jax\n\nbert = bert_jax.load({address})\n{use}"


def _theirs(repository: str, exported: Exported, data: DataFiles) -> str:
    """Return code that loads and uses the model with the library that it is exported for."""
    name, address = exported.architecture, json.dumps(repository)
    if exported.library == LIBRARY:
        loaded = f"from sentence_transformers import {name}\n\nmodel = {name}({address})\n"
    else:
        loaded = f"from transformers import AutoTokenizer, {name}\n\n"
        loaded += f"tokenizer = AutoTokenizer.from_pretrained({address})\n"
        loaded += f"model = {name}.from_pretrained({address})\n\n"
    use = 'inputs = tokenizer("A text.", return_tensors="pt")\noutputs = model(**inputs)'
    return loaded + (exported.task.library_code(data) if exported.task else use)


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


def _repository(name: str) -> str:
    return name.removeprefix(paths.HUB).partition("@")[0]


def _short(files: str) -> str:
    """Return files without their folders, which are of no use to others, and may be private."""
    # Nor with what signs an address: "?key=…".
    names = (re.sub(r"\?\w+=.*", "", file.strip()) for file in files.split(","))
    return ",".join(name if is_dataset(name) else file_name(name) for name in names)

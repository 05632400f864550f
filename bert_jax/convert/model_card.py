"""The card of an exported model, README.md: what it is, how it was trained, how to load it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from bert_jax.config import (
    DataFiles,
    EmbeddingConfig,
    FinetuneConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
    settings,
)
from bert_jax.console import counted
from bert_jax.convert.huggingface import Exported
from bert_jax.storage.paths import AnyPath
from bert_jax.tasks import glue
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint
from bert_jax.training import workdir as workdirs
from bert_jax.training.metrics import HELD_OUT

# By kind of task: the hub's name of it, an example for `predict`, and inputs for `transformers`.
_TEXTS = '"A text.", return_tensors="pt"'
_TASKS = {
    "classification": ("text-classification", '"A text."', _TEXTS),
    "regression": ("text-classification", '"A text."', _TEXTS),
    "token_classification": ("token-classification", '["A", "text"]', _TEXTS),
    "question_answering": (
        "question-answering",
        '{"question": "Which text?", "context": "A text."}',
        '"Which text?", "A text.", return_tensors="pt"',
    ),
    "embedding": ("sentence-similarity", "", ""),
    "multiple_choice": ("", '{"context": "A text.", "choices": ["One end.", "Another."]}', ""),
}
_FILES = ("source", "eval_source", "path", "train", "eval", "test")  # fields that name files
_OBJECTIVES = {
    "nsp": "masked language modelling (MLM) and next sentence prediction (NSP)",
    "sop": "masked language modelling (MLM) and sentence order prediction (SOP)",
    "none": "masked language modelling (MLM)",
}
_TOKENIZERS = {
    "wordpiece": "WordPiece",
    "sentencepiece": "SentencePiece",
    "byte_bpe": "byte-level BPE",
}
_MAX_LABELS = 20


def write(
    folder: Path,
    name: str,
    exported: Exported,
    config: ModelConfig,
    tokenizer: Tokenizer,
    task: TaskConfig | None,
    source: str | AnyPath | None,
    data: DataFiles,
    max_length: int,
) -> None:
    """Write the card of a model that was exported to a folder from a checkpoint, `source`."""
    name = name.removeprefix("hf:") if name.startswith("hf:") else Path(name).name
    task = None if "classifier" in exported.dropped else task
    run, results = _records(source)
    origin = results.get("init") or (source if isinstance(source, str) else "")
    layers = counted(config.num_hidden_layers, "layer")
    kinds = {"bert": "A BERT", "roberta": "A RoBERTa", "modernbert": "A ModernBERT"}
    kind = {**kinds, "electra": "An ELECTRA"}[config.model_type]
    about = (
        f"{kind} encoder of {layers}, hidden size {config.hidden_size:,}, with "
        f"{exported.num_parameters:,} parameters (`{exported.architecture}`). It reads up to "
        f"{max_length:,} tokens; its tokenizer is "
        f"{_TOKENIZERS[tokenizer.kind]} of {tokenizer.vocab_size:,} tokens. Written by bert-jax, "
        "which trains encoders in JAX."
    )
    if task and task.labels and task.kind != "multiple_choice":
        labels = ", ".join(_code(label) for label in task.labels[:_MAX_LABELS])
        rest = len(task.labels) - _MAX_LABELS
        about += f" Its labels are {labels}{f' and {rest:,} more' if rest > 0 else ''}."
    if task and task.kind == "embedding":
        about += f" {_vectors(task.embedding, config)}"
    parts = [_header(exported, task, origin, config), f"# {name}", about]
    if run:
        parts += _scores(source, run, results, exported.dropped)
        parts += ["## Training", _table(("", ""), _training(source, run, results, str(origin)))]
        parts += _settings(run)
    text = "\n\n".join([*parts, "## Use", *_use(name, exported, task, data)]) + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _records(source: str | AnyPath | None) -> tuple[TrainConfig | FinetuneConfig | None, Any]:
    """Return the config and the results of the run that wrote a checkpoint, if one did."""
    folder = Path() if source is None or isinstance(source, str) else source
    is_step = folder.name.isdigit() and folder.parent.name == "checkpoints"
    workdir = folder.parents[1] if is_step else folder.parent
    if not is_step and not (folder.name.startswith("best") and (workdir / "results.json").exists()):
        return None, {}
    values = checkpoint.read_json(folder, "config")
    kind = FinetuneConfig if "task" in values else TrainConfig
    return settings.from_dict(kind, values, f"{folder}/config"), workdirs.read_results(workdir)


def _header(exported: Exported, task: TaskConfig | None, origin: Any, config: ModelConfig) -> str:
    guesses = exported.architecture.endswith(("BertForPreTraining", "ForMaskedLM"))
    pipeline = "fill-mask" if guesses else "feature-extraction"
    pipeline = _TASKS[task.kind][0] if task else pipeline
    lines = ["# Add the license and the language, such as `license: mit` and `language: en`."]
    library = "sentence-transformers" if task and task.kind == "embedding" else "transformers"
    lines += [f"library_name: {library}"]
    lines += [f"pipeline_tag: {pipeline}"] if pipeline else []
    if str(origin).startswith("hf:"):
        lines += [f"base_model: {_repository(origin)}"]
    tags = ("bert-jax", "jax", config.model_type)
    tags += (library, "feature-extraction") if library != "transformers" else ()
    lines += ["tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join(["---", *lines, "---"])


def _vectors(embedding: EmbeddingConfig, config: ModelConfig) -> str:
    pooled = {
        "mean": "the mean of the tokens'",
        "max": "the maximum of the tokens'",
        "cls": "[CLS]'s",
    }
    steps = [f"{pooled[embedding.pooling]} last hidden states"]
    steps += ["a dense layer"] * bool(embedding.dense) + [
        "scaled to unit length"
    ] * embedding.normalize
    text = f"Vectors have {embedding.dense or config.hidden_size:,} numbers: {', '.join(steps)}."
    prompts = {"query": embedding.query_prompt, "passage": embedding.passage_prompt}
    before = " and ".join(f"{_code(p)} before each {name}" for name, p in prompts.items() if p)
    return f"{text} Put {before}." if before else text


def _scores(source: Any, run: Any, results: Mapping[str, Any], dropped: Sequence[str]) -> list[str]:
    """Return a table of held-out scores beside their baselines, as far as they are recorded."""
    if isinstance(run, TrainConfig):
        scores, baselines = checkpoint.read_scores(source), results.get("baselines", {})
        if scores is None and str(results.get("step")) == source.name:
            scores = results.get("scores")
        rows = []
        for title, key, form, baseline in HELD_OUT:
            if scores and key in scores:
                title = title.format(pairs=run.data.pairs.upper())
                other = f"{baselines[key]:{form}} ({baseline})" if key in baselines else ""
                rows.append((title, f"{scores[key]:{form}}", other))
        columns = ("held-out text", "this model", "baseline")
    else:
        summary = results.get("summary", [])
        columns = ("", *summary[0]["scores"]) if summary else ()
        scored = {f"this model, on {_code(k)}": v for k, v in results.get("scores", {}).items()}
        # The runs of single seeds are this model, or no better.
        scored |= {r["name"]: r["scores"] for r in summary if not r["name"].startswith("seed ")}
        rows = [
            (title, *(f"{scores[key]:z.4f}" if key in scores else "" for key in columns[1:]))
            for title, scores in scored.items()
        ]
    if not rows:
        return []
    note = [f"Measured with heads that are not in this repository: {', '.join(dropped)}."]
    return ["## Scores on held-out examples", *(note if dropped else ()), _table(columns, rows)]


def _training(source: Any, run: Any, results: Any, origin: str) -> list[tuple[str, str]]:
    rows = []
    if origin.startswith("hf:"):
        address = f"https://huggingface.co/{_repository(origin)}"
        rows += [("started from", f"[{_repository(origin)}]({address})")]
    elif "init" in results:
        folder = PurePath(origin)  # of a step, that of the run says more
        folder = folder.parents[1] if folder.parent.name == "checkpoints" else folder
        rows += [("started from", _code(folder.name) if origin else "random weights")]
    data, optimizer = run.data, run.optimizer
    if isinstance(run, FinetuneConfig):
        files = ", ".join(_code(_short(text)) for text in (run.data.train, run.data.eval) if text)
        rows += [("task", f"{run.task.kind}{run.task.glue and f' ({run.task.glue})'}")]
        rows += [("examples", files), ("epochs", f"{run.epochs:g}")]
    else:
        text = _code(_short(run.data.source))
        if run.data.source == "builtin":
            text = "the documentation of Python's standard library"
        if counts := results.get("text"):
            text += "; {tokens:,} tokens in {documents:,} documents".format(**counts)
        step = int(source.name)
        steps = f"{step:,} of {run.steps:,}" if step < run.steps else f"{step:,}"
        rows += [("text", text), ("objective", _objective(run)), ("steps", steps)]
    rows += [("batch", f"{data.batch_size:,} sequences of up to {data.max_length:,} tokens")]
    rate = f"{optimizer.name}, learning rate {optimizer.learning_rate:g}"
    return [*rows, ("optimizer", rate), ("seed", str(run.seed))]


def _objective(run: TrainConfig) -> str:
    is_electra = run.model.model_type == "electra"
    return "replaced token detection (RTD)" if is_electra else _OBJECTIVES[run.data.pairs]


def _settings(run: TrainConfig | FinetuneConfig) -> list[str]:
    """Return the fields that are not the defaults, but for the model's, which config.json has."""
    defaults, lines = settings.flatten(type(run)()), []
    for name, value in settings.flatten(run).items():
        if value != defaults[name] and not name.startswith(("model.", "task.labels", "parallel.")):
            is_file = name.rpartition(".")[2] in _FILES
            lines.append(f"{name} = {(_short(value) if is_file else value)!r}")
    block = "\n".join(lines).replace("`", "'")
    title = "<summary>Settings that are not the defaults of bert-jax</summary>"
    return [f"<details>{title}\n\n```text\n{block}\n```\n\n</details>"] if lines else []


def _use(name: str, exported: Exported, task: TaskConfig | None, data: DataFiles) -> list[str]:
    address, architecture = json.dumps(name), exported.architecture
    ours = json.dumps(f"hf:{name}" if "/" in name else name)
    embedding = task.embedding if task and task.kind == "embedding" else None
    prompt = ', prompt="query"' if embedding and embedding.query_prompt else ""
    result = f'print(bert.encode(["A text."]{prompt}).shape)  # one embedding a text'
    example, texts = _TASKS[task.kind][1:] if task else ("", _TEXTS)
    if texts == _TEXTS and task and len(glue.text_columns(task, data)) == 2:
        example, texts = '("A text.", "Another.")', '"A text.", "Another.", return_tensors="pt"'
    if task and not embedding:
        result = f"print(bert.predict([{example}])[0])"
    elif architecture.endswith(("BertForPreTraining", "ForMaskedLM")):
        result = 'for guess in bert.fill_mask("A text with a [MASK] in it."):\n'
        result += "    print(guess.token, guess.probability)"
    inputs = f"inputs = tokenizer({texts})"
    if task and task.kind == "multiple_choice":
        ends = '["A text."] * 2, ["One end.", "Another."], padding=True, return_tensors="pt"'
        inputs = f"inputs = tokenizer({ends})\n"
        inputs += "inputs = {key: value[None] for key, value in inputs.items()}"
    classes = f"from transformers import AutoTokenizer, {architecture}"
    loaded = f"tokenizer = AutoTokenizer.from_pretrained({address})\n"
    loaded += f"model = {architecture}.from_pretrained({address})"
    library, theirs = "transformers", f"{classes}\n\n{loaded}\n{inputs}\noutputs = model(**inputs)"
    if embedding:
        library, prompt = "sentence-transformers", prompt.replace("prompt", "prompt_name")
        theirs = f"from sentence_transformers import {architecture}\n\n"
        theirs += f"model = {architecture}({address})\n"
        theirs += f'print(model.encode(["A text."]{prompt}).shape)'
    return [
        "With bert-jax:",
        _python(f"import bert_jax\n\nbert = bert_jax.load({ours})\n{result}"),
        f"With `{library}`:",
        _python(theirs),
    ]


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _repository(name: Any) -> str:
    return str(name).removeprefix("hf:").partition("@")[0]


def _short(files: str) -> str:
    """Return files without their folders, which are of no use to others, and may be private."""
    names = (text if text.startswith("tfds:") else PurePath(text).name for text in files.split(","))
    return ",".join(names)


def _code(text: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text)
    return "`" + plain.replace("`", "'").replace("|", "\\|") + "`"

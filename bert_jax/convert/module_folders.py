"""The directories of sentence-transformers: a model's modules, each in a folder."""

import json
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.convert import huggingface
from bert_jax.convert.huggingface import Exported
from bert_jax.errors import UserError, refuse, without_controls
from bert_jax.storage import paths
from bert_jax.storage.json_files import read_json

MODULES, CONFIG, TOKENIZER = "modules.json", "config.json", "tokenizer_config.json"
REMEDY = "fetch it again"
# The kinds of modules that are read together, in this order; the optional ones are in brackets.
_LAYOUTS = (
    "Transformer Pooling [Dense] [Normalize]",
    "Transformer Dense [MultiVectorMask] [Normalize]",
    "Transformer SpladePooling",
)
_PACKAGES = ("sentence_transformers.", "pylate.")
# Settings of an encoder that are read, or of its computation.
_OF_ANY_VALUE = ("max_seq_length", "do_lower_case", "unpad_inputs", "model_args", "model_kwargs")
PROMPTS = ("query", "document")  # that a model for search adds by itself
_OTHER_NAMES = {"MLMTransformer": "Transformer"}


def read(path: Path, name: str = "") -> dict[str, Path]:
    """Return the folder of each module, or refuse what is not read; `name` is for messages."""
    where, folders = f"{name or path}: {MODULES}", dict[str, Path]()
    for entry in read_json(path / MODULES, REMEDY, list):
        entry = entry if isinstance(entry, dict) else {}
        module, folder = str(entry.get("type")), str(entry.get("path"))
        kind = module.rpartition(".")[2]
        kind = _OTHER_NAMES.get(kind, kind)
        is_known = module.startswith(_PACKAGES) and any(kind in each for each in _LAYOUTS)
        if not is_known or kind in folders or folder == ".." or Path(folder).name != folder:
            what = f"{module} in {folder!r}" if is_known else module
            raise UserError(f"{where} has {what}; {_read_layouts()}")
        folders[kind] = path / folder
    if not any(_fits([*folders], layout) for layout in _LAYOUTS):
        raise UserError(f"{where} has {', '.join(folders) or 'no module'}; {_read_layouts()}")
    return folders


def check(folders: Mapping[str, Path], path: Path) -> None:
    """Refuse a directory without the folder of a module that has files."""
    for kind, folder in folders.items():
        # Git drops the folder of a module without files.
        if kind != "Normalize" and not paths.is_folder(folder):
            raise UserError(f"{path / MODULES} names {folder}, which is no folder; {REMEDY}")


def _fits(kinds: list[str], layout: str) -> bool:
    names = layout.split()
    order = [name.strip("[]") for name in names]
    needed = [name for name in names if "[" not in name]
    return kinds == [name for name in order if name in kinds] and {*needed} <= {*kinds}


def _read_layouts() -> str:
    return f"only these are read: {'; '.join(_LAYOUTS)}"


def settings_file(encoder: Path) -> Path:
    """Return the file of the settings of an encoder, which older versions named by its model."""
    named = sorted(encoder.glob("sentence_*_config.json"))
    return named[0] if named else encoder / huggingface.TRANSFORMER


def max_length(encoder: Path, config: ModelConfig) -> int:
    """Return the number of tokens to which the texts of an encoder are truncated."""
    file = settings_file(encoder)
    longest = read_json(file, REMEDY).get("max_seq_length") if file.exists() else None
    if longest is None and (beside := encoder / TOKENIZER).exists():
        file, longest = beside, read_json(beside, REMEDY).get("model_max_length")
    longest = math.inf if longest is None else longest
    if not isinstance(longest, int | float) or not longest >= 3:
        raise UserError(f"{file}: the maximum length is {longest!r}; it must be 3 tokens or more")
    return int(min(longest, config.max_position_embeddings))


def read_config(file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a module, without what would change its result in another way.

    `fields` have the value that they must have; ... is any. Of others, only what is off or empty.
    """
    values = read_json(file, REMEDY)
    for name, value in values.items():
        if fields[name] not in (..., value) if name in fields else value:
            raise UserError(f"{file} has {name} {str(value)[:60]!r}, which is not supported")
    return values


def check_encoder(
    encoder: Path,
    task: str = "feature-extraction",
    output: str = "last_hidden_state",
    also: Sequence[str] = (),
) -> None:
    """Refuse settings of an encoder that would change its result; `also` are read elsewhere."""
    fields = {
        "transformer_task": task,
        "module_output_name": "token_embeddings",
        "modality_config": {"text": {"method": "forward", "method_output_name": output}},
        **dict.fromkeys((*_OF_ANY_VALUE, *also), ...),
    }
    if (file := settings_file(encoder)).exists():
        read_config(file, fields)


def num_outputs(values: Mapping[str, Any], file: Path) -> int:
    """Return the size of the vectors of a dense layer, from its config."""
    size = values.get("out_features")
    if not isinstance(size, int) or size < 1:
        raise UserError(f"{file}: out_features is {size!r}; {REMEDY}")
    return size


def check_settings(values: Mapping[str, Any], file: Path, similarity: str) -> None:
    """Refuse settings of a model for search that would change its scores; warn of other prompts."""
    prompts = values.get("prompts") or {}
    prompts = prompts if isinstance(prompts, Mapping) else {PROMPTS[0]: prompts}
    found = [name for name in ("max_active_dims", "truncate_dim") if values.get(name)]
    found += ["prompts"] * any(prompts.get(name) for name in PROMPTS)
    name = values.get("similarity_fn_name") or similarity
    found += ["similarity_fn_name"] * (str(name).lower() != similarity)
    refuse(
        found,
        f"{file} has {', '.join(found)}, which {'are' if len(found) > 1 else 'is'} not supported",
        fix="take a model without",
    )
    warn_lost(lost_prompts(values, prompts), file)


def lost_prompts(
    values: Mapping[str, Any], prompts: Mapping[str, Any], kept: Collection[str] = ()
) -> list[str]:
    """Return what is not kept of the prompts by name in a model's settings; `kept` are texts."""
    others = [name for name, prompt in prompts.items() if prompt and prompt not in kept]
    lost = [f"the prompts {', '.join(map(without_controls, others))}"] * bool(others)
    if prompts.get(default := str(values.get("default_prompt_name"))):
        lost.append(f"{without_controls(default)} as the prompt of all texts that name none")
    return lost


def warn_lost(lost: Sequence[str], file: Path) -> None:
    """Warn of settings in a file that are not kept."""
    if lost:
        warnings.warn(f"{file}: not kept: {'; '.join(lost)}", stacklevel=3)


def write(path: Path, modules: Mapping[str, Mapping[str, Any]], *, prefix: str) -> dict[str, Path]:
    """Write the list of modules by their kinds, and the config of each; return their folders.

    `prefix` is the name of the package that has the kinds, with a point, unless a kind has its own.
    """
    listed, folders = [], {}
    for index, (kind, values) in enumerate(modules.items()):
        folder = f"{index}_{kind.rpartition('.')[2]}" if index else ""
        module = kind if "." in kind else prefix + kind
        listed.append({"idx": index, "name": str(index), "path": folder, "type": module})
        folders[kind] = path / folder
        if folder:
            folders[kind].mkdir()
            write_json(folders[kind] / CONFIG, values)
    write_json(path / MODULES, listed)
    return folders


def write_json(file: Path, values: Any) -> None:
    """Write JSON for a person to read."""
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_settings(
    path: Path, exported: Exported, max_length: int, described: Mapping[str, Any]
) -> None:
    """Write the settings of an encoder that was exported, and those of the model as a whole."""
    settings: dict[str, Any] = {"max_seq_length": max_length, "do_lower_case": False}
    if exported.newly_initialized:  # a pooler, which no vector depends on
        settings["model_args"] = {"add_pooling_layer": False}
    write_json(path / huggingface.TRANSFORMER, settings)
    write_json(path / huggingface.SETTINGS, described)

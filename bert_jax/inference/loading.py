"""Read a checkpoint of any kind."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn

from bert_jax.config import DataFiles, FinetuneConfig, ModelConfig, TaskConfig
from bert_jax.config.fields import Dtype
from bert_jax.config.validation import validate_model
from bert_jax.convert import google, hub, huggingface, names, sentence_transformers
from bert_jax.distributed.devices import resolve_dtype
from bert_jax.distributed.mesh import own_settings
from bert_jax.errors import UserError
from bert_jax.inference.runner import Runner
from bert_jax.objectives import pretraining_model
from bert_jax.storage import paths
from bert_jax.storage.paths import AnyPath
from bert_jax.tasks import make_task
from bert_jax.tasks.foreign import UnknownColumns
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LoadedModel:
    """The content of a checkpoint; `Bert` says what the fields are."""

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    model: Any
    unused: Sequence[str] = ()
    task: TaskConfig | None = None
    data: DataFiles = dataclasses.field(default_factory=UnknownColumns)
    source: str | AnyPath | None = None
    objective: str = "auto"  # of its pretraining, if that is known
    source_params: Any = None  # the parameters that the source has

    def __post_init__(self) -> None:
        """With other parameters, as by `dataclasses.replace`, a model has no source."""
        is_same = self.source_params is None or self.source_params is self.params
        of_source = self.params if is_same and self.source is not None else None
        object.__setattr__(self, "source_params", of_source)
        object.__setattr__(self, "source", self.source if is_same else None)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle writes: the fields, and not what was compiled."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def runner(self) -> Runner:
        """The parameters on the local devices, and what is compiled for them."""
        return Runner(self.params)


@own_settings()
def load_model(path: str | AnyPath, dtype: Dtype | None = None) -> LoadedModel:
    """Return the content of a checkpoint; `bert_jax.load` says of which, and what a dtype is."""
    if paths.is_on_hub(path):
        return dataclasses.replace(load_model(hub.fetch(str(path)), dtype), source=str(path))
    path = paths.as_path(path)
    for module, is_its in (
        (google, google.is_google),
        (sentence_transformers, sentence_transformers.is_sentence_transformers),
        (huggingface, huggingface.is_huggingface),
    ):
        if isinstance(path, Path) and is_its(path):
            config, converted, tokenizer = module.load(path)
            config = _computed_in(config, dtype)
            modules = names.module_names(converted.params)
            task = converted.task and make_task(converted.task)
            limits = converted.max_length, task and task.foreign_max_length
            longest = min([config.max_position_embeddings, *filter(None, limits)])
            return LoadedModel(
                config=config,
                params=converted.params,
                tokenizer=tokenizer,
                model=_make_model(config, converted.task, modules=modules),
                unused=converted.unused,
                task=converted.task,
                data=converted.data or UnknownColumns(max_length=longest),
                source=paths.absolute(path),
            )
    return _load_own(checkpoint.find(path), dtype)


def _computed_in(config: ModelConfig, dtype: Dtype | None) -> ModelConfig:
    """Return the config with another dtype, unless it is None."""
    if dtype is None:
        return config
    config = dataclasses.replace(config, dtype=dtype)
    validate_model(config, "dtype")
    return resolve_dtype(config, jax.local_devices()[0])


def _make_model(
    config: ModelConfig,
    task: TaskConfig | None,
    probe: str = "",
    modules: Collection[str] | None = None,
    objective: str = "",
) -> nn.Module:
    """Return the module whose parameters a checkpoint has, or all that it may have."""
    if task:
        return make_task(task).model(config, probe)
    has_pairs = modules is None or {"bert/pooler", "nsp_head"} <= {*modules}
    return pretraining_model(config, pairs=has_pairs, objective=objective)


def _load_own(folder: AnyPath, dtype: Dtype | None) -> LoadedModel:
    """Return the content of a checkpoint that bert-jax wrote."""
    where, run = f"{folder}/config", checkpoint.read_config(folder)
    validate_model(run.model, where)
    run.model = _computed_in(run.model, dtype)
    task, probe, data, objective = None, "", UnknownColumns(), "auto"
    if isinstance(run, FinetuneConfig):
        task, probe, data = run.task, run.probe, UnknownColumns.read(run.data)
    else:
        objective = run.objective
    make = functools.partial(_make_model, run.model, task, probe, objective=objective)
    try:
        model = make()
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    tokenizer = checkpoint.read_tokenizer(folder)
    shapes, optional = names.stored_shapes(model)
    params = checkpoint.read_params(folder, shapes, optional)
    return LoadedModel(
        config=run.model,
        params=params,
        tokenizer=tokenizer,
        model=make(modules=names.module_names(params)),
        task=task,
        data=data,
        source=paths.absolute(folder),
        objective=objective,
    )

"""How an architecture is written by `transformers`: its classes, tensors and `config.json`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.text.tokenizer import Tokenizer

# The folder of a model's companion, beside the files of the model.
COMPANION_FOLDER = "generator"
_LEAVES = {"kernel": "weight", "scale": "weight", "embeddings": "weight", "bias": "bias"}

Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Head:
    """A class of `transformers` that an encoder is exported as, without a task.

    Attributes:
      suffix: the end of its name, after the architecture's `class_prefix`.
      modules: ours that it has, beside those that every encoder of the architecture has.
      companion: whether the model's companion is lost, is written beside it, or is written alone.
    """

    suffix: str
    modules: Sequence[str] = ()
    companion: Literal["lost", "beside", "alone"] = "lost"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The names that an architecture has in files of `transformers`, and here.

    A tensor's standard name is that in a file of the masked LM, or of the class that its names
    are modelled on, which is BERT's for each encoder with BERT's layers.

    The companion of a model is a second one that it was pretrained with, and that `transformers`
    has as a model of its own.

    Attributes:
      class_prefix: the beginning of the names of its classes, such as "Bert".
      modules: the standard name of each module outside of the layers, by its path here.
      layers: what the standard names of all layers begin with.
      layer_modules: the same as `modules`, for the modules of a layer.
      decoder: the standard name of the output matrix, which is that of the word embeddings.
      heads: what is exported without a task, by the name of the choice.
      encoder: what the standard names of the encoder begin with.
      encoder_parts: what they begin with where a file has the encoder alone.
      words: the name of the word embeddings.
      stacked: tensors that are several of our matrices, one after the other, and of how many.
      renamed: other spellings of a part of a name in older files, and the standard one.
      prefixes: the beginning of names in its classes, and the standard one.
      class_prefixes: the same for single classes, by name; these take precedence.
      config_names: fields of `config.json` that are called otherwise here, and how.
      config_defaults: the values of our fields where `config.json` says nothing.
      switches: fields of `config.json` of which one value is supported.
      others: fields of `config.json` that `read_fields` reads, or that change no result.
      not_written: our fields that its `config.json` does not have.
      companion_modules: our modules of the companion; empty for an architecture without one.
    """

    class_prefix: str
    modules: Mapping[str, str]
    layers: str
    layer_modules: Mapping[str, str]
    decoder: str
    heads: Mapping[str, Head]
    encoder: str = "bert."
    encoder_parts: Sequence[str] = ()
    words: str = "word_embeddings"
    stacked: Mapping[str, int] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    class_prefixes: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    config_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: Sequence[str] = ()
    not_written: Sequence[str] = ()
    companion_modules: Sequence[str] = ()

    @classmethod
    def like(cls, other: "Exchange", **changes: Any) -> "Exchange":
        """Return the names of `other`, but for some."""
        return cls(**{**vars(other), **changes})

    def standard_name(self, name: str, architecture: str = "") -> str:
        """Return the standard name of a tensor in a file of some class of `transformers`."""
        for prefix, standard in self._prefixes(architecture).items():
            if name.startswith(prefix):
                name = standard + name.removeprefix(prefix)
                break
        if name.startswith(tuple(self.encoder_parts)):
            name = self.encoder + name
        for other, standard in self.renamed.items():
            name = name.replace(other, standard)
        return name

    def name_in_class(self, name: str, architecture: str) -> str:
        """Return the name in a class of `transformers` of the tensor with this standard name."""
        if architecture.endswith("Model"):  # an encoder alone has no prefix of its own
            return name.removeprefix(self.encoder)
        for prefix, standard in self._prefixes(architecture).items():
            if name.startswith(standard):
                return prefix + name.removeprefix(standard)
        return name

    def _prefixes(self, architecture: str) -> dict[str, str]:
        return {**self.class_prefixes.get(architecture, {}), **self.prefixes}

    def name_of(self, path: str) -> str:
        """Return the standard name of a parameter, such as "bert/layer_0/up/kernel"."""
        module, leaf = path.rsplit("/", 1)
        layer = re.fullmatch(r"bert/layer_(\d+)/(.*)", module)
        name = self.layer_modules.get(layer[2]) if layer else self.modules.get(module)
        if name is None:
            raise UserError(
                f"the module {module} has no name in files of transformers; leave out the class of "
                "transformers of a task of your own that has it"
            )
        name = f"{self.layers}{layer[1]}.{name}" if layer else name
        leaf = self.words if leaf == "word_embeddings" else leaf
        return f"{name}.{_LEAVES.get(leaf, f'{leaf}.weight')}"

    def first_position(self, values: Mapping[str, Any]) -> int:
        """Return which position embedding is that of the first token, by `config.json`."""
        return 0

    def read_fields(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values of a `config.json` by our names; refuse what is not supported."""
        check_switches(values, self.switches, where)
        # A field that has our name alone is none of this class.
        ours = {
            self.config_names.get(name, name): value
            for name, value in values.items()
            if name in self.config_names or name not in self.config_names.values()
        }
        return {**self.config_defaults, **ours}

    def write_fields(self, config: Any, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return what `config.json` says beside our fields and the `switches`."""
        return {}

    def split(self, config: Any, params: Params) -> tuple[ModelConfig, Params] | None:
        """Return the companion of a model, with its parameters; None without one."""
        return None

    def join(
        self,
        config: Any,
        params: Params,
        companion: ModelConfig,
        companion_params: Params,
        where: str,
    ) -> tuple[ModelConfig, Params]:
        """Return a model with its companion, read from `where`; refuse that of another."""
        raise AssertionError(f"{config.model_type} names no companion_modules")


def check_switches(values: Mapping[str, Any], switches: Mapping[str, Any], where: str) -> None:
    """Refuse a field of `config.json` of another value than the one that is supported."""
    for name, expected in switches.items():
        if values.get(name, expected) != expected:
            raise UserError(f"{where} has {name} {values[name]}; only {expected} is read")

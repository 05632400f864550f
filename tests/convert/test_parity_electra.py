"""An ELECTRA's numbers beside PyTorch `transformers`: both parts, and whole steps of training."""

import copy
import dataclasses
import json
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import check_gradients, masking
from outputs import check_encoder, close, masked_batch
from test_parity import (
    NEXT,
    PREDICTED,
    check_twenty_steps,
    gradients_of,
    pytestmark,
    read_there,
    rows,
    torch,
    transformers,
    write_model,
)

import bert_jax
from bert_jax.config import TrainConfig
from bert_jax.config.recipes import recipe
from bert_jax.convert import names
from bert_jax.models.electra import ARCHITECTURE, generator_config
from bert_jax.objectives import pretraining_model
from bert_jax.objectives.replaced_tokens import ReplacedTokens

__all__ = ["pytestmark"]
SMALLER = {"hidden_size": 48, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def electra(tmp_path_factory):
    """Both parts of the reference, and ours that has read them."""
    folder = tmp_path_factory.mktemp("model")
    beside = folder / "generator"
    reference = write_model("electra", folder)
    small = write_model("electra", beside, 1, "ForMaskedLM", **SMALLER)
    small.electra.embeddings = reference.electra.embeddings
    small.generator_lm_head.weight = reference.electra.embeddings.word_embeddings.weight
    with torch.no_grad():
        # No special token is sampled: PyTorch has no gradient of the padding's embedding.
        small.generator_lm_head.bias[:5] = -15
    with warnings.catch_warnings(action="ignore"):
        small.save_pretrained(beside)
    return reference, small, bert_jax.load(folder)


@pytest.fixture(scope="module")
def batch(electra):
    ours = electra[-1]
    ids, types, mask = rows(ours)
    labels, masked = np.take_along_axis(ids, PREDICTED, 1), ids.copy()
    row, column = np.nonzero(PREDICTED)
    masked[row, PREDICTED[row, column]] = ours.tokenizer.mask_id
    return {
        **masked_batch(masked, types, mask, PREDICTED, labels.astype(np.int32), NEXT),
        "index": jnp.arange(len(ids)),
        "sampling_key": jnp.broadcast_to(jax.random.key(0), len(ids)),
    }


def tensors(batch):
    names = ("input_ids", "token_type_ids", "attention_mask")
    return {name: torch.from_numpy(np.asarray(batch[name], np.int64)) for name in names}


def test_every_number_of_both_parts(electra, batch):
    reference, small, ours = electra
    config, params = ARCHITECTURE.exchange.split(ours.config, ours.params)
    positions = jnp.broadcast_to(jnp.arange(batch["input_ids"].shape[1]), batch["input_ids"].shape)
    inputs = [batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")]
    real = np.asarray(inputs[2]).astype(bool)
    assert config.hidden_size == 48
    run = jax.jit(ours.model.apply, static_argnames="method")
    arguments = {"params": ours.params}, *inputs, positions
    all_logits = (
        run(*arguments, method="discriminate")[0],
        run(*arguments).mlm_logits,
    )
    parts = ((reference, ours.config, ours.params), (small, config, params))
    for (theirs, own, weights), logits in zip(parts, all_logits, strict=True):
        with torch.no_grad():
            expected = theirs(**tensors(batch), output_hidden_states=True, output_attentions=True)
        layers = expected.hidden_states, expected.attentions
        check_encoder(own, weights["bert"], inputs, *layers)
        close(np.asarray(logits)[real], expected.logits[real], least=0.3)


def our_loss(ours, batch):
    """The loss of our parameters, and what the discriminator sees."""
    objective = ReplacedTokens(ours.model, TrainConfig(model=ours.config), masking())
    object.__setattr__(objective.masking, "vocab_size", ours.config.vocab_size)
    weights = objective.weights(batch)

    def loss(params):
        output = objective.apply(params, batch, None, positions=batch["predictions"].positions)
        return objective.loss(params, batch, weights, None)[0], objective._replace(
            batch, output.mlm_logits
        )

    return loss


def reference_loss(reference, small, batch, replaced, differs):
    predictions = batch["predictions"]
    labels = np.full(batch["input_ids"].shape, -100)
    chosen = np.nonzero(np.asarray(predictions.weights))
    labels[chosen[0], np.asarray(predictions.positions)[chosen]] = np.asarray(predictions.labels)[
        chosen
    ]
    mlm = small(**tensors(batch), labels=torch.from_numpy(labels)).loss
    corrupted = tensors({**batch, "input_ids": replaced})
    rtd = reference(**corrupted, labels=torch.from_numpy(np.asarray(differs, np.int64))).loss
    return mlm + 50 * rtd


def tensors_of(reference, small):
    """The parameters of both by our path, each once."""
    found = {
        ARCHITECTURE.exchange.standard_name(name): value
        for name, value in reference.named_parameters()
    }
    for name, value in small.named_parameters():
        if not name.startswith(("electra.embeddings.", "generator_lm_head.weight")):
            found["generator/" + ARCHITECTURE.exchange.standard_name(name)] = value
    return found


def by_standard_name(ours, params):
    """Our parameters as `tensors_of` names them."""
    _, alone = ARCHITECTURE.exchange.split(ours.config, params)
    main = {k: v for k, v in params.items() if k in ("bert", "discriminator_head")}
    found = dict(names.to_foreign(main, (), "electra"))
    small = names.to_foreign(alone, (), "electra")
    found |= {"generator/" + k: v for k, v in small if not k.startswith("bert.embeddings.")}
    return found


def test_loss_and_every_gradient_of_a_step(electra, batch):
    reference, small, ours = electra
    value_and_grad = jax.jit(jax.value_and_grad(our_loss(ours, batch), has_aux=True))
    (loss, (replaced, differs)), gradients = value_and_grad(ours.params)
    assert 0 < np.asarray(differs).sum() < (PREDICTED > 0).sum() + 1
    reference.zero_grad()
    small.zero_grad()
    expected = reference_loss(reference, small, batch, replaced, differs)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    actual, parameters = by_standard_name(ours, gradients), tensors_of(reference, small)
    assert actual.keys() == parameters.keys()
    check_gradients(actual, gradients_of(parameters))


def test_twenty_steps_of_training(electra, batch):
    """The reference is fed the samples of our generator."""
    reference, small, ours = electra
    reference, small = copy.deepcopy((reference, small))
    keys = (jnp.broadcast_to(jax.random.key(n), len(PREDICTED)) for n in range(20))
    check_twenty_steps(
        tensors_of(reference, small),
        ours.params,
        partial(by_standard_name, ours),
        lambda params, batch: our_loss(ours, batch)(params),
        lambda batch, drawn: reference_loss(reference, small, batch, *drawn),
        [{**batch, "sampling_key": key} for key in keys],
    )


@pytest.mark.parametrize("head", [None, "masked-lm", "none"])
def test_exports_load_with_no_key_missing_or_unexpected(electra, head, tmp_path):
    reference, small, ours = electra
    exported = ours.export(tmp_path / "out", head)
    classes = {None: "ElectraForPreTraining", "masked-lm": "ElectraForMaskedLM"}
    assert exported.architecture == classes.get(head, "ElectraModel")
    folders = {tmp_path / "out": small if head == "masked-lm" else reference}
    if head is None:
        folders[tmp_path / "out/generator"] = small
        assert not exported.dropped
    for folder, before in folders.items():
        kind = json.loads((folder / "config.json").read_text())["architectures"][0]
        loaded = read_there(folder, kind)
        expected = dict((before if head != "none" else before.electra).named_parameters())
        found = dict(loaded.named_parameters())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("name", ["electra_small", "electra_base"])
def test_parameter_counts_of_the_recipes(name):
    model = dataclasses.replace(recipe(name).model, dtype="float32")
    module = pretraining_model(model, pairs=False)
    shapes = jax.eval_shape(module.init_params, jax.random.key(0))
    own = generator_config(model)
    counts = []
    for config, kind in ((model, "ForPreTraining"), (own, "ForMaskedLM")):
        sizes = {
            field: getattr(config, field)
            for field in (*SMALLER, "vocab_size", "num_hidden_layers", "max_position_embeddings")
        }
        sizes["embedding_size"] = model.embedding_size or model.hidden_size
        with torch.device("meta"):
            built = getattr(transformers, f"Electra{kind}")(transformers.ElectraConfig(**sizes))
        counts.append(sum(p.numel() for p in built.parameters()))
    shared = sum(p.numel() for p in built.electra.embeddings.parameters())
    assert sum(x.size for x in jax.tree.leaves(shapes)) == sum(counts) - shared

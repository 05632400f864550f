"""ELECTRA's objective: what is masked, sampled and detected, and its loss by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import VOCAB, batch, objective, params
from scipy import special, stats

from bert_jax.objectives.replaced_tokens import ReplacedTokens, sample_tokens
from bert_jax.training.metrics import describe, means

MASK_ID, SIZE = 4, 300
KEY = jax.random.key(0, impl="threefry2x32")
TASK = objective(
    model_type="electra",
    num_hidden_layers=1,
    embedding_size=8,
    generator_hidden_size=0.5,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
LOGITS = 2 * np.random.default_rng(0).normal(size=(2, SIZE + 20)).astype(np.float32)


def sample(indices, logits=LOGITS, key=KEY) -> np.ndarray:
    repeated = jnp.broadcast_to(logits, (len(indices), *logits.shape))
    return np.asarray(jax.jit(sample_tokens, static_argnums=3)(key, indices, repeated, SIZE))


def test_samples_follow_the_softmax_of_the_tokens():
    count = 20_000
    drawn = sample(np.arange(count))
    assert drawn.max() < SIZE  # beyond it no token exists
    for position, logits in enumerate(LOGITS):
        expected = count * special.softmax(logits[:SIZE])
        found = np.bincount(drawn[:, position], minlength=SIZE)
        often = expected > 5
        found, expected = (
            np.append(x[often], x[~often].sum()) for x in (found, expected.astype(float))
        )
        assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-4
    # The positions of a sequence, and its neighbours, are independent.
    for one, other in ((drawn[:, 0], drawn[:, 1]), (drawn[1:, 0], drawn[:-1, 0])):
        frequent = np.argmax(LOGITS[0])
        table = np.histogram2d(one == frequent, other == frequent, bins=2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4 or table.min() == 0


def test_a_sample_is_keyed_to_its_sequence():
    drawn = sample(np.arange(64))
    np.testing.assert_array_equal(sample(np.arange(32, 64)), drawn[32:])
    assert (sample(np.arange(64), key=jax.random.fold_in(KEY, 1)) != drawn).mean() > 0.5


@pytest.fixture(scope="module")
def prepared():
    """Many sequences as they are, and masked."""
    rows = batch(1000)
    assert isinstance(TASK, ReplacedTokens)
    return rows, jax.jit(TASK.prepare)(KEY, rows)


def test_of_the_predicted_tokens_85_percent_are_masked_and_no_other_changes(prepared):
    rows, examples = prepared
    chosen = examples["predictions"].weights > 0
    masked = np.take_along_axis(examples["input_ids"], examples["predictions"].positions, 1)[chosen]
    labels = examples["predictions"].labels[chosen]
    assert ((masked == MASK_ID) | (masked == labels)).all()
    assert stats.binomtest(int((masked == MASK_ID).sum()), len(masked), 0.85).pvalue > 1e-4
    assert (examples["input_ids"] != rows["input_ids"]).sum() == (masked == MASK_ID).sum()


@pytest.mark.parametrize("shift", [0, 1])
def test_a_sample_that_is_the_original_token_is_no_replacement(prepared, shift):
    """The generator is sure of a token: the original, or the one after it."""
    rows, examples = prepared
    predictions = examples["predictions"]
    tokens = (predictions.labels + shift) % VOCAB
    logits = 100 * jax.nn.one_hot(tokens, VOCAB)
    replaced, differs = map(np.asarray, jax.jit(TASK._replace)(examples, logits))
    expected = np.zeros(differs.shape, bool)
    for row, (positions, weights) in enumerate(
        zip(predictions.positions, predictions.weights, strict=True)
    ):
        expected[row, positions[weights > 0]] = bool(shift)
    np.testing.assert_array_equal(differs, expected)
    wanted = np.where(expected, (rows["input_ids"] + 1) % VOCAB, rows["input_ids"])
    np.testing.assert_array_equal(replaced, wanted)


@pytest.fixture(scope="module")
def detected(prepared):
    """Some of the sequences; the loss, the metrics and the gradient of the detection alone."""
    examples = jax.tree.map(lambda x: x[:16], prepared[1])
    weights = TASK.weights(examples)

    def losses(params):
        loss, metrics = TASK.loss(params, examples, weights, None)
        return metrics["rtd_loss"].total, (loss, metrics)

    gradient, (loss, metrics) = jax.jit(jax.grad(losses, has_aux=True))(params(TASK))
    return examples, float(loss), jax.device_get(metrics), gradient


def test_the_loss_is_that_of_both_parts_by_hand(detected):
    examples, loss, metrics, _ = detected
    variables, predictions = {"params": params(TASK)}, examples["predictions"]
    rest = examples["token_type_ids"], examples["attention_mask"]
    run = jax.jit(TASK.model.apply, static_argnames="method")
    output = run(variables, examples["input_ids"], *rest, predictions.positions)
    replaced, differs = jax.jit(TASK._replace)(examples, output.mlm_logits)
    logits = np.asarray(
        run(variables, replaced, *rest, predictions.positions, method="discriminate")[0]
    )
    differs = np.asarray(differs)
    assert differs.any()
    log_shares = special.log_softmax(np.asarray(output.mlm_logits), axis=-1)
    labels, chosen = map(np.asarray, (predictions.labels, predictions.weights))
    nats = -np.take_along_axis(log_shares, labels[..., None], -1)[..., 0]
    mlm = (nats * chosen).sum() / chosen.sum()
    is_token = np.asarray(examples["attention_mask"]) > 0
    signed = np.where(differs, logits, -logits)[is_token]
    rtd = -special.log_expit(signed).mean()
    assert loss == pytest.approx(float(mlm + 50 * rtd), rel=1e-5)
    sums = {name: [float(x.total), float(x.weight)] for name, x in metrics.items()}
    found = means(sums, TASK.loss_weights)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["rtd_accuracy"] == pytest.approx((signed > 0).mean())
    assert found["rtd_recall"] == pytest.approx((logits[differs] > 0).mean())
    assert found["rtd_precision"] == pytest.approx(differs[is_token & (logits > 0)].mean())
    assert found["rtd_accuracy_baseline"] == pytest.approx(1 - differs[is_token].mean())
    assert found["token_share"] == pytest.approx(is_token.mean())
    assert -1 <= found["hidden_similarity"] <= 1
    share = found["rtd_accuracy_baseline"]
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    wanted = {"rtd_accuracy": share, "rtd_recall": 0.0, "rtd_loss": pytest.approx(entropy)}
    assert TASK.moving_baselines(found) == wanted
    line = describe(found, TASK.figures, {"mlm_loss": 4.0})
    assert re.search(r"mlm \S+ \(unigram entropy 4\.00, accuracy \S+%\)  rtd \S+ \(accuracy", line)
    assert "recall" in line
    assert "baseline" not in line


def test_sampling_has_no_gradient(detected):
    """The detection trains the encoder and the shared embeddings, not the generator."""
    gradient = detected[-1]
    sizes = jax.tree.map(lambda x: float(jnp.abs(x).max()), gradient)
    for module in ("generator", "generator_head"):
        assert not any(jax.tree.leaves(sizes[module]))
    assert sizes["bert"]["embeddings"]["word_embeddings"] > 0
    assert sizes["bert"]["embeddings_project"]["kernel"] > 0

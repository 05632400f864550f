"""Packed sequences: the losses and gradients of the same pairs alone; no leaks between them."""

import dataclasses

import helpers
import jax
import numpy as np
import pytest
from flax import traverse_util
from helpers import LENGTH, SPECIAL, VOCAB, batch, masking, params

from bert_jax.batches.packing import NO_PAIR, max_pairs, pack
from bert_jax.config import DataConfig, TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
from bert_jax.models.bert import BertModel
from bert_jax.objectives.masking import Predictions
from bert_jax.objectives.sentence_pairs import SentencePairs
from bert_jax.planning import synthetic
from bert_jax.training.objective import TOKENS, Batch
from bert_jax.training.step import make_eval_step

PAIRS, LONG, ROWS = 11, 2 * LENGTH, 16
PLACES = max_pairs(LONG)


def objective(**changes) -> SentencePairs:
    return helpers.objective(LONG, **{"max_position_embeddings": LONG, **changes})


def prepare(task: SentencePairs, rows, seed: int = 0) -> Batch:
    return jax.device_get(jax.jit(task.prepare)(jax.random.key(seed), rows))


def places_of(alone) -> list[tuple[int, int, int, int]]:
    """Row, number and start of each pair in rows twice as long, and its size."""
    sizes = np.asarray(alone["attention_mask"]).sum(1)
    members = pack(sizes, LONG, PLACES, np.arange(len(sizes)))
    found = {}
    for row, pairs in enumerate(members):
        start = 0
        for number, pair in enumerate(pairs[pairs >= 0].tolist()):
            found[pair] = row, number, start, int(sizes[pair])
            start += int(sizes[pair])
    return [found[pair] for pair in range(len(sizes))]


def packed(alone) -> dict[str, np.ndarray]:
    """Pack sequences of one pair each, one pair at a time."""
    places = places_of(alone)
    rows = 1 + max(row for row, *_ in places)
    names = ("input_ids", "token_type_ids", "attention_mask", "position_ids")
    made = {name: np.zeros((rows, LONG), np.int32) for name in names}
    made["segment_starts"] = np.zeros((rows, PLACES), np.int32)
    made["next_sentence_label"] = np.full((rows, PLACES), NO_PAIR, np.int32)
    for pair, (row, number, start, size) in enumerate(places):
        span = slice(start, start + size)
        for name in ("input_ids", "token_type_ids"):
            made[name][row, span] = alone[name][pair, :size]
        made["attention_mask"][row, span] = number + 1
        made["position_ids"][row, span] = np.arange(size)
        made["segment_starts"][row, number] = start
        made["next_sentence_label"][row, number] = alone["next_sentence_label"][pair]
    return {**made, "index": np.arange(rows, dtype=np.int32)}


def packed_as_masked(task: SentencePairs, alone, masked: Batch) -> Batch:
    """Pack sequences that are masked already, so that the same tokens are predicted."""
    places = places_of(alone)
    rows = packed({**alone, "input_ids": masked["input_ids"]})
    result = prepare(task, rows)
    count = masked["predictions"].positions.shape[1]
    shape = len(rows["index"]), PLACES * count
    parts = {name: np.zeros(shape, np.int32) for name in ("positions", "labels", "weights")}
    for pair, (row, number, start, _) in enumerate(places):
        span = slice(number * count, (number + 1) * count)
        for name, part in parts.items():
            part[row, span] = getattr(masked["predictions"], name)[pair]
        parts["positions"][row, span] += start
    parts["weights"] = parts["weights"].astype(np.float32)
    return {**result, "input_ids": rows["input_ids"], "predictions": Predictions(**parts)}


def test_losses_and_gradients_are_those_of_a_pair_a_sequence():
    task, alone = objective(num_hidden_layers=1), batch(PAIRS)
    weights = params(task)
    masked = prepare(task, alone, seed=1)

    @jax.jit
    def losses(params, batch):
        return jax.value_and_grad(task.loss, has_aux=True)(params, batch, task.weights(batch), None)

    (expected, sums), wanted = jax.device_get(losses(weights, masked))
    others = packed_as_masked(task, alone, masked)
    (loss, packed_sums), found = jax.device_get(losses(weights, others))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
        assert float(packed_sums[name].total) == pytest.approx(float(sums[name].total), rel=1e-5)
        assert packed_sums[name].weight == sums[name].weight
    assert sums["nsp_loss"].weight == PAIRS
    assert packed_sums[TOKENS].total == sums[TOKENS].total == alone["attention_mask"].sum()
    whole = max(np.abs(gradient).max() for gradient in jax.tree.leaves(wanted))
    actual = traverse_util.flatten_dict(found, sep="/")
    for name, gradient in traverse_util.flatten_dict(wanted, sep="/").items():
        error = np.abs(actual[name] - gradient).max()
        if "key" in name and "bias" in name:  # softmax does not see a key's bias
            assert error < 1e-5 * whole
        else:
            assert error < 1e-5 * np.abs(gradient).max(), name


def encode(task: SentencePairs, weights, rows):
    """Return the last hidden state and the pooled output of a batch, packed or not."""

    @jax.jit
    def run(weights, rows):
        packing = {name: rows[name] for name in ("position_ids", "segment_starts") if name in rows}
        given = [rows[name] for name in ("input_ids", "token_type_ids", "attention_mask")]
        output = BertModel(task.model.config).apply({"params": weights["bert"]}, *given, **packing)
        return output.last_hidden_state, output.pooled

    return run(weights, rows)


@pytest.mark.parametrize("kind", ["sinusoidal", "relative_key", "relative_key_query"])
@pytest.mark.parametrize("count", [LONG, LENGTH])
def test_other_positions_are_counted_in_each_segment_too(kind, count):
    """Also where the model has fewer positions than a packed sequence has tokens."""
    changes = {"position_embedding_type": kind, "max_position_embeddings": count}
    task, alone = objective(**changes, num_hidden_layers=1), batch(PAIRS)
    weights = params(task)
    hidden, pooled = encode(task, weights, alone)
    found, found_pooled = encode(task, weights, packed(alone))
    for pair, (row, number, start, size) in enumerate(places_of(alone)):
        np.testing.assert_allclose(
            found[row, start : start + size], hidden[pair, :size], rtol=0, atol=1e-5
        )
        np.testing.assert_allclose(found_pooled[row, number], pooled[pair], rtol=0, atol=1e-5)


def test_a_segment_does_not_see_the_others():
    """Nor padding."""
    task, rows = objective(), packed(batch(PAIRS))
    weights = params(task)
    changed = rows["attention_mask"] % 2 == 0  # every second segment, and the padding
    ids = np.where(changed, (rows["input_ids"] + 7) % VOCAB, rows["input_ids"])
    hidden, pooled = encode(task, weights, rows)
    new, new_pooled = encode(task, weights, {**rows, "input_ids": ids})
    assert (rows["attention_mask"] == 3).any()
    np.testing.assert_array_equal(hidden[~changed], new[~changed])
    assert np.abs(hidden - new)[changed & (rows["attention_mask"] > 0)].max(-1).min() > 1e-3
    of_first = np.arange(PLACES) % 2 == 0
    is_pair = rows["next_sentence_label"] >= 0
    np.testing.assert_array_equal(pooled[is_pair & of_first], new_pooled[is_pair & of_first])
    assert np.abs(pooled - new_pooled)[is_pair & ~of_first].max(-1).min() > 1e-3


def test_whole_words_end_where_segments_do():
    """A packed sequence is masked as one: its tokens are counted over all segments."""
    rows = packed(batch(PAIRS))
    given = [rows[name] for name in ("input_ids", "attention_mask", "index")]
    sizes = (rows["attention_mask"] > 0).sum(1)
    one_word = np.ones(VOCAB, bool)  # each segment is one
    for continues, counts in ((None, np.arange(LONG + 1) // 8), (one_word, np.arange(LONG + 1))):
        mask = dataclasses.replace(
            masking(continues, LONG), counts=counts, max_predictions=int(counts[-1])
        )
        _, chosen = jax.jit(mask)(jax.random.key(0), *given)
        if continues is None:
            np.testing.assert_array_equal(chosen.weights.sum(1), sizes // 8)
    for row in range(len(rows["index"])):
        is_word = ~np.isin(rows["input_ids"][row], SPECIAL)
        edges = np.flatnonzero(np.diff(np.pad(is_word.astype(int), 1)))
        words = [set(range(*edge)) for edge in edges.reshape(-1, 2)]
        assert len(words) >= 2 * (rows["next_sentence_label"][row] >= 0).sum() - 2
        taken = set(np.asarray(chosen.positions[row])[np.asarray(chosen.weights[row]) > 0].tolist())
        assert taken == set().union(*words)


@pytest.mark.devices(8)
def test_eight_devices_agree_with_one():
    """Masks are keyed to the sequence; the sums are of the pairs of all devices."""
    rows = {name: value[:ROWS] for name, value in packed(batch(4 * ROWS)).items()}
    task, found = objective(num_hidden_layers=1), []
    for devices in (1, 8):
        layout = replicated_layout(make_mesh(devices=jax.devices()[:devices]))
        step = compile_step(make_eval_step(task), "mesh", layout, "metrics")
        found.append(jax.device_get(step(jax.device_put(params(task), layout.params), rows)))
    assert found[0]["nsp_loss"].weight == (rows["next_sentence_label"] >= 0).sum()
    assert found[0][TOKENS].total == (rows["attention_mask"] > 0).sum()
    for name, one in found[0].items():
        assert found[1][name].weight == one.weight
        assert found[1][name].total == pytest.approx(one.total, rel=1e-5)


@pytest.mark.parametrize("length", [16, LONG])
def test_synthetic_batches_have_the_same_form(length):
    config = TrainConfig(data=DataConfig(packing=True, max_length=length, batch_size=3))
    made = synthetic.random_batch(config, make_schedule(config).stages[0])
    assert made.keys() == packed(batch(1)).keys()
    most = max_pairs(length)
    for name, value in made.items():
        assert value.dtype == np.int32
        wanted = {"index": (3,), "segment_starts": (3, most), "next_sentence_label": (3, most)}
        assert value.shape == wanted.get(name, (3, length))
    for row in range(3):
        starts = made["segment_starts"][row][made["next_sentence_label"][row] >= 0]
        np.testing.assert_array_equal(np.flatnonzero(made["position_ids"][row] == 0), starts)
        numbers = 1 + np.searchsorted(starts, np.arange(length), "right") - 1
        np.testing.assert_array_equal(made["attention_mask"][row], numbers)

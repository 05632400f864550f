"""The same numbers as PyTorch `transformers`, from random weights in directories that it wrote."""

import copy
import json
import shlex
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import linen as nn
from helpers import check_gradients
from outputs import check_encoder, close, loss_of, masked_batch

import bert_jax
from bert_jax.batches import loader
from bert_jax.config.schedule import make_rate_schedule
from bert_jax.convert import names
from bert_jax.objectives.masked_lm import BertForMaskedLM
from bert_jax.tasks import make_task
from bert_jax.training.optimizer import decayed, learning_rate

pytestmark = [
    pytest.mark.parity,
    # Of the other packages' own making.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # models this small only wait for the other threads

WORDS = "the quick brown fox jumps over a lazy dog while it rains on plains of spain"
TEXT = [
    ("the quick brown fox jumps", "over a lazy dog"),
    ("it rains", "on the plains of spain while a dog jumps over the fox"),
    ("while it rains on the lazy plains of spain the quick brown dog", "jumps"),
    ("a fox", "a dog"),
]
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
SHAPES = {
    "bert": dict(zip(SIZES, (2, 64, 4, 128), strict=True)),
    "bert tanh": dict(zip(SIZES, (3, 48, 3, 80), strict=True), hidden_act="gelu_new"),
    "bert relu": dict(
        zip(SIZES, (1, 24, 1, 24), strict=True), hidden_act="relu", layer_norm_eps=1e-6
    ),
    "roberta": dict(zip(SIZES, (2, 32, 2, 64), strict=True)),
    "electra": dict(zip(SIZES, (2, 96, 4, 128), strict=True), embedding_size=24),
    "modernbert": dict(zip(SIZES, (5, 48, 3, 80), strict=True)),
}


CLASSES = {
    "bert": ("Bert", "ForPreTraining"),
    "roberta": ("Roberta", "ForMaskedLM"),
    "electra": ("Electra", "ForPreTraining"),
    "modernbert": ("ModernBert", "ForMaskedLM"),
}


def write_model(kind: str, folder, seed: int = 0, head: str = "", **values):
    """Writes a directory of random weights, large enough that all numbers are of size about 1."""
    torch.manual_seed(seed)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    sizes = dict(
        vocab_size=len(special) + len(WORDS.split()),
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **SHAPES[kind],
    )
    if kind == "roberta":
        sizes |= dict(max_position_embeddings=33, pad_token_id=0, type_vocab_size=1)
    elif kind == "modernbert":
        del sizes["hidden_dropout_prob"], sizes["attention_probs_dropout_prob"]
        values.pop("type_vocab_size", None)
        sizes |= dict(
            pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3
        )
        sizes |= dict.fromkeys(
            ("hidden_activation", "classifier_activation"), "gelu_new" if head else "gelu"
        )
        # A window of three tokens to either side, as 6: it is halved. Rows have up to seventeen.
        sizes |= dict(local_attention=7, global_rope_theta=1000.0)
    prefix, own_head = CLASSES[kind.split()[0]]
    with warnings.catch_warnings(action="ignore"):
        config = getattr(transformers, f"{prefix}Config")(**sizes | values)
        model = getattr(transformers, f"{prefix}{head or own_head}")(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = value.shape[-1] ** -0.5 if value.ndim == 2 else 0.3
            value.normal_(0, scale).add_(1.0 if name.lower().endswith("norm.weight") else 0.0)
            if kind == "electra" and name.endswith(("out_proj.weight", "prediction.weight")):
                value.mul_(4)  # what is after a GELU is small
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in [*special, *WORDS.split()]))
    return model.eval()


def read_there(folder, name, initialized=()):
    """Load a directory by a class of `transformers`, with no key missing or unexpected."""
    with warnings.catch_warnings(action="ignore"):
        loader = getattr(transformers, name)
        model, report = loader.from_pretrained(folder, output_loading_info=True)
    assert sorted(report["missing_keys"]) == sorted(initialized)
    assert not report["unexpected_keys"]
    return model.eval()


def rows(bert):
    """The text as rows of pairs, padded; a RoBERTa's have one type."""
    tokenizer = bert.tokenizer
    ids, types = np.zeros((4, 32), np.int64), np.zeros((4, 32), np.int64)
    for row, pair in enumerate(TEXT):
        a, b = tokenizer.encode(pair)
        sequence = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        ids[row, : len(sequence)] = sequence
        if bert.config.type_vocab_size > 1:
            types[row, len(a) + 2 : len(sequence)] = 1
    length = int((ids > 0).sum(1).max())
    ids, types = ids[:, :length], types[:, :length]
    return ids, types, (ids != tokenizer.pad_id).astype(np.int64)


def tensors(reference, ids, types, mask):
    """The inputs of the reference; a ModernBERT has no token types."""
    inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
    if reference.config.model_type == "modernbert":
        del inputs["token_type_ids"]
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


# What an ELECTRA does in pretraining is in test_parity_electra.py.
@pytest.fixture(params=[kind for kind in SHAPES if kind != "electra"], scope="module")
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_model(request.param, folder), bert_jax.load(folder)


of_each_architecture = pytest.mark.parametrize(
    "pair", ["bert", "roberta", "modernbert"], indirect=True, scope="module"
)


def test_every_number_of_the_forward_pass(pair, record_property):
    reference, ours = pair
    inputs = rows(ours)
    with torch.no_grad():
        expected = reference(
            **tensors(reference, *inputs), output_hidden_states=True, output_attentions=True
        )
        pooler = getattr(reference.base_model, "pooler", None)
        pooled = None if pooler is None else pooler(expected.hidden_states[-1])
    inputs = [x.astype(np.int32) for x in inputs]
    layers = expected.hidden_states, expected.attentions
    errors = check_encoder(ours.config, ours.params["bert"], inputs, *layers, pooled)
    real = inputs[2].astype(bool)
    positions = np.broadcast_to(np.arange(real.shape[1], dtype=np.int32), real.shape)
    heads = jax.jit(ours.model.apply)({"params": ours.params}, *inputs, positions)
    logits = expected.prediction_logits if "prediction_logits" in expected else expected.logits
    errors["MLM logits"] = close(np.asarray(heads.mlm_logits)[real], logits[real], least=0.3)
    for name, error in errors.items():
        record_property(name, error)
    if "seq_relationship_logits" in expected:
        close(heads.nsp_logits, expected.seq_relationship_logits)


PREDICTED = np.array([[1, 4], [2, 0], [5, 7], [1, 2]], np.int32)  # 0: no prediction
NEXT = np.array([0, 1, 1, 0], np.int32)


def our_loss(ours, ids, types, mask):
    labels = jnp.take_along_axis(jnp.asarray(ids), PREDICTED, 1)
    return loss_of(ours, masked_batch(ids, types, mask, PREDICTED, labels, NEXT))


def reference_loss(reference, ids, types, mask):
    labels = np.full(ids.shape, -100)
    chosen = np.nonzero(PREDICTED)
    indices = chosen[0], PREDICTED[chosen]
    labels[indices] = ids[indices]
    inputs = tensors(reference, ids, types, mask)
    inputs["labels"] = torch.from_numpy(labels)
    if hasattr(reference, "cls"):
        inputs["next_sentence_label"] = torch.from_numpy(NEXT.astype(np.int64))
    return lambda: reference(**inputs).loss


def tensors_of(reference) -> dict[str, np.ndarray]:
    """The reference's parameters by standard name, each once."""
    standard = names.exchange_of(reference.config.model_type).standard_name
    actual = {standard(name): value for name, value in reference.named_parameters()}
    actual.pop("cls.predictions.decoder.weight", None)
    return actual


def gradients_of(parameters) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}


def adamw(named_parameters, rate: float, decay: float):
    """AdamW of PyTorch that decays what ours does, and ours."""
    named_parameters = list(named_parameters)
    no_decay = ("bias", "LayerNorm.weight", "norm.weight")
    groups = [
        {
            "params": [p for n, p in named_parameters if n.endswith(no_decay) == kept],
            "weight_decay": decay * (not kept),
        }
        for kept in (True, False)
    ]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, eps=1e-6, weight_decay=decay, mask=decayed),
    )
    return torch.optim.AdamW(groups, lr=rate, eps=1e-6), optimizer


def check_twenty_steps(parameters, params, by_name, our_loss, reference_loss, batches):
    """Train by AdamW in both; compare the parameters, which all have moved.

    `our_loss` returns what `reference_loss` needs of our side of the step, too. Returns the
    largest error of a parameter, relative to its norm.
    """
    stepper, optimizer = adamw(parameters.items(), rate=1e-3, decay=0.01)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        gradient, drawn = jax.grad(our_loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, drawn

    for batch in batches:
        params, state, drawn = step(params, state, batch)
        stepper.zero_grad()
        reference_loss(batch, drawn).backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        stepper.step()
    found, worst = by_name(params), 0.0
    assert found.keys() <= parameters.keys()
    for name, value in found.items():
        # A RoBERTa's positions have a row more.
        expected, start = (x[name].detach().numpy()[-len(value) :] for x in (parameters, before))
        size = np.linalg.norm(expected)
        error = np.linalg.norm(value - expected) / size
        assert error < 1e-4, name
        worst = max(worst, float(error))
        if not name.endswith("self.key.bias"):  # which nothing depends on
            assert np.linalg.norm(expected - start) > 1e-3 * size, name
    return worst


def test_loss_and_every_gradient(pair, record_property):
    reference, ours = pair
    inputs = rows(ours)
    reference.zero_grad()
    expected = reference_loss(reference, *inputs)()
    expected.backward()
    loss, gradients = jax.jit(jax.value_and_grad(our_loss(ours, *inputs)))(ours.params)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    record_property("loss", abs(float(loss) / expected.item() - 1))
    actual = dict(names.to_foreign(gradients, model_type=ours.config.model_type))
    parameters = tensors_of(reference)
    assert set(actual) <= set(parameters)
    record_property("gradients", check_gradients(actual, gradients_of(parameters)))


@of_each_architecture
def test_twenty_steps_of_training(pair, record_property):
    reference, ours = pair
    reference = copy.deepcopy(reference)  # the optimizer changes it, and other tests share it
    ids, *others = rows(ours)
    # Other words in every step.
    words = (
        np.random.default_rng(n).integers(5, ours.config.vocab_size, ids.shape) for n in range(20)
    )
    error = check_twenty_steps(
        tensors_of(reference),
        ours.params,
        lambda params: dict(names.to_foreign(params, model_type=ours.config.model_type)),
        lambda params, batch: (our_loss(ours, batch, *others)(params), None),
        lambda batch, _: reference_loss(reference, batch, *others)(),
        [np.where(ids >= 5, other, ids) for other in words],
    )
    record_property("parameters after twenty steps", error)


@of_each_architecture
@pytest.mark.parametrize("head", [None, "masked-lm", "none"])
def test_exports_load_with_no_key_missing_or_unexpected(pair, head, tmp_path):
    reference, ours = pair
    exported = ours.export(tmp_path / "out", head)
    automatic = {
        "BertForPreTraining": "AutoModelForPreTraining",
        "BertForMaskedLM": "AutoModelForMaskedLM",
        "BertModel": "AutoModel",
        "RobertaForMaskedLM": "AutoModelForPreTraining",
        "RobertaModel": "AutoModel",
        "ModernBertForMaskedLM": "AutoModelForMaskedLM",
        "ModernBertModel": "AutoModel",
    }[exported.architecture]
    # RobertaModel has a pooler, which this checkpoint does not.
    initialized = ["pooler.dense.bias", "pooler.dense.weight"] if exported.newly_initialized else []
    model = read_there(tmp_path / "out", automatic, initialized)
    assert type(model).__name__ == exported.architecture
    before, after = (dict(m.base_model.named_parameters()) for m in (reference, model))
    for name in (before.keys() & after.keys()) - set(initialized):
        first = 1 if name == "embeddings.position_embeddings.weight" else 0  # a RoBERTa's padding
        assert torch.equal(before[name][first:], after[name][first:]), name


LABELS = {"id2label": {0: "no", 1: "yes", 2: "maybe"}, "label2id": {"no": 0, "yes": 1, "maybe": 2}}
TASKS = {
    "classification": ("ForSequenceClassification", LABELS),
    "regression": ("ForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "multi_label_classification": (
        "ForSequenceClassification",
        {**LABELS, "problem_type": "multi_label_classification"},
    ),
    "token_classification": ("ForTokenClassification", LABELS),
    "question_answering": ("ForQuestionAnswering", {}),
    "multiple_choice": ("ForMultipleChoice", {}),
}


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "electra"])
@pytest.mark.parametrize("task", TASKS)
def test_round_trip_of_a_fine_tuned_model(kind, task, tmp_path):
    head, values = TASKS[task]
    # Two types for a RoBERTa too, so that both are seen.
    reference = write_model(kind, tmp_path / "original", 2, head, type_vocab_size=2, **values)
    ours = bert_jax.load(tmp_path / "original")
    assert ours.task.kind == task
    assert ours.task.labels == (("no", "yes", "maybe") if "id2label" in values else ())
    assert not ours.unused

    ids, types, mask = rows(ours)
    assert mask.min() == 0
    assert types.max() == (kind != "modernbert")
    if task == "multiple_choice":
        ids, types, mask = (x.reshape(2, 2, -1) for x in (ids, types, mask))
    with torch.no_grad():
        expected = reference(**tensors(reference, ids, types, mask))
        inputs = tensors(reference, ids, types, mask)
    ids, types, mask = (x.astype(np.int32) for x in (ids, types, mask))
    actual = np.asarray(jax.jit(ours.model.apply)({"params": ours.params}, ids, types, mask))
    real = mask.astype(bool)
    if task == "question_answering":
        both = torch.stack((expected.start_logits, expected.end_logits), -1)
        assert (actual.swapaxes(1, 2)[~real] == -1e9).all()
        close(actual.swapaxes(1, 2)[real], both[real], least=0.3)
    elif task == "token_classification":
        close(actual[real], expected.logits[real], least=0.3)
    else:
        close(actual, expected.logits, least=0.3)
    if task == "multi_label_classification":
        labels = np.array([[1, 0, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1]], np.float32)
        loss = make_task(ours.task).objective(ours.model).metrics(actual, labels)["loss"]
        with torch.no_grad():
            theirs = reference(**inputs, labels=torch.from_numpy(labels)).loss
        assert float(loss.total / loss.weight) == pytest.approx(theirs.item(), rel=1e-5)

    exported = ours.export(tmp_path / "exported")
    again = read_there(tmp_path / "exported", f"AutoModel{head}")
    assert type(again).__name__ == type(reference).__name__ == exported.architecture
    assert again.config.id2label == reference.config.id2label
    assert again.config.label2id == reference.config.label2id
    with torch.no_grad():
        logits = again(**inputs)[0]
    chosen = real if task in ("token_classification", "question_answering") else ...
    close(logits[chosen], expected[0][chosen])
    before, after = reference.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        first = kind == "roberta" and name.endswith("position_embeddings.weight")  # of padding
        assert torch.equal(value[first:], after[name][first:]), name


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
def test_the_mlm_head_of_a_roberta_has_an_activation_of_its_own(tmp_path, activation):
    """The erf GELU, whatever that of the layers is; in its exports too."""
    reference = write_model("roberta", tmp_path / "theirs", hidden_act=activation)
    ours = bert_jax.load(tmp_path / "theirs")
    ours.export(tmp_path / "ours")
    exported = read_there(tmp_path / "ours", "RobertaForMaskedLM")
    ids, types, mask = rows(ours)
    real = mask.astype(bool)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    inputs = [x.astype(np.int32) for x in (ids, types, mask)]
    logits = jax.jit(ours.model.apply)({"params": ours.params}, *inputs, positions).mlm_logits
    for model in (reference, exported):
        with torch.no_grad():
            expected = model(**tensors(model, ids, types, mask)).logits
        close(np.asarray(logits)[real], expected[real], least=0.3)


def test_a_roberta_with_the_tokenizer_of_a_bert(tmp_path):
    """As `klue/roberta-base` is: one separator between two texts, and type 0."""
    folder, again = tmp_path / "model", tmp_path / "exported"
    reference = write_model("roberta", folder)
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    bert_jax.load(folder).export(again)
    first, second = (list(texts) for texts in zip(*TEXT, strict=True))
    inputs = tokenizer(
        first, second, padding=True, return_tensors="pt", return_token_type_ids=False
    )
    with torch.no_grad():
        expected = reference.roberta(**inputs)[0].numpy()
    is_text = inputs["attention_mask"].numpy().astype(bool)
    exported = transformers.AutoTokenizer.from_pretrained(again)
    assert exported(first, second).input_ids == [
        row[mask].tolist() for row, mask in zip(inputs["input_ids"].numpy(), is_text, strict=True)
    ]
    for path in (folder, again):
        ours = bert_jax.load(path)
        arrays = ours.tokenize(first, second)
        np.testing.assert_array_equal(arrays["input_ids"], inputs["input_ids"])
        close(np.asarray(ours(first, second).last_hidden_state)[is_text], expected[is_text])


def test_a_fine_tuning_beside_pytorchs(tmp_path, monkeypatch):
    """A ModernBERT of random weights, by `bert_jax.finetune` and by a loop over its batches."""
    folder, batches = tmp_path / "init", []
    reference = write_model("modernbert", folder, 3, "ForSequenceClassification", **LABELS)
    # Of two padded lengths, each of which is compiled.
    generator, lines = np.random.default_rng(0), ["sentence\tlabel", f"{WORDS}\tmaybe"]
    for _ in range(95):
        words = generator.choice(WORDS.split(), generator.integers(15, 30))
        lines.append(f"{' '.join(words)}\t{'yes' if 'fox' in words else 'no'}")
    for name, part in (("train", lines), ("dev", lines[:32])):
        (tmp_path / f"{name}.tsv").write_text("\n".join(part) + "\n")
    config = bert_jax.FinetuneConfig(
        epochs=2.0,
        log_every=1,
        task=bert_jax.TaskConfig(labels=("no", "yes", "maybe")),
        data=bert_jax.DataFiles(
            train=str(tmp_path / "train.tsv"),
            eval=str(tmp_path / "dev.tsv"),
            max_length=32,
            batch_size=8,
        ),
        optimizer=bert_jax.OptimizerConfig(name="adamw", learning_rate=1e-3, warmup_fraction=0.2),
    )
    prefetch = loader.prefetch

    def recording(source, *args):
        for batch in prefetch(source, *args):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(loader, "prefetch", recording)
    first = jax.devices()[:1]  # a program for one device compiles in half the time
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda: first)
    result = bert_jax.finetune(config, folder, tmp_path / "task", quiet=True)
    path = next((tmp_path / "task").glob("seed-*/metrics.jsonl"))
    records = map(json.loads, path.read_text().splitlines())
    losses = [record["loss"] for record in records if record["split"] == "train"]
    steps, best = len(losses), json.loads((path.parent / "result.json").read_text())["best"]["step"]
    assert steps == 24

    c = config.optimizer
    stepper, _ = adamw(reference.named_parameters(), c.learning_rate, c.weight_decay)
    assert (c.b1, c.b2, c.eps) == (0.9, 0.999, 1e-6)
    rate = learning_rate(make_rate_schedule(c, steps))
    for step in range(steps):
        for group in stepper.param_groups:
            group["lr"] = rate(step + 1)
        ids, mask, labels = (
            torch.from_numpy(np.array(batches[step][name]).astype(np.int64))
            for name in ("input_ids", "attention_mask", "labels")
        )
        inputs = {"input_ids": ids, "attention_mask": mask}
        loss = reference(**inputs, labels=labels).loss
        assert losses[step] == pytest.approx(loss.item(), rel=1e-4), step
        stepper.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), c.clip_norm)
        stepper.step()
        if step + 1 == best:
            with torch.no_grad():
                expected = reference(**inputs).logits
            arrays = (x.numpy().astype(np.int32) for x in (ids, ids * 0, mask))
            apply = jax.jit(result.bert.model.apply)
            close(apply({"params": result.bert.params}, *arrays), expected, 1e-4, least=0.3)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("task", ["", "classification"])
def test_a_modernbert_is_initialized_as_theirs(task):
    """Standard deviation and truncation of each tensor: of 12,000 values, to 3%."""
    head = TASKS[task][0] if task else "ForMaskedLM"
    sizes = dict(hidden_size=120, num_hidden_layers=4, num_attention_heads=4, intermediate_size=100)
    values = dict(vocab_size=130, initializer_range=0.03, **sizes)
    theirs = transformers.ModernBertConfig(pad_token_id=0, **values)
    torch.manual_seed(0)
    reference = getattr(transformers, f"ModernBert{head}")(theirs)
    config = bert_jax.ModernBertConfig(**values)
    labels = bert_jax.TaskConfig(labels=("a", "b"))
    model = make_task(labels).model(config, "") if task else BertForMaskedLM(config)
    params = nn.unbox(jax.jit(model.init_params)(jax.random.key(0)))
    expected = tensors_of(reference)
    actual = dict(names.to_foreign(params, model_type="modernbert"))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        other = expected[name].detach().numpy()
        assert value.shape == other.shape
        if value.ndim == 1:
            np.testing.assert_array_equal(value, other)
            continue
        few = 4 if value.size < 1000 else 1  # the classifier's
        assert value.std() == pytest.approx(other.std(), rel=0.03 * few), name
        assert np.abs(value).max() == pytest.approx(np.abs(other).max(), rel=0.02 * few), name


def test_the_command_that_converts_a_pickle(tiny_bert, tmp_path):
    """Tensors may be transposed views, as conversions from TensorFlow have left them."""
    table = torch.arange(6.0).reshape(2, 3)
    tiny_bert.export(tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.unlink()
    torch.save({"x": table, "y": table.T}, tmp_path / "model/pytorch_model.bin")
    with pytest.raises(bert_jax.UserError) as refusal:
        bert_jax.load(tmp_path / "model")
    command = shlex.split(str(refusal.value).partition("is installed: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True)
    tensors = safetensors.numpy.load_file(weights)
    np.testing.assert_array_equal(tensors["y"], tensors["x"].T)

"""Late interaction and sparse vectors as sentence-transformers and PyLate have them, both ways."""

import dataclasses
import io
import json
import warnings

import numpy as np
import pytest
import sentencepiece
from helpers import random_bert, refused, untrained

import bert_jax
from bert_jax.text import tokenizer_loading
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer

pytestmark = [
    pytest.mark.parity,
    # Of the other packages' own making, and of texts that are too long for the tiny models.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::bert_jax.TextWarning"),
]
with warnings.catch_warnings(action="ignore"):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("sentence_transformers")
TEXTS = ["The river bank.", "a token reads, the model!", "bank " * 40, "?", "The bank reads"]
SETTINGS = "config_sentence_transformers.json"
# Tokens of the small vocabulary that no text has.
MARKS = {"query_token": "[unused0]", "passage_token": "[unused1]"}


def late(tiny_bert, tmp_path, **fields):
    """An untrained model of late interaction with the marks in its vocabulary."""
    folder = tmp_path / "tokenizer"
    tiny_bert.tokenizer.save(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    for index, mark in enumerate(MARKS.values()):
        # In place of the last tokens.
        old = next(token for token, number in vocabulary.items() if number == 63 - index)
        del vocabulary[old]
        vocabulary[mark] = 63 - index
    file.write_text(json.dumps(content))
    tokenizer = tokenizer_loading.load(folder)
    bert = untrained(tiny_bert, "late_interaction")
    task = dataclasses.replace(bert.task, query_length=16, **fields)
    data = dataclasses.replace(bert.data, max_length=20)
    return dataclasses.replace(bert, task=task, data=data, tokenizer=tokenizer)


def check_late(bert, theirs) -> None:
    for prompt, encode in (("query", theirs.encode_query), ("passage", theirs.encode_document)):
        expected = encode(TEXTS, convert_to_numpy=True, show_progress_bar=False)
        actual = bert.encode(TEXTS, prompt=prompt)
        assert [len(each) for each in actual] == [len(each) for each in expected]
        for mine, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5)
    assert len({len(each) for each in actual}) > 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**MARKS, "expansion": "attended"},
        {**MARKS, "expansion": "none", "skipped_tokens": ()},
    ],
)
def test_late_interaction(tiny_bert, tmp_path, fields):
    bert = late(tiny_bert, tmp_path, **fields)
    bert.export(tmp_path / "ours")
    theirs = library.MultiVectorEncoder(str(tmp_path / "ours"), device="cpu")
    check_late(bert, theirs)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    for folder in ("ours", "theirs"):  # in the layouts of PyLate, and of its own
        again = bert_jax.load(tmp_path / folder)
        for name in ("expansion", "query_token", "passage_token", "skipped_tokens"):
            assert getattr(again.task, name) == getattr(bert.task, name)
        assert again.data.max_length == 20
        check_late(again, theirs)


def test_marks_that_would_change_the_text_after_them_are_not_exported(tiny_bert, tmp_path):
    """Of a SentencePiece, `tokenizers` puts a space before the first token alone."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, "the model reads a bank and the river"] * 30),
        model_writer=model,
        vocab_size=64,
        hard_vocab_limit=False,
        control_symbols=["[CLS]", "[SEP]", "[MASK]", "<pad>"],
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(model.getvalue())
    bert = untrained(random_bert(tiny_bert.config, tokenizer), "late_interaction")
    task = dataclasses.replace(bert.task, query_length=16)
    dataclasses.replace(bert, task=task).export(tmp_path / "unmarked")
    theirs = library.MultiVectorEncoder(str(tmp_path / "unmarked"), device="cpu")
    check_late(dataclasses.replace(bert, task=task), theirs)
    marked = dataclasses.replace(bert, task=dataclasses.replace(task, query_token="<s>"))
    with refused("read the start of a text after '<s>' as other tokens; train without task.query"):
        marked.export(tmp_path / "marked")
    assert not (tmp_path / "marked").exists()


def test_pylate(tiny_bert, tmp_path):
    """Where it is installed, which needs older versions of the other packages."""
    pylate = pytest.importorskip("pylate.models")
    # Of words that the vocabulary lacks, PyLate makes the unknown token, and skips that;
    # sentence-transformers does not, nor do we.
    bert = late(tiny_bert, tmp_path, **MARKS, skipped_tokens=(".", "##s", "the"))
    bert.export(tmp_path / "ours")
    theirs = pylate.ColBERT(str(tmp_path / "ours"), device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    again = bert_jax.load(tmp_path / "theirs")
    assert theirs.tokenizer.unk_token_id not in theirs.skiplist
    for prompt in ("query", "passage"):
        expected = theirs.encode(TEXTS, is_query=prompt == "query")
        for model in (bert, again):
            for mine, other in zip(model.encode(TEXTS, prompt=prompt), expected, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-5)


def test_sparse_vectors(tiny_bert, tmp_path):
    bert = untrained(tiny_bert, "sparse")
    bert = dataclasses.replace(bert, data=dataclasses.replace(bert.data, max_length=20))
    bert.export(tmp_path / "ours")
    theirs = library.SparseEncoder(str(tmp_path / "ours"), device="cpu")
    expected = theirs.encode(TEXTS, convert_to_sparse_tensor=False, show_progress_bar=False)
    expected = np.asarray(expected)
    assert 0.1 < (expected > 0).mean() < 0.9
    np.testing.assert_allclose(bert.encode(TEXTS), expected, atol=1e-5)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = bert_jax.load(tmp_path / "theirs")
    assert (again.task.kind, again.data.max_length) == ("sparse", 20)
    np.testing.assert_allclose(again.encode(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["embedding", "sparse", "late_interaction", "of its own"])
def test_settings_that_are_not_kept(kind, tiny_bert, tmp_path):
    """One answer for each kind: what would change the vectors is refused, the rest is named."""
    if kind in ("embedding", "sparse"):
        untrained(tiny_bert, kind).export(tmp_path / "model")
    else:
        late(tiny_bert, tmp_path).export(tmp_path / "model")
    folder = tmp_path / "model"
    if kind == "of its own":
        library.MultiVectorEncoder(str(folder), device="cpu").save_pretrained(str(tmp_path / "own"))
        folder = tmp_path / "own"
    settings = json.loads((folder / SETTINGS).read_text())
    prompts = {**settings.get("prompts", {}), "topic": "the ", "none": ""}
    changed = settings | {"prompts": prompts, "default_prompt_name": "topic"}
    (folder / SETTINGS).write_text(json.dumps(changed))
    lost = "not kept: the prompts topic; topic as the prompt of all texts that name none$"
    with pytest.warns(UserWarning, match=lost):
        bert_jax.load(folder)
    (folder / SETTINGS).write_text(json.dumps(settings))
    file = folder / "sentence_bert_config.json"
    values = json.loads(file.read_text())
    for name in ("processor_kwargs", "tokenizer_args"):
        file.write_text(json.dumps(values | {name: {"model_max_length": 9}}))
        with refused(f"has {name} \"{{'model_max_length': 9}}\", which is not supported"):
            bert_jax.load(folder)
    file.write_text(json.dumps(values | {"transformer_task": "any-to-any"}))
    with refused("has transformer_task 'any-to-any', which is not supported"):
        bert_jax.load(folder)


def test_what_is_refused(tiny_bert, tmp_path):
    untrained(tiny_bert, "sparse").export(tmp_path / "sparse")
    file = tmp_path / "sparse" / "1_SpladePooling" / "config.json"
    file.write_text(json.dumps({"pooling_strategy": "sum"}))
    with refused("has pooling_strategy sum; only max is read"):
        bert_jax.load(tmp_path / "sparse")
    folder = tmp_path / "late"
    late(tiny_bert, tmp_path).export(folder)
    sparse = tmp_path / "sparse" / SETTINGS
    file.write_text(json.dumps({"pooling_strategy": "max"}))
    sparse.write_text(json.dumps({"max_active_dims": 5}))
    with refused("has max_active_dims, which is not supported"):
        bert_jax.load(tmp_path / "sparse")
    sparse.write_text("{}")
    lengths = tmp_path / "sparse" / "sentence_bert_config.json"
    lengths.write_text(json.dumps({"query_length": 6}))
    with refused("has query_length '6', which is not supported"):
        bert_jax.load(tmp_path / "sparse")
    dense = next(folder.glob("*Dense/config.json"))
    values = json.loads(dense.read_text())
    for name in ("bias", "activation_function"):  # which the library then has, and tanh
        dense.write_text(json.dumps({key: x for key, x in values.items() if key != name}))
        with refused(f"has {name}"):
            bert_jax.load(folder)
    dense.write_text(json.dumps(values))
    settings = json.loads((folder / SETTINGS).read_text())
    for changed, key_words in (
        ({"query_length": "x"}, "query_length is 'x'"),
        ({"document_length": 0}, "document_length is '0'"),
        ({"query_prefix": 3}, "query_prefix is '3'; it must be a token"),
        ({"skiplist_words": "ab"}, "skiplist_words are no list of tokens"),
        (
            {"skiplist_words": ["[CLS]", "."]},
            "skiplist_words has [CLS], which every passage is scored by",
        ),
        ({"do_query_expansion": "no"}, "do_query_expansion is 'no'; it must be true or false"),
        ({"prompts": {"query": "x"}, "similarity_fn_name": "xtr"}, "prompts, similarity_fn_name"),
    ):
        (folder / SETTINGS).write_text(json.dumps(settings | changed))
        with refused(key_words):
            bert_jax.load(folder)
    is_attended = settings.pop("attend_to_expansion_tokens")
    for name in ("attend_to_expansion_tokens", "attend_to_mask_tokens"):  # the latter of ColBERT
        (folder / SETTINGS).write_text(json.dumps({**settings, name: not is_attended}))
        assert bert_jax.load(folder).task.expansion == ("unattended" if is_attended else "attended")
    (folder / SETTINGS).write_text(json.dumps(settings | {"query_prefix": "[Q] "}))
    with refused("the tokenizer has no token '[Q] '"):
        bert_jax.load(folder).encode(TEXTS, prompt="query")


def test_what_is_refused_of_a_layout_of_its_own(tiny_bert, tmp_path):
    late(tiny_bert, tmp_path, **MARKS).export(tmp_path / "ours")
    folder = tmp_path / "theirs"
    library.MultiVectorEncoder(str(tmp_path / "ours"), device="cpu").save_pretrained(str(folder))
    for name, changed, words in (
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["query"]}, "skiplist_tasks other"),
        (
            "2_MultiVectorMask/config.json",
            {"skiplist_words": ["[SEP]"]},
            "has [SEP], which every passage is scored by",
        ),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min"}}, "the query_expans"),
        ("sentence_bert_config.json", {"query_expansion": {"token": "the"}}, "the query_expansion"),
        ("sentence_bert_config.json", {"query_expansion": "yes"}, "the query_expansion yes"),
        ("sentence_bert_config.json", {"document_length": "x"}, "document_length is 'x'"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"max_length": 6}}},
            "has processing_kwargs",
        ),
        (SETTINGS, {"prompts": {"query": "the bank: "}}, "the prompt 'the bank: ' for a query"),
        (SETTINGS, {"prompts": "the bank"}, "the prompt 'the bank' for a query"),
        (SETTINGS, {"similarity_fn_name": "mean_maxsim"}, "has similarity_fn_name"),
    ):
        file = folder / name
        before = file.read_text()
        file.write_text(json.dumps(json.loads(before) | changed))
        with refused(words):
            bert_jax.load(folder)
        file.write_text(before)
    mask = folder / "2_MultiVectorMask/config.json"
    for names in (None, "document"):  # the library's default, and another spelling of it
        mask.write_text(json.dumps(json.loads(mask.read_text()) | {"skiplist_tasks": names}))
        assert bert_jax.load(folder).task
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:-1]))
    with refused("does not scale its vectors to unit length"):
        bert_jax.load(folder)


@pytest.mark.parametrize("fields", [{}, {"hidden_size": 24}])
def test_the_loss_of_late_interaction(fields):
    """As `MultiVectorMultipleNegativesRankingLoss` has it, by its own scores."""
    from sentence_transformers.multi_vector_encoder.scoring import colbert_scores

    from bert_jax.tasks.late_interaction import LateInteractionObjective, max_similarity

    draw = np.random.default_rng(0)
    count, size = 6, fields.get("hidden_size", 8)
    vectors = draw.normal(size=(count, 3, 7, size)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    is_scored = draw.random((count, 3, 7)) < 0.7
    is_scored[..., 0] = True
    vectors *= is_scored[..., None]
    scores = colbert_scores(
        torch.tensor(vectors[:, 0]),
        torch.tensor(vectors[:, 1:]),
        queries_mask=torch.tensor(is_scored[:, 0]),
        documents_mask=torch.tensor(is_scored[:, 1:]),
    )
    mine = max_similarity(vectors[:, 0], vectors[:, 1:].reshape(-1, 7, size))
    np.testing.assert_allclose(mine, scores, atol=1e-5)
    expected = torch.nn.functional.cross_entropy(scores / 0.5, torch.arange(count) * 2)
    objective = LateInteractionObjective(None, 0.5)
    labels = np.arange(count * 3, dtype=np.int32).reshape(count, 3)
    loss = objective.metrics(vectors, labels)["loss"]
    np.testing.assert_allclose(loss.total / loss.weight, expected, rtol=1e-5)


def test_the_loss_of_sparse_vectors():
    """As `SpladeLoss` has it: the cross-entropy of inner products, and two penalties."""
    from sentence_transformers.sparse_encoder.losses import FlopsLoss

    from bert_jax.tasks.sparse import SparseConfig, SparseObjective

    draw = np.random.default_rng(0)
    vectors = np.maximum(draw.normal(size=(6, 3, 30)), 0).astype(np.float32)
    config = SparseConfig(query_penalty=0.3, passage_penalty=0.7)
    queries, passages = torch.tensor(vectors[:, 0]), torch.tensor(vectors[:, 1:].reshape(12, 30))
    flops = FlopsLoss(None).compute_loss_from_embeddings
    ranked = torch.nn.functional.cross_entropy(queries @ passages.T, torch.arange(6) * 2)
    expected = ranked + 0.3 * flops(queries) + 0.7 * flops(passages)
    # Two examples of padding add nothing.
    padded = np.pad(vectors, ((0, 2), (0, 0), (0, 0)), constant_values=5.0)
    labels = np.arange(24, dtype=np.int32).reshape(8, 3)
    labels[6:] = -1
    objective = SparseObjective(None, config)
    loss = objective.metrics(padded, labels)["loss"]
    np.testing.assert_allclose(loss.total / loss.weight, expected, rtol=1e-5)
    begun = objective.at_progress(np.float32(0.0)).metrics(padded, labels)["loss"]
    np.testing.assert_allclose(begun.total / begun.weight, ranked, rtol=1e-5)
    third = objective.at_progress(np.float32(0.165)).metrics(padded, labels)["loss"]
    grown = ranked + (expected - ranked) / 4
    np.testing.assert_allclose(third.total / third.weight, grown, rtol=1e-5)

"""Late interaction and sparse vectors: what is encoded, small runs, indexes, and mistakes."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import model_config, refused, untrained

import bert_jax
from bert_jax import FinetuneConfig, Index, OptimizerConfig
from bert_jax.batches.buckets import Batcher
from bert_jax.config import DataFiles
from bert_jax.config.validation import validate_finetuning
from bert_jax.retrieval import search
from bert_jax.tasks import make_task, task_class
from bert_jax.tasks.datasets import load_datasets
from bert_jax.tasks.examples import Example
from bert_jax.tasks.late_interaction import LateInteraction, LateInteractionConfig
from bert_jax.tasks.sparse import SparseConfig

CONFIGS = {
    "late_interaction": LateInteractionConfig(query_length=12, skipped_tokens=("the",)),
    "sparse": SparseConfig(),
}
KINDS = pytest.mark.parametrize("kind", [*CONFIGS])
TEXTS = ["the river bank", "a token", "the model reads a head", "bank", "sees the small river"]


def test_the_roles_of_tokens(wordpiece):
    """A query is filled up with [MASK]s that are scored; of a passage some tokens are not."""
    config = dataclasses.replace(
        CONFIGS["late_interaction"], query_length=8, query_token="[UNK]", skipped_tokens=("dog",)
    )
    task, model = make_task(config), model_config()
    examples = [
        Example(None, "a:1", ("the dog", "lazy dog", "the fox"), 1.0),
        Example(None, "a:2", ("lazy dog", "the fox", "lazy dog " * 9), 1.0),
    ]
    features = task.features(examples, wordpiece, model, 10)
    assert features.truncated == 1
    assert task.truncation(1, DataFiles(max_length=10)) == (
        "1 text to 10 tokens, or of a query to 8, which is task.query_length"
    )
    batch = Batcher(features, wordpiece, 2, 10).batch(np.array([0, 1, -1]), 16)
    assert batch["input_ids"].shape == batch["token_roles"].shape == (3, 3, 16)
    # Of 3 tokens of each query, 2 of three passages and 8 of the last; not of the [MASK]s.
    assert Batcher(features, wordpiece, 2, 10).unknown == (2, 20)
    rows = batch["input_ids"][0], batch["token_roles"][0]
    tokens = [[wordpiece.id_to_token(token) for token in row] for row in rows[0]]
    query = ["[CLS]", "[UNK]", "the", "dog", "[SEP]", "[MASK]", "[MASK]", "[MASK]"]
    assert tokens[0][:8] == query
    assert rows[1][0].tolist() == [1] * 5 + [3] * 3 + [0] * 8
    assert tokens[1][:4] == ["[CLS]", "lazy", "dog", "[SEP]"]
    assert rows[1][1].tolist() == [1, 1, 2, 1] + [0] * 12
    assert not batch["token_roles"][2].any()
    # Equal texts have one number, whatever they are.
    labels = batch["labels"]
    assert labels[0, 1] == labels[1, 0]
    assert labels[2].tolist() == [-1] * 3


@KINDS
def test_a_run(kind, tmp_path, shallow_bert):
    """It learns which words belong together, and is loaded, searched and evaluated as trained."""
    words = ["token", "model", "layer", "head", "river", "bank", "reads", "sees", "small"]
    pairs = [f"the {a}\ta {b} of {b}" for a, b in zip(words, words[1:] + words[:1], strict=True)]
    files = {"train": pairs * 4, "eval": pairs}
    for name, lines in files.items():
        (tmp_path / f"{name}.tsv").write_text("\n".join(["q\tp", *lines]) + "\n")
    files = {name: str(tmp_path / f"{name}.tsv") for name in files}
    config = FinetuneConfig(
        epochs=3.0,
        task=CONFIGS[kind],
        data=DataFiles(**files, text="q,p", max_length=16, batch_size=8),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-2),
    )
    result = bert_jax.finetune(config, shallow_bert, tmp_path / "run", quiet=True)
    rows = {row["name"]: row["scores"]["ndcg@10"] for row in result.comparison}
    assert {"before training", "BM25", "TF-IDF"} <= set(rows)
    assert rows["seed 0"] > rows["before training"] + 0.1
    loaded = bert_jax.load(tmp_path / "run")
    assert loaded.task == result.bert.task
    line = json.loads((tmp_path / "run" / "predictions.jsonl").read_text().splitlines()[0])
    again = loaded.predict([tuple(pairs[0].split("\t"))])
    assert again[0]["similarity"] == pytest.approx(line["prediction"], rel=1e-4)
    assert again.scores == {}  # without labels
    # The index finds what the run's own scores say.
    index = Index.build(loaded, [], tmp_path / "index", texts=[p.split("\t")[1] for p in pairs])
    hits = index.search([p.split("\t")[0] for p in pairs], top_k=1)
    first = np.mean([found[0].number == number for number, found in enumerate(hits)])
    assert first == pytest.approx(result.scores["eval"]["recall@1"], abs=0.12)  # float16
    reloaded = Index.load(tmp_path / "index")
    assert [hit.number for hit in reloaded.search("the token", 3)] == [
        hit.number for hit in index.search("the token", 3)
    ]


@KINDS
def test_an_index_has_the_scores_of_the_definition(kind, tiny_bert, tmp_path):
    bert = untrained(tiny_bert, kind)
    bert = dataclasses.replace(bert, task=dataclasses.replace(CONFIGS[kind]))
    index = Index.build(bert, [], tmp_path / "my.index", texts=TEXTS)
    query = "a river reads"
    asked, passages = bert.encode([query], prompt="query")[0], bert.encode(TEXTS, prompt="passage")
    if kind == "sparse":
        assert passages.shape == (len(TEXTS), bert.config.vocab_size)
        expected = passages @ asked
    else:
        assert asked.shape == (12, 128)
        tokens = [[*map(bert.tokenizer.id_to_token, ids)] for ids in bert.tokenizer.encode(TEXTS)]
        counts = [2 + len(each) - each.count("the") for each in tokens]  # [CLS] and [SEP]
        assert [len(each) for each in passages] == counts
        expected = np.array([(asked @ each.T).max(1).sum() for each in passages])
    hits = index.search(query, top_k=5)
    assert [hit.number for hit in hits] == np.argsort(-expected).tolist()
    scores = [hit.score for hit in sorted(hits, key=lambda hit: hit.number)]
    np.testing.assert_allclose(scores, expected, rtol=2e-3)
    with refused("is of another model"):
        Index.load(tmp_path / "my.index", tiny_bert)
    other = dataclasses.replace(bert, data=dataclasses.replace(bert.data, max_length=16))
    with refused("is of another model"):
        Index.load(tmp_path / "my.index", other)
    Index.build(tiny_bert, [], tmp_path / "my.index", texts=TEXTS, force=True)


@pytest.mark.parametrize("block", [1, 60, 1 << 20])
def test_sums_of_the_best_products_in_blocks(monkeypatch, block):
    monkeypatch.setattr(search, "_BLOCK", block)
    monkeypatch.setattr(search, "_SCORES", 60)  # two queries at once
    draw = np.random.default_rng(0)
    passages = [draw.normal(size=(count, 4)) for count in draw.integers(1, 9, 30)]
    queries = [draw.normal(size=(count, 4)) for count in (1, 5, 2, 3, 4)]
    found = search.token_top_k(passages, queries, 40)
    for query, indices, scores in zip(queries, found.indices, found.scores, strict=True):
        expected = np.array([(query @ passage.T).max(1).sum() for passage in passages])
        assert indices.tolist() == np.argsort(-expected).tolist()
        np.testing.assert_allclose(scores, expected[indices], rtol=1e-5)


def test_embeddings_in_a_file(tiny_bert, tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    for kind, config in CONFIGS.items():
        bert = dataclasses.replace(untrained(tiny_bert, kind), task=config)
        bert.save(tmp_path / kind)
        bert_jax_main("embed", kind, "texts.txt", f"--output={kind}.npz")
        with np.load(f"{kind}.npz") as file:
            arrays = dict(file)
        expected = bert.encode(TEXTS)
        if kind == "sparse":
            np.testing.assert_allclose(arrays["vectors"], expected, atol=1e-6)
            continue
        ends = np.cumsum([len(each) for each in expected])
        np.testing.assert_array_equal(arrays["ends"], ends)
        np.testing.assert_allclose(arrays["vectors"], np.concatenate(expected), atol=1e-6)
        printed = bert_jax_main("embed", kind, "texts.txt", "--json", "--prompt=query")
        line = json.loads(printed.splitlines()[0])
        assert np.shape(line["vectors"]) == (12, 128)
        with refused("an .npy cannot say which text a vector is of"):
            bert_jax_main("embed", kind, "texts.txt", "--output=out.npy")


def test_a_model_is_continued_with_its_own_settings(tiny_bert):
    kind = task_class("late_interaction")
    of_recipe = bert_jax.recipe("finetune/late_interaction", bert_jax.FinetuneConfig).task
    skips = dataclasses.replace(of_recipe, skipped_tokens=(".", ","))
    assert kind.continued(of_recipe, skips).skipped_tokens == (".", ",")
    initial = dataclasses.replace(CONFIGS["late_interaction"], size=24, expansion="attended")
    config = dataclasses.replace(LateInteractionConfig(), temperature=0.5, query_length=16)
    found = kind.continued(config, initial)
    assert found == dataclasses.replace(initial, temperature=0.5, query_length=16)
    default = LateInteractionConfig().query_length
    config = LateInteractionConfig(query_length=default)
    initial = dataclasses.replace(initial, query_length=default + 8)
    assert kind.continued(config, initial) == initial
    set_by_hand = kind.continued(config, initial, ["query_length"])
    assert set_by_hand == dataclasses.replace(initial, query_length=default)
    with refused("task.size is 64, and that of the checkpoint is 24; leave it out"):
        kind.continued(LateInteractionConfig(size=64), initial)


def test_an_index_is_of_what_its_vectors_depend_on(tiny_bert, tmp_path):
    """Not of the weights of a loss, or of a pooler."""
    for kind, config in CONFIGS.items():
        bert = dataclasses.replace(untrained(tiny_bert, kind), task=config)
        Index.build(bert, [], tmp_path / kind, texts=TEXTS)
        other = dataclasses.replace(bert, task=dataclasses.replace(config, temperature=0.5))
        assert Index.load(tmp_path / kind, other).search([]) == []
    changed = dataclasses.replace(CONFIGS["late_interaction"], expansion="none")
    bert = dataclasses.replace(untrained(tiny_bert, "late_interaction"), task=changed)
    with refused("is of another model"):
        Index.load(tmp_path / "late_interaction", bert)


def test_texts_of_skipped_tokens_alone_and_long_queries(tiny_bert):
    config = dataclasses.replace(CONFIGS["late_interaction"], query_length=24)
    bert = dataclasses.replace(untrained(tiny_bert, "late_interaction"), task=config)
    bert = dataclasses.replace(bert, data=dataclasses.replace(bert.data, max_length=16))
    assert [len(each) for each in bert.encode(["the", "the the"])] == [2, 2]
    # A query may be longer than a passage.
    assert bert.encode(["the bank"], prompt="query")[0].shape == (24, 128)
    with pytest.warns(bert_jax.TextWarning, match="longer than the model's 24 tokens"):
        bert.encode(["the bank " * 20], prompt="query")
    assert bert.predict([("the bank " * 9, "a river")])[0]["similarity"] > 0
    for arguments, key_words in (
        ({"batch_size": -1}, "batch_size is -1"),
        ({"prompt": "query", "layer": -1}, "the prompt 'query' is for the model's own vectors"),
        ({"prompt": "answer"}, "prompt is 'answer'; the model has query and passage"),
    ):
        with refused(key_words):
            bert.encode(["the"], **arguments)
    with refused("the checkpoint has no masked LM head"):
        untrained(tiny_bert, "sparse").fill_mask("the [MASK]")


def test_masks_beyond_the_window_of_a_local_layer(wordpiece):
    model = model_config("modernbert", local_attention=8)
    task = make_task(CONFIGS["late_interaction"])
    with refused("queries are filled up to 12 tokens, and a local layer sees 4 to each side"):
        task.text_features(["the fox"], wordpiece, model, 16, is_query=True)


@pytest.mark.parametrize(
    ("kind", "fields", "others", "key_words"),
    [
        (
            "late_interaction",
            {"query_length": 20},
            {},
            "task.query_length is 20; give 8 to 16, the tokens",
        ),
        ("late_interaction", {"query_length": 4}, {}, "task.query_length is 4; give 8 to 16"),
        ("late_interaction", {}, {"probe": "1"}, "late_interaction trains the whole encoder"),
        ("late_interaction", {"size": 0}, {}, "task.size is 0"),
        ("sparse", {}, {"probe": "1"}, "sparse trains the whole encoder"),
        ("sparse", {}, {"data": DataFiles(max_length=16, batch_size=1)}, "data.batch_size is 1"),
        ("sparse", {"query_penalty": -1.0}, {}, "task.query_penalty is -1.0"),
        ("sparse", {"temperature": 0.0}, {}, "task.temperature is 0.0"),
    ],
)
def test_settings_that_do_not_fit(kind, fields, others, key_words):
    task = dataclasses.replace(CONFIGS[kind], **fields)
    settings = {"data": DataFiles(max_length=16), "model": model_config(), **others}
    config = FinetuneConfig(task=task, **settings)
    with refused(key_words):
        validate_finetuning(config)


def test_what_a_checkpoint_or_a_tokenizer_lacks(tiny_bert, wordpiece, tmp_path):
    (tmp_path / "pairs.tsv").write_text("q\tp\nthe token\ta model\n")
    train = str(tmp_path / "pairs.tsv")
    data = DataFiles(train=train, eval=train, text="q,p", max_length=16, batch_size=8)
    config = FinetuneConfig(task=SparseConfig(), data=data)
    with refused("the checkpoint has no masked LM head on its encoder, which sparse needs"):
        bert_jax.finetune(config, untrained(tiny_bert, "embedding"), tmp_path / "run", quiet=True)
    task = make_task(dataclasses.replace(CONFIGS["late_interaction"], passage_token="[D]"))
    with refused("the tokenizer has no token '[D]'"):
        task.text_features(["the fox"], wordpiece, model_config(), 16)
    task = make_task(
        dataclasses.replace(CONFIGS["late_interaction"], skipped_tokens=("[SEP]", "."))
    )
    with refused("task.skipped_tokens has [SEP], which every passage is scored by; remove it"):
        task.text_features(["the fox"], wordpiece, model_config(), 16)
    task = make_task(dataclasses.replace(CONFIGS["late_interaction"], passage_token="fox"))
    with refused("the token 'fox', which is to mark texts, is a word of texts", "as [unused0]"):
        task.text_features(["the dog"], wordpiece, model_config(), 16)
    with refused("has 3 texts, and a:1 2"):
        examples = [Example(None, f"a:{n}", ("the",) * (n + 1), 1.0) for n in (1, 2)]
        task.features(examples, wordpiece, model_config(), 16)


def test_the_rows_of_a_query_are_held_out_together(tmp_path):
    table = tmp_path / "pairs.tsv"
    rows = "".join(f"query {i}\tpassage {i} {j}\n" for i in range(50) for j in range(4))
    table.write_text(f"query\tpassage\n{rows}")
    config = FinetuneConfig(
        data=DataFiles(train=str(table), text="query,passage", eval_fraction=0.2),
        task=SparseConfig(),
    )
    _, found = load_datasets(config)
    (held_out,) = found.evals.values()
    trained = {example.texts[0] for example in found.train}
    assert len(held_out) == 40
    assert trained.isdisjoint(example.texts[0] for example in held_out)


def test_a_continued_late_interaction_keeps_its_marks():
    own = LateInteractionConfig(query_token="[unused0]", passage_token="[unused1]")
    assert LateInteraction.continued(LateInteractionConfig(), own) == own

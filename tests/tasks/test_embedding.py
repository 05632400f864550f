"""Embeddings: examples of every form, scores against their definitions, a small run."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import model_config, refused, untrained
from scipy import stats
from sklearn.metrics import ndcg_score

import bert_jax
from bert_jax.batches.buckets import Batcher
from bert_jax.config import DataFiles, EmbeddingConfig, FinetuneConfig, OptimizerConfig
from bert_jax.config.settings import override
from bert_jax.config.validation import validate_finetuning
from bert_jax.errors import UserError
from bert_jax.inference.embeddings import embedding_identity
from bert_jax.tasks.datasets import load_datasets, read_examples
from bert_jax.tasks.embedding import Embedding, EmbeddingTaskConfig
from bert_jax.tasks.examples import Example

COLUMNS = DataFiles(text="query,passage")


def task(**fields) -> Embedding:
    return Embedding(EmbeddingTaskConfig(embedding=EmbeddingConfig(**fields)))


def read(path, content: str, data: DataFiles = COLUMNS, **fields) -> list[Example]:
    path.write_text(content, encoding="utf-8")
    return read_examples(task(**fields), str(path), data, labelled=True)


def texts(examples: list[Example]) -> list[tuple[str, ...]]:
    return [example.texts for example in examples]


def test_pairs_and_hard_negatives(tmp_path):
    table = "query,passage,negative\nfox,the fox,der Hund\n狐,the fox,le chien\n"
    examples = read(tmp_path / "a.csv", table, DataFiles(text="query, passage,negative"))
    assert texts(examples) == [("fox", "the fox", "der Hund"), ("狐", "the fox", "le chien")]
    lines = '{"query": "fox", "passage": "the fox"}\n{"query": "dog", "passage": "the dog"}\n'
    assert texts(read(tmp_path / "a.jsonl", lines)) == [("fox", "the fox"), ("dog", "the dog")]


def test_plain_text(tmp_path):
    lines = "a fox\nthe dog\n\nwho jumps\nover what\n"
    same = read(tmp_path / "a.txt", lines, DataFiles(), pairs="same")
    assert [first for first, _ in texts(same)] == ["a fox", "the dog", "who jumps", "over what"]
    assert all(first == second for first, second in texts(same))
    neighbours = read(tmp_path / "a.txt", lines, DataFiles(), pairs="neighbours")
    assert texts(neighbours) == [("a fox", "the dog"), ("who jumps", "over what")]
    column = read(tmp_path / "a.tsv", "sentence\na fox\nthe dog\n", DataFiles(), pairs="neighbours")
    assert texts(column) == [("a fox", "the dog")]
    rows = '{"sentence": "a"}\n{"sentence": "b"}\n{"sentence": null}\n{"sentence": "c"}\n'
    lines = read(tmp_path / "a.jsonl", rows, DataFiles(), pairs="neighbours")
    assert texts(lines) == [("a", "b")]


def test_scored_pairs(tmp_path):
    table = "query\tpassage\tlabel\nfox\tdog\t0.25\nfox\tthe fox\t-1\n"
    examples = read(tmp_path / "a.tsv", table, loss="cosine")
    assert [example.label for example in examples] == [0.25, -1.0]
    of_stars = read(tmp_path / "a.tsv", table.replace("0.25", "4.5"), loss="cosent")
    assert of_stars[0].label == 4.5


@pytest.mark.parametrize(
    ("name", "content", "fields", "key_words"),
    [
        ("a.tsv", "query\tpassage\nfox\t \n", {}, "a.tsv:2: a text is ' '"),
        ("a.tsv", "query\tpassages\nfox\tdog\n", {}, "has no column 'passage'"),
        ("a.tsv", "query\tpassage\tlabel\nfox\tdog\t7\n", {"loss": "cosine"}, "'7' is no cosine"),
        ("a.tsv", "query\tpassage\tlabel\nfox\tdog\tx\n", {"loss": "cosent"}, "'x' is no number"),
        ("a.tsv", "query\tpassage\tlabel\nfox\tdog\t\n", {"loss": "cosent"}, "has no label"),
        ("a.tsv", "query\tpassage\nfox\tdog\n", {"loss": "cosent"}, "has no column 'label'; set"),
        ("a.tsv", "sentence\na fox\n", {"data": DataFiles()}, "one text; name two columns"),
        ("a.txt", "a fox\n", {"data": DataFiles()}, "a.txt:1 is a text alone"),
        (
            "a.jsonl",
            '{"sentence": 3}\n',
            {"data": DataFiles(), "pairs": "same"},
            "a.jsonl:1: a text is 3; give texts alone",
        ),
    ],
)
def test_bad_input(tmp_path, name, content, fields, key_words):
    with refused(key_words):
        read(tmp_path / name, content, **fields)


NO_DROPOUT = model_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.mark.parametrize(
    ("embedding", "others", "key_words"),
    [
        ({"dimensions": (8, 32)}, {}, "has 8, 32, and a vector has 16 numbers"),
        ({"dimensions": (0,)}, {}, "task.embedding.dimensions is 0; it must be a positive"),
        ({}, {"data": DataFiles(max_length=16, batch_size=1)}, "batch_size is 1; raise it"),
        ({}, {"probe": "1"}, "embeddings have no head"),
        ({"pairs": "same", "loss": "cosine"}, {}, "has no scores for loss cosine"),
        ({"pairs": "same"}, {"model": NO_DROPOUT}, "needs dropout, and the model has none"),
        ({"temperature": 0.0}, {}, "temperature is 0.0"),
        (
            {"pairs": "same"},
            {"data": DataFiles(train="a.tsv", text="query,passage", max_length=16)},
            "same makes pairs of a single text, and data.text names 2 columns; name one, give",
        ),
    ],
)
def test_settings_that_do_not_fit(embedding, others, key_words):
    task = EmbeddingTaskConfig(embedding=EmbeddingConfig(**embedding))
    fields = {"data": DataFiles(max_length=16), "model": model_config()} | others
    with refused(key_words):
        validate_finetuning(FinetuneConfig(task=task, **fields))


def test_pairs_of_plain_text_may_be_held_out_in_a_table():
    embedding = EmbeddingConfig(pairs="neighbours")
    data = DataFiles(train="a.txt.gz", eval="a.tsv", text="query,passage", max_length=16)
    task = EmbeddingTaskConfig(embedding=embedding)
    validate_finetuning(FinetuneConfig(task=task, data=data, model=model_config()))


def test_a_dense_layer_of_another_width_is_refused():
    of = {size: EmbeddingTaskConfig(embedding=EmbeddingConfig(dense=size)) for size in (0, 8, 12)}
    with refused("task.embedding.dense is 12, and that of the checkpoint is 8; leave it out"):
        Embedding.continued(of[12], of[8])
    assert Embedding.continued(of[12], of[8], new_head=True).embedding.dense == 12
    assert Embedding.continued(of[0], of[8]).embedding.dense == 8
    assert Embedding.continued(of[0], of[8], ["embedding.dense"]).embedding.dense == 0
    assert Embedding.continued(of[12], of[0]).embedding.dense == 12


def test_sizes_of_vectors_on_the_command_line():
    config = FinetuneConfig()
    override(config, "task.kind", "embedding")
    override(config, "task.embedding.dimensions", "32,128")
    assert config.task.embedding.dimensions == (32, 128)
    with pytest.raises(UserError, match="dimensions=32,x: a value of type"):
        override(config, "task.embedding.dimensions", "32,x")


def test_texts_are_packed_numbered_and_prompted(wordpiece):
    """Equal texts have one number, whether they are queries or passages; prompts are read."""
    pairs = [("the fox", "lazy dog"), ("who", "lazy dog"), ("lazy dog", "the fox jumps over")]
    examples = [Example(None, f"a:{i}", pair, 1.0) for i, pair in enumerate(pairs)]
    embedding = task(query_prompt="what ")
    features = embedding.features(examples, wordpiece, model_config(), 6)
    labels = np.array(features.labels)
    assert labels[0, 1] == labels[1, 1] == labels[2, 0]
    assert features.truncated == 1  # the fox jump ##s over, of which 4 fit
    batch = Batcher(features, wordpiece, 2, 6).batch(np.array([0, 2, -1]), 16)
    kept = batch["attention_mask"][0] > 0
    names = [wordpiece.id_to_token(token) for token in batch["input_ids"][0][kept]]
    assert names == ["[CLS]", "what", "the", "fox", "[SEP]", "[CLS]", "lazy", "dog", "[SEP]"]
    assert batch["attention_mask"][0][kept].tolist() == [1] * 5 + [2] * 4
    assert batch["position_ids"][0][kept].tolist() == [*range(5), *range(4)]
    assert batch["segment_starts"].tolist() == [[0, 5], [0, 5], [0, 0]]
    assert batch["labels"][2].tolist() == [[-1, -1]]


def test_scores_of_retrieval():
    """Against scikit-learn; a passage that two queries share is once in what is searched."""
    draw = np.random.default_rng(0)
    examples = [Example(None, "", (f"q{i // 2}", f"p{i % 7}", f"n{i}"), 1.0) for i in range(12)]
    by_text = {t: draw.normal(size=4) for example in examples for t in example.texts}
    predictions = [np.array([by_text[t] for t in example.texts]) for example in examples]
    queries = list(dict.fromkeys(example.texts[0] for example in examples))
    passages = list(dict.fromkeys(t for example in examples for t in example.texts[1:]))
    wanted = np.zeros((len(queries), len(passages)))
    for example in examples:
        wanted[queries.index(example.texts[0]), passages.index(example.texts[1])] = 1
    unit = {t: vector / np.linalg.norm(vector) for t, vector in by_text.items()}
    cosines = np.array([[unit[q] @ unit[p] for p in passages] for q in queries])
    scores = task().score(examples, predictions)
    assert scores["ndcg@10"] == pytest.approx(ndcg_score(wanted, cosines, k=10))
    first = wanted[np.arange(len(queries)), cosines.argmax(1)]
    assert scores["recall@1"] == pytest.approx(np.mean(first / wanted.sum(1)))


def test_a_text_is_no_result_of_itself():
    """Of questions that were asked twice, each is a query and a passage."""
    retrieval, examples = (
        task(),
        [Example(None, "", texts, 1.0) for texts in (("a", "b"), ("b", "a"), ("c", "c"))],
    )
    near, nearer, far = np.float32([[1, 0], [0.9, 0.1], [0, 1]])
    vectors = {"a": near, "b": nearer, "c": far}
    predictions = [np.stack([vectors[text] for text in each.texts]) for each in examples]
    assert retrieval.score(examples, predictions)["recall@1"] == 1.0
    found = retrieval.baselines([], examples)["BM25"]
    assert found["recall@1"] == pytest.approx(1 / 3)  # of "c"; the others have no word of theirs


def test_a_constant_has_the_score_of_passages_in_their_order():
    examples = [Example(None, "", (f"query {i}", f"passage {i}"), 1.0) for i in range(5)]
    ranks = np.arange(1, 6)
    assert task().constant_score(examples) == pytest.approx(np.mean(1 / np.log2(ranks + 1)))
    predictions = [np.ones((2, 4), np.float32)] * 5
    assert task().score(examples, predictions)["ndcg@10"] == task().constant_score(examples)


def test_scores_of_similarity():
    draw = np.random.default_rng(0)
    vectors, labels = draw.normal(size=(9, 2, 4)), draw.normal(size=9)
    examples = [Example(None, "", ("a", "b"), float(label)) for label in labels]
    first, second = (vectors[:, i] / np.linalg.norm(vectors[:, i], axis=1)[:, None] for i in (0, 1))
    cosines = (first * second).sum(1)
    scores = task(loss="cosent").score(examples, list(vectors))
    assert scores["spearman"] == pytest.approx(stats.spearmanr(labels, cosines)[0])
    assert scores["pearson"] == pytest.approx(stats.pearsonr(labels, cosines)[0])


def test_a_run(tmp_path, shallow_bert):
    """It learns which words belong together, and is loaded with what it was made by."""
    words = ["token", "model", "layer", "head", "river", "bank", "reads", "sees", "small"]
    pairs = [f"the {a}\ta {b} of {b}" for a, b in zip(words, words[1:] + words[:1], strict=True)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["q\tp", *pairs]) + "\n")
    train = str(tmp_path / "pairs.tsv")
    config = FinetuneConfig(
        epochs=8.0,
        task=EmbeddingTaskConfig(embedding=EmbeddingConfig(dimensions=(8, 16))),
        data=DataFiles(train=train, eval=train, text="q,p", max_length=16, batch_size=8),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-2),
    )
    judged = tmp_path / "judged.tsv"
    judged.write_text("q\tp\tlabel\nthe token\ta model of model\t1\nthe token\ta bank\t0\n")
    config.data.test = str(judged)
    result = bert_jax.finetune(config, shallow_bert, tmp_path / "run", quiet=True)
    rows = {row["name"]: row["scores"]["ndcg@10"] for row in result.comparison}
    assert {"before training", "BM25", "TF-IDF"} <= set(rows)
    assert rows["seed 0"] > rows["before training"] + 0.1
    loaded = bert_jax.load(tmp_path / "run")
    assert loaded.task.embedding.dimensions == (8, 16)
    line = json.loads((tmp_path / "run" / "predictions.jsonl").read_text().splitlines()[0])
    again = loaded.predict([tuple(pairs[0].split("\t"))])[0]["similarity"]
    assert again == pytest.approx(line["prediction"], abs=1e-5)
    # The ranking loss takes texts that do not belong together for a pair.
    assert "loss" in result.scores["eval"]
    assert result.scores["test"] == loaded.predict(judged).scores
    assert "ndcg@10" in result.scores["test"]
    assert "loss" not in result.scores["test"]
    with pytest.raises(UserError, match="give two texts"):
        loaded.predict(["the model"])
    with pytest.raises(UserError, match="give two texts"):
        loaded.predict([("the model", "a model", "the dog")])


def test_a_test_set_in_which_nothing_is_asked_for_is_predicted(tmp_path, shallow_bert):
    embedding = EmbeddingConfig(loss="cosent", evaluation="retrieval")
    apart = tmp_path / "apart.tsv"
    apart.write_text("q\tp\tlabel\nthe bank\ta river\t0\n")
    config = FinetuneConfig(
        task=EmbeddingTaskConfig(embedding=embedding),
        data=DataFiles(test=str(apart), text="q,p", max_length=16, batch_size=2),
    )
    rows = [{"q": "the bank", "p": p, "label": i} for i, p in enumerate(("a river", "a bank"))]
    run = tmp_path / "run"
    result = bert_jax.finetune(config, shallow_bert, run, train=rows, eval=rows, quiet=True)
    assert not {"ndcg@10", "map"} & result.scores["test"].keys()
    line = json.loads((run / "predictions.test.jsonl").read_text())
    assert line["label"] == 0.0
    with refused("no held-out pair has a score above 0"):  # before the training
        bert_jax.finetune(config, shallow_bert, run, train=rows, eval=rows[:1], quiet=True)


def test_pairs_without_a_score_are_not_asked_for():
    retrieval = task(loss="cosent", evaluation="retrieval")
    examples = [
        Example(None, "a:1", ("one", "first"), 0.0),
        Example(None, "a:2", ("two", "second"), 1.0),
    ]
    near, far = np.eye(2, dtype=np.float32)
    scores = retrieval.score(examples, [np.stack([near, near]), np.stack([near, far])])
    assert scores["mrr@10"] == 0.5  # of "two" alone, whose passage is the second
    apart = examples[:1], [np.stack([near, near])]  # perhaps of a test set: it is written
    assert retrieval.score(*apart) == {}
    with refused("the labels of the held-out examples give no ndcg@10; give more examples"):
        retrieval.mean_score({})
    with refused("no held-out pair has a score above 0"):  # before the training
        retrieval.held_out_examples(examples[:1])
    assert task(loss="cosent").held_out_examples(examples[:1]) == examples[:1]


@pytest.mark.parametrize("label", ["False", "false", "0", "-1"])
def test_labels_of_pairs_that_are_apart(tmp_path, label):
    path = tmp_path / "a.csv"
    path.write_text(f"query,passage,label\na,b,True\nc,d,{label}\n")
    data = DataFiles(text="query,passage", label="label")
    with refused("a.csv:3 has a label of 0 or less"):
        read_examples(task(), str(path), data, labelled=True)


def test_a_ranking_loss_trains_on_no_pair_that_is_apart(tmp_path):
    """Where similarity is evaluated, pairs that are apart may be held out, not trained on."""
    path = tmp_path / "a.csv"
    path.write_text("query,passage,label\na,b,1\nc,d,0\ne,f,1\n")
    data = DataFiles(text="query,passage", label="label", eval=str(path))
    embedding = EmbeddingConfig(loss="ranking", evaluation="similarity")
    config = FinetuneConfig(data=data, task=EmbeddingTaskConfig("embedding", embedding=embedding))
    rows = [{"query": a, "passage": a, "label": label} for a, label in (("a", 1), ("b", 0))]
    _, datasets = load_datasets(config, train=rows[:1])
    assert [example.label for example in datasets.evals["eval"]] == [1, 0, 1]
    with refused("train[1] has a label of 0 or less, of texts that do not belong together"):
        load_datasets(config, train=rows)
    # Training reads no label, and what is held out needs one.
    plain = [{"query": "a", "passage": "b"}, {"query": "c", "passage": "d", "label": None}]
    _, datasets = load_datasets(config, train=plain)
    assert [example.label for example in datasets.train] == [1, 1]
    config.data = DataFiles(text="query,passage", label="label")
    with refused("train[0] has no column 'label'"):
        load_datasets(config, train=plain)


def test_vectors_of_windows_depend_on_whether_each_is_normalized(tiny_bert):
    def identity(max_length: int, *, normalize: bool) -> dict:
        bert, embedding = untrained(tiny_bert, "embedding"), EmbeddingConfig(normalize=normalize)
        task = EmbeddingTaskConfig(embedding=embedding)
        model = Embedding(task).model(bert.config)
        data = DataFiles(max_length=max_length)
        return embedding_identity(dataclasses.replace(bert, task=task, model=model, data=data))

    assert identity(32, normalize=True) == identity(32, normalize=False)
    assert identity(64, normalize=True) != identity(64, normalize=False)


def test_a_label_that_no_one_gave_is_not_written(tmp_path):
    """Pairs of a file are scored all the same; those of Python are not."""
    path, vectors = tmp_path / "a.jsonl", np.eye(2)
    pair = {"query": "a", "passage": "b"}
    rows = [pair, pair | {"label": None}, pair | {"label": ""}, pair | {"label": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = read_examples(task(), str(path), COLUMNS, labelled=False)
    assert [each.label for each in examples] == [1.0] * 4
    lines = task().files(examples, [vectors] * 4)[".jsonl"].splitlines()
    assert [json.loads(line).get("label") for line in lines] == [None, None, None, 1.0]
    values = [task().example_from(row, 0, COLUMNS).label for row in (*rows, ("a", "b"))]
    assert values == [None, None, None, 1.0, None]
    named = dict(pair, score=0.5)
    assert (
        task(loss="cosent")
        .example_from(named, 0, DataFiles(text="query,passage", label="score"))
        .label
        == 0.5
    )


def test_texts_that_do_not_belong_together_are_no_pairs(tmp_path):
    """Each kind of evaluation has its own scores, and pairs alone have no label."""
    task = Embedding(EmbeddingTaskConfig("embedding"))
    path = tmp_path / "a.tsv"
    path.write_text("query\tpassage\tlabel\na\tb\t1\nc\td\t0\n")
    for label in ("label", "score"):  # a reranker's file has the former, whatever is named
        data = DataFiles(text="query,passage", label=label)
        with refused("a.tsv:3 has a label of 0 or less, of texts that do not belong together"):
            read_examples(task, str(path), data, labelled=True)
        found = read_examples(task, str(path), data, labelled=False)  # to be predicted
        assert [each.label for each in found] == [1, 0]
        assert [each.absent_column for each in found] == ["", ""]
    misspelt = DataFiles(text="query,passage", label="labels")
    path.write_text("query\tpassage\tgrade\na\tb\t1\nc\td\t0\n")
    with refused("a.tsv:2 has no label in 'labels'; fill it in, or set data.label to the name of"):
        read_examples(task, str(path), misspelt, labelled=True)
    # A score alone says whether a pair is one; beside a label it is another's.
    path.write_text("query\tpassage\tscore\na\tb\t0.9\nc\td\t-0.1\n")
    with refused("a.tsv:3 has a label of 0 or less"):
        read_examples(task, str(path), DataFiles(text="query,passage"), labelled=True)
    # A label above 0 is how relevant the passage is; a score is not.
    path.write_text("query\tpassage\tlabel\na\tb\t3\nc\td\t1\n")
    found = read_examples(task, str(path), DataFiles(text="query,passage"), labelled=True)
    assert [each.label for each in found] == [3, 1]
    path.write_text("query\tpassage\tscore\na\tb\t0.9\n")
    (found,) = read_examples(task, str(path), DataFiles(text="query,passage"), labelled=True)
    assert found.label == 1
    path.write_text("query\tpassage\tscore\tlabel\na\tb\t0\t1\nc\td\t-0.1\t1\n")
    found = read_examples(task, str(path), DataFiles(text="query,passage"), labelled=True)
    assert [each.label for each in found] == [1, 1]
    scored = EmbeddingConfig(loss="cosent")
    for embedding, metric in ((EmbeddingConfig(), "spearman"), (scored, "ndcg@10")):
        with refused(f"task.metrics has '{metric}'"):
            Embedding(EmbeddingTaskConfig("embedding", metrics=(metric,), embedding=embedding))


def test_a_continued_model_keeps_what_makes_its_vectors(tiny_bert):
    own = EmbeddingConfig("cls", 8, "identity", False, "q: ", "p: ")
    found = Embedding.continued(EmbeddingTaskConfig(), EmbeddingTaskConfig(embedding=own))
    assert found.embedding == own

    def identity(**fields):
        bert = untrained(tiny_bert, "embedding")
        task = dataclasses.replace(bert.task, embedding=EmbeddingConfig(**fields))
        model = Embedding(task).model(bert.config)
        return embedding_identity(dataclasses.replace(bert, task=task, model=model))

    for fields in ({"pooling": "cls"}, {"query_prompt": "the "}, {"passage_prompt": "a "}):
        assert identity(**fields) != identity()

"""Reranking: reading, negatives and scores by plain definitions; a whole run; search with it."""

import copy
import dataclasses
import json
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import model_config, refused
from scipy.special import expit, log_softmax

import bert_jax
from bert_jax import DataFiles, FinetuneConfig, Index, OptimizerConfig, TaskConfig, console
from bert_jax.config.validation import validate_finetuning
from bert_jax.retrieval import bm25
from bert_jax.runs import learning_rates
from bert_jax.runs.task_run import Examples
from bert_jax.tasks import make_task, passages
from bert_jax.tasks.datasets import Datasets, load_datasets, read_examples
from bert_jax.tasks.examples import Example
from bert_jax.tasks.reranker import Reranker, RerankerConfig

MODEL = model_config()
COLUMNS = DataFiles(text="query,passage")


def task(**fields) -> Reranker:
    return Reranker(RerankerConfig(**fields))


def read(path, columns=COLUMNS):
    return [(e.texts, e.label) for e in read_examples(task(), str(path), columns, labelled=True)]


def test_a_label_that_is_missing_is_not_one(tmp_path):
    table = tmp_path / "a.tsv"
    table.write_text("query\tpassage\tlabel\nwho\tfox\t\n")
    with refused("a.tsv:2 has no label; fill it in"):
        read(table)
    (example,) = read_examples(task(), str(table), COLUMNS, labelled=False)
    assert example.label is None
    named = DataFiles(text="query,passage", label="labl")
    with refused("a.tsv:2 has no column 'labl'; set data.label to its name, or leave that out"):
        read(table, named)
    # A model that was trained with such a column predicts files without one.
    (example,) = read_examples(task(), str(table), named, labelled=False)
    assert example.label is None
    table.write_text("query\tpassage\nwho\tfox\n")
    (example,) = read_examples(task(), str(table), COLUMNS, labelled=False)
    assert example.label is None  # to predict, and not to score
    value = {"query": "who", "passage": "fox"}
    assert task().example_from(value, 0, COLUMNS).label is None
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"query": "who", "passage": ["fox", "dog"], "label": [true, false]}\n')
    assert read(lines) == [(("who", "fox", "dog"), (1.0, 0.0))]


def test_queries_without_a_relevant_passage_are_counted(capsys):
    judged = {"who": {"fox": 1.0, "dog": 0.0}, "what": {"dog": 0.0}, "where": {"fox": 0.0}}
    with console.output(console.Level.PROGRESS):
        assert len(passages.training_groups(judged, 1)) == 1
        assert len(passages.candidate_lists(judged, 0)) == 1
    line = "skipped    2 queries without a relevant passage\n"
    assert capsys.readouterr().out.count(line) == 2


def test_queries_are_held_out_whole(tmp_path):
    table = tmp_path / "a.tsv"
    rows = [f"q{i}\tp{i} {j}\t{int(not j)}" for i in range(40) for j in range(6)]
    table.write_text("\n".join(["query\tpassage\tlabel", *rows]) + "\n")
    data = dataclasses.replace(COLUMNS, train=str(table), eval_fraction=0.25)
    config = FinetuneConfig(task=RerankerConfig(negatives=3, candidates=0), data=data)
    _, sets = load_datasets(config)
    assert {len(each.texts) for each in sets.evals["eval"]} == {7}
    held_out, trained = ({each.texts[0] for each in s} for s in (sets.evals["eval"], sets.train))
    assert (len(held_out), len(trained)) == (10, 30)
    assert not held_out & trained
    of_task = task(candidates=0)
    with_one = examples(("q", "a", "b", [1, 0]), ("r", "a", "b", [0, 0]))
    assert [e.texts[0] for e in of_task.held_out_examples(with_one)] == ["q"]
    with refused("no held-out query has a relevant passage; give labels above 0"):
        of_task.held_out_examples(with_one[1:])


def examples(*rows) -> list[Example]:
    return [Example(None, "a:1", tuple(texts), tuple(label)) for *texts, label in rows]


def test_a_label_for_each_passage_or_the_first_is_relevant(tmp_path):
    table = tmp_path / "a.tsv"
    table.write_text("query\tpassage\tlabel\nwho\tfox\t1\nwho\tdog\t0\nwhat\tdog\t0.5\n")
    pairs = [(("who", "fox"), (1.0,)), (("who", "dog"), (0.0,)), (("what", "dog"), (0.5,))]
    assert read(table) == pairs
    table.write_text("query\tpassage\tother\nwho\tfox\tdog\n")
    assert read(table) == [(("who", "fox"), (1.0,))]
    triples = DataFiles(text="query,passage,other")
    assert read(table, triples) == [(("who", "fox", "dog"), (1.0, 0.0))]
    lines = tmp_path / "a.jsonl"
    first = {"query": "who", "passage": ["fox", "dog"]}
    labelled = {"query": "who", "passage": ["fox", "dog", "the"], "label": [0, 2, 1]}
    for row, expected in (
        (first, (("who", "fox", "dog"), (1.0, 0.0))),
        (labelled, (("who", "fox", "dog", "the"), (0.0, 2.0, 1.0))),
    ):
        lines.write_text(json.dumps(row) + "\n")
        assert read(lines) == [expected]
    lines.write_text(json.dumps(labelled) + "\n" + json.dumps(first) + "\n")
    with refused("a.jsonl:2 has no 'label', unlike those before it; give a label to all or"):
        read(lines)
    lines.write_text(json.dumps(first) + "\n" + json.dumps(labelled) + "\n")
    with refused("a.jsonl:2 has a 'label', unlike those before it"):
        read(lines)


def test_truths_in_a_csv_are_those_of_json(tmp_path):
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.csv"
    rows = [{"query": "who", "passage": text, "label": text == "fox"} for text in ("fox", "dog")]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table.write_text("query,passage,label\nwho,fox,True\nwho,dog,False\n")
    assert read(table) == read(lines) == [(("who", "fox"), (1.0,)), (("who", "dog"), (0.0,))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "who", "passage": []}, "a.jsonl:1 has a query without a passage; give both"),
        ({"query": "who", "passage": [""]}, "a.jsonl:1: a text is ''; fill it in"),
        ({"query": "", "passage": ["fox"]}, "a.jsonl:1: a text is ''; fill it in"),
        ({"query": "who"}, "a.jsonl:1 has no column 'passage'"),
        ({"query": "who", "passage": ["fox"], "label": [1, 0]}, "has 2 labels of 1 passage; give"),
        ({"query": "who", "passage": "fox", "label": "x"}, "the label 'x' is no relevance; give"),
        ({"query": "who", "passage": "fox", "label": -1}, "the label -1 is no relevance; give 0"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with refused(message):
        read(path)


def test_the_same_passage_as_relevant_and_not_is_relevant():
    rows = examples(("who", "fox", [1]), ("who", "fox", [0]), ("who", "dog", [0]))
    (example,) = task(negatives=1).training_examples(rows)
    assert (example.texts, example.label) == (("who", "fox", "dog"), (1.0, 0.0))


def corpus(count: int = 60, seed: int = 0) -> list[Example]:
    generator = np.random.default_rng(seed)
    words = [f"w{number}" for number in range(12)]
    passages = [" ".join(generator.choice(words, 6)) for _ in range(count)]
    passages = list(dict.fromkeys(passages))
    queries = [" ".join(generator.choice(text.split(), 2)) for text in passages]
    return examples(*zip(queries, passages, [[1.0]] * len(passages), strict=True))


def test_negatives_are_the_best_of_bm25_that_are_not_relevant():
    rows = corpus()
    relevant: dict[str, set] = {}
    for row in rows:
        relevant.setdefault(row.texts[0], set()).add(row.texts[1])
    passages = [row.texts[1] for row in rows]
    groups = task(negatives=5).training_examples(rows)
    assert sorted(g.texts[:2] for g in groups) == sorted(row.texts for row in rows)
    for query, positive, *negatives in (group.texts for group in groups):
        order = bm25.rank(passages, [query], len(passages)).indices[0]
        ranked = [passages[i] for i in order if passages[i] not in relevant[query]]
        assert positive in relevant[query]
        assert len(negatives) == 5
        # Of equal scores any.
        counts = bm25.rank(passages, [query], len(passages)).scores[0]
        score = dict(zip([passages[i] for i in order], counts, strict=True))
        assert [score[n] for n in negatives] == [score[r] for r in ranked[:5]]
        assert not relevant[query] & {*negatives}


def test_a_query_is_no_negative_of_its_own():
    rows = examples(
        ("how to boil an egg", "egg boiling method", [1]),
        ("what do hens lay", "how to boil an egg", [1]),
        ("who", "an egg to boil", [1]),
    )
    groups = task(negatives=1).training_examples(rows)
    assert groups[0].texts == ("how to boil an egg", "egg boiling method", "an egg to boil")


def test_negatives_of_the_file_come_first():
    rows = corpus()
    own = dataclasses.replace(rows[0], texts=(*rows[0].texts, "w0 w1"), label=(1.0, 0.0))
    group = task(negatives=3).training_examples([own, *rows[1:]])[0]
    assert group.texts[2] == "w0 w1"
    assert len({*group.texts}) == 5
    with refused("the query 'who' has 1 passages that are not relevant, of 7"):
        task().training_examples(examples(("who", "fox", [1]), ("what", "dog", [1])))
    with refused("no passage is relevant; give labels above 0"):
        task().training_examples(examples(("who", "fox", [0])))
    pairs = examples(("who", "fox", [0.5]), ("what", "dog", [0]))
    assert task(loss="binary", negatives=0).training_examples(pairs) == pairs
    with refused("all labels are equal, so that there is nothing to tell apart; name their column"):
        task(loss="binary", negatives=0).training_examples(pairs[:1])
    with refused("a label is 2, and the binary loss takes those from 0 to 1"):
        task(loss="binary", negatives=0).training_examples(examples(("who", "fox", [2])))


def test_held_out_queries_have_the_best_of_bm25_in_random_order():
    rows = corpus()
    passages = [row.texts[1] for row in rows]
    held_out = task(candidates=10).held_out_examples(rows)
    assert len(held_out) == len({row.texts[0] for row in rows})
    missed = 0
    for query, *found in (each.texts for each in held_out):
        ranked = bm25.rank(passages, [query], len(passages))
        texts = [passages[i] for i in ranked.indices[0]]
        score = dict(zip(texts, ranked.scores[0].tolist(), strict=True))
        # Of equal scores any.
        assert sorted(score[text] for text in found) == sorted(ranked.scores[0][:10].tolist())
        example = next(each for each in held_out if each.texts[0] == query)
        relevant = {row.texts[1] for row in rows if row.texts[0] == query}
        assert [text in relevant for text in found] == [v > 0 for v in example.label[:10]]
        assert sum(example.label) == len(relevant)
        missed += len(example.label) - 10
    assert missed  # relevant ones that BM25 has not found
    constant = task(candidates=10).constant_score(held_out)
    baseline = task(candidates=10).baselines([], held_out)["BM25"]["ndcg@10"]
    assert 0 < constant < baseline < 1
    listed = task(candidates=0).held_out_examples(rows)
    assert sum(len(each.texts) - 1 for each in listed) == len(rows)


def test_scores_of_a_query_whose_passages_are_in_several_examples():
    rows = examples(("q", "a", [0]), ("q", "b", [1]), ("q", "c", [2]), ("r", "a", "b", [0, 1]))
    logits = [np.array([3.0]), np.array([2.0]), np.array([1.0]), np.array([0.0, 1.0])]
    scores = task().score(rows, logits)
    ideal = 2 + 1 / np.log2(3)
    first = (1 / np.log2(3) + 2 / np.log2(4)) / ideal
    assert scores["ndcg@10"] == pytest.approx((first + 1) / 2)
    assert scores["mrr@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert scores["map"] == pytest.approx(((1 / 2 + 2 / 3) / 2 + 1) / 2)
    # Equal logits are no good order, wherever the relevant passage is.
    first = examples(*((f"q{i}", *"abcd", [1, 0, 0, 0]) for i in range(200)))
    equal = task().score(first, [np.full(4, 0.5)] * 200)["mrr@10"]
    assert equal == pytest.approx(np.mean([1, 1 / 2, 1 / 3, 1 / 4]), abs=0.06)
    assert equal != 0.5
    listwise = -log_softmax([3, 2, 1]) @ [0, 1 / 3, 2 / 3], -log_softmax([0, 1])[1]
    assert scores["loss"] == pytest.approx(np.mean(listwise))
    # A relevant passage that the candidates lack takes part of the best possible score.
    missing = examples(("q", "a", "b", [0, 1, 1]))
    score = task().score(missing, [np.array([0.0, 1.0])])["ndcg@10"]
    assert score == pytest.approx(1 / (1 + 1 / np.log2(3)))
    binary = task(loss="binary").score(rows[3:], [np.array([0.5, 2.0])])["loss"]
    assert binary == pytest.approx(-np.log([1 - expit(0.5), expit(2.0)]).mean())


def test_features_are_pairs_and_the_losses_are_those_of_their_formulas(wordpiece):
    rows = examples(("who", "the fox", "dog", [1, 0]), ("what", "dog", "the lazy dog", [0, 1]))
    features = task().features(rows, wordpiece, MODEL, 16)
    who, the, fox, dog = 14, 5, 6, 12
    assert [each.tolist() for each in features.sequences[:2]] == [
        [2, who, 3, the, fox, 3],
        [2, who, 3, dog, 3],
    ]
    assert (features.choices, features.second_starts[:2]) == (2, [3, 3])
    many = examples(("who", *("fox",) * 40, [1] + [0] * 39), ("what", "dog", [1]))
    alone = task().features(many, wordpiece, MODEL, 16)
    assert (alone.choices, len(alone)) == (1, 41)
    assert task().features(many, wordpiece, MODEL, 6).truncated == 0
    assert task().features(rows, wordpiece, MODEL, 5).truncated == 2

    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 4)).astype(np.float32)
    labels = np.eye(4, dtype=np.float32)[[1, 0, 3]]
    labels[2] = np.nan  # padding
    for loss, expected in (
        ("listwise", -log_softmax(logits[:2], 1)[[0, 1], [1, 0]].mean()),
        ("binary", -np.log(np.where(labels[:2] > 0, expit(logits[:2]), expit(-logits[:2]))).mean()),
    ):
        of_task = task(loss=loss)
        metrics = of_task.objective(of_task.model(MODEL)).metrics(logits, labels)
        assert float(metrics["loss"].total / metrics["loss"].weight) == pytest.approx(expected)


def test_settings_that_do_not_fit():
    config = FinetuneConfig(task=RerankerConfig(negatives=0), data=COLUMNS)
    with refused("task.loss listwise compares passages, and task.negatives is 0; raise it"):
        validate_finetuning(config)
    config.task = RerankerConfig(negatives=32)
    with refused("task.negatives exceeds 31"):
        validate_finetuning(config)


WORDS = ["river", "bank", "token", "model", "reads", "sees", "the", "small"]


@pytest.fixture(scope="module")
def finished(shallow_bert, tmp_path_factory):
    """A run in which the passages with a river answer, whatever is asked."""
    folder = tmp_path_factory.mktemp("reranker")
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(300):
        words = generator.choice(WORDS[1:], 6, replace=False).tolist()
        query, right, wrong = " ".join(words[:3]), ["river", words[3]], words[4:]
        texts = {"passage": generator.permutation(right), "other": generator.permutation(wrong)}
        rows.append({"query": query, **{name: " ".join(text) for name, text in texts.items()}})
    config = FinetuneConfig(
        epochs=12.0,
        task=RerankerConfig(negatives=1, candidates=0),
        data=DataFiles(text="query,passage,other", max_length=32, batch_size=16),
        optimizer=OptimizerConfig(name="adamw", learning_rate=0.02, warmup_fraction=0.1),
    )
    return bert_jax.finetune(config, shallow_bert, folder / "run", train=rows[60:], eval=rows[:60])


def test_a_run_learns_predicts_and_is_exported(finished, tmp_path, bert_jax_main):
    names = [row["name"] for row in finished.comparison]
    assert names == ["seed 0", "best constant prediction", "BM25"]
    ours, constant, by_words = (row["scores"]["ndcg@10"] for row in finished.comparison)
    assert ours > max(constant, by_words) + 0.1
    bert = bert_jax.load(finished.checkpoint)
    pair, ranked = bert.predict([("river", "the river"), ("river", "small bank", "a river")])
    assert [*pair] == ["score"]
    assert ranked["ranking"] == np.argsort(-np.array(ranked["scores"])).tolist()
    # Of a query with many passages, in batches by their length.
    passages = [" ".join(WORDS[i % 8 :][: 1 + i % 5]) for i in range(40)]
    alone = [each["score"] for each in bert.predict([("bank", text) for text in passages])]
    assert bert.predict([("bank", *passages)])[0]["scores"] == pytest.approx(alone, rel=1e-5)
    lines = (finished.checkpoint.parent / "predictions.jsonl").read_text().splitlines()
    best = json.loads(lines[0])["passages"]
    assert [each["label"] for each in best] == [1.0, 0.0]
    assert best == sorted(best, key=lambda each: -each["score"])
    (tmp_path / "pairs.txt").write_text("river\tthe river\n")
    given = "--text", "bank", "the river\tbank"  # a passage with a tab
    (result,) = bert_jax_main("predict", finished.checkpoint.parent, "--json", *given).splitlines()
    assert json.loads(result)["texts"] == ["bank", "the river\tbank"]
    printed = bert_jax_main("predict", finished.checkpoint.parent, tmp_path / "pairs.txt")
    assert f"{pair['score']:8.4f}  river | the river" in printed

    bert.export(tmp_path / "exported")
    values = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert values["sentence_transformers"]["activation_fn"].endswith(".Sigmoid")
    again = bert_jax.load(tmp_path / "exported")
    assert (again.task.kind, again.task.negatives) == ("reranker", 1)
    # Saved again by a `CrossEncoder` that reads fewer tokens and has another activation.
    saved = copy.deepcopy(values)
    saved["sentence_transformers"]["activation_fn"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "exported" / "config.json").write_text(json.dumps(saved))
    settings = tmp_path / "exported" / "tokenizer_config.json"
    before = settings.read_text()
    settings.write_text(json.dumps(json.loads(before) | {"model_max_length": 9}))
    again = bert_jax.load(tmp_path / "exported")
    assert (again.task.activation, again.data.max_length) == ("identity", 9)
    settings.write_text(before)
    for name in ("bert_jax_task", "sentence_transformers"):  # as another program writes it
        del values[name]
    values["sbert_ce_default_activation_function"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "exported" / "config.json").write_text(json.dumps(values))
    foreign = bert_jax.load(tmp_path / "exported")
    assert (foreign.task.kind, foreign.task.activation) == ("reranker", "identity")
    logit = foreign.predict([("river", "the river")])[0]["score"]
    assert expit(logit) == pytest.approx(pair["score"], rel=1e-5)
    values["sbert_ce_default_activation_function"] = "os.system"
    (tmp_path / "exported" / "config.json").write_text(json.dumps(values))
    with refused("has the activation 'os.system'; only"):
        bert_jax.load(tmp_path / "exported")


def test_search_with_a_reranker(finished, tiny_bert, tmp_path, bert_jax_main):
    texts = [f"{a} {b}" for a in WORDS for b in WORDS if a != b]
    index = Index.build(tiny_bert, output=tmp_path / "my.index", texts=texts)
    bert = finished.bert
    plain = index.search("river", 20)
    hits = index.search("river", 5, reranker=bert, candidates=20)
    scores = np.array([each["score"] for each in bert.predict([("river", h.text) for h in plain])])
    order = np.argsort(-scores, kind="stable")[:5]
    assert [hit.text for hit in hits] == [plain[i].text for i in order]
    np.testing.assert_allclose([hit.score for hit in hits], scores[order], rtol=1e-5)
    both = index.search(["river", "bank"], 5, reranker=bert, candidates=20)
    np.testing.assert_allclose([h.score for h in both[0]], [h.score for h in hits], rtol=1e-5)
    with refused("the reranker", "has no head of a task; train one with"):
        index.search("river", reranker=tiny_bert)
    assert index.search([], reranker=bert) == []
    (again,) = index.search((q for q in ["river"]), 5, reranker=bert, candidates=20)
    np.testing.assert_allclose([h.score for h in again], [h.score for h in hits], rtol=1e-5)
    with refused("reranker is 5; give a model, or the path of a checkpoint"):
        index.search("river", reranker=5)
    with refused("--candidates are what a reranker reads; give --reranker, or leave it out"):
        bert_jax_main("search", tmp_path / "my.index", "river", "--candidates=5")
    with refused("candidates is 0; give a whole number, 1 or more"):
        index.search("river", reranker=bert, candidates=0)
    flags = ("--checkpoint", tmp_path / "bert", "--candidates=20", "--top-k=5", "--json")
    tiny_bert.save(tmp_path / "bert")
    reranker = f"--reranker={finished.checkpoint.parent}"
    printed = bert_jax_main("search", tmp_path / "my.index", "river", reranker, *flags)
    printed_scores = [hit["score"] for hit in json.loads(printed)["hits"]]
    np.testing.assert_allclose(printed_scores, [hit.score for hit in hits], rtol=1e-5)


def test_a_run_on_the_built_in_examples_has_real_candidates():
    config = bert_jax.recipe("finetune/reranker", FinetuneConfig)
    config.data.train = "builtin@eval"  # the smaller one
    of_task, sets = load_datasets(config)
    assert {len(each.texts) for each in sets.train} == {9}
    held_out = sets.evals["eval"]
    assert {len(each.texts) for each in held_out} == {101}
    assert 0.2 < of_task.baselines([], held_out)["BM25"]["ndcg@10"] < 0.3
    assert of_task.constant_score(held_out) < 0.1


def test_without_a_common_word_passages_are_random():
    """Else all such queries would have the first passages of the file."""
    judged = {f"frage{i}": {f"answer number {i}": 1.0} for i in range(300)}
    groups = passages.training_groups(judged, 3)
    assert len({example.texts[2:] for example in groups}) > 1
    assert all(example.texts[1] not in example.texts[2:] for example in groups)
    lists = passages.candidate_lists(judged, 100)
    found = sum(len(example.label) == 100 for example in lists)
    assert 70 < found < 130  # the relevant one is among a third, which are not the first hundred
    assert any(len(example.label) == 101 for example in lists[:100])


def test_passages_without_words_are_in_random_order():
    judged = {"🙂": {"😀": 1.0, "😂": 0.0}, "q": {"🤔": 1.0}}
    (first, second) = passages.training_groups(judged, 1)
    assert (first.texts, second.texts[:2]) == (("🙂", "😀", "😂"), ("q", "🤔"))
    assert {len(each.texts) for each in passages.candidate_lists(judged, 2)} == {3}


def test_a_query_is_no_candidate_of_itself():
    """Unless it asks for itself."""
    judged = {"to boil rice": {"cook rice": 1.0}, "cook rice": {"to boil rice": 1.0}}
    lists = passages.candidate_lists({**judged, "fly a kite": {"fly a kite": 1.0}}, 2)
    candidates = {each.texts[0]: {*each.texts[1:]} for each in lists}
    assert candidates["to boil rice"] == {"cook rice", "fly a kite"}
    assert candidates["cook rice"] == {"to boil rice", "fly a kite"}
    assert "fly a kite" in candidates["fly a kite"]


def test_a_query_of_which_a_learning_rate_is_trained_is_not_scored(monkeypatch):
    """And of a task without queries, the sample is as random as its examples."""
    monkeypatch.setattr(learning_rates, "tokenize", lambda *_, **__: None)
    examples = [
        Example(None, f"a:{i}", (f"query {i % 20}", f"passage {i}"), (1.0,)) for i in range(60)
    ]
    run = Mock(config=FinetuneConfig(seed=3), task=Reranker(RerankerConfig()))
    datasets = Datasets(examples, {}, {})
    run.examples = Examples(run.task, datasets, "", train=Mock(), held_out={})
    sample = learning_rates._sample(run).datasets
    trained, scored = sample.train, sample.evals["sample"]
    assert len(trained) + len(scored) == 60
    assert 12 <= len(scored) <= 15
    assert not {each.texts[0] for each in trained} & {each.texts[0] for each in scored}
    run.task = make_task(TaskConfig(labels=("a", "b")))
    order = np.random.default_rng(3).permutation(60)
    scored = learning_rates._sample(run).datasets.evals["sample"]
    assert scored == [examples[i] for i in sorted(order[:12])]


def test_a_query_without_a_relevant_passage_has_no_score():
    """As it is dropped from held-out examples, so that a file has one score wherever it is."""
    found = Example(None, "1", ("a", "b", "c"), (0.0, 1.0))
    none = Example(None, "2", ("d", "e", "f"), (0.0, 0.0))
    logits = np.array([1.0, 2.0])
    both, alone = task().score([found, none], [logits] * 2), task().score([found], [logits])
    assert both["ndcg@10"] == alone["ndcg@10"] == 1.0
    assert "ndcg@10" not in task().score([none], [logits])
    for loss, has_loss in (("binary", True), ("listwise", False)):
        assert task(loss=loss).has_loss([none]) is has_loss
        missed = dataclasses.replace(none, label=(0.0, 0.0, 1.0))
        assert task(loss=loss).has_loss([missed]) is has_loss
        assert task(loss=loss).has_loss([none, found])

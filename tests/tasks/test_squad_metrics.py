"""SQuAD's metrics: worked examples, thresholds by trial, and against `transformers`."""

import numpy as np
import pytest

from bert_jax.tasks import squad_metrics
from bert_jax.tasks.squad_metrics import against, best_threshold, normalize, summary

WORDS = ["the", "a", "An", "and", "another", "cat", "Cat's", "cats", "the-cat", "dog,", "(dog)"]
WORDS += ["1999", "1,999", "Zürich", "ÉCOLE", "．"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat's\tmeow!", "cats meow"),
        ("An apple a day", "apple day"),
        ("another theme", "another theme"),
        ("$1,000.50", "100050"),
        ("the-cat", "thecat"),  # punctuation goes first
        ("“quoted” — dash", "“quoted” — dash"),  # of ASCII alone
        ("the", ""),
        ("", ""),
        ("ÉCOLE", "école"),
    ],
)
def test_normalize(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("The cat", ["cat", "a dog"], 1, 1),
        ("black cat", ["cat", "dog"], 0, 2 / 3),  # precision 1/2, recall 1
        ("cat cat dog", ["cat dog dog"], 0, 2 / 3),  # 2 of 3 both ways
        ("b a c", ["c d e f", "c b"], 0, 1),  # the order of words is nothing to F1
        ("bird", ["cat"], 0, 0),
        ("", ["cat"], 0, 0),
        ("cat", [], 0, 0),
        ("", [], 1, 1),
        ("the", [], 1, 1),
        ("", ["the", "cat"], 0, 0),  # an answer that is nothing does not count
        ("", ["the"], 1, 1),
        ("x", ["the"], 0, 0),
    ],
)
def test_against(prediction, answers, exact, f1):
    assert against(prediction, answers) == (exact, pytest.approx(f1))


def test_summary():
    scores = [against("cat", ["cat"]), against("black cat", ["cat"]), against("cat", [])]
    assert summary(scores, [True, True, False]) == {
        "exact_match": pytest.approx(1 / 3),
        "f1": pytest.approx(5 / 9),
        "HasAns_exact": 0.5,
        "HasAns_f1": pytest.approx(5 / 6),
        "NoAns_exact": 0.0,
        "NoAns_f1": 0.0,
    }
    assert list(summary(scores[:1], [True])) == ["exact_match", "f1", "HasAns_exact", "HasAns_f1"]


def test_best_threshold_by_hand():
    # Two right answers that "no answer" leads by -3 and 2, and one given where there is none.
    answered, null = np.array([1.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])
    assert best_threshold(answered, null, np.array([-3.0, 2.0, 5.0])) == (1.0, 3.5)
    assert best_threshold(answered, null, np.array([-3.0, 5.0, 2.0])) == (2 / 3, -0.5)
    # Equal odds cannot be told apart by a threshold.
    assert best_threshold(answered, null, np.array([2.0, 2.0, 2.0])) == (2 / 3, 3.0)
    assert best_threshold(np.zeros(2), np.ones(2), np.array([-4.0, 7.0])) == (1.0, -5.0)
    assert best_threshold(np.zeros(2), np.ones(2), np.array([4.0, 7.0])) == (1.0, 0.0)


def test_best_threshold_is_the_best_and_has_its_score():
    generator = np.random.default_rng(0)
    for _ in range(200):
        size = generator.integers(1, 12)
        answered = generator.integers(0, 5, size) / 4
        null = generator.integers(0, 2, size).astype(float)
        odds = generator.integers(-3, 4, size).astype(float)
        best, threshold = best_threshold(answered, null, odds)

        def score(threshold, answered=answered, null=null, odds=odds):
            return np.where(odds > threshold, null, answered).mean()

        assert best == pytest.approx(max(map(score, range(-5, 6))))
        assert score(threshold) == pytest.approx(best)
        assert abs(odds - threshold).min() >= 0.5  # however the odds are rounded


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_same_numbers_as_transformers():
    """Its version 4 has the official script of SQuAD 2.0; 5 does not."""
    theirs = pytest.importorskip("transformers.data.metrics.squad_metrics")
    generator = np.random.default_rng(1)

    class Example:
        def __init__(self, name, answers):
            self.qas_id = name
            self.answers = [{"text": text} for text in answers]

    def text(least):
        words = generator.choice(WORDS, generator.integers(least, 6))
        return generator.choice([" ", "  ", " \t"]).join(words)

    for _ in range(50):
        examples, predictions, odds = [], {}, {}
        for number in range(40):
            answers = [text(0) for _ in range(generator.integers(0, 4))]
            examples.append(Example(str(number), answers))
            # Their search takes any text for wrong where there is no answer, even an article.
            predictions[str(number)] = text(1) + " bird"
            odds[str(number)] = float(generator.normal())
        # A right answer with the lowest odds: else giving none may be best, and theirs then says 0.
        examples.append(Example("right", ["bird"]))
        predictions["right"], odds["right"] = "bird", -9.0
        expected = theirs.squad_evaluate(examples, predictions, odds, 0.0)
        true = [[answer["text"] for answer in e.answers] for e in examples]
        answered = np.array(
            [against(predictions[e.qas_id], a) for e, a in zip(examples, true, strict=True)]
        )
        has = [bool(answers) for answers in true]
        null = 1.0 - np.array(has, float)
        lead = np.array([odds[e.qas_id] for e in examples])
        chosen = np.where((lead > 0)[:, None], null[:, None], answered)
        scores = summary(chosen, has)
        for ours, name in (("exact_match", "exact"), ("f1", "f1")):
            assert 100 * scores[ours] == pytest.approx(expected[name], abs=1e-9)
            for part in ("HasAns", "NoAns"):
                both = f"{part}_{name}"
                assert 100 * scores[both] == pytest.approx(expected[both], abs=1e-9)
        for column, name in enumerate(("exact", "f1")):
            best, threshold = squad_metrics.best_threshold(answered[:, column], null, lead)
            assert 100 * best == pytest.approx(expected[f"best_{name}"], abs=1e-9)
            assert threshold == pytest.approx(expected[f"best_{name}_thresh"])

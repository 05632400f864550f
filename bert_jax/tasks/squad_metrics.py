"""How good answers are by SQuAD's own measures: exact match and F1 of words, versions 1.1 and 2.0.

Source: Rajpurkar et al. 2016, section 6, and 2018, section 5; written from their definitions. All
numbers are fractions of 1, where the official scripts print percents.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Score(NamedTuple):
    """How good answers are, each from 0 to 1."""

    exact: float
    f1: float


class Threshold(NamedTuple):
    """The best that any threshold gives, and the threshold."""

    score: float
    threshold: float


def normalize(text: str) -> str:
    """Returns a text without what is not compared: case, ASCII punctuation, articles, spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def against(prediction: str, answers: Sequence[str]) -> Score:
    """Returns the scores of a prediction against the true answer that it is nearest to, for each.

    Args:
      prediction: the text; "" for "no answer".
      answers: the true ones; none where the question has no answer. Those of which nothing is left
        when normalized are left out, as version 2.0 does.
    """
    found = normalize(prediction)
    true = [text for text in map(normalize, answers) if text] or [""]
    return Score(float(found in true), max(_f1(found.split(), text.split()) for text in true))


def _f1(found: Sequence[str], true: Sequence[str]) -> float:
    if not found or not true:
        return float(not found and not true)
    same = sum((Counter(found) & Counter(true)).values())
    # Of precision and recall, the harmonic mean.
    return 2 * same / (len(found) + len(true))


def summary(scores: Sequence[Score] | np.ndarray, has_answer: Sequence[bool]) -> dict[str, float]:
    """Returns the means over all questions, and over those with and without an answer.

    Args:
      scores: of each question; [n, 2].
      has_answer: whether the question has one.

    Returns:
      "exact_match" and "f1"; the same for the parts, by the official names, "HasAns_exact" and so
      on; a part with no questions is left out.
    """
    values, has = np.asarray(scores, float).reshape(-1, 2), np.asarray(has_answer, bool)
    result = {"exact_match": _mean(values[:, 0]), "f1": _mean(values[:, 1])}
    for name, part in (("HasAns", values[has]), ("NoAns", values[~has])):
        if len(part):
            result |= {f"{name}_exact": _mean(part[:, 0]), f"{name}_f1": _mean(part[:, 1])}
    return result


def _mean(values: np.ndarray) -> float:
    return float(values.sum() / max(1, len(values)))


def best_threshold(answered: np.ndarray, null: np.ndarray, odds: np.ndarray) -> Threshold:
    """Returns the best mean score that giving some answers and withholding others can have.

    The answers given are those whose odds are not above the threshold. Unlike in the official
    script, the threshold always has the score that it comes with: answers of equal odds are given
    together, and where none should be given it is below all odds.

    Args:
      answered: [n], the scores of the answers.
      null: [n], those of "no answer".
      odds: [n], by how much "no answer" leads.
    """
    if not len(odds):
        return Threshold(0.0, 0.0)
    order = np.argsort(odds, kind="stable")
    odds = np.asarray(odds, float)[order]
    totals = null.sum() + np.cumsum((answered - null)[order])
    totals[:-1][odds[1:] == odds[:-1]] = -np.inf
    best = int(np.argmax(totals))
    if totals[best] > null.sum():
        return Threshold(float(totals[best] / len(odds)), float(odds[best]))
    return Threshold(_mean(null), min(0.0, float(odds[0]) - 1))

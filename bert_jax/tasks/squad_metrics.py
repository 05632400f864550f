"""SQuAD's scores, as fractions of 1: Rajpurkar et al. 2016, section 6, and 2018, section 5."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Return a text without case, ASCII punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def against(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return the best exact match and F1 to a true answer that is not empty when normalized."""
    words = normalize(prediction)
    true = [text for text in map(normalize, answers) if text] or [""]
    return float(words in true), max(_f1(words.split(), text.split()) for text in true)


def _f1(predicted: Sequence[str], true: Sequence[str]) -> float:
    if not predicted or not true:
        return float(not predicted and not true)
    same = sum((Counter(predicted) & Counter(true)).values())
    return 2 * same / (len(predicted) + len(true))  # the harmonic mean of precision and recall


def summary(scores: Sequence[tuple[float, float]], has_answer: Sequence[bool]) -> dict[str, float]:
    """Return the means of scores [n, 2] over all questions, and with and without an answer."""
    values, has = np.array(scores), np.array(has_answer)
    groups = {("exact_match", "f1"): values, ("HasAns_exact", "HasAns_f1"): values[has]}
    groups["NoAns_exact", "NoAns_f1"] = values[~has]
    result: dict[str, float] = {}
    for names, group in groups.items():
        if len(group):
            result |= zip(names, group.mean(0).tolist(), strict=True)
    return result


def best_threshold(answered: np.ndarray, null: np.ndarray, odds: np.ndarray) -> tuple[float, float]:
    """Return the best mean score of any threshold of odds, above which "" is better, and it.

    The threshold is half-way to the next odds: rounded otherwise, no example changes sides.
    """
    # Unlike in the official script, answers of equal odds are treated alike.
    order = np.argsort(odds, kind="stable")
    odds = np.asarray(odds, float)[order]
    totals = null.sum() + np.cumsum((answered - null)[order])
    totals[:-1][odds[1:] == odds[:-1]] = -np.inf
    best = int(np.argmax(totals))
    if totals[best] > null.sum():
        following = odds[best + 1] if best + 1 < len(odds) else odds[best] + 2
        return float(totals[best] / len(odds)), float((odds[best] + following) / 2)
    return float(null.mean()), min(0.0, float(odds[0]) - 1)

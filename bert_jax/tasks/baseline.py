"""What a fine-tuned classifier is compared with: a linear one, on the words of the texts."""

from bert_jax.tasks.classification import Classification
from bert_jax.tasks.datasets import Datasets


def tfidf_scores(task: Classification, sets: Datasets) -> dict[str, float]:
    """Returns the scores, on the first held-out set, of logistic regression on TF-IDF.

    Of words and pairs of words, with scikit-learn's own settings but for sublinear counts; nothing
    is chosen on the held-out set.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    held_out = next(iter(sets.evals.values()))
    texts, other = ([" ".join(e.texts) for e in examples] for examples in (sets.train, held_out))
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(words, LogisticRegression(max_iter=1000))
    model.fit(texts, [example.label for example in sets.train])
    predicted = [task.labels.index(label) for label in model.predict(other)]
    return task.class_scores(held_out, predicted)

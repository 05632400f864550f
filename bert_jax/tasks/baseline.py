"""The baseline of fine-tuned classifiers: logistic regression on TF-IDF."""

from bert_jax.tasks.classification import Classification
from bert_jax.tasks.datasets import Datasets


def tfidf_scores(task: Classification, datasets: Datasets) -> dict[str, float]:
    """Return the scores of the baseline on the first held-out set.

    The features are words and pairs of words, with scikit-learn's own settings but for sublinear
    counts. Nothing is chosen on the held-out set.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    held_out = next(iter(datasets.evals.values()))
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(vectorizer, LogisticRegression(max_iter=1000))
    texts = [" ".join(example.texts) for example in datasets.train]
    model.fit(texts, [example.label for example in datasets.train])
    predicted = model.predict([" ".join(example.texts) for example in held_out])
    return task.class_scores(held_out, [task.labels.index(label) for label in predicted])

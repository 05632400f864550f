"""The encoder of docs/embeddings.md in MTEB, on a task of functions of Python's library."""

import re
from pathlib import Path

import numpy as np
import pytest

import bert_jax
from bert_jax.tasks.embedding import EmbeddingTaskConfig
from bert_jax.text import builtin

pytestmark = pytest.mark.parity
ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")  # of MTEB and what it imports
def test_a_retrieval_task_has_the_score_of_the_cosines(tiny_run, tmp_path):
    mteb = pytest.importorskip("mteb", reason="pip install mteb")
    import datasets
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    pairs = [each[:2] for each in builtin.described("eval")[:40]]
    queries, passages = ([pair[i] for pair in pairs] for i in (0, 1))

    class Functions(AbsTaskRetrieval):
        metadata = TaskMetadata(
            type="Retrieval",
            name="Functions",
            description="Which signature has a function that does this?",
            dataset={"path": "local", "revision": "1"},
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, num_proc=None, **options):
            def table(name, texts):
                rows = [{"id": f"{name}{i}", "text": text} for i, text in enumerate(texts)]
                return datasets.Dataset.from_list(rows)

            relevant = {f"q{i}": {f"p{i}": 1} for i in range(len(pairs))}
            parts = {"queries": table("q", queries), "corpus": table("p", passages)}
            split = {**parts, "relevant_docs": relevant, "top_ranked": None}
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    config = bert_jax.FinetuneConfig(task=EmbeddingTaskConfig(), epochs=1.0)
    config.task.embedding.query_prompt = "search: "
    config.data.text, config.data.batch_size, config.data.max_length = "query,passage", 8, 32
    rows = [dict(zip(("query", "passage"), pair, strict=True)) for pair in pairs]
    run = tmp_path / "run"
    bert_jax.finetune(config, tiny_run.checkpoint, run, train=rows, eval=rows, quiet=True)

    page = (ROOT / "docs/embeddings.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n((?:(?!```).)*AbsEncoder.*?)^```", page, re.M | re.S)
    names: dict = {}
    exec(code, names)
    results = mteb.evaluate(names["Encoder"](run), Functions(), cache=None)
    score = results.task_results[0].scores["test"][0]["main_score"]

    bert = bert_jax.load(run)
    cosines = bert.encode(queries, prompt="query") @ bert.encode(passages, prompt="passage").T
    # Between that where texts of one cosine are ranked last, and where they are ranked first.
    own = np.diag(cosines)[:, None]
    worst, best = (
        np.where(
            (ranks := (cosines > own + margin).sum(1) - (margin < 0)) < 10,
            1 / np.log2(ranks + 2),
            0,
        ).mean()
        for margin in (-1e-6, 1e-6)
    )
    assert best - worst < 0.05
    assert worst - 1e-4 <= score <= best + 1e-4

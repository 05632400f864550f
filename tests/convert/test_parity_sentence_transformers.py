"""The vectors of sentence-transformers, of directories that it wrote, and in it of our exports."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers import model_config, random_arrays

import bert_jax
from bert_jax.config import DataFiles, EmbeddingConfig, TokenizerConfig
from bert_jax.convert import tokenizer_files
from bert_jax.tasks.embedding import BertForEmbedding, EmbeddingTaskConfig
from bert_jax.text import tokenizer_training

pytestmark = [
    pytest.mark.parity,
    # Of the other packages' own making, and of texts that are too long for the tiny models, or
    # unknown to them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::bert_jax.TextWarning"),
]
with warnings.catch_warnings(action="ignore"):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models
from test_parity import WORDS, write_model  # noqa: E402
from test_sentence_transformers import OLD, SETTINGS, write, write_json  # noqa: E402

TEXTS = [
    "The quick brown fox jumps",
    "",
    "it rains",
    " ".join([WORDS] * 3),  # beyond every length
    "  A lazy   dog,\tand a fox! ",
    "Où est la bibliothèque ? 今天天气很好。",
    "Привет, мир! สวัสดีครับ नमस्ते 😀",
]
PROMPTS = {"query": "the dog: ", "document": "it rains on "}
LENGTH = 13


def check(bert, theirs) -> None:
    """The same vectors, with and without prompts; numbers of size about 1."""
    functions = {"": theirs.encode, "query": theirs.encode_query, "passage": theirs.encode_document}
    for prompt, function in functions.items():
        expected = function(TEXTS)
        scale = 1 / np.abs(expected).mean()
        actual = bert.encode(TEXTS, prompt=prompt)
        assert actual.shape == expected.shape
        assert len(np.unique(expected.round(3), axis=0)) >= 5
        np.testing.assert_allclose(actual * scale, expected * scale, rtol=0, atol=1e-5)


def check_export(bert, folder: Path, length: int = LENGTH) -> None:
    bert.export(folder)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == length
    assert theirs.similarity_fn_name == "cosine"
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")  # and no other
    assert {*theirs[0].auto_model.state_dict()} == {*tensors}
    check(bert, theirs)


@pytest.fixture(scope="module")
def encoder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(request.param, folder, head="Model")
    bert = bert_jax.load(folder)
    for name, content in tokenizer_files.files(bert.tokenizer, bert.config).items():
        (folder / name).write_bytes(content)  # a ModernBERT's is not read from a vocab.txt
    return folder


LAYERS = {
    "none": [],
    "normalized": [models.Normalize],
    "tanh": [lambda size: models.Dense(size, 20), models.Normalize],
    "identity": [lambda size: models.Dense(size, 40, False, torch.nn.Identity())],
}


@pytest.mark.parametrize(
    ("encoder", "pooling", "after"),
    [
        ("bert", "mean", "none"),
        ("bert", "cls", "normalized"),
        ("bert", "max", "identity"),
        ("modernbert", "mean", "tanh"),
        ("electra", "mean", "tanh"),
    ],
    indirect=["encoder"],
)
def test_what_it_writes_and_what_it_reads(encoder, pooling, after, tmp_path):
    torch.manual_seed(0)
    transformer = models.Transformer(str(encoder), max_seq_length=LENGTH)
    size = transformer.get_embedding_dimension()
    modules = [transformer, models.Pooling(size, pooling_mode=pooling)]
    modules += [
        layer(size) if layer is not models.Normalize else layer() for layer in LAYERS[after]
    ]
    theirs = library.SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    bert = bert_jax.load(tmp_path / "theirs")
    assert bert.unused == []
    check(bert, theirs)
    check_export(bert, tmp_path / "ours")


def test_the_older_layout_and_lowercase(tmp_path):
    """As versions before 2.0 wrote it, with a cased tokenizer that is lowercased before."""
    pooling = {"word_embedding_dimension": 12, "pooling_mode_max_tokens": True}
    folder = write(tmp_path / "old", encoder="0_Transformer", prefix=OLD, pooling=pooling)
    (folder / "2_Normalize").mkdir()
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    settings = {"max_seq_length": LENGTH, "do_lower_case": True}
    write_json(folder / "0_Transformer/tokenizer_config.json", tokenizer)
    write_json(folder / "0_Transformer/sentence_bert_config.json", settings)
    write_json(folder / SETTINGS, {"prompts": PROMPTS})
    bert = bert_jax.load(folder)
    check(bert, library.SentenceTransformer(str(folder), device="cpu"))
    check_export(bert, tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        ("roberta", "byte_bpe"),
        ("modernbert", "byte_bpe"),
        ("bert", "sentencepiece"),
        ("bert", "wordpiece"),
    ],
)
def test_a_model_of_ours(kind, tokenizer, tmp_path):
    text = [*TEXTS, WORDS, *WORDS.split()] * 3
    trained = tokenizer_training.train(text, TokenizerConfig(kind=tokenizer), 400)
    sizes = {"vocab_size": trained.vocab_size, "max_position_embeddings": 48, "model_type": kind}
    if kind != "bert":
        sizes["type_vocab_size"] = 1
    own = EmbeddingConfig("cls", dense=9, query_prompt="the dog: ", passage_prompt="it rains on ")
    model = BertForEmbedding(model_config(**sizes), 0, "", own)
    params = random_arrays(model.init_params)
    task, data = EmbeddingTaskConfig(embedding=own), DataFiles(max_length=40)
    bert = bert_jax.Bert(model.config, params, trained, model, task=task, data=data)
    check_export(bert, tmp_path / "ours", 40)

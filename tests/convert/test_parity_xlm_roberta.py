"""XLM-RoBERTa and CamemBERT: the same ids and hidden states as in `transformers`, both ways."""

import io
import shutil
import warnings

import numpy as np
import pytest
from helpers import refused

import bert_jax

pytestmark = [
    pytest.mark.parity,
    # Of the other packages' own making.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
with warnings.catch_warnings(action="ignore"):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sentencepiece = pytest.importorskip("sentencepiece")

LINES = [
    "The river bank was flooded, and the bank closed.",
    "Der Fluß war über die Ufer getreten; die Straße blieb gesperrt.",
    "Le café naïf de l'été fut déjà rouvert.",
    "東京 は 日本 の 首都 です。",
    "सभी मनुष्य स्वतंत्र पैदा होते हैं।",
    "Все люди рождаются свободными и равными.",
] * 20
TEXTS = [
    *LINES[:6],
    "a  b\tc\n d",
    "unknown: 한국어 😀👍🏽 ﬁ ½ Ⅷ",
    "X\u0301e\u0301 ▁ a ▁b <tag> ",
    "the <mask> bank",
]
# Class, and the position of the first token.
KINDS = {"bert": ("Bert", 0), "xlm-roberta": ("XLMRoberta", 2), "camembert": ("Camembert", 2)}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=200,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
    )
    file = tmp_path_factory.mktemp("model") / "sentencepiece.bpe.model"
    file.write_bytes(model.getvalue())
    return file


def write_tokenizer(model_file, folder, kind: str) -> int:
    """Writes the files as `transformers` does, beside the .model, whose ids are others."""
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(model_file.read_bytes())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces[3:]]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    options = {}
    if kind == "camembert":
        special = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
        cls = transformers.CamembertTokenizer
    else:
        cls = transformers.XLMRobertaTokenizer
        options["_spm_precompiled_charsmap"] = proto.normalizer_spec.precompiled_charsmap
    vocab = [*((name, 0.0) for name in special), *pieces, ("<mask>", 0.0)]
    tokenizer = cls(vocab=vocab, model_max_length=64, **options)
    tokenizer.save_pretrained(folder)
    shutil.copy(model_file, folder)
    return len(tokenizer)


@pytest.fixture(params=KINDS, scope="module")
def folder(request, model_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    size, (prefix, first) = write_tokenizer(model_file, folder, request.param), KINDS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64 + first,
        type_vocab_size=1 if first else 2,
        pad_token_id=1,
    )
    getattr(transformers, f"{prefix}ForMaskedLM")(config).save_pretrained(folder)
    return folder


def check_same(bert, folder) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    arrays = bert.tokenize(TEXTS)
    np.testing.assert_array_equal(arrays["input_ids"], inputs["input_ids"])
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states[-1].numpy()
    is_text = inputs["attention_mask"].numpy().astype(bool)
    hidden = np.asarray(bert(TEXTS).last_hidden_state)
    np.testing.assert_allclose(hidden[is_text], expected[is_text], atol=1e-5)
    # Also in a BERT, whose own tokenizer puts one separator between two texts, and types 0 and 1.
    pair = tokenizer("the bank", "la rivière", return_tensors="pt")
    with torch.no_grad():
        expected = model(**pair, output_hidden_states=True).hidden_states[-1].numpy()
    own = bert.tokenize(["the bank"], ["la rivière"])
    np.testing.assert_array_equal(own["input_ids"], pair["input_ids"])
    hidden = np.asarray(bert(["the bank"], ["la rivière"]).last_hidden_state)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)


def test_ids_and_hidden_states(folder, tmp_path):
    bert = bert_jax.load(folder)
    check_same(bert, folder)
    bert.export(tmp_path / "ours")
    check_same(bert, tmp_path / "ours")
    check_same(bert_jax.load(tmp_path / "ours"), folder)


def test_words_have_their_tokens(folder):
    """Offsets are those of the words, without the space before them."""
    bert, text = bert_jax.load(folder), "the river bank"
    ids, offsets = bert.tokenizer.encode_with_offsets(text)
    names = [bert.tokenizer.id_to_token(index) for index in ids]
    parts = [text[start:end] for start, end in offsets]
    for part, name in zip(parts, names, strict=True):
        assert part == (name.lstrip("▁") or part)  # that of a space alone is the letter after it
    assert "".join(part for part, name in zip(parts, names, strict=True) if name != "▁") == (
        text.replace(" ", "")
    )
    assert [name.startswith("▁") for name in names] == [
        not continues for continues in bert.tokenizer.continues_word[list(ids)]
    ]
    (vectors,) = bert.encode([text], pooling="words")
    assert vectors.shape == (3, 32)
    assert bert.tokenizer.encode_with_masks("the [MASK] bank") == [
        *bert.tokenizer.encode(["the <mask> bank"])[0]
    ]
    assert bert.tokenizer.decode(ids).strip() == text


def test_a_head_of_a_task(folder, tmp_path):
    rows = [{"sentence": line, "label": str(i % 2)} for i, line in enumerate(LINES[:8])]
    config = bert_jax.recipe("finetune/classification", bert_jax.FinetuneConfig)
    config.epochs, config.data.batch_size, config.data.max_length = 1.0, 8, 24
    result = bert_jax.finetune(
        config, bert_jax.load(folder), tmp_path / "run", train=rows, eval=rows, quiet=True
    )
    result.bert.export(tmp_path / "ours")
    with warnings.catch_warnings(action="error"):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        inputs = tokenizer(LINES[:4], padding=True, return_tensors="pt")
        expected = torch.softmax(model.eval()(**inputs).logits, -1).max(-1).values.tolist()
    actual = [each["probability"] for each in result.bert.predict(LINES[:4])]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_model_file_alone_is_refused(folder, tmp_path):
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    (copied / "tokenizer.json").write_bytes(b"")
    with refused("holds no readable tokenizer"):
        bert_jax.load(copied)
    (copied / "tokenizer.json").unlink()
    with refused("are not those of sentencepiece.bpe.model; put the model's tokenizer.json beside"):
        bert_jax.load(copied)

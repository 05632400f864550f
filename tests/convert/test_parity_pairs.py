"""Pairs of texts have the token types that the model's own tokenizer gives them."""

import warnings

import numpy as np
import pytest
from helpers import refuses_to_load
from test_parity import LABELS, TEXT, WORDS, torch, transformers, write_model
from tokenizers import processors

import bert_jax
from bert_jax.text.tokenizer import WordPieceTokenizer

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SPECIAL = dict(zip(("pad", "unk", "cls", "sep", "mask"), WordPieceTokenizer.special, strict=True))
ALL = ["input_ids", "token_type_ids", "attention_mask"]
ONE, TWO = "[CLS] $A [SEP] $B [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
TWO_SEPARATORS = "[CLS] $A [SEP] [SEP] $B:1 [SEP]:1"
# How two texts are joined, the inputs that the settings name, and the token types of a pair.
FORMS = {
    "the class of transformers 5": (TWO, None, 1),
    "inputs without types": (TWO, ["input_ids", "attention_mask"], 1),
    "a template of one type": (ONE, ALL, 1),
    "two types": (TWO, ALL, 2),
    "two separators and two types": (TWO_SEPARATORS, ALL, 2),
}


def write_tokenizer(folder, pair, inputs):
    """Write a tokenizer as `transformers` saves one that belongs to no model."""
    tokens = [*WordPieceTokenizer.special, *WORDS.split()]
    inner = WordPieceTokenizer.from_vocabulary(tokens, lowercase=True)._tokenizer
    special = [(token, tokens.index(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=special
    )
    settings = {f"{role}_token": token for role, token in SPECIAL.items()}
    settings |= {"model_input_names": inputs} if inputs else {}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **settings)
    tokenizer.save_pretrained(folder)


def predicted_there(folder, kind):
    """Return the probabilities by `transformers`, and the token types; None for no types."""
    with warnings.catch_warnings(action="ignore"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        prefix = {"bert": "Bert", "roberta": "Roberta", "electra": "Electra"}[kind]
        model = getattr(transformers, f"{prefix}ForSequenceClassification").from_pretrained(folder)
    inputs = tokenizer(*map(list, zip(*TEXT, strict=True)), padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**inputs).logits.softmax(-1).numpy(), inputs.get("token_type_ids")


@pytest.mark.parametrize("kind", ["bert", "electra", "roberta"])
@pytest.mark.parametrize("form", FORMS)
def test_pairs_have_the_token_types_of_the_tokenizer(kind, form, tmp_path):
    pair, inputs, count = FORMS[form]
    folder, exported = tmp_path / "model", tmp_path / "exported"
    write_model(kind, folder, 0, "ForSequenceClassification", type_vocab_size=2, **LABELS)
    write_tokenizer(folder, pair, inputs)
    expected, types = predicted_there(folder, kind)
    assert count == (1 if types is None else 1 + types.max())
    bert_jax.load(folder).export(exported)
    for path in (folder, exported):
        bert = bert_jax.load(path)
        arrays = bert.tokenize(*map(list, zip(*TEXT, strict=True)))
        assert arrays["token_type_ids"].max() == count - 1
        found = [[*row["probabilities"].values()] for row in bert.predict(TEXT)]
        np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(predicted_there(exported, kind)[0], expected, atol=1e-5)


def test_other_token_types_of_two_texts_are_refused(tmp_path):
    write_model("bert", tmp_path)
    write_tokenizer(tmp_path, "[CLS] $A:1 [SEP] $B [SEP]", ALL)
    refuses_to_load(tmp_path, "other token types than 0, or 0 and 1; these are read")
    write_tokenizer(tmp_path, "[CLS] $A:1 [SEP] $B [SEP]", ["input_ids", "attention_mask"])
    assert bert_jax.load(tmp_path).config.pair_token_types == 1

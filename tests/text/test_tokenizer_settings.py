"""Settings and files beside a `tokenizer.json`, read as `transformers` reads them."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from helpers import refused
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from bert_jax.config import ModelConfig, TokenizerConfig
from bert_jax.convert.tokenizer_files import files
from bert_jax.text import tokenizer_loading, tokenizer_training
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "<e1>", "a", "b", "A", "e", "é", "<", ">", "e1", "[", "]", "new"]
GENERIC = "PreTrainedTokenizerFast"


def template(single: str = "[CLS] $A [SEP]"):
    return processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )


def wordpiece(*, lowercase: bool = True, single: str = "[CLS] $A [SEP]", added=()):
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([*SPECIAL, *added])
    tokenizer.post_processor = template(single)
    return tokenizer


def byte_bpe(*, add_prefix_space: bool):
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *pre_tokenizers.ByteLevel.alphabet()]
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.add_special_tokens(vocabulary[:4])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def load(tokenizer, **others):
    """Read a `tokenizer.json` beside other files of JSON."""
    content = {name.replace("__", "."): json.dumps(value) for name, value in others.items()}
    content["tokenizer.json"] = tokenizer.to_str()
    return tokenizer_loading.from_files({n: c.encode() for n, c in content.items()}, "here")


def tokens(tokenizer, text: str, *, masked: bool = False) -> str:
    ids = tokenizer.encode_with_masks(text) if masked else tokenizer.encode([text])[0]
    return " ".join(map(tokenizer.id_to_token, ids))


def test_a_tokenizer_json_is_right_about_the_tokens_that_it_has():
    """Older directories list them once more, without their properties."""
    found = load(wordpiece(added=["[NEW]"]), added_tokens__json={"[NEW]": len(WORDS)})
    assert tokens(found, "a [NEW] [new] b") == "a [NEW] [ new ] b"
    bpe = byte_bpe(add_prefix_space=False)
    mask = {"content": "<mask>", "lstrip": True}
    found = load(
        bpe,
        added_tokens__json={"<mask>": bpe.token_to_id("<mask>")},
        tokenizer_config__json={"mask_token": mask},
    )
    assert tokens(found, "a <mask> b", masked=True) == "a <mask> Ġ b"


@pytest.mark.parametrize(
    "others",
    [
        {"tokenizer_config__json": {"additional_special_tokens": ["<e1>"]}},
        {"tokenizer_config__json": {"extra_special_tokens": ["<e1>"]}},
        {"tokenizer_config__json": {"extra_special_tokens": {"entity": "<e1>"}}},
        {"tokenizer_config__json": {"bos_token": "<e1>"}},
        {"special_tokens_map__json": {"additional_special_tokens": [{"content": "<e1>"}]}},
    ],
)
def test_a_token_that_settings_name_as_special_is_one(others):
    assert tokens(load(wordpiece()), "a <e1> b") == "a < e1 > b"
    assert tokens(load(wordpiece(), **others), "a <e1> b") == "a <e1> b"


@pytest.mark.parametrize(
    ("in_json", "settings", "expected"),
    [
        (False, {"tokenizer_class": "RobertaTokenizerFast", "add_prefix_space": True}, "Ġ a"),
        (True, {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False}, "a"),
        (True, {"tokenizer_class": "RobertaTokenizer"}, "a"),
        (False, {"tokenizer_class": GENERIC, "add_prefix_space": True}, "a"),
        (True, {}, "Ġ a"),
    ],
)
def test_the_space_before_the_first_word(in_json, settings, expected):
    found = load(byte_bpe(add_prefix_space=in_json), tokenizer_config__json=settings)
    assert tokens(found, "a") == expected


def test_a_generic_class_normalizes_as_its_tokenizer_json():
    for name, expected in ((GENERIC, "a e"), ("BertTokenizer", "A é")):
        settings = {"tokenizer_class": name, "do_lower_case": False}
        assert tokens(load(wordpiece(), tokenizer_config__json=settings), "A é") == expected


@pytest.mark.parametrize(
    ("settings", "key_words"),
    [
        ({"sep_token": "<e1>"}, "has the sep_token '<e1>'; only [SEP] is read"),
        ({"mask_token": {"content": "<e1>"}}, "has the mask_token '<e1>'; only [MASK] is read"),
        ({"split_special_tokens": True}, "has split_special_tokens, which is not done"),
        ({"truncation_side": "left"}, "(truncation_side left), which is not done"),
    ],
)
def test_settings_that_are_refused(settings, key_words):
    with refused(key_words):
        load(wordpiece(), tokenizer_config__json=settings)


def test_special_tokens_of_their_own_file_overrule_the_settings():
    """As in `transformers`, but where the settings list the added tokens."""
    other, cls = {"cls_token": {"content": "<e1>"}}, {"cls_token": "[CLS]"}
    with refused("special_tokens_map.json has the cls_token '<e1>'; only [CLS] is read"):
        load(wordpiece(), special_tokens_map__json=other, tokenizer_config__json=cls)
    assert load(wordpiece(), special_tokens_map__json=cls, tokenizer_config__json=other)
    settings = {**cls, "added_tokens_decoder": {}}
    assert load(wordpiece(), special_tokens_map__json=other, tokenizer_config__json=settings)


def test_a_tokenizer_json_that_keeps_the_end_of_a_text_is_refused():
    cut = wordpiece()
    cut.enable_truncation(8, direction="left")
    with refused("keeps the end of a long text (truncation left), which is not done"):
        load(cut)
    assert load(cut, tokenizer_config__json={"truncation_side": "right"})


def test_a_template_without_cls_is_refused():
    with refused("the tokenizer adds [SEP] to a text, and must add [CLS] [SEP]", "post_processor"):
        load(wordpiece(single="$A [SEP]"))


def test_the_offsets_of_composed_characters():
    tokenizer = tokenizer_training.train(
        ["cafe\u0301 한국 x\u0323\u0307"] * 9, TokenizerConfig(kind="wordpiece"), 60
    )
    for text in ("cafe\u0301 a", "x\u0323\u0307", "\u1112\u1161\u11ab\u1100\u116e\u11a8"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert len(ids) == len(offsets)
        covered = {i for start, end in offsets for i in range(start, end)}
        assert covered == {i for i, character in enumerate(text) if character != " "}


def test_a_sentencepiece_comes_back_from_transformers():
    """Whose `save_pretrained` writes a `tokenizer.json` of it, and no .model."""
    sentences = ["the river bank is here", "élan vital office", "don't stop... [x] (y)"] * 30
    model = ModelConfig(hidden_size=8, num_attention_heads=2)
    own = tokenizer_training.train(sentences, TokenizerConfig(kind="sentencepiece"), 200)
    content = files(own, model)
    found = tokenizer_loading.from_files({"tokenizer.json": content["tokenizer.json"]}, "here")
    assert (found.kind, found.special_ids) == ("unigram", own.special_ids)
    for text in (*sentences[:3], " the  river ", "élan"):
        assert list(found.encode([text])[0]) == own.encode([text])[0].tolist()
    for text in ("the [MASK] bank", "the [MASK]. [MASK]"):
        assert found.encode_with_masks(text) == own.encode_with_masks(text)


def from_elsewhere(model_type="unigram", **options) -> SentencePieceTokenizer:
    """A SentencePiece model that is not of bert-jax, without [CLS], [SEP] and [MASK]."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the river bank is here", "the model reads a file"] * 30),
        model_writer=model,
        model_type=model_type,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return SentencePieceTokenizer(model.getvalue())


def with_added(own: SentencePieceTokenizer, added, removed=()) -> dict[str, bytes]:
    """The files of an export, to which a library has added tokens, in place of some others."""
    content = files(own, ModelConfig(hidden_size=8, num_attention_heads=2))
    values = json.loads(content["tokenizer.json"])
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] not in removed]
    values["post_processor"] = None
    inner = tokenizers.Tokenizer.from_str(json.dumps(values))
    inner.add_special_tokens([*added])
    return {
        "spiece.model": own.files()["sentencepiece.model"],
        "tokenizer.json": inner.to_str().encode(),
    }


def test_tokens_that_only_the_tokenizer_json_has_are_read():
    """Before, those of the .model were, of which [CLS] was another token."""
    own, special = from_elsewhere(), ["[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    content = with_added(own, [*special, "<new>"], removed=("<pad>", "[MASK]"))
    found = tokenizer_loading.from_files(content, "here")
    size = own.vocab_size - 2  # without <pad> and [MASK], which the .model lacks
    ids = [found.cls_id, found.sep_id, found.pad_id, found.mask_id]
    assert ids == [size, size + 1, size + 2, size + 3]
    assert tokens(found, "the <new>").endswith("<new>")
    assert tokenizer_loading.from_files(with_added(own, ()), "here").kind == "sentencepiece"
    added = tokenizer_loading.from_files(with_added(own, ["<new>"]), "here")
    assert added.special_ids == own.special_ids
    assert tokens(added, "the <new>").endswith("<new>")
    with refused("a BPE tokenizer.json is not read", "the one beside it has other tokens or ids"):
        tokenizer_loading.from_files(with_added(from_elsewhere("bpe"), ["<new>"]), "here")


def test_special_tokens_of_a_model_are_those_of_the_settings():
    own = from_elsewhere(control_symbols=["[CLS]", "[SEP]", "[MASK]", "<pad>"])
    content = own.files() | {"tokenizer_config.json": b'{"cls_token": "[CLS]"}'}
    assert tokenizer_loading.from_files(content, "here").cls_id == own.cls_id
    content["tokenizer_config.json"] = b'{"cls_token": "<s>"}'
    with refused("has the cls_token '<s>'; only [CLS] is read"):
        tokenizer_loading.from_files(content, "here")


def test_two_vocabularies_are_refused():
    content = from_elsewhere().files() | {"vocab.txt": "\n".join(WORDS).encode()}
    with refused("two vocabularies, sentencepiece.model and vocab.txt; remove the one that is not"):
        tokenizer_loading.from_files(content, "here")


def test_merges_alone_are_no_vocabulary():
    with refused("no sentencepiece .model, tokenizer.json, vocab.txt"):
        tokenizer_loading.from_files({"merges.txt": b"a b\n"}, "here")


def test_settings_beside_a_file_are_those_of_its_folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    alone, folder = (tokenizer_loading.load(path) for path in (tmp_path / "vocab.txt", tmp_path))
    assert alone.fingerprint == folder.fingerprint
    assert list(alone.encode("A")) != list(alone.encode("a"))

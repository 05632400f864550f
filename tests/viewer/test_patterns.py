"""Patterns of attention: against loops over random maps, over files, and the command's mistakes."""

import gzip
import json
import math
import unicodedata

import jax
import numpy as np
import pytest

from bert_jax import Patterns, UserError, console
from bert_jax.batches.token_sequences import FILL
from bert_jax.inference.tokenization import sequences_of
from bert_jax.viewer import patterns

TEXTS = [
    "The river bank.",
    ("A model reads the token.", "the river, the bank"),
    "the",
    ("bank", "The token."),
    "The (small) model reads; the large model sees the river.",
]


def expected_sums(attention, ids, second_start, tokenizer):
    """The sums over the queries of one text and their weights, by loops; `attention` is [L, L]."""
    n = len(ids)
    special = (tokenizer.cls_id, tokenizer.sep_id)
    text = [i for i in range(n) if ids[i] not in special]

    def is_punctuation(token):
        characters = tokenizer.id_to_token(int(token)).removeprefix("##")
        return all(unicodedata.category(c) in ("Po", "Ps", "Pe", "Pd", "Sm") for c in characters)

    keys = {
        "next": lambda q: [k for k in text if k == q + 1],
        "previous": lambda q: [k for k in text if k == q - 1],
        "same": lambda q: [k for k in text if k != q and ids[k] == ids[q]],
        "cls": lambda q: [k for k in range(n) if ids[k] == tokenizer.cls_id],
        "sep": lambda q: [k for k in range(n) if ids[k] == tokenizer.sep_id],
        "punctuation": lambda q: [k for k in text if is_punctuation(ids[k])],
        "other_segment": lambda q: [k for k in text if (k < second_start) != (q < second_start)],
    }
    sums, weights = dict.fromkeys(keys, 0.0), dict.fromkeys(keys, 0)
    for name, find in keys.items():
        for q in text:
            if found := find(q):
                sums[name] += sum(float(attention[q, k]) for k in found)
                weights[name] += 1
    entropies = [-sum(p * math.log(p) for p in map(float, attention[q, :n]) if p) for q in text]
    sums["broad"], weights["broad"] = sum(entropies) / math.log(n), len(text)
    return np.array([*sums.values()]), np.array([*weights.values()])


def sequences(tokenizer):
    for text in TEXTS:
        columns = tokenizer.encode([text] if isinstance(text, str) else list(text))
        ids = [tokenizer.cls_id]
        starts = []
        for column in columns:
            starts.append(len(ids))
            ids += [*column, tokenizer.sep_id]
        yield np.array(ids), (starts[1] if len(starts) > 1 else len(ids))


def test_sums_are_those_of_loops(tiny_bert):
    tokenizer = tiny_bert.tokenizer
    found = list(sequences(tokenizer))
    length = max(len(ids) for ids, _ in found) + 3
    indices = np.array([*range(len(found)), FILL])
    batch = sequences_of(tiny_bert, [ids for ids, _ in found]).batch(indices, length)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    generator = np.random.default_rng(0)
    maps = generator.dirichlet(np.full(length, 0.3), (2, len(ids), 3, length))
    # As softmax leaves padding without attention; there is none for the sequence of padding alone.
    maps = maps * mask[:, None, None, :] + 1e-30
    maps = np.float32(maps / maps.sum(-1, keepdims=True) * (mask.sum(1) > 0)[:, None, None, None])
    roles = patterns._roles(tokenizer, range(tokenizer.vocab_size))[ids] * mask
    starts = np.array([*(start for _, start in found), 0])
    sums, uniform, weights = map(np.asarray, jax.jit(patterns._sum)(maps, ids, roles, starts))
    for index, (tokens, start) in enumerate(found):
        n = len(tokens)
        for layer, head in np.ndindex(2, 3):
            wanted, counts = expected_sums(maps[layer, index, head], tokens, start, tokenizer)
            np.testing.assert_allclose(sums[index, layer, head], wanted, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(weights[index], counts)
        alike, _ = expected_sums(np.full((n, n), 1 / n), tokens, start, tokenizer)
        np.testing.assert_allclose(uniform[index], alike, rtol=1e-5)
    # Each kind has queries in some text.
    assert weights.sum(0).all()
    assert not any(values[-1].any() for values in (sums, uniform, weights))


def of_maps(bert, maps):
    ids, start = next(sequences(bert.tokenizer))
    maps = np.broadcast_to(np.float32(maps(len(ids))), (1, 1, len(ids), len(ids)))
    found = patterns.of_text("model", bert.tokenizer, maps, ids, start, is_truncated=False)
    return {name: float(values[0, 0]) for name, values in found.values.items()}


def test_maps_of_known_patterns(tiny_bert):
    (ids, _), *_ = sequences(tiny_bert.tokenizer)
    size = len(ids)
    uniform = of_maps(tiny_bert, lambda n: np.full((n, n), 1 / n))
    assert uniform["broad"] == pytest.approx(1)
    assert uniform["cls"] == uniform["sep"] == pytest.approx(1 / size)
    following = of_maps(tiny_bert, lambda n: np.roll(np.eye(n), 1, axis=1))
    assert (following["next"], following["previous"], following["broad"]) == (1, 0, 0)
    # The full stop follows one token, and [SEP] follows it.
    assert following["sep"] == following["punctuation"] == pytest.approx(1 / (size - 2))
    assert of_maps(tiny_bert, lambda n: np.roll(np.eye(n), -1, axis=1))["previous"] == 1
    assert np.isnan(uniform["other_segment"])


def test_streaming_is_the_mean_over_views(tiny_bert):
    texts = TEXTS * 30
    found = tiny_bert.attention_patterns(iter(["", *texts, ("a", "")]))
    views = [tiny_bert.attention(*([t] if isinstance(t, str) else t)) for t in TEXTS]
    sums = weights = 0
    for view in views:
        each = [
            [
                expected_sums(head, view.input_ids, view.second_start, view.tokenizer)
                for head in layer
            ]
            for layer in view.maps
        ]
        sums = sums + np.array([[head[0] for head in layer] for layer in each])
        weights = weights + each[0][0][1]
    for index, (name, values) in enumerate(found.values.items()):
        assert values.shape == (2, 2)
        np.testing.assert_allclose(values, sums[..., index] / weights[index], rtol=1e-5)
        assert ((values >= 0) & (values <= 1)).all()
        one = views[1].patterns()
        alone = tiny_bert.attention_patterns([TEXTS[1]])
        np.testing.assert_allclose(one.values[name], alone.values[name], rtol=1e-5)
        np.testing.assert_allclose(one.uniform[name], alone.uniform[name], rtol=1e-5)
    assert (found.num_texts, found.num_tokens) == (len(texts), 30 * weights[-1])


def test_truncated_texts_are_counted_and_empty_ones_refused(tiny_bert):
    texts = ["the bank " * 40, ("the " * 20, "bank " * 20), "the"]
    with pytest.warns(UserWarning, match="2 of 3 texts are longer than the model's 32 tokens"):
        found = tiny_bert.attention_patterns(texts)
    assert (found.num_truncated, found.num_tokens) == (2, 30 + 29 + 1)
    assert found.to_json()["truncated"] == 2
    with pytest.raises(UserError, match="no text with tokens"):
        tiny_bert.attention_patterns(["", " "])


def test_what_is_punctuation(tiny_bert):
    class Tokens:
        pad_id, cls_id, sep_id = 0, 1, 2

        def readable(self, index):
            return tokens[index]

    tokens = ["[PAD]", "[CLS]", "[SEP]", "bank", "##s", ".", "##.", "##", "▁", "▁,", "Ġ(", "Ġa"]
    tokens += ["$", "«", "।", "a.", "[MASK]", "ĠĠ", "...", "7", ""]
    found = patterns._roles(Tokens(), range(len(tokens)))
    marks = [token for token, role in zip(tokens, found, strict=True) if role == 2]
    assert marks == [".", "##.", "##", "▁,", "Ġ(", "$", "«", "।", "..."]
    assert found[:3].tolist() == [0, 3, 4]


def test_strongest_heads():
    values = np.array([[0.1, 0.5], [0.7, 0.2]], np.float32)
    found = Patterns("m", 1, 1, 0, {"next": values, "same": values * np.nan}, {})
    assert [(i, j) for i, j, _ in found.strongest("next")] == [(2, 1), (1, 2), (2, 2)]
    assert found.strongest("next", 1)[0][2] == pytest.approx(0.7)
    assert found.strongest("same") == []


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt.gz"
    lines = ["\t".join([text] if isinstance(text, str) else text) for text in TEXTS]
    path.write_bytes(gzip.compress("\n".join([*lines, "", "the " * 50]).encode()))
    return path


def test_the_command(tiny_run, tiny_bert, file, tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("patterns.html", "patterns.json"):
        (tmp_path / name).write_text("of an earlier run")
    warned = []
    monkeypatch.setattr(console, "warn", warned.append)
    words = (tiny_run.checkpoint, f"--texts=~/{file.name}", "--force")
    printed = bert_jax_main("attention", *words).splitlines()
    with pytest.warns(UserWarning, match="truncated"):
        expected = tiny_bert.attention_patterns([*TEXTS, "the " * 50])
    tokens = f"{expected.num_tokens} tokens"
    assert warned == ["1 of 6 texts are longer than the model's 32 tokens and were truncated"]
    assert printed[0] == f"6 texts of {tokens}"
    assert [line.split("  ")[0] for line in printed[1:9]] == [
        name.replace("_", " ") for name in patterns.EXPLANATIONS
    ]
    layer, head, share = expected.strongest("previous")[0]
    strongest = f"layer {layer} head {head:<2} {share:4.0%}"
    assert printed[2].startswith(f"previous       {strongest}   layer")
    assert printed[9].startswith("patterns.html: ")
    written = json.loads((tmp_path / "patterns.json").read_text())
    content = expected.to_json()
    assert written.pop("model") == repr(tiny_bert)
    for name in patterns.EXPLANATIONS:
        np.testing.assert_allclose(written["values"][name], content["values"][name], atol=1.01e-4)
    assert written.keys() == content.keys()
    assert written["texts"] == 6
    page = (tmp_path / "patterns.html").read_text()
    _, _, rest = page.partition('<script type="application/json" id="data">')
    data = json.loads(rest.partition("</script>")[0])
    assert (data["patterns"], data["texts"]) == (written, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--texts=none"], "none does not exist; give a file with a text a line"),
        (["--texts=empty"], "empty has no text; give one a line"),
        (["--texts=blank"], "blank has no text"),
        (["--texts=."], "is a folder, not a file"),
        (["--texts=texts", "--output=."], "[.] is a folder; give the path of a file"),
        (["--texts=texts", "--output=a/"], "a/ is a folder; give the path of a file"),
        (["--texts=texts", "--output=there.html/a"], "is in no folder"),
        (["--texts=binary"], "has a NUL byte"),
        (["--texts=texts.jsonl"], "texts.jsonl has records, not a text a line; write the texts"),
        (["--texts=texts", "text"], "give a TEXT or two, or a file"),
        ([], "give a TEXT or two, or a file"),
        (["--texts=texts", "--compare=bank"], "--compare=WORD takes each text as a TEXT"),
        (["--texts=texts", "--output=there.html"], "there.html already exists"),
        (["--texts=texts", "--output=numbers.html"], "numbers.json already exists"),
        (["--texts=texts", "--output=numbers.json"], "give the page a name in .html"),
        (["--texts=texts", "--output=no/page.html"], "make the folder first"),
        (["one", "two", "three"], "3 texts are too many"),
    ],
)
def test_mistakes_before_the_model_is_loaded(words, message, tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    contents = {"empty": "", "blank": " \n\n", "binary": "a\0b", "texts": "The river bank."}
    for name, content in {**contents, "there.html": "", "numbers.json": ""}.items():
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        bert_jax_main("attention", "no checkpoint", *words)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_without_pairs_and_one_of_three_texts(tiny_run, tmp_path, bert_jax_main):
    path, output = tmp_path / "texts.txt", f"--output={tmp_path / 'page.html'}"
    path.write_text("The river bank.\na\tb\tc\n")
    with pytest.raises(UserError, match=r"texts\.txt:2 has 2 tabs"):
        bert_jax_main("attention", tiny_run.checkpoint, f"--texts={path}", output)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]
    path.write_text("The river bank.\n")
    printed = bert_jax_main("attention", tiny_run.checkpoint, f"--texts={path}", output)
    assert "other segment  none in these texts" in printed
    values = json.loads((tmp_path / "page.json").read_text())["values"]
    assert values["other_segment"] == [[None, None], [None, None]]

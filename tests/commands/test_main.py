"""The `bert-jax` command: help, results, and mistakes in one line."""

import json
import os
import shlex
import shutil
import string

import pytest
from helpers import refused

from bert_jax import UserError
from bert_jax.commands import flags, main
from bert_jax.commands.main import COMMANDS
from bert_jax.storage.locks import locked
from bert_jax.text import shards
from bert_jax.text.store import open_store
from bert_jax.training import checkpoint


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command, bert_jax_main, capsys, monkeypatch):
    """It is one screen that opens with an example, whose flags and fields the command has."""
    with pytest.raises(SystemExit) as end:
        bert_jax_main(*command.split(), "--help")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert f"\nusage: bert-jax {command}".rstrip() in printed
    assert len(printed.splitlines()) <= 50 or command == "prepare"
    assert "--coordinator_address" not in printed
    _, example, *_ = printed.split("\n\n")
    assert example.startswith(f"    bert-jax {command or 'pretrain'}")
    line = example.splitlines()[0].partition(" #")[0]
    module = main.import_command(command or "pretrain")
    ran = []
    monkeypatch.setattr(module, "run", lambda args, words: ran.append((args, words)))
    bert_jax_main(*shlex.split(line)[1:])
    for args, words in ran:
        assert not words or flags.read_config(args.config, words, args.parser.recipe[1])
    assert ran


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["pretrain", "--init="], "--init"),
        (["finetune", "--workdir", ""], "--workdir"),
        (["finetune", "--config="], "--config"),
        (["embed", "", "file", "--json"], "CHECKPOINT"),
        (["index", "x", "", "--output=y"], "FILE"),
        (["search", "x", "query", "--checkpoint="], "--checkpoint"),
        (["benchmark", "--profile="], "--profile"),
        (["prepare", "builtin", "s", "--eval-source="], "--eval-source"),
        (["export", "--", "run", ""], "DST"),
    ],
)
def test_an_empty_value_is_refused(bert_jax_main, words, name):
    """It may be an unset variable of the shell."""
    with pytest.raises(UserError, match=f"^{name} is empty; "):
        bert_jax_main(*words)


def test_help_lists_the_fields_of_a_recipe(bert_jax_main, capsys):
    for words, text in (
        (
            "pretrain --help-all",
            "--config.model.hidden_size=128\n        width of the encoder (def",
        ),
        (
            "pretrain --help-all --config=electra_small",
            "width of embeddings; 0: hidden_size (default: 0)",
        ),
        ("pretrain --help-all --config=small", "--config.steps=50000\n        training steps (def"),
        ("finetune --config finetune/squad --help-all", "task.kind=question_answering"),
    ):
        with pytest.raises(SystemExit):
            bert_jax_main(*words.split())
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key_words"),
    [
        ("pretrian", "'pretrian' is unknown; did you mean pretrain?"),
        ("zzz", "choose one of prepare, "),
        ("--vresion", "did you mean --version?"),
        ("export a b --head=maskedlm", "did you mean masked-lm?"),
        ("prepare --config=small a b", "a recipe and its fields are for pretrain"),
        ("fill-mask runs/tiny a [MASK]", "'[MASK]' is one word too many"),
        ("export a", "DST; see `bert-jax export --help`"),
        ("pretrain --wrokdir=x", "did you mean --workdir=x?"),
        ("pretrain --steps 9", "did you mean --config.steps?"),
        ("pretrain --batch-size=8", "did you mean --config.data.batch_size=8?"),
        ("pretrain --zzz", "--help-all lists the flags, and a word after -- is none"),
        ("-q pretrain", "'-q' is not a flag; flags follow the command"),
        ("search x -quer", "'-quer' is not a flag; "),
        (
            "search x --zzzzz",
            "'--zzzzz' is not a flag; --help lists the flags, and a word after --",
        ),
        ("predict x --text -x", "'-x' is not a flag; --help lists the flags, and a word after --"),
        ("embed x -- -f.txt", "one of the arguments --output --json is required"),
        ("embed x f --layer -1", "one of the arguments --output --json is required"),
        ("embed --json -- x -f.txt", "-f.txt does not exist"),
        ("predict --text -- x -f.txt", "CHECKPOINT"),
        ("pretrain --config.learning_rte=1", "did you mean --config.optimizer.learning_rate?"),
        ("pretrain --config.data.pairs=ns", "did you mean nsp?"),
        (
            "finetune --config.data.eval_fraction=0.3",
            "--config.data.eval_fraction 0.3 has no effect beside --config.data.eval builtin@eval; "
            "leave it out, or set --config.data.eval=none",
        ),
        ("finetune --config=finetune/glue:mrcp", "did you mean mrpc?"),
        (
            "finetune --config=finetune/glue:mrpc --config.data.eval_fraction=0.3",
            "--config.data.eval_fraction 0.3 has no effect on a task of GLUE, which has held-out",
        ),
        ("prepare builtin s --vocab-size=-1", "--vocab-size is -1"),
        ("prepare t.csv s --vocab-size=9", "too small"),
        ("prepare t.csv s --tokenizer=x.model", "x.model"),
        ("fill-mask . a[MASK]", "holds no checkpoint"),
        ("prepare builtin s --eval-fraction=0", "--eval-fraction is 0"),
        ("prepare builtin s --tokenizer=wordpeice", "did you mean wordpiece?"),
        ("prepare builtin s --tokenizer=gs://b/t", "is not on a disk; copy it, and give that"),
        ("prepare t.csv s --text-field=txt", "--text-field to one of text, n; did you mean text?"),
        ("prepare a@1,b@2 s", "prepare each text by itself, all with one --tokenizer=PATH"),
    ],
)
def test_a_mistake_of_the_command_line(words, key_words, bert_jax_main, tmp_path, monkeypatch):
    """It names the nearest of what there is, in the words of the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("text,n\na text,1\n")
    with refused(key_words):
        bert_jax_main(*words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_commands_by_task(bert_jax_main):
    printed = bert_jax_main()
    assert printed.index("\ntrain\n") < printed.index("  pretrain ") < printed.index("\nuse\n")
    assert all(f"\n  {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("path", ["x" * 5000, "file/x", "loop/x", "a\nb\x1b"])
def test_paths_that_cannot_be(path, tmp_path, monkeypatch, bert_jax_main):
    """Each is refused in a line that leaves a terminal as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text\n")
    (tmp_path / "loop").symlink_to("loop")
    commands = [
        ("pretrain", f"--init={path}"),
        ("pretrain", f"--config={path}"),
        ("pretrain", f"--config.tokenizer.path={path}"),
        ("pretrain", f"--config.data.source={path}"),
        ("finetune", f"--init={path}"),
        ("prepare", "file", "store", f"--tokenizer={path}"),
        ("predict", path, "file"),
        ("embed", "checkpoint", path, "--output=a.npz"),
    ]
    if "\n" not in path:  # which is a possible name
        commands += [("prepare", "file", path)]
        commands += [("pretrain", f"--workdir={w}") for w in (path, "run\udcff")]
    for words in commands:
        alone = ["--num_processes=1"] if words[0] in ("pretrain", "finetune") else []
        with pytest.raises(UserError) as error:
            bert_jax_main(*words, *alone)
        assert str(error.value).isprintable()
        assert "coordinator_address" not in str(error.value)


def test_prepare_prints_a_command_that_works(tmp_path, monkeypatch, bert_jax_main):
    """It trains on the store, whatever the size of its vocabulary."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("One sentence.\nAnother sentence.\nA third one.\n\n" * 20)
    options = "--tokenizer=wordpiece", "--vocab-size=40"
    printed = bert_jax_main("prepare", "text.txt", "store", *options)
    assert "training: " in printed
    assert ", 3 sentences, 1 document\n" in printed
    command = shlex.split(printed.partition("train on it with: ")[2])
    fields = {"steps": 2, "data.batch_size": 8, "data.max_length": 32}
    fields |= {"model.hidden_size": 16, "model.num_hidden_layers": 1}
    changes = [f"--config.{name}={value}" for name, value in fields.items()]
    bert_jax_main(*command[1:], "--workdir=run", "--num_processes=1", *changes)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["model"]["vocab_size"] == 40
    with refused("another tokenizer"):
        bert_jax_main("prepare", "text.txt", "store")


def test_prepare_replaces_only_a_store(tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"A sentence of {name}.\nAnother.\n\n" * 40)
    words = ("prepare", "two.txt", "store", "--tokenizer=wordpiece", "--vocab-size=40")
    (tmp_path / "store").mkdir()
    bert_jax_main(words[0], "one.txt", *words[2:], "--force")  # an empty folder
    before = (tmp_path / "store/store.json").read_bytes()
    with refused("other text; choose another folder, or replace it with"):
        bert_jax_main(*words)
    (tmp_path / "bad.txt").write_bytes(b"\xff\n")
    with refused("is not UTF-8"):
        bert_jax_main(words[0], "bad.txt", *words[2:], "--force")
    for name in ("mine.txt", "mine.tmp", "mine.lock"):
        (tmp_path / "store" / name).write_text("kept")
        with refused("other files too, and is not replaced"):
            bert_jax_main(*words, "--force")
        assert (tmp_path / "store/store.json").read_bytes() == before
        (tmp_path / "store" / name).unlink()
    (tmp_path / "store/store.json.0123abcd.tmp").touch()  # as a killed process leaves
    shutil.copytree("store", ".store.new", dirs_exist_ok=True)  # as --force of another text leaves
    bert_jax_main(*words, "--force")
    assert (tmp_path / "store/store.json").read_bytes() != before
    assert {path.name for path in tmp_path.iterdir()} >= {"one.txt", "two.txt", "bad.txt", "store"}
    assert len(list(tmp_path.iterdir())) == 4
    with locked(tmp_path / "store"), refused("store is in use by process"):
        bert_jax_main(words[0], "one.txt", *words[2:], "--force")
    (tmp_path / "store").rename("real")
    (tmp_path / "store").symlink_to("real")
    bert_jax_main(words[0], "one.txt", *words[2:], "--force")
    assert (tmp_path / "store").is_symlink()
    assert (tmp_path / "real/store.json").read_bytes() == before


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_a_case_that_a_tokenizer_has_itself(kind, tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("A sentence of one.\nAnother.\n\n" * 40)
    words = ("prepare", "one.txt", "store", f"--tokenizer={kind}", "--vocab-size=40")
    bert_jax_main(*words)
    with refused("--cased has no effect on store/tokenizer"):
        bert_jax_main(*words[:2], "other", "--tokenizer=store/tokenizer", "--cased")
    tokenizer = open_store(tmp_path / "store").tokenizer
    checkpoint.write_params(tmp_path / "saved", {}, {}, tokenizer)
    with refused("--cased has no effect on saved"):
        bert_jax_main(*words[:2], "other", "--tokenizer=saved", "--cased")
    bert_jax_main(*words[:2], "other", "--tokenizer=store")
    kept, other = (open_store(tmp_path / name).tokenizer for name in ("store", "other"))
    assert other.fingerprint == kept.fingerprint


@pytest.mark.parametrize("case", ["cased", "uncased"])
def test_the_tokenizer_of_a_google_checkpoint_has_its_own_case(
    case, tmp_path, monkeypatch, bert_jax_main
):
    monkeypatch.chdir(tmp_path)
    letters = string.ascii_letters if case == "cased" else string.ascii_lowercase
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters]
    (tmp_path / "google").mkdir()
    (tmp_path / "google/bert_config.json").write_text("{}")
    (tmp_path / "google/vocab.txt").write_text("\n".join(tokens) + "\n")
    (tmp_path / "one.txt").write_text("A b C .\nD e F .\n\n" * 40)
    bert_jax_main("prepare", "one.txt", "store", "--tokenizer=google")
    tokenizer = open_store(tmp_path / "store").tokenizer
    assert tokenizer.encode(["A"])[0] == [tokens.index("A" if case == "cased" else "a")]


def test_prepare_in_shards(tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("One sentence.\nAnother sentence.\n\n" * 40)
    words = ("prepare", "text.txt", "store")

    def refuse(key_words, *words):
        with refused(key_words):
            bert_jax_main(*words)

    refuse("has no tokenizer", *words, "--shard=0/3")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    train = (*words, "--sample=0.5", "--tokenizer=wordpiece", "--vocab-size=40")
    assert "trained on 1 of 1 chunks" in bert_jax_main(*train)
    refuse("store/tokenizer already exists", *train)
    default = ("--sample=1", "--tokenizer=wordpiece", "--vocab-size=0")  # as for a whole store
    assert "other/tokenizer, trained on" in bert_jax_main("prepare", "text.txt", "other", *default)
    shutil.rmtree("other")
    for text in ("3/3", "-1/3", "1", "1/0", "a/b", "1/3/4"):
        refuse(f"--shard={text} is no shard; give its number, from 0", *words, f"--shard={text}")
    for options in (("--sample=inf",), ("--sample=nan",), ("--sample=1", "--shard=0/3")):
        refuse("--sample must be a positive number of gigabytes", *words, *options)
    refuse("--sample trains a tokenizer", *words, "--sample=1", "--tokenizer=store/tokenizer")
    refuse("required: SOURCE, STORE; see", "prepare")
    refuse("already exists", *train)
    bert_jax_main(*train, "--force")
    for flag in ("--cased", "--tokenizer=byte_bpe", "--vocab-size=50"):
        refuse(f"{flag.partition('=')[0]} has no effect on shards", *words, "--shard=0/3", flag)
    for number in (2, 0, 0, 1):
        printed = bert_jax_main("prepare", "text.txt", f"--shard={number}/3", "store")
        assert ("after all others: " in printed) == (number != 1)
    assert "training: " in printed
    assert "train on it with: bert-jax pretrain --config.data.source=store" in printed
    for options in ((), ("--force",)):
        refuse("store is complete without this shard", *words, "--shard=0/4", *options)
    refuse("other.txt does not exist", "prepare", "other.txt", "store", "--shard=0/3", "--force")
    bert_jax_main(*words, "--tokenizer=store/tokenizer")  # the same text
    bert_jax_main(*train, "--cased", "--force")  # a tokenizer for shards that are to come
    with refused("with another tokenizer than", "prepare them again, or remove that folder"):
        shards.finish(tmp_path / "store")
    refuse("another tokenizer; choose another folder, or replace it", *words, "--shard=0/3")
    other = ("--shard=0/3", "--tokenizer=store/shards/00000-of-00003/tokenizer")
    refuse("store has another tokenizer than --tokenizer=store/shards", *words, *other)
    text = tmp_path / "text.txt"
    before = text.read_text()
    text.write_text(f"{before}\n\nAnother document.\n")
    for number in range(3):
        printed = bert_jax_main(*words, f"--shard={number}/3", "--force")
        assert "after all others: " in printed
    shards.finish(tmp_path / "store")
    changed = open_store(tmp_path / "store")
    text.write_text(before)
    for number in range(3):
        bert_jax_main(*words, f"--shard={number}/3", "--force")
    shards.finish(tmp_path / "store")
    assert open_store(tmp_path / "store").fingerprint != changed.fingerprint
    bert_jax_main("prepare", "text.txt", "other", "--tokenizer=byte_bpe", "--vocab-size=300")
    for number in range(3):  # with a tokenizer that replaces that of the store
        shard = (f"--shard={number}/3", "--tokenizer=other", "--force")
        bert_jax_main(*words, *shard)
    shards.finish(tmp_path / "store")
    assert open_store(tmp_path / "store").tokenizer.kind == "byte_bpe"
    for flag in ("--model-type=bpe", "--strip-accents", "--vocab-size=50"):
        key_words = f"{flag.partition('=')[0]} has no effect on a tokenizer that is trained already"
        refuse(key_words, *words, "--tokenizer=store/tokenizer", flag)
    bert_jax_main(*words, "--tokenizer=byte_bpe", "--vocab-size=300", "--force")
    assert not (tmp_path / "store/shards").exists()
    monkeypatch.chdir("store")
    bert_jax_main("prepare", "../text.txt", ".", "--vocab-size=60", "--force")
    monkeypatch.chdir(tmp_path)
    for options in (("--shard=0/3", "--tokenizer=store/tokenizer"), ("--sample=1", "--force")):
        refuse("store is a store without shards", *words, *options)
    open_store(tmp_path / "store").verify()


def test_force_replaces_only_what_the_command_writes(tiny_run, tmp_path, bert_jax_main):
    exported, imported = tmp_path / "exported", tmp_path / "imported"
    commands = (("export", tiny_run.checkpoint, exported), ("import", exported, imported))
    for words in commands:
        bert_jax_main(*words)
        with refused("already exists", "--force"):
            bert_jax_main(*words)
        before = os.stat(words[2]).st_ino
        bert_jax_main(*words, "--force")
        assert os.stat(words[2]).st_ino != before
    for words, other in zip(commands, (imported, exported), strict=True):
        foreign = shutil.copytree(words[2], tmp_path / "foreign")
        (foreign / "mine.txt").write_text("kept")
        empty = tmp_path / "empty"
        empty.mkdir(exist_ok=True)
        for there in (other, foreign, empty, tmp_path, tiny_run.checkpoint.parents[1]):
            files = sorted(there.rglob("*"))
            with refused("is not replaced"):
                bert_jax_main(*words[:2], there, "--force")
            assert sorted(there.rglob("*")) == files
        shutil.rmtree(foreign)
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "imported", "empty"}

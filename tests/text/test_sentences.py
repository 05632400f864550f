"""Sentences end at punctuation, but not after an abbreviation."""

import time

import pytest

from bert_jax.text.sentences import split_sentences, split_text


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Smith met Mr. J. Doe. They left.", ["Dr. Smith met Mr. J. Doe.", "They left."]),
        ("It cost 3.50 dollars, e.g. a lot. Yes.", ["It cost 3.50 dollars, e.g. a lot.", "Yes."]),
        (
            'He said "Stop." Then (it ended.) Fine.',
            ['He said "Stop."', "Then (it ended.)", "Fine."],
        ),
        ("version 2. of it", ["version 2. of it"]),
        ("これは文です。次の文です！終わり", ["これは文です。", "次の文です！", "終わり"]),
        ("ሰላም ነው። እንዴት ነህ፧ ደህና", ["ሰላም ነው።", "እንዴት ነህ፧", "ደህና"]),
        ("یہ ایک جملہ ہے۔ یہ دوسرا ہے۔", ["یہ ایک جملہ ہے۔", "یہ دوسرا ہے۔"]),
        ("မြန်မာ။ နိုင်ငံ။", ["မြန်မာ။", "နိုင်ငံ။"]),
        ("پی۔ایچ۔ڈی۔ کے بعد۔ دوسرا", ["پی۔ایچ۔ڈی۔", "کے بعد۔", "دوسرا"]),
        ("ដី ទឹក ។ល។ និង អក្សរ។ ថ្មី", ["ដី ទឹក ។ល។ និង អក្សរ។", "ថ្មី"]),
        ("ភាសាខ្មែរ។ អក្សរ៕", ["ភាសាខ្មែរ។", "អក្សរ៕"]),
        ("བོད་ཡིག ། ། སྐད་ཡིག།", ["བོད་ཡིག ། །", "སྐད་ཡིག།"]),
        ("Առաջին։ Երկրորդ։", ["Առաջին։", "Երկրորդ։"]),
        ("पहला वाक्य। दूसरा॥ तीसरा", ["पहला वाक्य।", "दूसरा॥", "तीसरा"]),
        ("ყველა თანასწორია. მათ აქვთ გონება.", ["ყველა თანასწორია.", "მათ აქვთ გონება."]),
        ("値は０．５だ．次の文", ["値は０．５だ．", "次の文"]),
        ("ᱟᱞᱮ ᱠᱟᱱᱟ᱾ ᱱᱚᱶᱟ", ["ᱟᱞᱮ ᱠᱟᱱᱟ᱾", "ᱱᱚᱶᱟ"]),
        ("Wait... what? no.", ["Wait... what? no."]),
        ("", []),
    ],
)
def test_split_sentences(paragraph, sentences):
    assert split_sentences(paragraph) == sentences


def test_lines_of_chinese_and_japanese_are_joined_without_a_space():
    assert split_text("基本人权和价\n值。财\n  产 of\nall\n人") == [
        "基本人权和价值。",
        "财产 of all 人",
    ]
    assert split_text("모든\n사람\n\nทุก\nคน") == ["모든 사람", "ทุก คน"]


def test_the_time_is_linear_in_a_run_of_marks():
    started = time.monotonic()
    assert split_sentences("." * 200_000 + "x") == ["." * 200_000 + "x"]
    assert len(split_sentences("། " * 100_000 + "x")) == 2
    assert len(split_sentences("།" + " " * 100_000 + "x")) == 2
    assert time.monotonic() - started < 2

"""How a tokenizer of the `tokenizers` library joins texts with special tokens."""

import re

import tokenizers

from bert_jax.errors import UserError


def num_separators(tokenizer: tokenizers.Tokenizer, cls_id: int, sep_id: int) -> int:
    """Return how many separators a tokenizer puts between two texts.

    0 is for one that adds no special token to a pair.

    Raises:
      UserError: special tokens stand elsewhere around one text or two than BERT's, or RoBERTa's,
        which has more separators between them.
    """
    cls, sep = map(tokenizer.id_to_token, (cls_id, sep_id))
    if tokenizer.encode("").ids != [cls_id, sep_id]:
        names = " ".join(tokenizer.encode("").tokens) or "nothing"
        raise UserError(
            f"the tokenizer adds {names} to a text, and must add {cls} {sep}; correct the "
            "post_processor in its tokenizer.json"
        )
    encoding = tokenizer.encode("a", "a")
    # C and S are [CLS] and [SEP], A and B tokens of the two texts, and ? another special token.
    letters = {cls_id: "C", sep_id: "S"}
    order = "".join(
        letters.get(token_id, "?") if text is None else "AB"[text]
        for token_id, text in zip(encoding.ids, encoding.sequence_ids, strict=True)
    )
    if re.fullmatch("A*B*", order):
        return 0
    match = re.fullmatch("CA*(S+)B*S", order)
    if match is None:
        joined = " ".join(
            token if text is None else "AB"[text]
            for token, text in zip(encoding.tokens, encoding.sequence_ids, strict=True)
        )
        raise UserError(
            f"the tokenizer joins two texts A and B to {joined}, and must join them to {cls} A "
            f"{sep} B {sep}; correct the post_processor in its tokenizer.json"
        )
    return len(match[1])


def num_token_types(tokenizer: tokenizers.Tokenizer) -> int:
    """Return 1 where both texts of a pair have token type 0, and 2 where the second has type 1.

    3 is for any other types, such as of a first text with type 1.
    """
    encoding = tokenizer.encode("a", "a")
    types = encoding.type_ids
    if not any(types):
        return 1
    # The separator at the end has the type of the second text.
    second = encoding.sequence_ids.index(1) if 1 in encoding.sequence_ids else len(types) - 1
    return 2 if types == [int(index >= second) for index in range(len(types))] else 3

"""How a tokenizer of the `tokenizers` library joins texts with special tokens."""

import re

import tokenizers

from bert_jax.errors import UserError


def num_separators(tokenizer: tokenizers.Tokenizer, cls_id: int, sep_id: int) -> int:
    """Return how many [SEP] a tokenizer puts between two texts; 0 if it has no rule for two.

    Raises:
      UserError: it puts one text, or two, between other special tokens than BERT.
    """
    cls, sep = map(tokenizer.id_to_token, (cls_id, sep_id))
    if tokenizer.encode("").ids != [cls_id, sep_id]:
        names = " ".join(tokenizer.encode("").tokens) or "nothing"
        raise UserError(
            f"a text gets the special tokens {names}, not {cls} and {sep}; correct the "
            "post_processor of its tokenizer.json"
        )
    encoding = tokenizer.encode("a", "a")
    of_special = {cls_id: "C", sep_id: "S"}
    order = "".join(
        of_special.get(index, "?") if text is None else "AB"[text]
        for index, text in zip(encoding.ids, encoding.sequence_ids, strict=True)
    )
    if re.fullmatch("A*B*", order):
        return 0
    match = re.fullmatch("CA*(S+)B*S", order)
    if match is None:
        raise UserError(
            f"the texts a and a are joined to {' '.join(encoding.tokens)}, not with {sep} between "
            "and behind them; correct the post_processor of its tokenizer.json"
        )
    return len(match[1])

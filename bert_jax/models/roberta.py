"""RoBERTa: BERT's encoder, pretrained without pairs. Source: Liu et al. 2019, and fairseq."""

from collections.abc import Mapping
from typing import Any

from bert_jax.errors import UserError
from bert_jax.models import bert
from bert_jax.models.bert import Bert
from bert_jax.models.exchange import Exchange
from bert_jax.text.tokenizer import Tokenizer


class RobertaExchange(Exchange):
    """RoBERTa's names, whose standard ones are BERT's; its positions begin after the padding's."""

    def first_position(self, values: Mapping[str, Any]) -> int:
        """Return what `create_position_ids_from_input_ids` of `transformers` begins with."""
        padding = values.get("pad_token_id", 1)
        return padding + 1 if isinstance(padding, int) else 2

    def read_fields(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values of a `config.json` by our names."""
        if values.get("position_embedding_type", "absolute") != "absolute":
            raise UserError(f"{where}: relative positions are read of a bert only")
        if self.first_position(values) < 1:
            raise UserError(f"{where}: pad_token_id is negative; give that of the tokenizer")
        return super().read_fields(values, where)

    def write_fields(self, config: Any, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the ids of the first and the last token."""
        return {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}


def _exchange(class_prefix: str) -> Exchange:
    return RobertaExchange.like(
        bert.EXCHANGE,
        class_prefix=class_prefix,
        heads={name: bert.EXCHANGE.heads[name] for name in ("masked-lm", "none")},
        others=(),
        prefixes={
            "lm_head.dense.": "cls.predictions.transform.dense.",
            "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
            "lm_head.": "cls.predictions.",
            "roberta.": "bert.",
        },
        class_prefixes={
            f"{class_prefix}ForSequenceClassification": {
                "roberta.pooler.": "roberta.pooler.",  # unused, but in older files
                "classifier.dense.": "bert.pooler.dense.",
                "classifier.out_proj.": "classifier.",
            },
            f"{class_prefix}ForQuestionAnswering": {"qa_outputs.": "classifier."},
        },
    )


class Roberta(Bert):
    """RoBERTa: its texts are joined by two separators, and it is pretrained without pairs.

    Both texts of a pair have token type 0, whatever `type_vocab_size` is, unless `pair_token_types`
    is 2. The MLM head has the erf GELU, whatever `hidden_act` is. Source: `transformers`, the
    tokenizers' `RobertaTokenizer.create_token_type_ids_from_sequences`, and `RobertaLMHead`.
    """

    pretrains_on_pairs = False
    separators = 2
    has_pair_types = False
    mlm_activation = "gelu"
    exchange = _exchange("Roberta")


class XlmRoberta(Roberta):
    """RoBERTa for a hundred languages, with a SentencePiece. Source: Conneau et al. 2020."""

    exchange = _exchange("XLMRoberta")


class Camembert(Roberta):
    """RoBERTa for French, with a SentencePiece. Source: Martin et al. 2020."""

    exchange = _exchange("Camembert")


ARCHITECTURE, XLM_ROBERTA, CAMEMBERT = Roberta(), XlmRoberta(), Camembert()

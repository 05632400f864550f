"""RoBERTa: BERT's encoder, pretrained without pairs. Source: Liu et al. 2019, and fairseq."""

from bert_jax.models.bert import Bert


class Roberta(Bert):
    """RoBERTa: its texts are joined by two separators, and it has no NSP head."""

    has_nsp = False
    separators = 2


ARCHITECTURE = Roberta()

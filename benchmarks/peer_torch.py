"""A train step of transformers' BERT or ModernBERT in PyTorch, for peers.py, which starts it.

AdamW (fused) with the gradient clipped as in the config; masks are chosen beforehand, outside of
the time. `head` "full" scores every position, as transformers does; "masked" gathers the positions
to be predicted first, which of the two only its ModernBERT can.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from peer_worker import Spec, read_spec, run_peer, serve, synthetic
from torch.nn import attention, functional
from transformers.models.bert import modeling_bert

transformers.logging.set_verbosity_error()


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("intermediate_size", "max_position_embeddings")
_OF_BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_act", "type_vocab_size")
_GLOBAL = "full_attention"
_NO_LABEL = -100  # of transformers

Batch = dict[str, torch.Tensor]


def labels_everywhere(batch: Batch) -> torch.Tensor:
    """Returns the labels of all tokens, as transformers takes them."""
    everywhere = torch.full_like(batch["input_ids"], _NO_LABEL)
    return everywhere.scatter_(1, batch["positions"], batch["labels"])


def make_modernbert(spec: Spec, batch: Batch) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Returns the model, and a function that gives the loss of the batch."""
    config = transformers.ModernBertConfig(
        **{name: spec.model[name] for name in _SIZES},
        local_attention=spec.model["local_attention"],
        layer_types=[
            "sliding_attention" if index % spec.model["global_attn_every_n_layers"] else _GLOBAL
            for index in range(spec.model["num_hidden_layers"])
        ],
        hidden_activation=spec.model["hidden_act"],
        attention_dropout=spec.model["attention_probs_dropout_prob"],
        mlp_dropout=spec.model["hidden_dropout_prob"],
        embedding_dropout=spec.model["hidden_dropout_prob"],
        sparse_prediction=spec.head == "masked",
        **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
    )
    model = transformers.ModernBertForMaskedLM(config)
    inputs = {"input_ids": batch["input_ids"], "labels": labels_everywhere(batch)}
    if not spec.sdpa:
        inputs["attention_mask"] = batch["attention_mask"]
    return model, lambda: model(**inputs).loss


def make_bert(spec: Spec, batch: Batch) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Returns the model, and a function that gives the loss of the batch."""
    if spec.sdpa:  # under torch.compile a mask is made of no padding too, which kernels refuse
        setattr(modeling_bert, "create_bidirectional_mask", lambda **_: None)  # noqa: B010
    config = transformers.BertConfig(**{name: spec.model[name] for name in (*_SIZES, *_OF_BERT)})
    model = transformers.BertForPreTraining(config)
    inputs = {k: batch[k] for k in ("input_ids", "token_type_ids")}
    if not spec.sdpa:
        inputs["attention_mask"] = batch["attention_mask"]
    positions, labels = batch["positions"], batch["labels"]
    everywhere = labels_everywhere(batch)
    rows = torch.arange(len(positions), device=positions.device)[:, None]

    def full() -> torch.Tensor:
        follows = batch["next_sentence_label"]
        return model(**inputs, labels=everywhere, next_sentence_label=follows).loss

    def masked() -> torch.Tensor:
        output = model.bert(**inputs)
        chosen = output.last_hidden_state[rows, positions]
        scores, follows = model.cls(chosen, output.pooler_output)
        loss = functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        return loss + functional.cross_entropy(follows.float(), batch["next_sentence_label"])

    return model, {"full": full, "masked": masked}[spec.head]


def make_step(spec: Spec, device: torch.device) -> Callable[[], torch.Tensor]:
    """Returns a function that takes a step, and gives the loss as a tensor on the device."""
    torch.manual_seed(0)
    batch = {k: torch.from_numpy(v).to(device) for k, v in synthetic(spec).items()}
    is_modernbert = spec.model["model_type"] == "modernbert"
    model, loss_of = (make_modernbert if is_modernbert else make_bert)(spec, batch)
    model.to(device).train()
    clip_norm = json.loads(spec.config)["optimizer"]["clip_norm"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    if spec.compile:
        loss_of = torch.compile(loss_of)
    choose_kernel: Callable[[], Any] = nullcontext
    if spec.sdpa:
        backend = getattr(attention.SDPBackend, spec.sdpa)
        choose_kernel = partial(attention.sdpa_kernel, backend)

    def step() -> torch.Tensor:
        narrow = spec.dtype == "bfloat16"
        with choose_kernel(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow):
            loss = loss_of()
        loss.backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    """Builds the model, takes the first steps, and waits to be asked for more."""
    spec = read_spec()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if spec.threads:
        torch.set_num_threads(spec.threads)
    step = make_step(spec, device)

    def run(steps: int) -> float:
        losses = [step() for _ in range(steps)]
        return float(np.mean(torch.stack(losses).cpu().numpy()))

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    serve(run, versions)


if __name__ == "__main__":
    run_peer(main)

"""A train step of Hugging Face's BERT in PyTorch, for peers.py, which starts this program.

AdamW (fused) with the gradient clipped, as its users train; masks are chosen beforehand, outside of
the time. `head` "full" scores every position, as transformers does; "masked" gathers the positions
to be predicted first, which it does not.
"""

import numpy as np
import torch
import transformers
from peer_worker import Spec, read_spec, run_peer, serve, synthetic
from torch.nn import functional

transformers.logging.set_verbosity_error()


def make_step(spec: Spec, device: torch.device):
    """Returns a function that takes a step, and gives the loss as a tensor on the device."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_act", "vocab_size")
    names += ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names += ("max_position_embeddings", "type_vocab_size")
    config = transformers.BertConfig(**{name: spec.model[name] for name in names})
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batch = {k: torch.from_numpy(v).to(device) for k, v in synthetic(spec).items()}
    inputs = {k: batch[k] for k in ("input_ids", "token_type_ids", "attention_mask")}
    positions, labels = batch["positions"], batch["labels"]
    everywhere = torch.full_like(batch["input_ids"], -100).scatter_(1, positions, labels)
    rows = torch.arange(len(positions), device=device)[:, None]

    def full() -> torch.Tensor:
        follows = batch["next_sentence_label"]
        return model(**inputs, labels=everywhere, next_sentence_label=follows).loss

    def masked() -> torch.Tensor:
        output = model.bert(**inputs)
        chosen = output.last_hidden_state[rows, positions]
        scores, follows = model.cls(chosen, output.pooler_output)
        loss = functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        return loss + functional.cross_entropy(follows.float(), batch["next_sentence_label"])

    loss_of = {"full": full, "masked": masked}[spec.head]
    if spec.compile:
        loss_of = torch.compile(loss_of)

    def step() -> torch.Tensor:
        narrow = spec.dtype == "bfloat16"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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

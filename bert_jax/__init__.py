"""BERT in JAX: pretrain an encoder from your own text, and use it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.bert import Bert, load

__all__ = ["Bert", "load"]


def __getattr__(name: str) -> Any:
    # Imported when first used: a command that only prepares text should not wait for JAX.
    if name in __all__:
        from bert_jax import bert as pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module 'bert_jax' has no attribute {name!r}")

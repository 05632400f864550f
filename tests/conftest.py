"""Eight fake CPU devices, and shapes checked at run time in every module of the package."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)

from jaxtyping import install_import_hook

install_import_hook(["bert_jax.models", "bert_jax.training"], "beartype.beartype")

"""Where the time of a step goes: kinds of operations, and their shares of a trace."""

import re

import jax
import jax.numpy as jnp
import pytest

from bert_jax.planning.profile import BETWEEN, MATMULS, Interval, Operation, operations, shares


def test_kinds_and_bytes_of_a_compiled_program():
    """A matmul moves its operands and its result, whatever the compiler fuses it with."""

    def function(x, y, z):
        with jax.named_scope("softmax"):
            weights = jax.nn.softmax(z)
        with jax.named_scope("query_norm"):
            centered = z - z.mean(-1, keepdims=True)
        return x @ y, weights, centered

    sizes = (48, 32), (32, 16), (64, 40)
    arguments = [jnp.ones(size) for size in sizes]
    found = operations(jax.jit(function).lower(*arguments).compile().as_text())
    kinds = {
        kind: [each.size for each in found.values() if each.kind == kind]
        for kind, _ in found.values()
    }
    assert 4 * (48 * 32 + 32 * 16 + 48 * 16) in kinds[MATMULS]
    assert {"softmax", "normalization", MATMULS} <= kinds.keys()
    assert not {"optimizer", "dropout", "communication"} & kinds.keys()


def test_a_lookup_moves_what_it_reads_and_a_loop_only_what_its_body_does():
    table, rows = 4 * 5000 * 96, 4 * 40 * 96
    lookup = jax.jit(lambda table, ids: table[ids] * 2).lower(
        jnp.ones((5000, 96)), jnp.zeros(40, jnp.int32)
    )
    sizes = [each.size for each in operations(lookup.compile().as_text()).values()]
    assert 2 * rows + 4 * 40 in sizes
    assert not [size for size in sizes if size > 2 * table]

    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    weights, x = jnp.ones((8, 64, 64)), jnp.ones((32, 64))
    gradient = jax.jit(jax.grad(lambda w, x: layers(x, w).sum())).lower(weights, x).compile()
    found = operations(gradient.as_text())
    in_loop = [each.size for name, each in found.items() if name.startswith("dynamic-slice")]
    in_loop += [each.size for name, each in found.items() if "update-slice" in name]
    assert in_loop
    assert max(in_loop) < 4 * (2 * 64 * 64 + 32)  # of one layer
    of_loops = re.findall(r"%([\w.-]+) = .* while\(", gradient.as_text())
    assert of_loops
    assert not any(found[name].size for name in of_loops)


_OF_A_GPU = """HloModule step
ENTRY %main (x: bf16[8,4], y: bf16[4,2]) -> bf16[8,2] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[4,2]{1,0} parameter(1)
  %product = bf16[8,2]{1,0} custom-call(%x, %y), custom_call_target="__cublas$lt$matmul"
  %own = bf16[8,2]{1,0} custom-call(%product), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %fmha = bf16[8,2]{1,0} custom-call(%product), custom_call_target="__cudnn$fmhaSoftmax"
}
"""


def test_calls_of_a_gpus_libraries_are_what_they_compute():
    found = operations(_OF_A_GPU)
    assert found["product"] == Operation(MATMULS, 2 * (8 * 4 + 4 * 2 + 8 * 2))
    assert found["fmha"] == found["own"] == Operation("attention", 2 * 2 * 8 * 2)


@pytest.mark.devices(8)
def test_collectives_are_communication():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    program = jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split))
    kinds = {each.kind for each in operations(program.compile().as_text()).values()}
    assert "communication" in kinds


def test_shares_of_two_threads_and_of_a_loop():
    """The time of a loop's body is not that of the loop; the time of no operation is between."""
    known = {"dot": Operation(MATMULS, 100), "while": Operation("copies", 0)}
    threads = [
        [Interval("while", 0, 60), Interval("dot", 10, 50)],  # 20 of the loop's own
        [Interval("dot", 20, 40), Interval("unknown", 80, 100)],
    ]
    found = shares(threads, known, steps=2)
    # An operation runs in 80 of 100; 60 + 20 + 20 on threads.
    assert found[MATMULS] == {"share": pytest.approx(0.8 * 60 / 100), "bytes": 100}
    assert found["copies"]["share"] == found["other kernels"]["share"] == pytest.approx(0.16)
    assert found[BETWEEN]["share"] == pytest.approx(0.2)
    assert next(iter(found)) == MATMULS


def test_an_empty_trace_has_no_shares():
    assert shares([], {}, steps=1) == {}


def test_kernels_of_libraries_and_ends_that_overlap():
    """A GPU's next kernel may begin before the last one has ended."""
    threads = [
        [
            Interval("nvjet_sm90_tst_128x160_64x5", 0, 40),
            Interval("cudnn_generated_fort_native_sdpa_sm90", 39, 50),
            Interval("_attention_backward", 50, 60),
            Interval("Memset 0", 60, 100),
        ]
    ]
    found = shares(threads, {}, steps=1)
    assert {kind: row["share"] for kind, row in found.items()} == {
        MATMULS: pytest.approx(0.39),
        "attention": pytest.approx(0.21),
        "other kernels": pytest.approx(0.4),
        BETWEEN: 0,
    }

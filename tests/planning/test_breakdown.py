"""Kinds of operations, and the time that each has of a profile."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from bert_jax.errors import UserError
from bert_jax.planning import breakdown

PROGRAM = """HloModule jit_step

%fused_computation.1 (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %dot.1 = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %add.1 = f32[8,8]{1,0} add(%dot.1, %a)
}

%fused_computation.2 (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  %inner = f32[8,8]{1,0} fusion(%c, %c), kind=kOutput, calls=%fused_computation.1
  ROOT %negate.1 = f32[8,8]{1,0} negate(%inner)
}

%fused_computation.3 (d: u32[8]) -> u32[8] {
  %d = u32[8]{0} parameter(0)
  %shift = u32[8]{0} shift-right-logical(%d, %d)
  ROOT %xor.1 = u32[8]{0} xor(%d, %shift)
}

%body (e: f32[8,8]) -> f32[8,8] {
  %e = f32[8,8]{1,0} parameter(0)
  ROOT %copy.7 = f32[8,8]{0,1} copy(%e)
}

ENTRY %main (x: f32[8,8], y: u32[8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %y = u32[8]{0} parameter(1)
  %dot_fusion.2 = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%fused_computation.2
  %bits.3 = u32[8]{0} fusion(%y), kind=kLoop, calls=%fused_computation.3
  %all-reduce-start.1 = f32[8,8]{1,0} all-reduce-start(%dot_fusion.2), to_apply=%add
  %fmha.1 = f32[8,8]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %cublas.1 = f32[8,8]{1,0} custom-call(%x), custom_call_target="__cublas$gemm"
  ROOT %call.1 = f32[8,8]{1,0} call(%cublas.1), to_apply=%body
}
"""


def test_kinds():
    found = breakdown.kinds(PROGRAM)
    expected = {
        "dot_fusion.2": "matrix products",  # two fusions deep
        "bits.3": "random numbers",
        "all-reduce-start.1": "sent between devices",
        "fmha.1": "attention and other kernels",
        "cublas.1": "matrix products",
        "copy.7": "copies and reshapes",
    }
    assert {name: found[name] for name in expected} == expected
    assert "call.1" not in found  # what it calls is counted


def event(name: str, start: float, end: float, **stats):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=end - start, stats=stats.items())


def profile_of(planes):
    lines = {
        plane: [SimpleNamespace(name=name, events=events) for name, events in each.items()]
        for plane, each in planes.items()
    }
    return SimpleNamespace(
        planes=[SimpleNamespace(name=name, lines=each) for name, each in lines.items()]
    )


KINDS = {"dot.1": "matrix products", "add.2": "elementwise", "copy.3": "copies and reshapes"}


def test_time_is_shared_by_what_runs_at_once():
    """0 to 4 the product alone, to 6 with the addition, to 8 that alone, to 9 nothing, to 10."""
    events = {
        "one": [event("dot.1", 0, 6, hlo_op="dot.1"), event("copy.3", 9, 10, hlo_op="copy.3")],
        "two": [event("add.2", 4, 8, hlo_op="add.2"), event("Execute", 0, 10)],
    }
    found = breakdown.shares(profile_of({"/host:CPU": events, "/host:metadata": {}}), KINDS)
    assert found == pytest.approx(
        {
            "matrix products": 0.5,
            "elementwise": 0.3,
            breakdown.IDLE: 0.1,
            "copies and reshapes": 0.1,
        }
    )
    assert next(iter(found)) == "matrix products"


def test_an_operation_of_several_threads_ends_when_the_last_has():
    events = [event("dot.1", 0, 1, hlo_op="dot.1", _p=5), event("end: dot.1", 3, 4, _c=5)]
    events.append(event("add.2", 4, 8, hlo_op="add.2", _p=6))
    found = breakdown.shares(profile_of({"/host:CPU": {"one": events}}), KINDS)
    assert found == pytest.approx({"matrix products": 0.5, "elementwise": 0.5})


def test_accelerators():
    """A GPU's kernels with the instruction or with their own names; a TPU's line of operations."""
    kernels = [
        event("wgmma_gemm", 0, 4, hlo_op="dot.1"),
        event("add_2", 4, 6),
        event("nvjet_tst_128", 6, 7),
        event("something", 7, 8),
    ]
    gpu = {"Stream #1(Compute)": kernels, "XLA Modules": [event("jit_step", 0, 8)]}
    operations = [event("%dot.1 = f32[8,8] dot(%a)", 0, 2), event("while.4", 0, 8)]
    operations.append(event("%add.2 = f32[8] add(%a)", 2, 8))
    tpu = {"XLA Ops": operations, "Steps": [event("1", 0, 8)]}
    of_gpu, of_tpu = (
        breakdown.shares(profile_of({name: plane, "/host:CPU": {}}), KINDS)
        for name, plane in (("/device:GPU:0", gpu), ("/device:TPU:0", tpu))
    )
    assert of_gpu == pytest.approx(
        {"matrix products": 5 / 8, "elementwise": 2 / 8, breakdown.OTHER: 1 / 8}
    )
    assert of_tpu == pytest.approx({"matrix products": 2 / 8, "elementwise": 6 / 8})
    both = profile_of({"/device:GPU:0": gpu, "/device:GPU:1": gpu})
    assert breakdown.shares(both, KINDS) == pytest.approx(of_gpu)


def test_a_real_profile(tmp_path):
    step = jax.jit(lambda x: jnp.sum(jnp.tanh(x @ x) @ x)).lower(jnp.ones((256, 256))).compile()
    x = jnp.ones((256, 256))

    def run():
        for _ in range(5):
            step(x).block_until_ready()

    found = breakdown.profile(run, tmp_path, step.as_text())
    assert sum(found.values()) == pytest.approx(1)
    assert found["matrix products"] > 0.05
    assert all(share > 0 for share in found.values())


def test_a_profile_that_failed_is_no_zero(tmp_path):
    with pytest.raises(UserError, match="no operation of the step"):
        breakdown.profile(lambda: None, tmp_path, PROGRAM)
    with (
        jax.profiler.trace(str(tmp_path)),
        pytest.raises(UserError, match=r"the profile failed.* Only one"),
    ):
        breakdown.profile(lambda: None, tmp_path, PROGRAM)

"""Reading a compiled program's text: snippets by hand, and programs whose collectives are known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from bert_jax.config import ParallelConfig
from bert_jax.distributed.mesh import make_mesh
from bert_jax.planning import hlo, traffic
from bert_jax.planning.program import Collective, collectives

PAIRS = "{{0,1},{2,3},{4,5},{6,7}}"


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), jax.devices())


def program(*lines: str, before: str = "") -> str:
    """The text of a program of some instructions."""
    inside = "\n".join(f"  {line}" for line in ("%x = f32[8,4]{1,0} parameter(0)", *lines))
    return f"HloModule m\n\n{before}\nENTRY %main (x: f32[8,4]) -> f32[8,4] {{\n{inside}\n}}\n"


def only(mesh, *lines: str, before: str = "") -> Collective:
    (found,) = collectives(program(*lines, before=before), mesh)
    return found


@pytest.mark.parametrize(
    ("line", "kind", "payload", "sent"),
    [
        ("f32[8,4]{1,0} all-reduce(%x)", "all-reduce", 128, 128),
        ("(f32[8,4]{1,0}, bf16[2]{0}) all-reduce(%x, %y)", "all-reduce", 132, 132),
        ("f32[16,4]{1,0} all-gather(%x)", "all-gather", 256, 128),
        ("(f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%x)", "all-gather", 256, 128),
        ("f32[4,4]{1,0} reduce-scatter(%x)", "reduce-scatter", 128, 64),
        ("(f32[4,4], f32[4,4]) all-to-all(%x, %y)", "all-to-all", 128, 64),
    ],
)
def test_bytes(mesh, line, kind, payload, sent):
    found = only(mesh, f"%c = {line}, channel_id=1, replica_groups={PAIRS}, dimensions={{0}}")
    assert (found.kind, found.payload, found.sent) == (kind, payload, sent)
    assert (found.axes, found.devices, found.times) == (("tensor",), 2, 1)


@pytest.mark.parametrize(
    ("groups", "axes", "devices"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",), 2),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{}", ("data", "fsdp", "tensor"), 8),
        ("[4,2]<=[8]", ("tensor",), 2),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",), 2),
        ("[4,2]<=[2,2,2]T(2,1,0)", ("data",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",), 2),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2}", ("data",), 2),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", ("fsdp",), 2),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data", "fsdp"), 4),
        ("mesh[a=2,b=4], device_ids=(0,2,4,6,1,3,5,7) {a}", ("tensor",), 2),
    ],
)
def test_axes(mesh, groups, axes, devices):
    found = only(mesh, f"%c = f32[8,4]{{1,0}} all-reduce(%x), replica_groups={groups}, to_apply=%a")
    assert (found.axes, found.devices) == (axes, devices)


def test_permutation(mesh):
    pairs = "{{0,4},{4,0},{1,5},{5,1}}"
    found = only(mesh, f"%c = f32[8,4] collective-permute(%x), source_target_pairs={pairs}")
    assert (found.kind, found.axes, found.sent) == ("collective-permute", ("data",), 128)


def test_an_unknown_form_is_an_error(mesh):
    with pytest.raises(ValueError, match="unknown form"):
        only(mesh, "%c = f32[8,4] all-reduce(%x), replica_groups=V3[2], to_apply=%a")


def test_a_group_of_one_sends_nothing(mesh):
    line = "%c = f32[8,4] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    assert collectives(program(line), mesh) == []


LOOP = """
%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %two)
  %v = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %r = f32[8,4]{1,0} all-reduce(%v), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%next, %r)
}

%condition (q: (s32[], f32[8,4])) -> pred[] {
  %q = (s32[], f32[8,4]{1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %last = s32[]{:T(128)} constant(11)
  ROOT %less = pred[] compare(%j, LIMIT), direction=LT
}
"""


@pytest.mark.parametrize(
    ("limit", "config", "times", "is_exact"),
    [
        ("%last", "", 5, True),  # 1, 3, 5, 7, 9
        ("%j", "", 1, False),
        ("%j", ', backend_config={"known_trip_count":{"n":"7"}}', 7, True),
    ],
)
def test_loops(mesh, limit, config, times, is_exact):
    found = only(
        mesh,
        "%one = s32[] constant(1)",
        "%start = (s32[], f32[8,4]{1,0}) tuple(%one, %x)",
        f"%w = (s32[], f32[8,4]) while(%start), condition=%condition, body=%body{config}",
        before=LOOP.replace("LIMIT", limit),
    )
    assert (found.times, found.is_exact, found.sent) == (times, is_exact, times * 128)


ASYNC = """
%begin (a: f32[4,4]) -> (f32[4,4], f32[8,4]) {
  %a = f32[4,4]{1,0:T(8,128)S(1)} parameter(0)
  %g = f32[8,4]{1,0:T(8,128)} all-gather(%a), channel_id=9, replica_groups=[4,2]<=[8], \
dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %s = (f32[4,4], f32[8,4]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (b: f32[4,4]) -> f32[8,4] {
  %b = f32[4,4]{1,0} parameter(0)
  ROOT %h = f32[8,4]{1,0} all-gather(%b), channel_id=9, replica_groups=[4,2]<=[8], \
dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
}

%all-reduce-scatter.1 (c: f32[8,4]) -> f32[4,4] {
  %c = f32[8,4]{1,0} parameter(0)
  %r = f32[8,4]{1,0} all-reduce(%c), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %d = f32[4,4]{1,0} dynamic-slice(%r, %n, %m), dynamic_slice_sizes={4,4}
}
"""


def test_a_tpus_fusions(mesh):
    """One that runs beside other work has a copy in each of it; an all-reduce that is cut."""
    lines = (
        '%f = (f32[4,4], f32[8,4]) fusion(%x), calls=%begin, metadata={op_name="jit(f)/a"}',
        "%k = f32[8,4] fusion(%f), calls=%meanwhile",
        '%e = f32[4,4] fusion(%k), calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/b"}',
    )
    gather, scatter = collectives(program(*lines, before=ASYNC), mesh)
    assert (gather.kind, gather.sent, gather.source) == ("all-gather", 64, "jit(f)/a")
    assert (scatter.kind, scatter.sent, scatter.source) == ("reduce-scatter", 64, "jit(f)/b")


def test_compiled_collectives(mesh):
    def step(x):
        return (
            jax.lax.psum_scatter(x, ("data", "tensor"), tiled=True),
            jax.lax.all_gather(x, "fsdp", tiled=True),
            jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
            jax.lax.all_to_all(x, "tensor", 0, 1, tiled=True),
            jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.psum(y, ("data", "fsdp")), x),
        )

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 64), jnp.float32)).compile()
    found = {each.kind: each for each in collectives(compiled.as_text(), mesh)}
    size = 8 * 64 * 4
    for kind, axes, times, sent in (
        ("reduce-scatter", ("data", "tensor"), 1, size * 3 / 4),
        ("all-gather", ("fsdp",), 1, size),
        ("collective-permute", ("data",), 1, size),
        ("all-to-all", ("tensor",), 1, size / 2),
        ("all-reduce", ("data", "fsdp"), 3, 3 * size * 2 * 3 / 4),
    ):
        each = found[kind]
        assert (each.axes, each.times, each.sent) == (axes, times, sent)


def test_types():
    type_ = "((bf16[4,2]{1,0:T(8,128)(2,1)}), f32[128]{0:T(128)S(1)}, /*index=2*/s32[]{:S(2)})"
    assert hlo.elements(type_) == ["(bf16[4,2])", "f32[128]", "s32[]"]
    assert hlo.num_bytes(type_) == 16 + 512 + 4
    assert hlo.dtype(type_) == "bf16"


def test_bytes_moved():
    """What stays near the core moves nothing; of a table, what is looked up."""
    lines = (
        "%near = f32[8,4]{1,0:T(8,128)S(1)} add(%x, %x)",  # reads 2 × 128
        "%far = f32[8,4]{1,0} multiply(%near, %near)",  # writes 128
        "%row = f32[1,4]{1,0} dynamic-slice(%far, %n, %n), dynamic_slice_sizes={1,4}",  # 2 × 16
        "%c = (f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]{:S(2)}) copy-start(%far)",  # reads 128
        "%d = f32[8,4]{1,0:S(1)} copy-done(%c)",
    )
    assert traffic.moved(program(*lines)) == 256 + 128 + 32 + 128

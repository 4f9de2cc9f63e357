"""What stands in the text of a compiled program: collectives, copies, and what runs beside them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.tpu.hlo import (
    Collective,
    count_collectives,
    find_collectives,
    read_collectives,
    read_copies,
    read_overlap,
)


def test_a_collective_tells_its_bytes_and_where_it_comes_from():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("data")))
    assert count_collectives(jax.jit(lambda x: 2 * x).lower(x).compile()) == {}
    compiled = jax.jit(lambda x: x.sum(axis=0)).lower(x).compile()
    assert count_collectives(compiled) == {"all-reduce": 1}
    (found,) = find_collectives(compiled)
    assert (found.kind, found.bytes) == ("all-reduce", 3 * 4)
    assert "reduce_sum" in found.origin


def test_what_an_accelerator_starts_and_goes_on_from_is_counted_once():
    """These are lines of a program for a TPU.

    The start has other arrays in its result, too, and layouts have brackets.
    """
    lines = [
        "%all-reduce = bf16[2,1024]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.64), to_apply=%add, "
        'metadata={op_name="sum"}',
        "%start = (bf16[2,8]{1,0:T(8,128)}, bf16[2,8]{1,0}, u32[]{:S(2)}) "
        "collective-permute-start(%x), channel_id=4",
        "%done = bf16[2,8]{1,0:T(8,128)(2,1)} collective-permute-done(%start), "
        'metadata={op_name="jit(apply)/split"}',
        "%pieces = (pred[4]{0}, f32[]) all-to-all(%a, %b), channel_id=1",
    ]
    assert read_collectives("\n".join(lines)) == [
        Collective("all-reduce", 4096, "sum"),
        Collective("collective-permute", 32, "jit(apply)/split", is_async=True),
        Collective("all-to-all", 8, ""),
    ]


def test_who_exchanges_with_whom_is_read_also_where_an_exchange_ends():
    lines = [
        "%start = (bf16[2,8]{1,0}, bf16[2,8]{1,0}) collective-permute-start(%x), channel_id=4, "
        "source_target_pairs={{0,3},{1,0},{2,1},{3,2}}",
        "%done = bf16[2,8]{1,0} collective-permute-done(%start)",
        "%gather = bf16[4,8]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}",
        "%sum = bf16[2,8]{1,0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add",
    ]
    found = read_collectives("\n".join(lines))
    assert [(each.chips, each.direction) for each in found] == [(None, -1), (2, 0), (4, 0)]


# A loop of ten rounds, counted up by two, in which a product stands beside an exchange.
TPU_PROGRAM = """
HloModule jit_step, is_scheduled=true

%start_it (p: bf16[8,4]) -> (bf16[8,4], bf16[32,4]) {
  %p = bf16[8,4]{1,0} parameter(0)
  %gather.1 = bf16[32,4]{1,0} all-gather(%p), channel_id=7, metadata={op_name="jit(step)/dot"}
  ROOT %c = (bf16[8,4]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%end_it (p: bf16[8,4]) -> bf16[32,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %gather.2 = bf16[32,4]{1,0} all-gather(%p), channel_id=7
  ROOT %d = bf16[32,4]{1,0} custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"
}

%product (x: bf16[16,32], w: bf16[32,4]) -> bf16[16,4] {
  %x = bf16[16,32]{1,0} parameter(0)
  %w = bf16[32,4]{1,0} parameter(1)
  ROOT %y = bf16[16,4]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}

%body (state: (s32[], bf16[16,32])) -> (s32[], bf16[16,32]) {
  %state = (s32[], bf16[16,32]) parameter(0)
  %two = s32[] constant(2)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[16,32]{1,0} get-tuple-element(%state), index=1
  %next = s32[] add(%i, %two)
  %s = (bf16[8,4], bf16[32,4]) fusion(%x), kind=kCustom, calls=%start_it
  %beside = bf16[16,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %e = bf16[32,4]{1,0} fusion(%s), kind=kCustom, calls=%end_it
  %after = bf16[16,4]{1,0} fusion(%x, %e), kind=kOutput, calls=%product
  %sum = bf16[16,4]{1,0} all-reduce(%after), channel_id=8, to_apply=%add
  ROOT %t = (s32[], bf16[16,32]) tuple(%next, %x)
}

%condition (state: (s32[], bf16[16,32])) -> pred[] {
  %state = (s32[], bf16[16,32]) parameter(0)
  %ten = s32[] constant(10)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%i, %ten), direction=LT
}

ENTRY %main (x: bf16[16,32]) -> (s32[], bf16[16,32]) {
  %x = bf16[16,32]{1,0} parameter(0)
  ROOT %loop = (s32[], bf16[16,32]) while(%x), condition=%condition, body=%body
}
"""


def test_a_loop_counts_as_often_as_it_goes_round():
    schedule = read_overlap(TPU_PROGRAM)
    product = 2 * 16 * 32 * 4
    assert schedule.flops == 5 * 2 * product
    assert schedule.beside_exchange == 5 * product


def test_what_is_fused_with_other_work_is_one_collective():
    assert read_collectives(TPU_PROGRAM) == [
        Collective("all-gather", 32 * 4 * 2, "jit(step)/dot", runs=5, is_async=True),
        Collective("all-reduce", 16 * 4 * 2, "", runs=5, is_async=False),
    ]


@pytest.mark.parametrize(
    ("window", "flops"),
    [
        ("window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", 2 * 10 * 10 * 6 * 5),
        ("window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", 2 * 25 * 6 * 5),
    ],
)
def test_what_a_convolution_multiplies_with_its_padding_is_not_counted(window, flops):
    size = 2 if "stride" in window else 4
    text = f"""
ENTRY %main (x: bf16[1,4,4,6], w: bf16[3,3,6,5]) -> bf16[1,{size},{size},5] {{
  %x = bf16[1,4,4,6] parameter(0)
  %w = bf16[3,3,6,5] parameter(1)
  ROOT %y = bf16[1,{size},{size},5] convolution(%x, %w), {window}
}}"""
    assert read_overlap(text).flops == flops


def test_copies_are_read_from_the_text_of_a_program():
    tiles = "T(8,128)(2,1)"
    sync = "u32[]{:S(2)}) copy-start(%p)"
    weights = f"bf16[640,640]{{1,0:{tiles}"
    lines = [
        f"  %a = ({weights}S(1)}}, {weights}}}, {sync}, cross_program_prefetch_index=0",
        f"  %b = ({weights}S(1)}}, {weights}}}, {sync}",
        f"  %c = ({weights}}}, {weights}S(1)}}, {sync}",
        f"  %d = ({weights}}}, {weights}}}, {sync}",  # it stays in HBM
        f"  %e = ((bf16[2560,640]{{1,0:{tiles}}}), bf16[640,640]{{1,0:{tiles}S(3)}}, "
        "s32[]{:S(2)}) slice-start(%p), slice={[0:640], [0:640]}",
        "  %f = (f32[8]{0:T(128)S(1)}, f32[8]{0:T(128)}, " + sync,
        f"  %g = {weights}S(1)}} copy-done(%a)",
    ]
    found = read_copies("\n".join(lines))
    assert [str(copy) for copy in found] == [
        "2 × bf16[640,640], from HBM to S(1)",
        "1 × bf16[640,640], from S(1) to HBM",
        "1 × bf16[640,640], from HBM to S(3)",
        "1 × f32[8], from HBM to S(1)",
    ]
    assert [copy.bytes for copy in found] == [2 * 640 * 640] * 3 + [32]

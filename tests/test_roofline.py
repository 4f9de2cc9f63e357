"""A roofline for each instruction of a compiled program: closed forms."""

import pytest

from course.tpu.chips import Chip
from course.tpu.roofline import Roofline, count_instructions, read_arrays, read_roofline
from lab.ask.kernels import count_bundles

# A second for 2^40 operations, and one for 2^30 bytes; its MXU has 128 rows and columns.
CHIP = Chip("v5e", peak=2.0**40, bandwidth=2.0**30, on_chip=0, usable_hbm=2**40)


def text_of(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_f\n\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


def seconds_of(*lines, before=""):
    return read_roofline(text_of(*lines, before=before), CHIP)


def array(sides, space=""):
    order = ",".join(str(axis) for axis in reversed(range(len(sides))))
    return f"bf16[{','.join(map(str, sides))}]{{{order}:T(8,128)(2,1){space}}}"


LARGE = (8192, 8192)


def product(left=LARGE, right=LARGE, result=LARGE, space=""):
    return (
        f"%x = {array(left, space)} parameter(0)",
        f"%w = {array(right, space)} parameter(1)",
        f"ROOT %y = {array(result, space)} convolution(%x, %w), dim_labels=bf_io->bf",
    )


def test_a_product_takes_as_long_as_its_operations_or_its_bytes():
    assert seconds_of(*product()) == Roofline(multiplying=1.0, bytes=3 * 2**27)
    rows = (8, 8192)
    # Eight rows are 2^30 operations, and the weights 2^27 bytes.
    found = seconds_of(*product(left=rows, result=rows))
    assert found.multiplying == 0
    assert found.moving == pytest.approx((2**27 + 2 * 2**17) / 2**30)


def test_tiles_are_filled():
    # 64 columns take as long as 128, and so does a sum over 64 numbers.
    for changed in (
        {"right": (8192, 64), "result": (8192, 64)},
        {"left": (8192, 64), "right": (64, 8192)},
    ):
        assert seconds_of(*product(**changed, space="S(1)")).seconds == 128 / 8192
    assert read_arrays(array((8192, 64)))[0].bytes == 8192 * 128 * 2
    assert read_arrays("f32[100]{0:T(128)}")[0].bytes == 128 * 4
    assert read_arrays("bf16[64,3,128]{2,0,1:T(8,128)(2,1)}")[0].bytes == 64 * 3 * 128 * 2


def test_a_kernel_with_queries_keys_and_values_is_attention():
    sides = (2, 4096, 64)
    lines = [f"%{name} = {array(sides, 'S(1)')} parameter({n})" for n, name in enumerate("qkv")]
    call = f"ROOT %y = {array(sides, 'S(1)')} custom-call(%q, %k, %v), custom_call_target="
    found = seconds_of(*lines, f'{call}"tpu_custom_call"')
    assert found.seconds == 2 * 2 * (2 * 4096 * 128 * 4096) / 2**40
    assert seconds_of(*lines, f'{call}"Other"').seconds == 0


def test_a_batch_of_products_fills_each_and_a_convolution_all_of_its_pixels():
    # Four heads, each 64 × 64 by 64 × 64.
    sides = (4, 64, 64)
    found = seconds_of(
        f"%x = {array(sides, 'S(1)')} parameter(0)",
        f"%w = {array(sides, 'S(1)')} parameter(1)",
        f"ROOT %y = {array(sides, 'S(1)')} convolution(%x, %w), "
        "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
    )
    assert found.seconds == 4 * 2 * 64 * 128 * 128 / 2**40
    # Three places of a kernel over 16 pixels, two of them beyond the edges.
    found = seconds_of(
        f"%x = {array((1, 16, 128), 'S(1)')} parameter(0)",
        f"%w = {array((3, 128, 128), 'S(1)')} parameter(1)",
        f"ROOT %y = {array((1, 16, 128), 'S(1)')} convolution(%x, %w), "
        "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
    )
    assert found.seconds == pytest.approx((3 * 16 - 2) * 2 * 128 * 128 / 2**40)


def test_what_lies_on_the_chip_and_what_is_copied_beside_costs_nothing():
    copied = array(LARGE, "S(1)")
    start = (
        f"%x = {array(LARGE)} parameter(0)",
        f"%start = ({copied}, {array(LARGE)}, u32[]{{:S(2)}}) copy-start(%x)",
        f"%done = {copied} copy-done(%start)",
    )
    assert seconds_of(*start, f"ROOT %y = {copied} negate(%done)") == Roofline()
    written = seconds_of(*start, f"ROOT %y = {array(LARGE)} negate(%done)")
    assert written == Roofline(moving=1 / 8, bytes=2**27)


def test_of_what_a_fusion_slices_only_the_slice_counts():
    part = array((1024, 8192))
    fused = f"""%fused (p: bf16[8192,8192], i: s32[]) -> bf16[1024,8192] {{
  %p = {array(LARGE)} parameter(0)
  %i = s32[]{{:T(128)}} parameter(1)
  %z = s32[]{{:T(128)}} constant(0)
  %s = {part} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={{1024,8192}}
  ROOT %r = {part} negate(%s)
}}
"""
    lines = [
        f"%x = {array(LARGE)} parameter(0)",
        "%i = s32[]{:T(128)S(6)} parameter(1)",
        f"ROOT %y = {part} fusion(%x, %i), kind=kLoop, calls=%fused",
    ]
    assert seconds_of(*lines, before=fused).bytes == 2 * 2**24
    whole = fused.replace("negate(%s)", "add(%s, %p)")
    assert seconds_of(*lines, before=whole).bytes == 2**27 + 2**24


def test_a_loop_counts_as_often_as_it_goes_round_and_exchange_not_at_all():
    state = f"(s32[], {array(LARGE)})"
    loop = f"""%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = {array(LARGE)} get-tuple-element(%s), index=1
  %one = s32[]{{:S(6)}} constant(1)
  %next = s32[]{{:S(6)}} add(%n, %one)
  %y = {array(LARGE)} negate(%x)
  %all = {array(LARGE)} all-to-all(%y), replica_groups={{{{0,1}}}}
  ROOT %t = {state} tuple(%next, %all)
}}

%condition (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant(20)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}}
"""
    text = text_of(
        f"%s = {state} parameter(0)",
        f"ROOT %w = {state} while(%s), condition=%condition, body=%body",
        before=loop,
    )
    assert read_roofline(text, CHIP).seconds == pytest.approx(20 * 2 / 8, rel=1e-6)
    assert count_instructions(text, CHIP) == {"add": 20, "negate": 20, "all-to-all": 20}


KERNEL = """\
LB: loop body
   0x0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   : > { %4 = sbr.rel (%p1) target = $region5 }
   0x3   : > { vst 0 } /* Start region 4 */
   0x4   : > { vst 1 }
   0x5 PF: > { vmatmul } /* Start/End empty region 5 */
   0x6   : > { %6 = sbr.rel (%p2) target = $region7 }
   0x7   : > { vmatmul
 of two lines } /* Start region 6 */
   0x8   : > { vst 2 } /* End region 6 :: Start region 7 */
   0x9   : > { %p3 = scmp.ge.s32.totalorder %s2, 14 /* loop exit test */ }
   0xa   : > { %8 = sbr.rel (!%p3) target = $region1 }
   0xb   :  { vwait }
"""


def test_a_kernels_bundles_count_as_often_as_they_run():
    """Of ten bundles in twelve rounds, two only begin the sums of one block of three."""
    assert count_bundles(KERNEL, blocks=3) == 12 * 8 + 4 * 2

"""A roofline for each instruction of a compiled program: closed forms."""

import base64
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu

from course.model.attention import flash_kernel, splash
from course.tpu.chips import CHIPS, Chip, find_chip
from course.tpu.hlo import START, read_collectives
from course.tpu.roofline import (
    Roofline,
    clock_of,
    count_instructions,
    read_arrays,
    read_roofline,
    seconds_by_kind,
    waiting_seconds,
)
from lab.ask.schedules import blocks_of_keys, count_all, count_bundles, count_kernels

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


def test_products_of_int8_take_half_as_long():
    lines = [line.replace("bf16", "s8") for line in product(space="S(1)")]
    lines[-1] = lines[-1].replace("%y = s8", "%y = s32")
    assert seconds_of(*lines).multiplying == 0.5
    v4 = dataclasses.replace(CHIP, name="v4")
    assert read_roofline(text_of(*lines), v4).multiplying == 1.0
    for name, kind in CHIPS.items():  # v4 and TPU7x have no rate of their own in the table
        version = tpu.ChipVersion(name.removeprefix("tpu"))
        figures = tpu.get_tpu_info_for_chip(version, kind.cores)
        rate = figures.int8_ops_per_second / figures.bf16_ops_per_second
        assert kind.int8_rate == max(rate, 1)


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


def a_loop(last):
    """Return a loop that negates an array 20 times, ``last`` after it, and the loop's state."""
    state = f"(s32[], {array(LARGE)})"
    loop = f"""%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = {array(LARGE)} get-tuple-element(%s), index=1
  %one = s32[]{{:S(6)}} constant(1)
  %next = s32[]{{:S(6)}} add(%n, %one)
  %y = {array(LARGE)} negate(%x)
  %all = {array(LARGE)} {last}(%y), replica_groups={{{{0,1}}}}
  ROOT %t = {state} tuple(%next, %all)
}}

%condition (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant(20)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}}
"""
    return loop, state


def test_a_loop_counts_as_often_as_it_goes_round_and_exchange_not_at_all():
    loop, state = a_loop("all-to-all")
    text = text_of(
        f"%s = {state} parameter(0)",
        f"ROOT %w = {state} while(%s), condition=%condition, body=%body",
        before=loop,
    )
    assert read_roofline(text, CHIP).seconds == pytest.approx(20 * 2 / 8, rel=1e-6)
    assert count_instructions(text, CHIP) == {"add": 20, "negate": 20, "all-to-all": 20}


def test_a_chip_waits_for_what_is_left_of_an_exchange():
    small = array((4096, 8192))
    groups = "replica_groups={{0,1}}"
    lines = [
        f"%x = {array(LARGE)} parameter(0)",
        f"%first = ({small}, {small}) all-to-all-start(%x), {groups}",
        f"%second = ({small}, {small}) all-to-all-start(%x), {groups}",
        f"%y = {array(LARGE)} negate(%x)",
        f"%arrived = {small} all-to-all-done(%first)",
        f"%z = {small} negate(%arrived)",
        f"%also = {small} all-to-all-done(%second)",
        f"%all = {small} all-to-all(%also), {groups}",
        f"ROOT %w = {small} negate(%all)",
    ]

    def waiting(seconds):
        def seconds_of(lines):
            (exchange,) = read_collectives(lines)
            assert (exchange.bytes, exchange.chips) == (4096 * 8192 * 2, 2)
            return seconds

        return waiting_seconds(text_of(*lines), CHIP, {}, seconds_of)

    # A quarter of a second is computed beside the first, and an eighth until the second is needed.
    assert read_roofline(text_of(*lines), CHIP).seconds == (2 + 1 + 1) / 8
    assert waiting(0.5) == (0.5 - 2 / 8) + (0.5 - 1 / 8) + 0.5
    # What is left of the time beside the first is the second's.
    assert waiting(0.2) == pytest.approx((0.4 - 3 / 8) + 0.2)
    assert waiting(0.1) == pytest.approx(0.1)
    fused = text_of(*lines, f"%s = {small} custom-call(%w), {START}")
    with pytest.raises(NotImplementedError, match="inside of a fusion"):
        waiting_seconds(fused, CHIP, {}, lambda lines: 0.0)


def test_a_loop_beside_an_exchange_counts_as_often_as_it_goes_round():
    loop, state = a_loop("bitcast")
    text = text_of(
        f"%s = {state} parameter(0)",
        f"%x = {array(LARGE)} get-tuple-element(%s), index=1",
        f"%start = {array(LARGE)} all-gather-start(%x), replica_groups={{{{0,1}}}}",
        f"%w = {state} while(%s), condition=%condition, body=%body",
        f"ROOT %all = {array(LARGE)} all-gather-done(%start)",
        before=loop,
    )
    assert waiting_seconds(text, CHIP, {}, lambda lines: 6.0) == pytest.approx(1.0, rel=1e-5)


def test_an_instruction_takes_at_least_as_long_as_its_bundles():
    clock = clock_of(CHIP)
    text = text_of(*product())
    few, many = {"y": int(0.9 * clock)}, {"y": int(1.5 * clock), "another": 10**12}
    assert read_roofline(text, CHIP, few) == Roofline(multiplying=1.0, bytes=3 * 2**27)
    found = read_roofline(text, CHIP, many)
    assert found.multiplying == found.moving == 0
    assert found.seconds == found.issuing == pytest.approx(1.5, rel=1e-6)


def test_seconds_have_a_kind():
    lines = [*product(space="S(1)")[:2], product(space="S(1)")[2].replace("ROOT ", "")]
    lines.append(f"ROOT %z = {array(LARGE)} negate(%y)")
    clock = clock_of(CHIP)
    found = seconds_by_kind(text_of(*lines), CHIP, {"y": int(2 * clock)})
    assert found["products"] == pytest.approx(2, rel=1e-6)
    assert found["others"] == pytest.approx(2**27 / 2**30)
    assert found["kernels"] == 0


def test_the_clock_is_that_of_the_papers():
    """Jouppi et al. (2023) give v4's; the others are those of jax-ml.github.io/scaling-book."""
    published = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9}
    for name in CHIPS:
        clock = clock_of(find_chip(name))
        assert clock == pytest.approx(published.get(name, clock), rel=0.005)
        assert 1e9 < clock < 2.5e9


KERNEL = """\
LB: loop body
   0x0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 /* iteration index, stage = 0 */ } /* Start region 1 */
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
    assert count_bundles(KERNEL, blocks=3) == 12 * 8 + 4 * 2 + 2
    assert count_bundles(KERNEL) == 12 * 10 + 2


NESTED = """\
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 /* iteration index, stage = 0 */ } /* Start region 1 */
   0x2 LB: >> { %s3 = sadd.s32 1, %s1 } /* Start region 2 */
   0x3   : >> { %p1_p0 = scmp.ge.s32.totalorder %s3, 5 }
   0x4   : >> { %4 = sbr.rel (!%p1_p0) target = $region2 }
   0x5   : > { %p2_p1 = scmp.ge.s32.totalorder %s2, 9 /* loop exit test */ }
   0x6   : > { %6 = sbr.rel (!%p2_p1) target = $region1 }
"""


def test_a_loop_in_a_loop_runs_as_often_as_both_say():
    assert count_bundles(NESTED) == 1 + 7 * (1 + 5 * 3 + 2)
    # With more blocks on their way at a time, more rounds only begin and end.
    assert count_bundles(NESTED.replace("stage = 0", "stage = 3")) == 1 + 3 * (1 + 5 * 3 + 2)
    assert count_bundles(NESTED.replace("iteration index, stage = 0", "")) == 1 + 9 * 18
    # Where it is not said how often, it counts once.
    assert count_bundles(NESTED.replace("9 /* loop exit test */", "%s9")) == 1 + 18


def test_what_is_alike_is_scheduled_once():
    halves = "\n".join(
        f"%half.{n} (p: f32[{size}]) -> f32[{size}] {{\n"
        f"  %p.{n} = f32[{size}]{{0}} parameter(0)\n"
        f"  ROOT %h.{n} = f32[{size}]{{0}} negate(%p.{n})\n}}\n"
        for n, size in enumerate((8, 8, 16))
    )
    lines = ["%x = f32[8]{0} parameter(0)", "%z = f32[16]{0} parameter(1)"]
    for n in range(3):
        size, operand = (16, "z") if n == 2 else (8, "x")
        lines.append(
            f"%y.{n} = f32[{size}]{{0}} fusion(%{operand}), kind=kLoop, calls=%half.{n}, "
            f'metadata={{op_name="{n}"}}'
        )
    text = text_of(*lines, before=halves)
    assert count_all(text, {"y.1": NESTED}) == {"y.0": 127, "y.1": 127}
    assert count_all(text, {"y.2": NESTED, "TLP": NESTED}) == {"y.2": 127}


def test_a_kernel_says_how_many_blocks_of_keys_it_has():
    body = base64.b64encode(b"iteration_bounds = array<i64: 2, 20, 2, 3>, scratch").decode()
    assert blocks_of_keys(f'%k = custom-call(%q), backend_config={{"body":"{body}"}}') == 3
    assert blocks_of_keys("%k = fusion(%q), kind=kLoop") == 0


def test_a_kernel_without_bundles_is_not_taken_for_none():
    call = '%y = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
    text = text_of("%x = f32[8]{0} parameter(0)", call)
    assert count_kernels(text, CHIP, {"y": 7}) == 7
    with pytest.raises(RuntimeError, match="wrote no bundles of the kernel y"):
        count_kernels(text, CHIP, {})


def test_a_kernel_is_read_in_spite_of_line_breaks():
    body = base64.b64encode(b"iteration_bounds = array<i64: 2, 3>").decode()
    note = '{kernel_metadata={\n"xprof_metadata":"{}"\n}}'
    line = f"%y = f32[8]{{0}} custom-call(%x), frontend_attributes={note}"
    text = text_of("%x = f32[8]{0} parameter(0)", f'{line}, backend_config={{"body":"{body}"}}')
    assert count_all(text, {"y": KERNEL}) == {"y": count_bundles(KERNEL, blocks=3)}


@pytest.mark.parametrize(("kernel", "blocks"), [(flash_kernel, 3), (splash, 5)])
def test_a_kernel_of_jax_says_so_too(kernel, blocks):
    shape = jax.ShapeDtypeStruct((1, 2560, 2, 128), jnp.bfloat16)
    traced = jax.jit(kernel).trace(shape, shape, shape)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    body = re.search(r"body\\22: \\22([\w+/=]+)", text)[1]
    assert blocks_of_keys(f'%k = custom-call(%q), backend_config={{"body":"{body}"}}') == blocks

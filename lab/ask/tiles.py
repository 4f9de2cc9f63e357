"""Stable Diffusion XL's decoder for 2048 × 2048 pixels in tiles: what a chip needs.

It takes some twenty minutes. The whole image at once is not asked: after half an hour the compiler
had no answer.
"""

from course.sd.vae import decode
from course.tpu.compiler import ask_compiler
from course.tpu.pieces import load_config, take_piece
from course.tpu.programs import DECODER, make_program
from course.tpu.records import answer_of


def questions(rows: list[dict]) -> list[dict]:
    return [{"chip": "v5e", "side": 2048, "tile": 128}]  # 256 latents along a side


def answer(chip: str, side: int, tile: int) -> dict:
    program = make_program("sdxl", chip, height=side, width=side, attention="plain")
    config = load_config(program.model)

    def decode_image(p, latents):
        return decode(p, config.vae, latents, "plain", tile)

    piece = take_piece(program, DECODER)
    return answer_of(ask_compiler(decode_image, *piece.arguments, chip=chip))

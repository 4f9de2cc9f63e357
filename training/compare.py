"""Compare the bundled small FLUX.2 with diffusers on PyTorch: ``python -m training.compare``.

From the same noise, in float32, `flux2.generate` and diffusers' ``Flux2KleinPipeline`` draw four
pictures and edit four. Printed is the largest difference, of 255.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from course import flux2
from course.shapes import scenes
from training import qwen
from training.flow import ROOT

CHECKPOINT = ROOT / "checkpoints" / "shapes-flux2"
PROMPTS = [
    "a large red heart on a white background",
    "a medium blue star on a yellow background",
    "a small green ring on a black background",
    "a pink cross",
]
CHANGES = ["blue", "a star", "a white background", "large"]
SIZE = {"height": 64, "width": 64}


def by_diffusers(prompts: list[str], noise: np.ndarray, images: np.ndarray | None) -> np.ndarray:
    """Images, float32, (prompts, 64, 64, 3), one after another, as it edits one scene at a time."""
    pipeline = Flux2KleinPipeline.from_pretrained(CHECKPOINT, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    found = []
    for number, prompt in enumerate(prompts):
        image = None
        if images is not None:
            image = Image.fromarray(images[number])
        (drawn,) = pipeline(
            prompt=prompt,
            image=image,
            latents=torch.tensor(noise[number : number + 1]),
            num_inference_steps=8,
            guidance_scale=3.0,
            max_sequence_length=qwen.MAX_LENGTH,
            text_encoder_out_layers=(1, 2, 3),
            output_type="np",
            **SIZE,
        ).images
        found.append(drawn)
    return np.stack(found)


def main() -> None:
    params, config, tokenize = flux2.load(CHECKPOINT, jnp.float32)
    generate = jax.jit(flux2.generate, static_argnames=flux2.STATIC)
    noise = flux2.random_tokens(jax.random.key(0), config, len(PROMPTS), **SIZE)
    some = scenes.training_scenes(len(CHANGES), seed=0)
    before = np.stack([scenes.render(scene) for scene in some])
    for kind, prompts, images in (("drawn", PROMPTS, None), ("edited", CHANGES, before)):
        ids, mask = tokenize(prompts)
        ours = generate(
            params,
            config,
            ids,
            mask,
            noise,
            **SIZE,
            steps=8,
            guidance=3.0,
            empty=tokenize([""]),
            images=None if images is None else jnp.float32(images) / 255,
        )
        # diffusers has the latents unpacked: (1, channels, height, width) of the tokens.
        side = SIZE["height"] // config.vae.pixels_per_token
        tokens = np.asarray(noise).reshape(len(prompts), side, side, -1).transpose(0, 3, 1, 2)
        theirs = by_diffusers(prompts, tokens, images)
        difference = 255 * np.abs(np.asarray(ours) - theirs).max()
        print(f"{kind}: at most {difference:.4f} of 255")


if __name__ == "__main__":
    main()

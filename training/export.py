"""Write the trained small FLUX.2 as a folder in diffusers' format: ``python -m training.export``.

It has a folder for each part, with a configuration and bfloat16 safetensors, as
``Flux2KleinPipeline`` of diffusers loads it.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

from course.model.files import to_files
from training import flow, qwen

INDEX = {
    "_class_name": "Flux2KleinPipeline",
    "_diffusers_version": "0.39.0",
    "is_distilled": False,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": flow.CONFIG.shift,
    "use_dynamic_shifting": False,
}
LEVELS = len(flow.CONFIG.vae.block_out_channels)


def configurations() -> dict[str, dict]:
    """What ``config.json`` says of each part, but for diffusers' and transformers' defaults."""
    text = asdict(flow.CONFIG.text_encoder)
    return {
        "transformer": {
            "_class_name": "Flux2Transformer2DModel",
            "patch_size": 1,
            "guidance_embeds": False,
            **asdict(flow.CONFIG.transformer),
        },
        "text_encoder": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": qwen.MAX_LENGTH,
            "tie_word_embeddings": True,
            **text,
        },
        "vae": {
            "_class_name": "AutoencoderKLFlux2",
            "down_block_types": ["DownEncoderBlock2D"] * LEVELS,
            "up_block_types": ["UpDecoderBlock2D"] * LEVELS,
            "sample_size": flow.PIXELS,
            **asdict(flow.CONFIG.vae),
        },
    }


def files_of(params: dict[str, dict]) -> dict[str, dict[str, np.ndarray]]:
    """The parameters of each part in bfloat16, by the names that files have."""
    found = {}
    for part, values in params.items():
        found[part] = {name: value.astype(jnp.bfloat16) for name, value in to_files(values).items()}
    found["vae"]["bn.num_batches_tracked"] = np.zeros((), np.int64)
    # The last quarter of a text encoder is not read. Here it has no numbers of its own, so that
    # each of its layers gives back what it gets.
    text = flow.CONFIG.text_encoder
    first = "model.layers.0."
    for number in range(text.read_layers[-1], text.num_hidden_layers):
        for name, value in list(found["text_encoder"].items()):
            if name.startswith(first):
                same = np.ones_like(value) if value.ndim == 1 else np.zeros_like(value)
                found["text_encoder"][name.replace(".0.", f".{number}.", 1)] = same
    found["text_encoder"]["model.norm.weight"] = np.ones(text.hidden_size, jnp.bfloat16)
    return found


def export(params: dict[str, dict], folder: Path) -> None:
    """Write a model, with its VAE, as a folder in diffusers' format."""
    for part, config in configurations().items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        write_json(folder / part / "config.json", config)
    for part, values in files_of(params).items():
        stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        save_file(values, folder / part / f"{stem}.safetensors", metadata={"format": "pt"})
    qwen.write(folder / "tokenizer")
    (folder / "scheduler").mkdir(exist_ok=True)
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    write_json(folder / "model_index.json", INDEX)


def write_json(file: Path, values: dict) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def trained(folder: Path) -> tuple[dict[str, dict], int]:
    """The averaged parameters of the newest state of a training, its VAE, and the step.

    Raises
    ------
    FileNotFoundError
        If nothing was trained in the folder.
    """
    if not (folder / "states").is_dir():
        raise FileNotFoundError(f"{folder} holds no training: run python -m training.flow first.")
    recipe = flow.Recipe()
    numbers = flow.prepare(folder, recipe)
    state = jax.eval_shape(lambda: flow.initial_state(recipe, flow.make_optimizer(recipe)))
    with ocp.CheckpointManager((folder / "states").resolve()) as manager:
        step = manager.latest_step()
        state = manager.restore(step, args=ocp.args.StandardRestore(state))
    vae = flow.vae_parameters(numbers["mean"], numbers["variance"])
    return state["average"] | {"vae": vae}, step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, default=flow.WORK, help="default: %(default)s")
    add("--to", type=Path, default=flow.ROOT / "checkpoints" / "shapes-flux2")
    arguments = parser.parse_args()
    params, step = trained(arguments.work)
    export(params, arguments.to)
    print(f"Wrote what {step} steps gave into {arguments.to}.")


if __name__ == "__main__":
    main()

"""Files as people have them, made of the bundled checkpoints, without PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from course.model.files import FLOATS
from course.model.singles import Layout, to_single
from course.sd import Config
from course.sd.convert import NAMING, original_layout


def single_file(
    params: dict, config: Config, layouts: dict[str, Layout] | None = None, dtype=np.float32
) -> dict[str, np.ndarray]:
    """The tensors of a file with a whole model, in the original layout.

    ``layouts`` has others for some of the parts.
    """
    tensors = {}
    for part, values in params.items():
        layout = (layouts or {}).get(part)
        found = to_single(values, layout or original_layout(part, config), part, NAMING, config)
        for name, value in found.items():
            if layout is not None and name.endswith("text_projection"):
                # As diffusers' own script writes it.
                name, value = f"{name}.weight", np.ascontiguousarray(value.T)
            tensors[name] = value.astype(dtype)
    return tensors


def with_training(tensors: dict) -> dict:
    """What a file has that was saved in the middle of the training: averages, and what else."""
    more = {"model_ema.decay": np.ones(1, np.float32), "model_ema.num_updates": np.int32([7])}
    for name, value in tensors.items():
        if name.startswith("model.diffusion_model."):
            average = name.removeprefix("model.").replace(".", "")
            more[f"model_ema.{average}"] = value * 0
    more["betas"] = np.zeros(5, np.float64)
    more["cond_stage_model.transformer.text_model.embeddings.position_ids"] = np.arange(77)[None]
    return tensors | more


def in_8_bits(tensors: dict) -> dict:
    """The UNet's numbers as fp8."""
    changed = dict(tensors)
    for name, value in tensors.items():
        if name.startswith("model.diffusion_model."):
            changed[name] = value.astype(jnp.float8_e4m3fn)
    return changed


def for_inpainting(tensors: dict) -> dict:
    """A UNet that reads nine channels."""
    name = "model.diffusion_model.input_blocks.0.0.weight"
    more = np.zeros((len(tensors[name]), 5, 3, 3), tensors[name].dtype)
    return tensors | {name: np.concatenate([tensors[name], more], axis=1)}


def spoiled(tensors: dict, ending: str, number: float) -> dict:
    """The same tensors, with this number in the first one whose name has this ending."""
    name = next(name for name in tensors if name.endswith(ending))
    value = tensors[name].copy()
    value.flat[0] = number
    return tensors | {name: value}


def edit_json(file: Path, change: Callable[[dict], dict]) -> None:
    """Write a JSON file anew, as ``change`` makes it."""
    content = change(json.loads(file.read_text(encoding="utf-8")))
    file.unlink()  # which may be a link
    file.write_text(json.dumps(content), encoding="utf-8")


def save(tensors: dict, file: Path, metadata: dict | None = None) -> Path:
    """Write safetensors, and give the file's place."""
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()}, file, metadata
    )
    return file


def write_by_header(file: Path, header: str, tensors: dict) -> None:
    """Write safetensors anew from the header that they had, and the numbers."""
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little"))
        opened.write(header.encode())
        for name in sorted(entries, key=lambda name: entries[name]["data_offsets"]):
            opened.write(tensors[name].astype(FLOATS[entries[name]["dtype"]]).tobytes())


def save_in_parts(tensors: dict, folder: Path, stem: str, count: int) -> None:
    """Write so many files of safetensors, and an index that says which has which tensors."""
    names = sorted(tensors)
    places = {}
    for n in range(count):
        file = f"{stem}-{n + 1:05}-of-{count:05}.safetensors"
        save({name: tensors[name] for name in names[n::count]}, folder / file)
        places |= dict.fromkeys(names[n::count], file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def is_same(params: dict, others: dict) -> bool:
    """Whether two models have the same numbers in the same dtypes."""

    def is_equal(one, other):
        return one.dtype == other.dtype and np.array_equal(one, jnp.asarray(other))

    return jax.tree.all(jax.tree.map(is_equal, params, others))


def assert_same_image(found: np.ndarray, recorded: np.ndarray) -> None:
    """Raise unless an image is within 1 / 255 of what was recorded with 16 bits."""
    assert 255 * np.abs(np.asarray(found) - recorded / np.float32(65535)).max() < 1

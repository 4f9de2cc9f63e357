"""Which code is for a model: that of ``course.sd``, or that of ``course.flux2``.

Both have what commands need of a model, by the same names: ``load``, ``load_tokenizer``,
``read_config``, ``parameter_shapes`` and ``make_drawing``; and of files ``read_files``, ``save``,
``read_single_file``, ``to_single_files``, ``read_lora`` and ``save_lora``; and for fine-tuning the
module ``training``. Which model a folder
has, how large its images are and in how many steps they are drawn, ``helpers.models`` and
``helpers.checkpoints`` say.
"""

from pathlib import Path
from types import ModuleType

from course import flux2, sd
from helpers.models import which_model

CODE = {"sd": sd, "sdxl": sd, "flux2": flux2}  # for each key of helpers.models.MODELS
Config = sd.Config | flux2.Config


def find_code(folder: str | Path) -> ModuleType:
    """Return the code for the model in a folder, as ``find_model`` returns it.

    Raises
    ------
    RuntimeError
        If it is none that this course knows.

    Examples
    --------
    >>> from helpers import find_model
    >>> find_code(find_model("shapes-flux2")).__name__
    'course.flux2'
    """
    return CODE[which_model(folder)]


def code_of(config: Config) -> ModuleType:
    """Return the code for the model of a configuration."""
    return flux2 if isinstance(config, flux2.Config) else sd

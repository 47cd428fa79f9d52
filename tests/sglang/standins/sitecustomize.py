"""Python reads this at start in every process that has this folder on PYTHONPATH: it makes torchvision importable.

torchvision's wheel on PyPI is built for CUDA. Beside a CPU build of torch its library does not load, and its import
then fails for want of two operators. Nothing here calls them.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path


class MissingOperators(importlib.abc.MetaPathFinder):
    """Finds nothing, but defines torchvision's operators just before its import, if they would be missing."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            if not _loads(Path(importlib.util.find_spec(name).origin).parent):
                _define()


def _loads(folder):
    import torch

    for library in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            return False
    return True


def _define():
    import torch

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, MissingOperators())

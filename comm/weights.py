"""What travels over a weight channel: tensors as names, shapes and bytes.

Bytes rather than torch tensors, so that the channel, and ranks that only model an engine, need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, number format and shape of one tensor."""

    name: str
    """As in the Hugging Face checkpoint of the model."""
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a version."""

    spec: TensorSpec
    data: npt.NDArray[np.uint8]
    """[nbytes], contiguous, row-major; valid only until the call that it was handed to returns."""

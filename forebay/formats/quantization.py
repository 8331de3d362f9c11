"""`--quantization`, for those that need no more of it than its name."""

from enum import StrEnum


class Quantization(StrEnum):
    """The form in which matrices are held."""

    NONE = "none"  # the model's dtype
    FILE = "file"  # the file's own codes, where it has some that are held without loss, else the model's dtype
    INT8 = "int8"
    INT4 = "int4"

"""Type ids of GGUF tensors: those that are read here, and the names of those that are not.

Source: the GGUF specification and ggml's list of types, retired ones and one fork's included.
"""

from ..formats import FORMATS, Format
from .errors import UnknownFormatError

TYPES: dict[int, Format] = {f.ggml_type: f for f in FORMATS.values() if f.ggml_type is not None}

_RETIRED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
_NO_WEIGHTS = {
    9: "Q8_1 (activations only)", 15: "Q8_K (activations only)", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    41: "Q1_0",
}  # fmt: skip
# Ids of the ik_llama.cpp fork; from 202 on its row-interleaved variants.
_FORK = {
    97: "Q8_0_X4", 98: "Q8_1_X4", 99: "Q8_2_X4", 133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K",
    138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS",
    147: "Q8_K16", 148: "Q8_K32", 149: "Q8_KR8", 150: "Q8_K128", 151: "Q8_KV", 152: "IQ5_KS", 153: "IQ2_KT",
    154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip


def _why(ggml_type: int) -> str:
    if ggml_type in _RETIRED:
        return f"{_RETIRED[ggml_type]} was retired from GGUF; quantize the model again"
    if ggml_type in _NO_WEIGHTS:
        return f"{_NO_WEIGHTS[ggml_type]} is no weight format that is read here; get another file"
    if ggml_type in _FORK:
        return f"{_FORK[ggml_type]} is a type of the ik_llama.cpp fork; get a file with standard types"
    if 202 <= ggml_type <= 399 or 133 <= ggml_type <= 158:
        return "the id belongs to the ik_llama.cpp fork (row-interleaved from 202 on); get a file with standard types"
    return "the id is unknown; update millstream or get another file"


def format_of(where: str, name: str, ggml_type: int) -> Format:
    """The registry's format of a tensor's type id.

    Raises: UnknownFormatError naming file, tensor, id and the ids that are read.
    """
    if ggml_type not in TYPES:
        known = ", ".join(f"{f.name} ({number})" for number, f in sorted(TYPES.items()))
        raise UnknownFormatError(
            f"{where}: tensor {name}: GGUF type {ggml_type}: {_why(ggml_type)}. Types that are read: {known}"
        )
    return TYPES[ggml_type]

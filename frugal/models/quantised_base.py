"""Bases that are quantised already, or only say so: told from what the tensors are. Reads headers, imports no torch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frugal.errors import UnsupportedError

# What a method calls its tensors: (a regular expression on names, the method).
_NAMES = (
    (r"\.quant_state\.bitsandbytes__(nf4|fp4)$", "bitsandbytes 4-bit"),
    (r"\.weight\.(absmax|quant_map)$", "bitsandbytes 4-bit"),
    (r"\.(SCB|weight_format)$", "bitsandbytes 8-bit"),
    (r"\.g_idx$", "GPTQ"),
    (r"\.qweight$", "GPTQ or AWQ"),
    (r"_blocks$", "MXFP4"),
    (r"\.weight_packed$", "compressed-tensors"),
    (r"\.(weight_scale_inv|weight_scale|input_scale)$", "FP8"),
    (r"\.W_q$", "HQQ"),
)
_DENSE = ("F64", "F32", "F16", "BF16")
_WAY = {
    "MXFP4": "transformers makes it dense once: AutoModelForCausalLM.from_pretrained(BASE, "
    "quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16).save_pretrained(FOLDER)",
    "bitsandbytes 4-bit": "where bitsandbytes is installed: AutoModelForCausalLM.from_pretrained(BASE)"
    ".dequantize().save_pretrained(FOLDER); better, the 16-bit model that it was made from",
}
_OTHERWISE = "give the 16-bit model that it was made from"


def refuse_quantised(base: str, folder: Path, config: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Raise UnsupportedError when the weights in ``files`` are quantised, or ``config`` says so and they are not.

    One message: what config.json says, what the tensors are, and the way out. Damaged files are left to the reader.
    """
    said = said_method(config)
    found, dtype = _stored(files)
    if found is not None:
        what = f"its tensors are {found}"
        if said is None:
            what += ", though config.json does not say so"
        raise UnsupportedError(
            f"model.base: {base} is quantised already: {what}. frugal quantises 16-bit weights while it loads them; "
            f"{_WAY.get(found, _OTHERWISE)}. Then put that into model.base (--base for chat, eval and merge)."
        )
    if said is not None and dtype is not None:
        way = f" If they should be {said}, they are not the published ones." if said == "MXFP4" else ""
        raise UnsupportedError(
            f"model.base: {base}: config.json has a quantization_config ({said}), but the weights are {dtype}, not "
            f"quantised: the entry is stale. Remove `quantization_config` from {folder / 'config.json'}; name a "
            f"corrected copy in model.base (--base for chat, eval and merge).{way}"
        )


def refuse_said_quantised(base: str, config: Mapping[str, Any]) -> None:
    """The same for a model of which only config.json is here: before its weights are downloaded."""
    if (said := said_method(config)) is not None:
        raise UnsupportedError(
            f"model.base: {base} is published quantised (quantization_config in config.json: {said}). frugal quantises "
            f"16-bit weights while it loads them; {_WAY.get(said, _OTHERWISE)}, and put that into model.base."
        )


def said_method(config: Mapping[str, Any]) -> str | None:
    """The method that a config.json names, at its top or in a part such as `text_config`; None when there is none."""
    entry = config.get("quantization_config")
    if isinstance(entry, Mapping) and entry:
        method = str(entry.get("quant_method", "")).lower()
        if method == "mxfp4":
            return "MXFP4"
        if entry.get("load_in_4bit") or entry.get("_load_in_4bit"):
            return "bitsandbytes 4-bit"
        if entry.get("load_in_8bit") or entry.get("_load_in_8bit"):
            return "bitsandbytes 8-bit"
        return method or "a method that is not named"
    for value in config.values():
        if isinstance(value, Mapping) and (found := said_method(value)) is not None:
            return found
    return None


def _stored(files: Sequence[Path]) -> tuple[str | None, str | None]:
    """(the method whose tensors these are, the dtype of most dense matrices); None for what is not there."""
    counts: dict[str, int] = {}
    packed: str | None = None
    for file in files:
        for name, entry in _header(file).items():
            for pattern, method in _NAMES:
                if re.search(pattern, name):
                    return ("GPTQ" if method == "GPTQ or AWQ" and _has(files, r"\.g_idx$") else method), None
            shape, dtype = entry.get("shape"), str(entry.get("dtype"))
            if isinstance(shape, list) and len(shape) >= 2 and name.endswith("weight"):
                if dtype in _DENSE:
                    counts[dtype] = counts.get(dtype, 0) + 1
                elif dtype.startswith("F8"):
                    packed = "FP8"
                else:
                    packed = packed or f"packed integers ({dtype})"
    return packed, max(counts, key=lambda dtype: counts[dtype]) if counts else None


def _has(files: Sequence[Path], pattern: str) -> bool:
    return any(re.search(pattern, name) for file in files for name in _header(file))


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """Names of a safetensors file with dtype and shape; nothing for a file that cannot be read as one."""
    try:
        with open(file, "rb") as handle:
            (size,) = struct.unpack("<Q", handle.read(8))
            found = json.loads(handle.read(min(size, 100 << 20)))
    except (OSError, ValueError, struct.error):
        return {}  # whoever reads the weights says what is wrong with the file
    entries = found.items() if isinstance(found, dict) else ()
    return {name: entry for name, entry in entries if name != "__metadata__" and isinstance(entry, dict)}

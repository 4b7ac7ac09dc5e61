"""Written by benchmarks/kernels_sweep.py and attention_sweep.py; change candidates there."""

TILES: dict[str, dict[str, dict[str, int]]] = {
    "nf4_dequantize/16": {
        "default": {"BLOCKS": 64, "num_warps": 4},
        "sm_80": {"BLOCKS": 128, "num_warps": 4},
    },
    "nf4_dequantize/32": {
        "default": {"BLOCKS": 64, "num_warps": 4},
        "sm_80": {"BLOCKS": 128, "num_warps": 4},
    },
    "nf4_lora/16": {
        "default": {"BM": 32, "BN": 128, "BK": 16, "num_warps": 4},
        "sm_75": {"BM": 16, "BN": 128, "BK": 16, "num_warps": 4},
    },
    "nf4_lora/32": {
        "default": {"BM": 16, "BN": 128, "BK": 16, "num_warps": 4},
    },
    "rms_norm/16": {
        "default": {"TILE": 2048, "num_warps": 4},
    },
    "rms_norm/32": {
        "default": {"TILE": 2048, "num_warps": 4},
    },
    "rms_norm_backward/16": {
        "default": {"TILE": 2048, "num_warps": 4},
    },
    "rms_norm_backward/32": {
        "default": {"TILE": 2048, "num_warps": 4},
    },
    "rope/16": {
        "default": {"TILE": 2048, "num_warps": 4},
    },
    "rope/32": {
        "default": {"TILE": 1024, "num_warps": 2},
        "sm_75": {"TILE": 2048, "num_warps": 4},
        "sm_80": {"TILE": 2048, "num_warps": 4},
        "sm_120": {"TILE": 2048, "num_warps": 4},
    },
    "gated/16": {
        "default": {"BLOCK": 2048, "num_warps": 4},
    },
    "gated/32": {
        "default": {"BLOCK": 2048, "num_warps": 4},
    },
    "gated_backward/16": {
        "default": {"BLOCK": 1024, "num_warps": 4},
    },
    "gated_backward/32": {
        "default": {"BLOCK": 1024, "num_warps": 4},
    },
    "cross_entropy/16": {
        "default": {"BLOCK": 4096, "ONE_READ": 32768, "num_warps": 8},
        "sm_75": {"BLOCK": 8192, "ONE_READ": 32768, "num_warps": 8},
        "sm_80": {"BLOCK": 8192, "ONE_READ": 32768, "num_warps": 8},
    },
    "cross_entropy/32": {
        "default": {"BLOCK": 4096, "ONE_READ": 16384, "num_warps": 8},
    },
    "cross_entropy_once/16": {
        "default": {"BLOCK": 4096, "num_warps": 8},
        "sm_80": {"BLOCK": 8192, "num_warps": 8},
        "sm_90": {"BLOCK": 8192, "num_warps": 8},
    },
    "cross_entropy_once/32": {
        "default": {"BLOCK": 8192, "num_warps": 8},
    },
    "adam8bit/16": {
        "default": {"BLOCKS": 4, "num_warps": 4},
    },
    "adam8bit/32": {
        "default": {"BLOCKS": 4, "num_warps": 4},
    },
    "attention_d128/16": {
        "default": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
        "sm_100": {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3},
        "sm_120": {"BM": 128, "BN": 32, "num_warps": 8, "num_stages": 2},
        "sm_90": {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2},
    },
    "attention_d128/32": {
        "default": {"BM": 16, "BN": 32, "num_warps": 8, "num_stages": 1},
    },
    "attention_d256/16": {
        "default": {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 2},
        "sm_100": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_80": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 2},
    },
    "attention_d64/16": {
        "default": {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3},
        "sm_120": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    },
    "attention_d64/32": {
        "default": {"BM": 32, "BN": 32, "num_warps": 8, "num_stages": 1},
    },
    "attention_dkdv_d128/16": {
        "default": {"BM": 32, "BN": 64, "num_warps": 8, "num_stages": 2},
    },
    "attention_dkdv_d128/32": {
        "default": {"BM": 16, "BN": 16, "num_warps": 8, "num_stages": 1},
        "sm_120": {"BM": 16, "BN": 32, "num_warps": 8, "num_stages": 1},
    },
    "attention_dkdv_d256/16": {
        "default": {"BM": 32, "BN": 32, "num_warps": 8, "num_stages": 1},
    },
    "attention_dkdv_d64/16": {
        "default": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2},
        "sm_100": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_90": {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 2},
    },
    "attention_dkdv_d64/32": {
        "default": {"BM": 32, "BN": 32, "num_warps": 8, "num_stages": 1},
    },
    "attention_dq_d128/16": {
        "default": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_100": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 3},
        "sm_80": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 3},
        "sm_90": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 3},
    },
    "attention_dq_d128/32": {
        "default": {"BM": 16, "BN": 32, "num_warps": 8, "num_stages": 1},
        "sm_120": {"BM": 32, "BN": 16, "num_warps": 8, "num_stages": 1},
    },
    "attention_dq_d256/16": {
        "default": {"BM": 32, "BN": 32, "num_warps": 8, "num_stages": 2},
        "sm_100": {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 2},
        "sm_80": {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 2},
        "sm_90": {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 2},
    },
    "attention_dq_d64/16": {
        "default": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
        "sm_80": {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2},
    },
    "attention_dq_d64/32": {
        "default": {"BM": 32, "BN": 32, "num_warps": 8, "num_stages": 1},
    },
}

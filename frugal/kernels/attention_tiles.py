"""Written by benchmarks/attention_sweep.py; change candidates there."""

TILES: dict[str, dict[str, dict[str, int]]] = {
    "attention_d128/16": {
        "default": {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3},
        "sm_80": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
        "sm_86": {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3},
        "sm_90": {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2},
    },
    "attention_d128/32": {
        "default": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1},
        "sm_86": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1},
    },
    "attention_d64/16": {
        "default": {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3},
        "sm_100": {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3},
        "sm_120": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3},
        "sm_86": {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3},
        "sm_89": {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3},
        "sm_90": {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3},
    },
    "attention_d64/32": {
        "default": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2},
        "sm_86": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2},
    },
    "attention_dkdv_d128/16": {
        "default": {"BM": 32, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_80": {"BM": 32, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_86": {"BM": 32, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_90": {"BM": 32, "BN": 64, "num_warps": 8, "num_stages": 2},
    },
    "attention_dkdv_d64/32": {
        "default": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1},
        "sm_86": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1},
    },
    "attention_dq_d128/16": {
        "default": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_80": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 3},
        "sm_86": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 2},
        "sm_90": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 3},
    },
    "attention_dq_d128/32": {
        "default": {"BM": 16, "BN": 32, "num_warps": 4, "num_stages": 1},
        "sm_86": {"BM": 16, "BN": 32, "num_warps": 4, "num_stages": 1},
    },
    "attention_dq_d256/32": {
        "default": {"BM": 16, "BN": 16, "num_warps": 4, "num_stages": 1},
        "sm_86": {"BM": 16, "BN": 16, "num_warps": 4, "num_stages": 1},
    },
    "attention_dq_d64/32": {
        "default": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2},
        "sm_86": {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2},
    },
}

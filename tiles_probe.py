"""Times and bits of products of few rows by tile, depth and stages, on a GPU; not kept."""

import torch
from qat_core.exact.functions import linear
from qat_core.exact.operators import forbid_split_sums
from qat_core.exact.slices import add_up, slices_of
from qat_core.nvfp4 import dequantize
from qat_core.rollout.vllm.humming.few_rows import Kernel, Tile, _launch
from tests.integration.test_vllm_humming_tiles import packed_weight, served

forbid_split_sums()
TRIED = {
    8: {Tile(8, 64, 4): [(128, 8), (128, 6), (128, 5), (256, 4), (64, 12)]},
    16: {
        Tile(16, 64, 4): [(128, 6), (128, 5), (128, 4), (64, 8)],
        Tile(16, 32, 4): [(128, 6), (128, 4)],
    },
    32: {
        Tile(32, 64, 4): [(128, 6), (128, 5), (128, 4), (128, 3), (64, 6), (64, 8)],
        Tile(32, 128, 8): [(128, 4), (128, 5), (64, 6)],
    },
    64: {
        Tile(64, 64, 4): [(128, 5), (128, 4), (128, 3), (64, 5), (64, 7)],
        Tile(64, 128, 8): [(128, 6), (128, 4), (128, 3), (64, 6)],
    },
    128: {
        Tile(128, 128, 8): [(64, 6), (64, 4), (64, 5), (128, 3)],
        Tile(64, 128, 8): [(128, 6), (128, 4), (128, 3)],
        Tile(64, 64, 4): [(128, 3), (64, 5)],
    },
    256: {Tile(128, 128, 8): [(64, 6), (64, 4), (128, 3)], Tile(64, 128, 8): [(128, 6), (128, 3)]},
}
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "30b qkv": (5120, 2048),
    "30b o": (2048, 4096),
}
for name, (n, k) in SHAPES.items():
    packed = packed_weight(n, k)
    weight = dequantize(packed)
    slices = slices_of(n, k) if name.endswith(("o", "down")) else 1
    copies = [tuple(t.clone() for t in served(packed)) for _ in range(max(3, 2**28 // (n * k)))]
    for rows, tiles in TRIED.items():
        x = torch.randn(rows, k, device="cuda").bfloat16()
        expected = (add_up if slices > 1 else linear)(x, weight)
        out = x.new_empty(rows, n)
        for tile, ways in tiles.items():
            for stage_k, stages in ways:
                kernel = Kernel(tile, stage_k, stages, slices, False)

                def go(w):
                    _launch(kernel, -(-rows // tile.rows), n, [x, *w, out, x, x, x, rows, n, k, 1])

                label = f"{name:8} {rows:3} {tile.rows}x{tile.columns}x{tile.warps} k{stage_k} s{stages} slices {slices}"
                try:
                    go(copies[0])
                    torch.cuda.synchronize()
                except (RuntimeError, AssertionError) as error:
                    print(label, str(error)[:80])
                    continue
                same = torch.equal(out, expected)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for w in copies:
                        go(w)
                best, a, b = (
                    1e9,
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                for _ in range(4):
                    a.record()
                    for _ in range(4):
                        graph.replay()
                    b.record()
                    torch.cuda.synchronize()
                    best = min(best, a.elapsed_time(b) / 4 / len(copies) * 1e3)
                print(label, f"{best:.2f} us", "equal" if same else "DIFFERS", flush=True)

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


def timed(step):
    step(); torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = 1e9
    for _ in range(4):
        a.record()
        for _ in range(5):
            step()
        b.record(); torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) / 5)
    return best


from qat_core.exact import kernels
for name in ("o", "down", "30b o"):
    n, k = SHAPES[name]
    w = torch.randn(n, k, device="cuda").bfloat16()
    for rows in (2, 8, 64, 300, 1024, 4096, 8192):
        x, out = torch.randn(rows, k, device="cuda").bfloat16(), torch.empty(rows, n, device="cuda").bfloat16()
        pairs = list(zip(x.chunk(2, -1), w.chunk(2, -1), strict=True))
        def mm():
            kernels.add(*(torch.mm(p, c.T, out_dtype=torch.float32) for p, c in pairs), out)
            return out
        def bmm():
            halves = torch.ops.aten.bmm.dtype(x.view(rows, 2, -1).transpose(0, 1), w.view(n, 2, -1).permute(1, 2, 0), torch.float32)
            kernels.add(*halves, out)
            return out
        first = mm().clone()
        print(name, rows, "rows: whole", f"{timed(lambda: linear(x, w)) * 1e3:.1f}", "mm", f"{timed(mm) * 1e3:.1f}", "bmm", f"{timed(bmm) * 1e3:.1f} us", "equal" if torch.equal(first, bmm()) else "DIFFERS", flush=True)

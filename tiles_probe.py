"""Times and bits of products of few rows by tile and slices of K, on a GPU; not kept."""
import sys
import torch
from qat_core.exact.operators import forbid_split_sums
from qat_core.nvfp4 import dequantize
from qat_core.rollout.vllm.humming import few_rows
from qat_core.rollout.vllm.humming.few_rows import Kernel, Tile, _launch
from tests.integration.test_vllm_humming_tiles import packed_weight, served

forbid_split_sums()
ALL = {
    Tile(8, 64, 4, False): [(128, 8)],
    Tile(8, 64, 4, True): [(128, 8), (256, 5)],
    Tile(8, 128, 8, True): [(128, 8), (256, 5)],
    Tile(16, 32, 4, False): [(128, 6)],
    Tile(16, 64, 4, False): [(128, 6)],
    Tile(16, 64, 4, True): [(128, 8), (256, 5)],
    Tile(16, 128, 8, True): [(128, 6)],
    Tile(32, 64, 4, False): [(128, 6)],
    Tile(32, 64, 4, True): [(128, 6), (256, 4)],
    Tile(32, 128, 8, True): [(128, 6)],
    Tile(64, 64, 4, True): [(128, 5)],
    Tile(64, 128, 8, True): [(128, 6)],
    Tile(128, 128, 8, True): [(64, 6)],
}
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
          "30b qkv": (5120, 2048), "30b o": (2048, 4096)}
SLICES = {"qkv": (1, 2), "o": (1, 2, 4), "gate_up": (1,), "down": (1, 2, 3, 4), "30b qkv": (1, 2), "30b o": (1, 2, 4)}
for name, (n, k) in SHAPES.items():
    packed = packed_weight(n, k)
    weight = dequantize(packed)
    copies = [tuple(t.clone() for t in served(packed)) for _ in range(max(3, 2**28 // (n * k)))]
    torch.cuda.synchronize()
    for tile, ways in ALL.items():
        rows = tile.rows
        x = torch.randn(rows, k, device="cuda").bfloat16()
        out = x.new_empty(rows, n)
        for stage_k, stages in ways:
            for slices in SLICES[name]:
                if (k // slices) % stage_k:
                    continue
                kernel = Kernel(tile, stage_k, stages, slices, False)
                def go(w):
                    _launch(kernel, 1, n, [x, *w, out, x, x, x, rows, n, k, 1])
                label = f"{name:8} {rows:3} {tile.columns}x{tile.warps} {'wgmma' if tile.together else 'mma  '} {stage_k} {stages} slices {slices}"
                try:
                    go(copies[0]); torch.cuda.synchronize()
                except (RuntimeError, AssertionError) as error:
                    print(label, str(error)[:100]); continue
                size = k // slices
                total = None
                for at in range(0, k, size):
                    part = torch.mm(x[:, at:at + size], weight[:, at:at + size].T, out_dtype=torch.float32)
                    total = part if total is None else total + part
                same = torch.equal(out, total.bfloat16())
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for w in copies:
                        go(w)
                best = 1e9
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(4):
                    a.record()
                    for _ in range(5):
                        graph.replay()
                    b.record(); torch.cuda.synchronize()
                    best = min(best, a.elapsed_time(b) / 5 / len(copies) * 1e3)
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

@torch.compile
def added(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.bfloat16()

for name, (n, k) in SHAPES.items():
    x = torch.randn(8192, k, device="cuda").bfloat16()
    w = torch.randn(n, k, device="cuda").bfloat16()
    print(name, f"8192 rows, plain {timed(lambda: torch.nn.functional.linear(x, w)):.3f} ms")
    for slices in SLICES[name][1:]:
        size = k // slices
        def by_sum():
            return added([torch.mm(x[:, at:at + size], w[:, at:at + size].T, out_dtype=torch.float32) for at in range(0, k, size)])
        def by_addmm():
            total = torch.mm(x[:, :size], w[:, :size].T, out_dtype=torch.float32)
            for at in range(size, k, size):
                total = torch.addmm(total, x[:, at:at + size], w[:, at:at + size].T, out_dtype=torch.float32)
            return total.bfloat16()
        def by_bmm():
            parts = torch.bmm(x.view(-1, slices, size).transpose(0, 1), w.view(n, slices, size).permute(1, 2, 0), out_dtype=torch.float32)
            return added(list(parts))
        for way in (by_sum, by_addmm, by_bmm):
            try:
                print("   ", slices, way.__name__, f"{timed(way):.3f} ms", "equal" if torch.equal(way(), by_sum()) else "DIFFERS", flush=True)
            except RuntimeError as error:
                print("   ", slices, way.__name__, str(error)[:100])

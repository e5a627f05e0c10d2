"""Times and bits of tiles of few_rows.cu, old and new: python3 fr.py OUT.json (torch and triton only)."""
import json, math, sys, time
from pathlib import Path
from statistics import median
import torch, torch.nn.functional as F
from qat_core.rollout.vllm.humming import few_rows as fr
from qat_core.rollout.vllm.tile_layout import unpack
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
torch.backends.cuda.preferred_blas_library(backend="cublaslt")
HERE = Path(__file__).parent
NEW = (Path(fr.__file__).parent / "few_rows.cu").read_text()
OLD = HERE / "old.cu"  # the file before
COPY = """      arrive_when_copied(full + 8 * turn.slot);
    }
"""
FENCE = """      asm volatile("cp.async.commit_group;");
      if (stage < STAGES - 3) continue;
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      arrive_at(full + 8 * told.slot);
      told.next();
    }
"""
fenced = NEW.replace(COPY, FENCE).replace("Turn turn = {0, 1};\n    for (int stage = 0; stage < stages;", "Turn turn = {0, 1}, told = {0, 0};\n    for (int stage = 0; stage < stages + STAGES - 3;").replace("      wait_at(empty + 8 * turn.slot, turn.parity);\n      fetch", "      if (stage < stages) wait_at(empty + 8 * turn.slot, turn.parity);\n      fetch")
assert "told.next()" in fenced and OLD.exists(), "old.cu is to lie beside this file"
CONSUMER = NEW.replace("wait_at(full + 8 * turn.slot, turn.parity);", 'wait_at(full + 8 * turn.slot, turn.parity), [] { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }();')
assert CONSUMER != NEW
SOURCES = {"consumer": CONSUMER.encode(), "new": NEW.encode(), "old": OLD.read_bytes(), "fence": fenced.encode()}
SMS = 132
out = []

def compiled(source, tile, stage_k, stages, slices, experts=0, together=64, copying=128):
    from torch.cuda._utils import _cuda_load_module, _get_nvrtc_library
    names = {"ROWS": tile.rows, "COLUMNS": tile.columns, "WARPS": tile.warps, "STAGE_K": stage_k, "STAGES": stages, "SLICES": slices, "EXPERTS": experts, "TOGETHER_FROM": together, "COPYING": copying}
    src = SOURCES[source]
    cubin = fr._compile(_get_nvrtc_library(), src, ["-arch=sm_90a", "--std=c++17", *[f"-D{a}={b}" for a, b in names.items()]])
    k = _cuda_load_module(cubin).few_rows
    of_step = 9 * max(64, tile.columns)
    of_stage = stage_k // 16 * of_step + tile.rows * 2 * stage_k
    shared = stages * (-(-of_stage // 1024) * 1024 + 16)
    k.set_shared_memory_config(shared)
    threads = 32 * tile.warps + (copying if tile.rows >= together and source != "old" else 0)
    if experts:
        def call(x, words, scale, mult, order, res):
            pairs, n = res.shape
            k(grid=(len(order[1]), n // tile.columns, 1), block=(threads, 1, 1), args=[x, words, scale, mult, res, *order, pairs, n, x.shape[1], pairs // len(x)], shared_mem=shared)
        return call
    def call(x, words, scale, mult, res):
        rows, kk = x.shape; n = scale.shape[-1]
        k(grid=(-(-rows // tile.rows), n // tile.columns, slices), block=(threads, 1, 1), args=[x, words, scale, mult, res, x, x, x, rows, n, kk, 1], shared_mem=shared)
    return call

def weight(n, k):
    words = torch.randint(-2**31, 2**31 - 1, (k // 16, 2 * n), dtype=torch.int32, device="cuda")
    scale = torch.randint(0x28, 0x48, (k // 16, n), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    return words, scale, torch.full((1,), 2.0**-6, device="cuda")

def timed(calls, rounds=5):
    g = torch.cuda.CUDAGraph(); s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for c in calls[:2]: c()
        torch.cuda.synchronize()
        with torch.cuda.graph(g, stream=s):
            for c in calls: c()
    ts = []
    for _ in range(rounds + 1):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / len(calls))
    return median(ts[1:])

def expected(x, w, slices):
    if slices == 1: return F.linear(x, w)
    h = x.shape[1] // 2
    a = torch.mm(x[:, :h], w[:, :h].T, out_dtype=torch.float32); b = torch.mm(x[:, h:], w[:, h:].T, out_dtype=torch.float32)
    return (a + b).bfloat16()

SMALL = [(s, *o) for o in [((32, 64, 4), 128, 5, 64, 128), ((32, 128, 8), 128, 4, 64, 128), ((16, 64, 4), 128, 5, 64, 128), ((16, 32, 4), 128, 6, 64, 128), ((8, 64, 4), 128, 6, 64, 128)] for s in ("old", "new")]
SMALL += [("new", *o) for o in [((32, 64, 4), 128, 5, 32, 64), ((32, 128, 8), 128, 5, 32, 64), ((32, 128, 8), 128, 5, 32, 128), ((32, 192, 12), 128, 5, 32, 128), ((16, 64, 4), 128, 6, 16, 64), ((16, 128, 8), 128, 6, 16, 64), ((8, 64, 4), 128, 6, 8, 64), ((8, 64, 4), 128, 10, 8, 64), ((8, 128, 8), 128, 8, 8, 64), ((16, 64, 4), 128, 9, 16, 64), ((32, 64, 4), 128, 8, 32, 64), ((64, 128, 8), 128, 6, 64, 64), ((128, 128, 8), 64, 6, 64, 64)]]
def small(budget_s):
    t0 = time.time(); K = 4096
    for source, shape, sk, st, together, copying in SMALL:
        if time.time() - t0 > budget_s: return
        tile = fr.Tile(*shape); n = tile.columns * SMS
        packs = [weight(n, K) for _ in range(1 + int(100e6 // (n * K / 2)))]
        x = torch.randn(4 * tile.rows, K, device="cuda", dtype=torch.bfloat16); res = torch.empty(4 * tile.rows, n, device="cuda", dtype=torch.bfloat16)
        row = dict(source=source, tile=shape, stage_k=sk, stages=st, together=together <= shape[0], copying=copying)
        try:
            call = compiled(source, tile, sk, st, 1, 0, together, copying)
            res.zero_(); call(x, *packs[0], res); torch.cuda.synchronize()
            row["unequal"] = int((res != expected(x, unpack(*packs[0]), 1)).sum())
            for blocks in (1, 2, 4):
                row[f"ns{blocks}"] = round(timed([lambda p=p: call(x[: blocks * tile.rows], *p, res[: blocks * tile.rows]) for p in packs]) * 1e3 / (K / 16), 1)
        except Exception as e:
            row["error"] = str(e)[:200]
        print(row, flush=True); out.append(row)

def bits():
    """Ragged rows, few stages, both slices, all tiles: bits of the new kernel, and that nothing else is written."""
    bad = 0; cases = 0
    for (r, c, w), sk, st, together, copying in [((8, 64, 4), 128, 6, 64, 128), ((16, 32, 4), 128, 6, 64, 128), ((16, 64, 4), 128, 5, 64, 128), ((32, 64, 4), 128, 5, 64, 128), ((32, 128, 8), 128, 4, 64, 128), ((64, 64, 4), 128, 5, 64, 128), ((64, 128, 8), 128, 6, 64, 128), ((64, 192, 12), 128, 5, 64, 128), ((128, 128, 8), 64, 6, 64, 128), ((128, 192, 12), 64, 6, 64, 128), ((32, 64, 4), 128, 5, 32, 64), ((32, 128, 8), 128, 5, 32, 64), ((16, 64, 4), 128, 6, 16, 64), ((8, 64, 4), 128, 6, 8, 64)]:
        for k in (128, 256, 640, 4224):
            for slices in (1, 2):
                step = math.gcd(sk, k // slices)
                if step % 64: continue
                call = compiled("new", fr.Tile(r, c, w), step, st, slices, 0, together, copying)
                n = 2 * math.lcm(c, 64); pack = weight(n, k); full = unpack(*pack)
                for rows in (2, r - 1, r, 3 * r + 5):
                    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16); room = torch.full((rows + 2 * r, n), 7.0, device="cuda", dtype=torch.bfloat16)
                    call(x, *pack, room[:rows]); torch.cuda.synchronize(); cases += 1
                    wrong = int((room[:rows] != expected(x, full, slices)).sum()), int((room[rows:] != 7).sum())
                    if any(wrong): bad += 1; print("BITS", (r, c, w), together, "k", k, "slices", slices, "rows", rows, wrong, flush=True)
    print("bits", cases, "cases", bad, "bad", flush=True)

OPTIONS = {
    (64, 64, 4): [(128, 5), (128, 6), (64, 8)], (64, 128, 8): [(128, 6), (128, 5), (64, 8)], (64, 192, 12): [(128, 5), (64, 8), (64, 6)],
    (128, 64, 4): [(64, 6)], (128, 128, 8): [(64, 6), (64, 8), (128, 4), (128, 5)], (128, 192, 12): [(64, 6), (64, 8), (128, 4)],
}
def tiles(budget_s):
    t0 = time.time(); K = 4096
    for (r, c, w), options in OPTIONS.items():
        tile = fr.Tile(r, c, w); n = c * SMS
        packs = [weight(n, K) for _ in range(1 + int(100e6 // (n * K / 2)))]
        full = unpack(*packs[0])
        x = torch.randn(2 * r, K, device="cuda", dtype=torch.bfloat16); res = torch.empty(2 * r, n, device="cuda", dtype=torch.bfloat16)
        want = {1: expected(x, full, 1), 2: expected(x, full, 2)}
        runs = [(s, o) for o in options for s in (("new", "old", "fence", "consumer") if o == options[0] else ("new",))]
        for source, (sk, st) in runs:
            if time.time() - t0 > budget_s: return
            row = dict(tile=[r, c, w], source=source, stage_k=sk, stages=st)
            try:
                for slices in (1, 2):
                    call = compiled(source, tile, sk, st, slices)
                    res.zero_(); call(x, *packs[0], res); torch.cuda.synchronize()
                    row[f"unequal{slices}"] = int((res != want[slices]).sum())
                    if slices == 1:
                        row["one"] = timed([lambda p=p: call(x[:r], *p, res[:r]) for p in packs]) * 1e3 / (K / 16)
                        row["two"] = timed([lambda p=p: call(x, *p, res) for p in packs]) * 1e3 / (K / 16)
            except Exception as e:
                row["error"] = str(e)[:200]
            print(row, flush=True); out.append(row); json.dump(out, open(sys.argv[1], "w"))

def prefill():
    from qat_core.exact import kernels
    R = 8192
    x = torch.randn(R, 12288, device="cuda", dtype=torch.bfloat16); w = torch.randn(4096, 12288, device="cuda", dtype=torch.bfloat16) * .02
    ref = None
    for chunk in (8192, 4096, 2048, 1024):
        res = torch.empty(R, 4096, device="cuda", dtype=torch.bfloat16)
        def call():
            for a, b in zip(x.split(chunk), res.split(chunk)):
                h = 6144
                p = torch.mm(a[:, :h], w[:, :h].T, out_dtype=torch.float32); q = torch.mm(a[:, h:], w[:, h:].T, out_dtype=torch.float32)
                kernels.add(p, q, b)
        t = timed([call] * 4); ref = res.clone() if ref is None else ref
        print("halves", chunk, t, int((res != ref).sum()), flush=True); out.append(dict(halves=chunk, us=t))
    print("whole", timed([lambda: F.linear(x, w)] * 4), flush=True)
    for name, f in {
        "silu_mul": (lambda g=torch.randn(R, 24576, device="cuda", dtype=torch.bfloat16): kernels.silu_mul(*g.chunk(2, -1))),
        "norm": (lambda a=torch.randn(R, 4096, device="cuda", dtype=torch.bfloat16), b=torch.randn(R, 4096, device="cuda", dtype=torch.bfloat16), c=torch.ones(4096, device="cuda", dtype=torch.bfloat16): kernels.norm(a, c, 1e-6, b)),
    }.items():
        print(name, timed([f] * 4), flush=True)
    for n, k in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
        p = [weight(n, k) for _ in range(4)]
        print("unpack", n, k, timed([lambda q=q: unpack(*q) for q in p]), n * k * 2.5625 / 4.0e6, "us at 4 TB/s", flush=True)

def order_of(ids, rows, count):
    flat = ids.flatten(); pairs = len(flat)
    sorted_ids, experts = [], []
    for e in range(count):
        own = (flat == e).nonzero().flatten().tolist()
        while own:
            part, own = own[:rows], own[rows:]
            sorted_ids += part + [pairs] * (rows - len(part)); experts.append(e)
    most = pairs if pairs < count else count + pairs // rows
    pad = max(0, most - len(experts))
    as_int = lambda v: torch.tensor(v, dtype=torch.int32, device="cuda")
    return as_int(sorted_ids + [pairs] * (pad * rows)), as_int(experts + [-1] * pad), as_int([len(sorted_ids)])

EXPERT_OPTIONS = [  # source, tile, stage_k, stages, together, copying
    ("old", (32, 64, 4), 128, 4, 64, 128), ("old", (32, 128, 8), 128, 4, 64, 128), ("old", (16, 64, 4), 128, 4, 64, 128), ("old", (8, 64, 4), 128, 4, 64, 128),
    ("new", (32, 64, 4), 128, 4, 64, 128), ("new", (32, 64, 4), 128, 4, 32, 128), ("new", (32, 64, 4), 128, 4, 32, 64), ("new", (32, 64, 4), 128, 3, 32, 64), ("new", (32, 128, 8), 128, 4, 64, 128), ("new", (32, 128, 8), 128, 4, 32, 128), ("new", (32, 128, 8), 128, 4, 32, 64), ("new", (32, 128, 8), 128, 3, 32, 64),
    ("new", (16, 64, 4), 128, 4, 64, 128), ("new", (16, 64, 4), 128, 4, 16, 128), ("new", (16, 64, 4), 128, 4, 16, 64), ("new", (16, 128, 8), 128, 4, 16, 64),
    ("new", (8, 64, 4), 128, 4, 64, 128), ("new", (8, 64, 4), 128, 4, 8, 64), ("new", (8, 128, 8), 128, 4, 8, 64), ("new", (64, 64, 4), 128, 3, 64, 64), ("new", (64, 128, 8), 128, 3, 64, 64),
]
def experts(budget_s):
    t0 = time.time(); E, TOP = 128, 8
    for n, k, first in ((1536, 2048, True), (2048, 768, False)):
        words = torch.randint(-2**31, 2**31 - 1, (E, k // 16, 2 * n), dtype=torch.int32, device="cuda")
        scale = torch.randint(0x28, 0x48, (E, k // 16, n), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        mult = torch.full((E,), 2.0**-6, device="cuda")
        for tokens in (256, 128, 32, 512):
            pairs = tokens * TOP
            ids = torch.rand(tokens, E, device="cuda").topk(TOP).indices.int()
            x = torch.randn(tokens if first else pairs, k, device="cuda", dtype=torch.bfloat16)
            want = None
            for source, tile, sk, st, together, copying in EXPERT_OPTIONS:
                if time.time() - t0 > budget_s: return
                if n % tile[1] or (tile[0] == 8 and tokens > 128) or (tile[0] == 64 and tokens < 256): continue
                row = dict(source=source, n=n, tokens=tokens, tile=tile, stages=st, together=together <= tile[0], copying=copying)
                try:
                    call = CACHE.get((source, tile, sk, st, together, copying)) or compiled(source, fr.Tile(*tile), sk, st, 1, 1, together, copying)
                    CACHE[source, tile, sk, st, together, copying] = call
                    order = order_of(ids, tile[0], E); res = torch.zeros(pairs, n, device="cuda", dtype=torch.bfloat16)
                    call(x, words, scale, mult, order, res); torch.cuda.synchronize()
                    want = res.clone() if want is None else want
                    row["unequal"] = int((res != want).sum()); row["us"] = round(timed([lambda: call(x, words, scale, mult, order, res)] * 4), 1)
                except Exception as e:
                    row["error"] = str(e)[:200]
                print(row, flush=True); out.append(row)
CACHE = {}

LAYERS = {"8b qkv": (6144, 4096, 1), "8b o": (4096, 4096, 1), "8b gate_up": (24576, 4096, 1), "8b down": (4096, 12288, 2), "30b qkv": (5120, 2048, 1), "30b o": (2048, 4096, 2)}
BEST = {(64, 128, 8): (128, 6), (64, 192, 12): (128, 5), (128, 128, 8): (64, 6), (128, 192, 12): (64, 6)}
def layers(budget_s):
    from qat_core.exact import kernels
    t0 = time.time(); calls = {}
    for rows in (256, 8192, 128, 1024, 512, 64, 2048):
        for name, (n, k, slices) in LAYERS.items():
            if time.time() - t0 > budget_s: return
            packs = [weight(n, k) for _ in range(1 + int(120e6 // (n * k / 2)))]
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16); w = unpack(*packs[0]); want = expected(x, w, slices)
            row = dict(layer=name, rows=rows); res = torch.empty_like(want)
            for key, (sk, st) in BEST.items():
                if n % key[1] or (rows > 1024 and key[0] < 128): continue
                at = (key, slices)
                if at not in calls: calls[at] = compiled("new", fr.Tile(*key), sk, st, slices)
                res.zero_(); calls[at](x, *packs[0], res); torch.cuda.synchronize()
                unequal = int((res != want).sum())
                row[str(key[:2])] = round(timed([lambda p=p: calls[at](x, *p, res) for p in packs]), 1), unequal
            def halves(w):
                h = k // 2; a = torch.mm(x[:, :h], w[:, :h].T, out_dtype=torch.float32); b = torch.mm(x[:, h:], w[:, h:].T, out_dtype=torch.float32)
                kernels.add(a, b, res)
            product = halves if slices == 2 else (lambda w: F.linear(x, w))
            row["unpacked"] = round(timed([lambda p=p: product(unpack(*p)) for p in packs]), 1)
            ws = [w.clone() for _ in range(1 + int(160e6 // w.nbytes))]
            row["bf16"] = round(timed([lambda w=w: F.linear(x, w) for w in ws]), 1)
            print(row, flush=True); out.append(row); json.dump(out, open(sys.argv[1], "w"))

torch.manual_seed(0)
if len(sys.argv) > 2 and sys.argv[2] == "prefill": prefill()
elif len(sys.argv) > 2 and sys.argv[2] == "bits": bits()
elif len(sys.argv) > 2 and sys.argv[2] == "experts": experts(float(sys.argv[3]))
elif len(sys.argv) > 2 and sys.argv[2] == "small": small(float(sys.argv[3]))
elif len(sys.argv) > 2 and sys.argv[2] == "layers": layers(float(sys.argv[3]))
else: tiles(float(sys.argv[2]) if len(sys.argv) > 2 else 100)
json.dump(out, open(sys.argv[1], "w"))

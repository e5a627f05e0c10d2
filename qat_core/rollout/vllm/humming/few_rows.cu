// BF16 rows times an NVFP4 weight in Humming's layout (`tile_layout.py`), dense or of experts.
//
// Each sum is added along K in its order, by one chain of tensor core instructions of 16 numbers a
// slice, as cuBLAS adds it where it splits no sum: the same bits, for any number of rows. A block of
// threads has ROWS rows of the result and COLUMNS columns, 16 or 8 for each of its WARPS; a warp has
// all of its slice of K. What a stage of STAGE_K numbers needs is copied to shared memory some
// stages before, by every thread that copies from places that only move along K.
//
// Up to 16 rows a warp multiplies by itself (mma.sync), and every warp copies; from 32 on four of
// them multiply together (wgmma), with rows from shared memory, and four more do nothing but copy,
// so that nobody waits for all. What a step needs is read from there while others are unpacked and
// multiplied.
//
// Compiled with ROWS (8, 16, 32, 64 or 128), COLUMNS (32, or 64 to 192), WARPS (4 to 12), STAGE_K
// (64 or 128), STAGES, SLICES (of K, by as many blocks, added in order) and EXPERTS (0 or 1).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define ALONE (ROWS < 32)
constexpr bool TOGETHER = !ALONE;
constexpr int MULTIPLIERS = 32 * WARPS;  // threads
constexpr int COPIERS = 128;
constexpr int THREADS = MULTIPLIERS + (TOGETHER ? COPIERS : 0);
constexpr int EIGHTS = COLUMNS / WARPS / 8;  // of columns, of a warp
constexpr int COPIED = COLUMNS < 64 ? 64 : COLUMNS;  // columns lie in groups of 64
constexpr int STEPS = STAGE_K / 16;
constexpr int AHEAD = STAGES - 1;
// Steps whose codes are unpacked at once, while those before are multiplied. A warp waits at each
// wgmma with columns in registers until that before is done: of many rows, more of them hide less.
constexpr int BATCH = ALONE || STEPS == 4 && ROWS == 32 ? 2 : 128 / ROWS;
constexpr int CODE_BYTES = 8 * COPIED;  // of a step
constexpr int CHUNKS = STAGE_K / 8;  // of a row; a chunk is what one copy brings
// Rows lie in panels of 64 numbers, eight chunks: as wgmma reads them.
constexpr int ROW_BYTES = 128;
constexpr int PANEL_BYTES = ROWS * ROW_BYTES;
constexpr int CODES_AT = STAGE_K / 64 * PANEL_BYTES;
constexpr int SCALES_AT = CODES_AT + STEPS * CODE_BYTES;
constexpr int STAGE_BYTES = (SCALES_AT + STEPS * COPIED + 1023) / 1024 * 1024;
constexpr int CODE_CHUNKS = CODE_BYTES / 16, SCALE_CHUNKS = COPIED / 16;  // of a step
constexpr int STEPS_AT_ONCE = COPIERS / CODE_CHUNKS;
constexpr int CODE_COPIES = STEPS / STEPS_AT_ONCE;  // of a thread, a stage
constexpr int X_COPIES = (ROWS * CHUNKS + COPIERS - 1) / COPIERS;
constexpr int ROWS_AT_ONCE = COPIERS / CHUNKS;
constexpr bool ALL_COPY = ROWS % ROWS_AT_ONCE == 0;  // else some threads have no last row
constexpr int FULL_AT = STAGES * STAGE_BYTES, EMPTY_AT = FULL_AT + 8 * STAGES;  // barriers
static_assert(EIGHTS == 2 || COLUMNS == 32 && WARPS == 4 && ROWS == 16 && !EXPERTS, "no such tile");
static_assert(TOGETHER || MULTIPLIERS == COPIERS && COLUMNS <= 64, "a warp alone copies, too");
static_assert(!EXPERTS || SLICES == 1, "sums of experts are not cut");
static_assert(STEPS / BATCH % 2 == 0, "batches take turns with registers");
static_assert(STEPS % STEPS_AT_ONCE == 0 && COPIERS % CHUNKS == 0, "some is not copied");
static_assert(STAGE_K % 64 == 0, "rows lie in panels of 64 numbers");
static_assert(STEPS * SCALE_CHUNKS <= COPIERS && AHEAD > 1, "too little is copied, or too late");
constexpr float DOWN = 0x1p8f;  // see `factors_of`
using Weights = u32[2 * EIGHTS];  // of a thread: those of a step
using Sums = float[EIGHTS * ROWS / 16][4];

__device__ __forceinline__ void copy16(u32 to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0));
}

// Barriers in shared memory, of `count` arrivals a turn.
__device__ __forceinline__ void set_up(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void arrive_at(u32 barrier, bool does) {  // without a branch, see below
  asm volatile(
      "{\n.reg .pred does;\nsetp.ne.u32 does, %1, 0;\n"
      "@does mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier),
      "r"((u32)does)
      : "memory");
}

// Once all that this thread has copied so far is there.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

// Until the turn of this parity is over; that before the first has parity 1.
__device__ __forceinline__ void wait_at(u32 barrier, u32 parity) {
  u32 over;
  do {
    asm volatile(
        "{\n.reg .pred over;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n}\n"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!over);
}

// As above; wgmma reads by another proxy than copies write by.
__device__ __forceinline__ void wait_for_rows(u32 barrier, u32 parity) {
  wait_at(barrier, parity);
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Stages in turn, as a ring.
struct Turn {
  int slot;
  u32 parity;
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ u32 load32(u32 from) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(from));
  return value;
}

// The scales of a thread's columns, one or two.
__device__ __forceinline__ u32 load_scales(u32 from) {
  u32 value;
  if (EIGHTS == 2)
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=r"(value) : "r"(from));
  else
    asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(value) : "r"(from));
  return value;
}

// Rows of x: 16 of them and the numbers of a step, or eight and the numbers of two.
__device__ __forceinline__ void load_rows(u32 (&x)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from));
}

__device__ __forceinline__ u32 product2(u32 a, u32 b) {
  u32 value;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(value) : "r"(a), "r"(b));
  return value;
}

// Both times half 0 of b, the low one, or half 1.
template <int half>
__device__ __forceinline__ u32 product_half(u32 a, u32 b) {
  u32 value;
  asm("{\n.reg .b16 half0, half1;\n.reg .b32 both;\nmov.b32 {half0, half1}, %2;\n"
      "mov.b32 both, {half%3, half%3};\nmul.rn.bf16x2 %0, %1, both;\n}\n"
      : "=r"(value)
      : "r"(a), "r"(b), "n"(half));
  return value;
}

// Two codes, at bits 0 and 16 of `word >> at`, as BF16 numbers times 2**-126: one product brings the
// sign to bit 15 and the rest to bits 6 to 8.
template <int at>
__device__ __forceinline__ u32 two_codes(u32 word) {
  static_assert(at <= 6, "bits move up");
  return (word & 0x000F000Fu << at) * ((64 + 1) << (6 - at)) & 0x81C081C0u;
}

// Two E4M3 scales, of two columns, as BF16 numbers times 2**118: a code's bits are its value times
// 2**-126, so that their product is times 2**-8, which BF16 holds. A scale's own bits, at the place
// of BF16's exponent, are its value times 2**-120.
__device__ __forceinline__ u32 factors_of(u32 bits) {
  constexpr u32 UP = 0x7B007B00u;  // 2**119, twice
  return product2(product2(bits, UP), UP);
}

// Eight columns of a step, as tensor cores take them.
__device__ __forceinline__ void unpack(u32 (&weights)[2], u32 codes, u32 scale) {
  const u32 factor = factors_of(scale * 0x00100010u);
  weights[0] = product2(two_codes<0>(codes), factor);
  weights[1] = product2(two_codes<4>(codes), factor);
}

// 16 columns of a step.
__device__ __forceinline__ void unpack(u32 (&weights)[4], u32 codes, u32 scales) {
  const u32 factors = factors_of(__byte_perm(scales, 0, 0x4140) * 16);
  weights[0] = product_half<0>(two_codes<0>(codes), factors);
  weights[1] = product_half<1>(two_codes<0>(codes >> 8), factors);
  weights[2] = product_half<0>(two_codes<4>(codes), factors);
  weights[3] = product_half<1>(two_codes<4>(codes >> 8), factors);
}

// 16 rows of x times eight columns, or 16 columns times eight rows.
__device__ __forceinline__ void multiply_add_alone(float (&sum)[4], const u32 (&sixteen)[4],
                                                   u32 eight0, u32 eight1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(sixteen[0]), "r"(sixteen[1]), "r"(sixteen[2]), "r"(sixteen[3]), "r"(eight0),
        "r"(eight1));
}

#if ALONE
// Rows of x for a batch of two steps.
using Rows = u32[ROWS / 8][4];

__device__ __forceinline__ void load_batch(Rows& x, u32 at, int step) {
  const int lane = threadIdx.x % 32, row = lane % ROWS, chunk = 2 * (step % 4) + lane / ROWS;
  const u32 from = at + step / 4 * PANEL_BYTES + row * ROW_BYTES;
#pragma unroll
  for (int of = 0; of < ROWS / 8; ++of) load_rows(x[of], from + (chunk + 2 * of ^ row % 8) * 16);
}

__device__ __forceinline__ void multiply_add(Sums& sums, const Weights (&weights)[2],
                                             const Rows& x) {
#pragma unroll
  for (int of = 0; of < 2; ++of) {
#if ROWS == 8
    multiply_add_alone(sums[0], weights[of], x[0][2 * of], x[0][2 * of + 1]);
#else
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight)
      multiply_add_alone(sums[eight], x[of], weights[of][eight], weights[of][EIGHTS + eight]);
#endif
  }
}

__device__ __forceinline__ void wait_for_all(Sums&) {}
#else
#define FOUR(i) "+f"(s[i][0]), "+f"(s[i][1]), "+f"(s[i][2]), "+f"(s[i][3])
#define EIGHT(i) FOUR(i), FOUR(i + 1)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 2)
#define THIRTY_TWO(i) SIXTEEN(i), SIXTEEN(i + 4)
#define NAMES_0_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_0_31                                                                             \
  NAMES_0_15                                                                                   \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_0_63                                                                             \
  NAMES_0_31                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49" \
  ", %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PRODUCT(n, sums, columns, rows)                                                     \
  "{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n       \
  "k16.f32.bf16.bf16 {" sums "}, {" columns "}, " rows ", adds, 1, 1, 0;\n}\n"

// All rows of x, at a descriptor in shared memory, times what the four warps hold in registers.
__device__ __forceinline__ void multiply_add_together(Sums& s, const u32 (&a)[4],
                                                      unsigned long long rows) {
#if ROWS == 32
  asm volatile(PRODUCT("32", NAMES_0_15, "%16, %17, %18, %19", "%20")
               : SIXTEEN(0)
#elif ROWS == 64
  asm volatile(PRODUCT("64", NAMES_0_31, "%32, %33, %34, %35", "%36")
               : THIRTY_TWO(0)
#else
  asm volatile(PRODUCT("128", NAMES_0_63, "%64, %65, %66, %67", "%68")
               : THIRTY_TWO(0), THIRTY_TWO(8)
#endif
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}

// Begins to add the products of a batch with the rows of a stage, which lie at `at`. That is to be
// the same register of all warps: else each product waits until its descriptor has been moved there.
__device__ __forceinline__ void multiply_add(Sums& sums, const Weights (&weights)[BATCH], u32 at,
                                             int step) {
  // swizzled in 128 bytes; groups of eight rows are 1,024 bytes apart
  constexpr unsigned long long LAYOUT = 1ull << 62 | 64ull << 32 | 1ull << 16;
  const unsigned long long rows = LAYOUT | at >> 4;
  asm volatile("wgmma.fence.sync.aligned;\n");
#pragma unroll
  for (int of = step; of < step + BATCH; ++of)
    multiply_add_together(sums, weights[of - step], rows + (of / 4 * PANEL_BYTES + of % 4 * 32) / 16);
  asm volatile("wgmma.commit_group.sync.aligned;\n");
}

// For all batches but the last one that was begun.
__device__ __forceinline__ void wait_for_those_before() {
  asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
}

// The compiler is to read no sum before.
__device__ __forceinline__ void wait_for_all(Sums& sums) {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
  for (int of = 0; of < sizeof(Sums) / 16; ++of)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[of][i])::"memory");
}
#endif

__device__ __forceinline__ u32 rounded2(float first, float second) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;\n" : "=r"(both) : "f"(first), "f"(second));
  return both;
}

// Into shared memory, rounded.
__device__ __forceinline__ void store16(u32 to, float value) {
  asm volatile("{\n.reg .b16 rounded;\ncvt.rn.bf16.f32 rounded, %1;\nst.shared.b16 [%0], rounded;\n}\n" ::
                   "r"(to), "f"(value));
}

__device__ __forceinline__ void store32(u32 to, u32 both) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to), "r"(both));
}

__device__ __forceinline__ void copy_out(u16* to, u32 from) {
  uint4 eight;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
               : "r"(from));
  *reinterpret_cast<uint4*>(to) = eight;
}

__device__ __forceinline__ void meet_multipliers() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(MULTIPLIERS) : "memory");
}

// Whether this block of its cluster adds and stores these sums.
__device__ __forceinline__ bool owns(int of) { return SLICES == 1 || of % SLICES == blockIdx.z; }

#if SLICES > 1
static_assert(STAGES * STAGE_BYTES >= MULTIPLIERS * sizeof(Sums), "sums do not fit where stages lay");
#define CLUSTER __cluster_dims__(1, 1, SLICES)
__device__ __forceinline__ void meet_slices() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The sums of a cluster's blocks, in the order of slices; each block adds those that it owns.
__device__ __forceinline__ void add_slices(Sums& sums, u32 shared) {
  const u32 mine = shared + threadIdx.x * 16;
  __syncthreads();  // stages are read no more
#pragma unroll
  for (int of = 0; of < sizeof(Sums) / 16; ++of)
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(mine + of * MULTIPLIERS * 16),
                 "f"(sums[of][0]), "f"(sums[of][1]), "f"(sums[of][2]), "f"(sums[of][3]));
  meet_slices();
#pragma unroll
  for (int of = 0; of < sizeof(Sums) / 16; ++of) {
    if (!owns(of)) continue;
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
      u32 from;
      float part[4];
      asm("mapa.shared::cluster.u32 %0, %1, %2;\n"
          : "=r"(from)
          : "r"(mine + of * MULTIPLIERS * 16), "r"(slice));
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                   : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                   : "r"(from));
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[of][i] = slice ? sums[of][i] + part[i] : part[i];
    }
  }
  meet_slices();  // a block's memory is there until others have read it
}
#else
#define CLUSTER
__device__ __forceinline__ void add_slices(Sums&, u32) {}
#endif

// x (rows, K) or, of experts, rows that `sorted_ids / top_k` names; out (rows, N) or (pairs, N).
extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER
    few_rows(const u16* x, const u32* words, const u8* scale, const float* multiplier, u16* out,
             const int* sorted_ids, const int* expert_ids, const int* num_padded, int rows, int n,
             int k, int top_k) {
  extern __shared__ __align__(1024) u8 memory[];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int group = lane / 4, pair = lane % 4;
  const int first = blockIdx.x * ROWS, tile = blockIdx.y;
#if EXPERTS
  const int padded = num_padded[0], expert = expert_ids[blockIdx.x];  // read at once
  if (first >= padded || expert < 0) return;
  words += (long long)expert * (k / 16) * 2 * n;
  scale += (long long)expert * (k / 16) * n;
  multiplier += expert;
  // Row of the result, or anything from `rows` on where there is none.
  auto out_row = [&](int row) { return sorted_ids[first + row]; };
#else
  auto out_row = [&](int row) { return first + row; };
#endif
  words += (long long)blockIdx.z * (k / SLICES / 16) * 2 * n;
  scale += (long long)blockIdx.z * (k / SLICES / 16) * n;
  x += blockIdx.z * (k / SLICES);
  u32 shared;
  asm("{.reg .u64 a;\n cvta.to.shared.u64 a, %1;\n cvt.u32.u64 %0, a;}\n"
      : "=r"(shared)
      : "l"(memory));

  // What this thread copies, from where and to where of a stage.
  const int copier = TOGETHER ? thread - MULTIPLIERS : thread;
  const int column0 = tile * COLUMNS / COPIED * COPIED;
  u32 x_from[X_COPIES];
  bool has_row[X_COPIES];
  if (copier >= 0) {
    words += (long long)(copier / CODE_CHUNKS) * 2 * n + 2 * column0 + copier % CODE_CHUNKS * 4;
    scale += (long long)(copier / SCALE_CHUNKS) * n + column0 + copier % SCALE_CHUNKS * 16;
#pragma unroll
    for (int copy = 0; copy < X_COPIES; ++copy) {
      const int row = copier / CHUNKS + copy * ROWS_AT_ONCE;
      const int id = row < ROWS ? out_row(row) : rows;
      has_row[copy] = id < rows;
      x_from[copy] = (id < rows ? EXPERTS ? id / top_k : id : 0) * k + copier % CHUNKS * 8;
    }
  }
  // Swizzled as wgmma has it: the same chunk of eight rows lies in different banks.
  auto x_to = [&](int copy) {
    const int row = copier / CHUNKS + copy * ROWS_AT_ONCE, chunk = copier % CHUNKS;
    return chunk / 8 * PANEL_BYTES + row * ROW_BYTES + (chunk % 8 ^ row % 8) * 16;
  };
  const int stages = k / SLICES / STAGE_K;
  auto fetch = [&](int stage, u32 to) {
    if (stage < stages) {
#pragma unroll
      for (int copy = 0; copy < CODE_COPIES; ++copy) {
        if (COPIERS % CODE_CHUNKS == 0 || copier < CODE_CHUNKS * STEPS_AT_ONCE)
          copy16(to + CODES_AT + copy * STEPS_AT_ONCE * CODE_BYTES + copier * 16, words, true);
        words += STEPS_AT_ONCE * 2 * n;
      }
      if (copier < STEPS * SCALE_CHUNKS) copy16(to + SCALES_AT + copier * 16, scale, true);
      scale += (long long)STEPS * n;
#pragma unroll
      for (int copy = 0; copy < X_COPIES; ++copy) {
        if (ALL_COPY || copier / CHUNKS + copy * ROWS_AT_ONCE < ROWS)
          copy16(to + x_to(copy), x + x_from[copy], has_row[copy]);
        x_from[copy] += STAGE_K;
      }
    }
    if (!TOGETHER) asm volatile("cp.async.commit_group;\n");
  };
#if !ALONE
  const u32 full = shared + FULL_AT, empty = shared + EMPTY_AT;
  if (thread < STAGES) {
    set_up(full + 8 * thread, COPIERS);
    set_up(empty + 8 * thread, WARPS);
  }
  __syncthreads();
  if (copier >= 0) {
    Turn turn = {0, 1};
    for (int stage = 0; stage < stages; ++stage, turn.next()) {
      wait_at(empty + 8 * turn.slot, turn.parity);
      fetch(stage, shared + turn.slot * STAGE_BYTES);
      arrive_when_copied(full + 8 * turn.slot);
    }
    asm volatile("cp.async.wait_all;\n");
    return;
  }
#else
  for (int stage = 0; stage < AHEAD; ++stage) fetch(stage, shared + stage * STAGE_BYTES);
#endif

  // Which of a thread's four words, differently for the quarters of a warp, lest they share banks.
  const int word = (warp + lane / 8) % 4;
  const int columns64 = EIGHTS == 2 ? warp / 4 : 0;
  const int half = EIGHTS == 2 ? 0 : tile % 2;  // of the word's 16 columns, where a warp has eight
  const u32 codes_at = CODES_AT + columns64 * 512 + lane * 16 + word * 4;
  const u32 scales_at = SCALES_AT + columns64 * 64 + group * 8 + word * 2 + half;
  u32 codes[STEPS], bytes[STEPS];
  auto load = [&](int step, u32 at) {
    codes[step] = load32(at + codes_at + step * CODE_BYTES);
    bytes[step] = load_scales(at + scales_at + step * COPIED);
  };
  const u32 end = shared + STAGES * STAGE_BYTES;
  auto after = [&](u32 at) { return at + STAGE_BYTES == end ? shared : at + STAGE_BYTES; };
  const float factor = multiplier[0] * DOWN;
  Sums sums = {};
  u32 at = shared;
#if ALONE
  u32 to = shared + AHEAD * STAGE_BYTES;
  auto arrive = [&]() {  // all but the last stages that were fetched
    asm volatile("cp.async.wait_group %0;\n" ::"n"(AHEAD - 2));
    __syncthreads();
  };
  arrive();
  Rows x_of[2];
  load_batch(x_of[0], at, 0);
#else
  Turn turn = {0, 0}, done = {0, 0};  // of the stage that comes next; of the first not told of
  wait_for_rows(full, 0);
  turn.next();
#endif
#pragma unroll
  for (int step = 0; step < STEPS; ++step) load(step, at);
  for (int stage = 0; stage < stages; ++stage) {
    const u32 next = after(at);
#if ALONE
    fetch(stage + AHEAD, to);
    to = after(to);
#else
    // Here and nowhere below: with a branch between two products ptxas puts one after the other
    // (its C7513).
    if (stage + 1 < stages) wait_for_rows(full + 8 * turn.slot, turn.parity);
    const u32 of_all = __shfl_sync(~0u, at, 0);
#endif
    Weights weights[2][BATCH];
#pragma unroll
    for (int step = 0; step < STEPS; step += BATCH) {
      const int turns = step / BATCH % 2;
#pragma unroll
      for (int of = step; of < step + BATCH; ++of) {
        unpack(weights[turns][of - step], codes[of] >> 8 * half, bytes[of]);
        if (!TOGETHER) load(of, next);
      }
#if ALONE
      const bool is_last = step + BATCH == STEPS;
      load_batch(x_of[1 - turns], is_last ? next : at, is_last ? 0 : step + BATCH);
      multiply_add(sums, weights[turns], x_of[turns]);
#else
      multiply_add(sums, weights[turns], of_all, step);
#pragma unroll
      for (int of = step; of < step + BATCH; ++of) load(of, next);
      wait_for_those_before();
      if (step == 0) {  // what was multiplied before this batch has been read
        arrive_at(empty + 8 * done.slot, stage && lane == 0);
        if (stage) done.next();
      }
#endif
    }
    at = next;
#if ALONE
    arrive();
#else
    turn.next();
#endif
  }
  wait_for_all(sums);
  add_slices(sums, shared);

  // Through shared memory, as a thread's numbers lie far apart in the result; 16 rows of a dense one
  // are faster without.
  constexpr int OUT_BYTES = COLUMNS * 2 + 16;  // of a row, lest rows share banks
  constexpr int OUT_CHUNKS = COLUMNS / 8;
  static_assert(STAGES * STAGE_BYTES >= ROWS * OUT_BYTES, "the result does not fit where stages lay");
  constexpr bool BY_ROW = ROWS == 16;  // a thread has numbers of a row, not of a column
  constexpr bool AT_ONCE = BY_ROW && !EXPERTS;
  auto place = [&](int row, int column) { return shared + row * OUT_BYTES + column * 2; };
  auto out_at = [&](int id, int column) { return out + (long long)id * n + column0 + column; };
  if (!AT_ONCE) meet_multipliers();  // stages are read no more
#pragma unroll
  for (int of = 0; of < ROWS / 8; ++of) {
    if constexpr (BY_ROW) {
      const int row = of * 8 + group, id = out_row(row);
#pragma unroll
      for (int eight = 0; eight < EIGHTS; ++eight) {
        const int column = (warp + pair) % 4 * 16 + (eight + half) * 8 + pair * 2;
        const float* sum = sums[eight] + of * 2;
        const u32 both = rounded2(sum[0] * factor, sum[1] * factor);
        if (!AT_ONCE)
          store32(place(row, column), both);
        else if (id < rows && owns(eight))
          *reinterpret_cast<u32*>(out_at(id, column)) = both;
      }
    } else {
#pragma unroll
      for (int which = 0; which < 4; ++which) {
        const int column = columns64 * 64 + word * 16 + which / 2 * 8 + group;
        store16(place(of * 8 + pair * 2 + which % 2, column), sums[of][which] * factor);
      }
    }
  }
  if (AT_ONCE) return;
  meet_multipliers();
  for (int at = thread; at < ROWS * OUT_CHUNKS; at += MULTIPLIERS) {
    const int row = at / OUT_CHUNKS, chunk = at % OUT_CHUNKS, id = out_row(row);
    if (id >= rows || !owns(row / 8)) continue;
    copy_out(out_at(id, chunk * 8), place(row, chunk * 8));
  }
}

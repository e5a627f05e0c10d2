// BF16 rows times an NVFP4 weight in Humming's layout (`tile_layout.py`), dense or of experts.
//
// Each sum is added along K in its order, by one chain of tensor core instructions of 16 numbers, as
// cuBLAS adds it where it splits no sum: the same bits, for any number of rows. A block of threads
// has 16 columns of the result for each of its WARPS, and 8 * TILES rows; a warp has 16 of the
// columns and all of K. What a stage of STAGE_K numbers needs is copied to shared memory some stages
// before, by every thread from places that only move along K.
//
// Up to 16 rows a warp multiplies by itself (mma.sync). From 64 on four of them do so together
// (wgmma), with rows from shared memory, while the next codes are unpacked.
//
// Compiled with TILES (1, 2, 8 or 16), WARPS (4 or 8), STAGE_K (64, 128 or 256), STAGES and
// EXPERTS (0 or 1).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 16 * WARPS;
constexpr int STEPS = STAGE_K / 16;
constexpr int ROWS = 8 * TILES;
constexpr bool TOGETHER = TILES >= 8;
constexpr int AHEAD = TOGETHER ? STAGES - 2 : STAGES - 1;  // the last stage may still be read
// Steps whose codes are unpacked at once, while those before are multiplied: two batches at least,
// as they take turns with the registers.
constexpr int BATCH = TOGETHER && STEPS >= 8 ? 4 : 2;
constexpr int CODE_BYTES = 8 * COLUMNS;  // of a step
constexpr int CHUNKS = STAGE_K / 8;  // of a row; a chunk is what one copy brings
// Rows lie in slices of 64 numbers, eight chunks: as wgmma reads them.
constexpr int ROW_BYTES = 128;
constexpr int SLICE_BYTES = ROWS * ROW_BYTES;
constexpr int CODES_AT = STAGE_K / 64 * SLICE_BYTES;
constexpr int SCALES_AT = CODES_AT + STEPS * CODE_BYTES;
constexpr int STAGE_BYTES = (SCALES_AT + STEPS * COLUMNS + 1023) / 1024 * 1024;
constexpr int CODE_COPIES = STEPS / 4;  // of a thread, a stage; four steps are copied at once
constexpr int SCALE_COPIES = STEPS * COLUMNS / 16;
constexpr int X_COPIES = (ROWS * CHUNKS + THREADS - 1) / THREADS;
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;
static_assert(SCALE_COPIES <= THREADS && AHEAD > 0, "too little is copied, or too late");
constexpr float DOWN = 0x1p8f;  // see `factors_of`

__device__ __forceinline__ void copy16(u32 to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0));
}

__device__ __forceinline__ u32 load32(u32 from) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(from));
  return value;
}

__device__ __forceinline__ u32 load16(u32 from) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(from));
  return value;
}

// Eight rows of x, the numbers of two steps.
__device__ __forceinline__ void load_rows(u32 (&b)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(from));
}

__device__ __forceinline__ u32 product2(u32 a, u32 b) {
  u32 value;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(value) : "r"(a), "r"(b));
  return value;
}

// Two codes, at bits 0 and 16 of `word >> at`, as BF16 numbers times 2**-126.
template <int at>
__device__ __forceinline__ u32 two_codes(u32 word) {
  const u32 sign = word << (12 - at);
  const u32 rest = at <= 6 ? word << (at <= 6 ? 6 - at : 0) : word >> (at > 6 ? at - 6 : 0);
  return (sign & 0x80008000u) | (rest & 0x01C001C0u);
}

// Two E4M3 scales, of two columns, as BF16 numbers times 2**118: a code's bits are its value times
// 2**-126, so that their product is times 2**-8, which BF16 holds. A scale's own bits, at the place
// of BF16's exponent, are its value times 2**-120.
__device__ __forceinline__ u32 factors_of(u32 bytes) {
  constexpr u32 UP = 0x7B007B00u;  // 2**119, twice
  const u32 bits = __byte_perm(bytes, 0, 0x4140) << 4;
  return product2(product2(bits, UP), UP);
}

// 16 columns of a step, as tensor cores take them.
__device__ __forceinline__ void unpack(u32 (&a)[4], u32 codes, u32 scales) {
  const u32 factors = factors_of(scales);
  const u32 low = __byte_perm(factors, 0, 0x1010), high = __byte_perm(factors, 0, 0x3232);
  a[0] = product2(two_codes<0>(codes), low);
  a[1] = product2(two_codes<8>(codes), high);
  a[2] = product2(two_codes<4>(codes), low);
  a[3] = product2(two_codes<12>(codes), high);
}

__device__ __forceinline__ void multiply_add_alone(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 64 rows of x, at a descriptor in shared memory, times what the four warps hold in registers.
__device__ __forceinline__ void multiply_add_together(float (&s)[8][4], const u32 (&a)[4],
                                                      unsigned long long rows) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
      "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
      "%27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n}\n"
      : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]),
        "+f"(s[1][2]), "+f"(s[1][3]), "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
        "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3]), "+f"(s[4][0]), "+f"(s[4][1]),
        "+f"(s[4][2]), "+f"(s[4][3]), "+f"(s[5][0]), "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]),
        "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]), "+f"(s[7][0]), "+f"(s[7][1]),
        "+f"(s[7][2]), "+f"(s[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}

// Adds the products of some steps with the rows of a stage, which lie at `at`.
#if TILES < 8
__device__ __forceinline__ void multiply_add(float (&sums)[TILES][4], const u32 (&a)[2][4], u32 at,
                                             int step) {
  const int lane = threadIdx.x % 32, chunk = 2 * (step % 4) + lane / 8;
  const u32 from = at + step / 4 * SLICE_BYTES + lane % 8 * ROW_BYTES + (chunk ^ lane % 8) * 16;
#pragma unroll
  for (int of = 0; of < TILES; ++of) {
    u32 b[4];
    load_rows(b, from + of * 8 * ROW_BYTES);
    multiply_add_alone(sums[of], a[0], b[0], b[1]);
    multiply_add_alone(sums[of], a[1], b[2], b[3]);
  }
}

__device__ __forceinline__ void wait_for_all() {}
#else
__device__ __forceinline__ void multiply_add(float (&sums)[TILES][4], const u32 (&a)[BATCH][4], u32 at,
                                             int step) {
  // swizzled in 128 bytes; groups of eight rows are 1,024 bytes apart
  constexpr unsigned long long LAYOUT = 1ull << 62 | 64ull << 32 | 1ull << 16;
  const u32 from = at + step / 4 * SLICE_BYTES + step % 4 * 32;
  asm volatile("wgmma.fence.sync.aligned;\n");
#pragma unroll
  for (int of = 0; of < BATCH; ++of) {
#pragma unroll
    for (int rows = 0; rows < ROWS; rows += 64) {
      auto& some = reinterpret_cast<float(&)[8][4]>(sums[rows / 8]);
      multiply_add_together(some, a[of], LAYOUT | (from + rows * ROW_BYTES + of * 32) >> 4);
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned;\n");
  asm volatile("wgmma.wait_group.sync.aligned 1;\n");
}

__device__ __forceinline__ void wait_for_all() {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n");
}
#endif

__device__ __forceinline__ void store(u16* out, float value) {
  u16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;\n" : "=h"(rounded) : "f"(value));
  *out = rounded;
}

// x (rows, K) or, of experts, rows that `sorted_ids / top_k` names; out (rows, N) or (pairs, N).
extern "C" __global__ void __launch_bounds__(THREADS)
    few_rows(const u16* x, const u32* words, const u8* scale, const float* multiplier, u16* out,
             const int* sorted_ids, const int* expert_ids, const int* num_padded, int rows, int n,
             int k, int top_k) {
  extern __shared__ __align__(1024) u8 memory[];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int group = lane / 4, pair = lane % 4;
  const int first = blockIdx.x * ROWS, tile = blockIdx.y;
#if EXPERTS
  if (first >= num_padded[0]) return;
  const int expert = expert_ids[blockIdx.x];
  if (expert < 0) return;
  words += (long long)expert * (k / 16) * 2 * n;
  scale += (long long)expert * (k / 16) * n;
  multiplier += expert;
  // Row of the result, or anything from `rows` on where there is none.
  auto out_row = [&](int row) { return sorted_ids[first + row]; };
#else
  auto out_row = [&](int row) { return first + row; };
#endif
  u32 shared;
  asm("{.reg .u64 a;\n cvta.to.shared.u64 a, %1;\n cvt.u32.u64 %0, a;}\n"
      : "=r"(shared)
      : "l"(memory));

  // What this thread copies, from where and to where of a stage.
  words += (long long)(thread / (COLUMNS / 2)) * 2 * n + tile * 2 * COLUMNS +
           thread % (COLUMNS / 2) * 4;
  scale += (long long)(thread / WARPS) * n + tile * COLUMNS + thread % WARPS * 16;
  u32 x_from[X_COPIES];
  bool has_row[X_COPIES];
#pragma unroll
  for (int copy = 0; copy < X_COPIES; ++copy) {
    const int row = thread / CHUNKS + copy * ROWS_AT_ONCE;
    const int id = row < ROWS ? out_row(row) : rows;
    has_row[copy] = id < rows;
    x_from[copy] = (id < rows ? id / top_k : 0) * k + thread % CHUNKS * 8;
  }
  // Swizzled as wgmma has it: the same chunk of eight rows lies in different banks.
  auto x_to = [&](int copy) {
    const int row = thread / CHUNKS + copy * ROWS_AT_ONCE, chunk = thread % CHUNKS;
    return chunk / 8 * SLICE_BYTES + row * ROW_BYTES + (chunk % 8 ^ row % 8) * 16;
  };
  const int stages = k / STAGE_K;
  auto fetch = [&](int stage, u32 to) {
    if (stage < stages) {
#pragma unroll
      for (int copy = 0; copy < CODE_COPIES; ++copy) {
        copy16(to + CODES_AT + copy * 4 * CODE_BYTES + thread * 16, words, true);
        words += 8 * n;
      }
      if (thread < SCALE_COPIES) copy16(to + SCALES_AT + thread * 16, scale, true);
      scale += (long long)STEPS * n;
#pragma unroll
      for (int copy = 0; copy < X_COPIES; ++copy) {
        if (ROWS * CHUNKS >= THREADS || thread < ROWS * CHUNKS)
          copy16(to + x_to(copy), x + x_from[copy], has_row[copy]);
        x_from[copy] += STAGE_K;
      }
    }
    asm volatile("cp.async.commit_group;\n");
  };
  for (int stage = 0; stage < AHEAD; ++stage) fetch(stage, shared + stage * STAGE_BYTES);

  // Which of a thread's four words, differently for the quarters of a warp, lest they share banks.
  const int word = (warp + lane / 8) % 4;
  const u32 codes_at = CODES_AT + warp / 4 * 512 + lane * 16 + word * 4;
  const u32 scales_at = SCALES_AT + warp / 4 * 64 + group * 8 + word * 2;
  const u32 end = shared + STAGES * STAGE_BYTES;
  float sums[TILES][4] = {};
  u32 at = shared, to = shared + AHEAD * STAGE_BYTES;
  for (int stage = 0; stage < stages; ++stage) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(AHEAD - 1));
    if (TOGETHER) asm volatile("fence.proxy.async.shared::cta;\n");
    __syncthreads();
    u32 codes[STEPS], bytes[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      codes[step] = load32(at + codes_at + step * CODE_BYTES);
      bytes[step] = load16(at + scales_at + step * COLUMNS);
    }
    fetch(stage + AHEAD, to);
    to = to + STAGE_BYTES == end ? shared : to + STAGE_BYTES;
    u32 a[2][BATCH][4];
#pragma unroll
    for (int step = 0; step < STEPS; step += BATCH) {
      auto& of_batch = a[step / BATCH % 2];
#pragma unroll
      for (int of = 0; of < BATCH; ++of) unpack(of_batch[of], codes[step + of], bytes[step + of]);
      multiply_add(sums, of_batch, at, step);
    }
    at = at + STAGE_BYTES == end ? shared : at + STAGE_BYTES;
  }
  wait_for_all();

  const float factor = multiplier[0] * DOWN;
  const int column = tile * COLUMNS + warp / 4 * 64 + word * 16 + group;
#pragma unroll
  for (int of = 0; of < TILES; ++of) {
#pragma unroll
    for (int which = 0; which < 4; ++which) {
      const int row = out_row(of * 8 + pair * 2 + which % 2);
      if (row < rows)
        store(out + (long long)row * n + column + which / 2 * 8, sums[of][which] * factor);
    }
  }
}

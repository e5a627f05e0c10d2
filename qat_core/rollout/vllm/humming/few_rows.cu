// BF16 rows times an NVFP4 weight in Humming's layout (`tile_layout.py`), dense or of experts.
//
// Each sum is added along K in its order, by one chain of tensor core instructions of 16 numbers, as
// cuBLAS adds it where it splits no sum: the same bits, for any number of rows. A block of threads
// has 16 columns of the result for each of its WARPS, and 8 * TILES rows; a warp has 16 of the
// columns and all of K. What a stage of STAGE_K numbers needs is copied to shared memory some stages
// before, by every thread from places that only move along K.
//
// Compiled with TILES, WARPS (4 or 8), STAGE_K (64, 128 or 256), STAGES and EXPERTS (0 or 1).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 16 * WARPS;
constexpr int STEPS = STAGE_K / 16;
constexpr int ROWS = 8 * TILES;
constexpr int CODE_BYTES = 8 * COLUMNS;  // of a step
constexpr int ROW_BYTES = 2 * STAGE_K;
constexpr int CHUNKS = ROW_BYTES / 16;  // of a row; a chunk is what one copy brings
constexpr int SCALES_AT = STEPS * CODE_BYTES;
constexpr int X_AT = SCALES_AT + STEPS * COLUMNS;
constexpr int STAGE_BYTES = X_AT + ROWS * ROW_BYTES;
constexpr int CODE_COPIES = STEPS / 4;  // of a thread, a stage; four steps are copied at once
constexpr int SCALE_COPIES = STEPS * COLUMNS / 16;
constexpr int X_COPIES = (ROWS * CHUNKS + THREADS - 1) / THREADS;
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;
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

__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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
  extern __shared__ __align__(128) u8 memory[];
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
  const u16* x_from[X_COPIES];
  bool has_row[X_COPIES];
#pragma unroll
  for (int copy = 0; copy < X_COPIES; ++copy) {
    const int row = thread / CHUNKS + copy * ROWS_AT_ONCE;
    const int id = row < ROWS ? out_row(row) : rows;
    has_row[copy] = id < rows;
    x_from[copy] = x + (long long)(id < rows ? id / top_k : 0) * k + thread % CHUNKS * 8;
  }
  // Swizzled: the same chunk of eight rows lies in different banks. Rows of a thread's copies are
  // apart by ROWS_AT_ONCE, so that only fewer than eight of them change the place.
  auto x_to = [&](int copy) {
    const int row = thread / CHUNKS + copy * ROWS_AT_ONCE;
    return X_AT + row * ROW_BYTES + ((thread % CHUNKS) ^ (row & 7)) * 16;
  };
  const int stages = k / STAGE_K;
  auto fetch = [&](int stage, u32 to) {
    if (stage < stages) {
#pragma unroll
      for (int copy = 0; copy < CODE_COPIES; ++copy) {
        copy16(to + copy * 4 * CODE_BYTES + thread * 16, words, true);
        words += 8 * n;
      }
      if (thread < SCALE_COPIES) copy16(to + SCALES_AT + thread * 16, scale, true);
      scale += (long long)STEPS * n;
#pragma unroll
      for (int copy = 0; copy < X_COPIES; ++copy) {
        if (ROWS * CHUNKS >= THREADS || thread < ROWS * CHUNKS)
          copy16(to + x_to(copy), x_from[copy], has_row[copy]);
        x_from[copy] += STAGE_K;
      }
    }
    asm volatile("cp.async.commit_group;\n");
  };
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage, shared + stage * STAGE_BYTES);

  // Which of a thread's four words, differently for the quarters of a warp, lest they share banks.
  const int word = (warp + lane / 8) % 4;
  const u32 codes_at = warp / 4 * 512 + lane * 16 + word * 4;
  const u32 scales_at = SCALES_AT + warp / 4 * 64 + group * 8 + word * 2;
  const u32 rows_at = X_AT + lane % 8 * ROW_BYTES;
  float sums[TILES][4] = {};
  u32 at = shared, to = shared + (STAGES - 1) * STAGE_BYTES;
  for (int stage = 0; stage < stages; ++stage) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2));
    __syncthreads();
    u32 codes[STEPS], bytes[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      codes[step] = load32(at + codes_at + step * CODE_BYTES);
      bytes[step] = load16(at + scales_at + step * COLUMNS);
    }
    fetch(stage + STAGES - 1, to);
    to = to == shared + (STAGES - 1) * STAGE_BYTES ? shared : to + STAGE_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
      u32 a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 factors = factors_of(bytes[step + half]);
        const u32 low = __byte_perm(factors, 0, 0x1010), high = __byte_perm(factors, 0, 0x3232);
        a[half][0] = product2(two_codes<0>(codes[step + half]), low);
        a[half][1] = product2(two_codes<8>(codes[step + half]), high);
        a[half][2] = product2(two_codes<4>(codes[step + half]), low);
        a[half][3] = product2(two_codes<12>(codes[step + half]), high);
      }
#pragma unroll
      for (int of = 0; of < TILES; ++of) {
        u32 b[4];
        load_rows(b, at + rows_at + of * 8 * ROW_BYTES + ((2 * step + lane / 8) ^ lane % 8) * 16);
        multiply_add(sums[of], a[0], b[0], b[1]);
        multiply_add(sums[of], a[1], b[2], b[3]);
      }
    }
    at = at == shared + (STAGES - 1) * STAGE_BYTES ? shared : at + STAGE_BYTES;
  }

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

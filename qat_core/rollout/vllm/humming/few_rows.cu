// BF16 rows times an NVFP4 weight in Humming's layout (`tile_layout.py`), dense or of experts.
//
// Each sum is added along K in its order, by one chain of tensor core instructions of 16 numbers, as
// cuBLAS adds it where it splits no sum: the same bits, for any number of rows. A block of threads
// has 64 columns of the result and 8 * TILES rows; a warp has 16 of the columns and all of K. What a
// step needs is copied to shared memory some stages before.
//
// Compiled with TILES, STAGE_K (64 or 128), STAGES and EXPERTS (0 or 1).

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int STEPS = STAGE_K / 16;
constexpr int CODE_BYTES = 512;  // of 64 columns, a step
constexpr int SCALE_BYTES = 64;
constexpr int ROWS = 8 * TILES;
constexpr int ROW_BYTES = 2 * STAGE_K;
constexpr int CHUNKS = ROW_BYTES / 16;  // of a row
constexpr int SCALES_AT = STEPS * CODE_BYTES;
constexpr int X_AT = SCALES_AT + STEPS * SCALE_BYTES;
constexpr int STAGE_BYTES = X_AT + ROWS * ROW_BYTES;
constexpr float UP = 0x1p118f;  // a code's bits are its value * 2**-126: products are * 2**-8
constexpr float DOWN = 0x1p8f;

__device__ __forceinline__ void copy16(u32 to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0));
}

__device__ __forceinline__ u32 load32(u32 from) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(from));
  return value;
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

// The E4M3 scales of two columns, each twice, as BF16 numbers times 2**118.
__device__ __forceinline__ void two_scales(u32 from, u32& first, u32& second) {
  u16 bytes;
  u32 halves;
  float low, high;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bytes) : "r"(from));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(bytes));
  asm("{.reg .f16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;}\n"
      : "=f"(low), "=f"(high)
      : "r"(halves));
  low *= UP;
  high *= UP;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;\n" : "=r"(first) : "f"(low));
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;\n" : "=r"(second) : "f"(high));
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
extern "C" __global__ void __launch_bounds__(128)
    few_rows(const u16* x, const u32* words, const unsigned char* scale, const float* multiplier,
             u16* out, const int* sorted_ids, const int* expert_ids, const int* num_padded,
             int rows, int n, int k, int top_k) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ int row_of[ROWS];  // of x; row of the result, -1 where there is none
  __shared__ int out_of[ROWS];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int group = lane / 4, pair = lane % 4;
  const int tile = blockIdx.x, first = blockIdx.y * ROWS;
#if EXPERTS
  if (first >= num_padded[0]) return;
  const int expert = expert_ids[blockIdx.y];
  if (expert < 0) return;
  words += (long long)expert * (k / 16) * 2 * n;
  scale += (long long)expert * (k / 16) * n;
  multiplier += expert;
#endif
  for (int row = thread; row < ROWS; row += 128) {
#if EXPERTS
    const int id = sorted_ids[first + row];
    out_of[row] = id < rows ? id : -1;
    row_of[row] = id < rows ? id / top_k : -1;
#else
    out_of[row] = row_of[row] = first + row < rows ? first + row : -1;
#endif
  }
  __syncthreads();
  u32 shared;
  asm("{.reg .u64 a;\n cvta.to.shared.u64 a, %1;\n cvt.u32.u64 %0, a;}\n"
      : "=r"(shared)
      : "l"(memory));

  const int stages = k / STAGE_K;
  auto fetch = [&](int stage) {
    if (stage < stages) {
      const u32 to = shared + (stage % STAGES) * STAGE_BYTES;
#pragma unroll
      for (int chunk = thread; chunk < STEPS * 32; chunk += 128) {
        const long long step = stage * STEPS + chunk / 32;
        copy16(to + chunk * 16, words + step * 2 * n + tile * 128 + chunk % 32 * 4, true);
      }
      if (thread < STEPS * 4) {
        const long long step = stage * STEPS + thread / 4;
        copy16(to + SCALES_AT + thread * 16, scale + step * n + tile * 64 + thread % 4 * 16, true);
      }
#pragma unroll
      for (int chunk = thread; chunk < ROWS * CHUNKS; chunk += 128) {
        const int row = chunk / CHUNKS, part = chunk % CHUNKS, from = row_of[row];
        // swizzled: the same part of eight rows lies in different banks
        const u32 at = to + X_AT + row * ROW_BYTES + (part ^ (row & 7)) * 16;
        copy16(at, x + (long long)(from < 0 ? 0 : from) * k + stage * STAGE_K + part * 8,
               from >= 0);
      }
    }
    asm volatile("cp.async.commit_group;\n");
  };
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);

  float sums[TILES][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2));
    __syncthreads();
    fetch(stage + STAGES - 1);
    const u32 at = shared + (stage % STAGES) * STAGE_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const u32 word = load32(at + step * CODE_BYTES + lane * 16 + warp * 4);
      u32 low, high, a[4];
      two_scales(at + SCALES_AT + step * SCALE_BYTES + group * 8 + warp * 2, low, high);
      a[0] = product2(two_codes<0>(word), low);
      a[1] = product2(two_codes<8>(word), high);
      a[2] = product2(two_codes<4>(word), low);
      a[3] = product2(two_codes<12>(word), high);
#pragma unroll
      for (int of = 0; of < TILES; ++of) {
        const u32 row = at + X_AT + (of * 8 + group) * ROW_BYTES + pair * 4;
        const u32 b0 = load32(row + ((2 * step) ^ group) * 16);
        const u32 b1 = load32(row + ((2 * step + 1) ^ group) * 16);
        multiply_add(sums[of], a, b0, b1);
      }
    }
  }

  const float factor = multiplier[0] * DOWN;
  const int column = tile * 64 + warp * 16 + group;
#pragma unroll
  for (int of = 0; of < TILES; ++of) {
#pragma unroll
    for (int which = 0; which < 4; ++which) {
      const int row = out_of[of * 8 + pair * 2 + which % 2];
      if (row >= 0)
        store(out + (long long)row * n + column + which / 2 * 8, sums[of][which] * factor);
    }
  }
}

// The noise law, version 1, in plain JavaScript: the perturbation of every weight is a function of key, name, row and
// column. `evoalign_lib/noise.py` states the law; numbers in brackets are its sections. Math.fround rounds every
// operation to float32, in the order of the law, so the results are the bits that NumPy, numba and Triton give.
// A single function holds everything, so that a page can hand its text to a worker. It needs only the language itself.
const noiseLaw = () => {
  "use strict";
  const f = Math.fround;

  // ---- [1] keys: BLAKE2b (RFC 7693), read as little-endian integers; 64-bit numbers are BigInts

  const U64 = (1n << 64n) - 1n;
  const IV = [0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
    0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n];
  const SIGMA = ["0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
    "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
    "0123456789abcdef", "ea489fd61c02b753"].map((row) => Array.from(row, (digit) => parseInt(digit, 16)));

  function blake2b(bytes, size) {
    const h = IV.slice();
    h[0] ^= 0x01010000n ^ BigInt(size);
    const blocks = Math.max(1, Math.ceil(bytes.length / 128));
    for (let block = 0; block < blocks; block++) {
      const last = block === blocks - 1;
      const padded = new Uint8Array(128);
      padded.set(bytes.subarray(128 * block, 128 * (block + 1)));
      const m = new BigUint64Array(padded.buffer), v = [...h, ...IV];
      v[12] ^= BigInt(last ? bytes.length : 128 * (block + 1));
      if (last) v[14] ^= U64;
      const turned = (x, n) => (x >> n) | ((x << (64n - n)) & U64);
      const mix = (a, b, c, d, x, y) => {
        v[a] = (v[a] + v[b] + x) & U64;
        v[d] = turned(v[d] ^ v[a], 32n);
        v[c] = (v[c] + v[d]) & U64;
        v[b] = turned(v[b] ^ v[c], 24n);
        v[a] = (v[a] + v[b] + y) & U64;
        v[d] = turned(v[d] ^ v[a], 16n);
        v[c] = (v[c] + v[d]) & U64;
        v[b] = turned(v[b] ^ v[c], 63n);
      };
      for (const s of SIGMA) {
        for (let i = 0; i < 4; i++) mix(i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
        for (let i = 0; i < 4; i++) {
          mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
        }
      }
      for (let i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
    }
    return h[0] & ((1n << BigInt(8 * size)) - 1n);  // keys have 8 bytes, ids 4
  }

  // the bytes of [value, number of bytes] pairs, little endian, and of texts in UTF-8
  const packed = (...parts) => Uint8Array.from(parts.flatMap((part) => typeof part === "string"
    ? Array.from(new TextEncoder().encode(part))
    : Array.from({ length: part[1] }, (_, i) => Number((BigInt(part[0]) >> BigInt(8 * i)) & 255n))));
  const runKey = (arm, seed) => blake2b(packed([packed(arm).length, 4], arm, [seed, 8]), 8);
  const memberKey = (run, step, pair) => blake2b(packed("v1", [run, 8], [step, 4], [pair, 4]), 8);
  const parameterId = (name) => Number(blake2b(packed(name), 4));

  // ---- [2] words: Philox4x32-10

  const M0 = 0xd2511f53, M1 = 0xcd9e8d57, W0 = 0x9e3779b9, W1 = 0xbb67ae85;

  // the upper 32 bits of the product of two unsigned 32-bit numbers, from four products of halves
  function high(a, b) {
    const a0 = a & 0xffff, a1 = a >>> 16, b0 = b & 0xffff, b1 = b >>> 16;
    const x = Math.imul(a0, b1), y = Math.imul(a1, b0);
    const middle = (Math.imul(a0, b0) >>> 16) + (x & 0xffff) + (y & 0xffff);
    return (Math.imul(a1, b1) + (x >>> 16) + (y >>> 16) + (middle >>> 16)) | 0;
  }

  // write the words of n counters (quad, row, id, stream), (quad + 1, row, id, stream), ... to out
  function philox(out, n, quad, row, id, stream, k0, k1) {
    for (let j = 0; j < n; j++) {
      let c0 = (quad + j) | 0, c1 = row | 0, c2 = id | 0, c3 = stream | 0, a = k0 | 0, b = k1 | 0;
      for (let round = 0; round < 10; round++) {
        const h0 = high(M0, c0), h1 = high(M1, c2), l0 = Math.imul(M0, c0), l1 = Math.imul(M1, c2);
        c0 = h1 ^ c1 ^ a;
        c1 = l1;
        c2 = h0 ^ c3 ^ b;
        c3 = l0;
        a = (a + W0) | 0;
        b = (b + W1) | 0;
      }
      out[4 * j] = c0;
      out[4 * j + 1] = c1;
      out[4 * j + 2] = c2;
      out[4 * j + 3] = c3;
    }
  }

  // ---- [3] numbers, from n words each

  const [L0, L1, L2, L3, L4, L5, L6, L7, L8] = [7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1,
    1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1].map(f);
  const [S0, S1, S2, S3, S4] = [0.07747035, -0.59881765, 2.55012280, -5.16771174, 3.14159274].map(f);
  const [C0, C1, C2, C3, C4] = [0.22031199, -1.33268464, 4.05856084, -4.93480149, 1.0].map(f);
  const LN2 = f(0.69314718056), SQRT_HALF_BITS = 0x3f3504f3, BYTE_SUM_SCALE = f(0.006765875), ROUNDER = 12582912;
  const asFloat = new Float32Array(1), asBits = new Int32Array(asFloat.buffer);

  function gaussian(out, words, n) {
    for (let j = 0; j < n; j += 2) {
      // r = sqrt(-2 log u) with u = m 2^e, m between sqrt(1/2) and sqrt(2)
      asFloat[0] = f((words[j] >>> 8) * 2 ** -24 + 2 ** -25);
      const e = (asBits[0] - SQRT_HALF_BITS) >> 23;
      asBits[0] -= e << 23;
      const x = f(asFloat[0] - 1), x2 = f(x * x);
      let p = f(f(L0 * x) + L1);
      p = f(f(p * x) + L2);
      p = f(f(p * x) + L3);
      p = f(f(p * x) + L4);
      p = f(f(p * x) + L5);
      p = f(f(p * x) + L6);
      p = f(f(p * x) + L7);
      p = f(f(p * x) + L8);
      const log = f(f(e * LN2) + f(x + f(f(x2 * -0.5) + f(f(p * x) * x2))));
      const r = f(Math.sqrt(-2 * log));
      // 2 a / pi: quadrant plus the angle within it
      const turns = f((words[j + 1] >>> 8) * 2 ** -22), quadrant = f(f(turns + ROUNDER) - ROUNDER);
      const y = f(f(turns - quadrant) * 0.5), y2 = f(y * y);
      const sine = f(f(f(f(f(f(f(f(f(S0 * y2) + S1) * y2) + S2) * y2) + S3) * y2) + S4) * y);
      const cosine = f(f(f(f(f(f(f(f(C0 * y2) + C1) * y2) + C2) * y2) + C3) * y2) + C4);
      const odd = quadrant & 1, s = odd ? cosine : sine, c = odd ? sine : cosine;
      out[j] = f(r * ((quadrant + 1) & 2 ? -c : c));
      out[j + 1] = f(r * (quadrant & 2 ? -s : s));
    }
  }

  function byteSum(out, words, n) {
    for (let j = 0; j < n; j++) {
      const w = words[j], total = (w & 255) + ((w >>> 8) & 255) + ((w >>> 16) & 255) + (w >>> 24);
      out[j] = f((total - 510) * BYTE_SUM_SCALE);
    }
  }

  const MOST = 1024;  // counters at a time
  const words = new Int32Array(4 * MOST), line = new Float32Array(4 * MOST);

  // call take(index within the window, noise, its first and its last index + 1) for each stretch of a window
  function each(key, id, rows, cols, stream, distribution, take) {
    const k0 = Number(key & 0xffffffffn), k1 = Number(key >> 32n), width = cols[1] - cols[0];
    const draw = distribution === "byte_sum" ? byteSum : gaussian, first = Math.floor(cols[0] / 4);
    for (let row = rows[0]; row < rows[1]; row++) {
      for (let quad = first; 4 * quad < cols[1]; quad += MOST) {
        const n = Math.min(MOST, Math.ceil(cols[1] / 4) - quad), left = Math.max(cols[0] - 4 * quad, 0);
        philox(words, n, quad, row, distribution === "tied" ? 0 : id, stream, k0, k1);
        draw(line, words, 4 * n);
        const right = Math.min(cols[1] - 4 * quad, 4 * n);
        take((row - rows[0]) * width + 4 * quad + left - cols[0], line, left, right);
      }
    }
  }

  const DISTRIBUTIONS = ["gaussian", "byte_sum", "tied"];

  // a window of a tensor's noise, float32, row by row
  function normals(key, id, rows, cols, stream = 0, distribution = "gaussian") {
    if (!DISTRIBUTIONS.includes(distribution)) throw new RangeError("no distribution " + distribution);
    const out = new Float32Array((rows[1] - rows[0]) * (cols[1] - cols[0]));
    each(key, id, rows, cols, stream, distribution, (at, z, left, right) => out.set(z.subarray(left, right), at));
    return out;
  }

  // [4] low rank: sum over k of a[k, i] b[k, j]
  function lowRank(key, id, rows, cols, rank, distribution = "gaussian") {
    const a = normals(key, id, [0, rank], [0, rows], 1, distribution), root = f(1 / Math.sqrt(rank));
    const b = normals(key, id, [0, rank], [0, cols], 2, distribution);
    return Float32Array.from({ length: rows * cols }, (_, at) => {
      const i = Math.floor(at / cols), j = at % cols;
      let total = -0;
      for (let k = 0; k < rank; k++) total = f(total + f(f(a[k * rows + i] * root) * b[k * cols + j]));
      return total;
    });
  }

  // total[i] += c noise[i] for a whole tensor, each operation rounded
  function add(total, c, key, id, rows, cols, distribution) {
    each(key, id, [0, rows], [0, cols], 0, distribution, (at, z, left, right) => {
      for (let i = left, to = at; i < right; i++, to++) total[to] = f(total[to] + f(c * z[i]));
    });
  }

  return { runKey, memberKey, parameterId, philox, normals, lowRank, add };
};

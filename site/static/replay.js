// A run of ES replayed from its ledger, in plain JavaScript: the lines are read and their chain is checked, rewards become
// coefficients, and each step moves the weights by noise that is drawn again. `evoalign_lib/ledger.py` describes the
// file, `update_rules.py` the formulas, `noise.js` the noise. The order of every addition is Python's.
const replayLaw = (noise) => {
  "use strict";
  const f = Math.fround;
  const bytesOf = (text) => new TextEncoder().encode(text);
  const bytesOfBase64 = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

  // ---- SHA-256 (FIPS 180-4): the browser's own is not there for pages opened from a server without HTTPS

  const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  // the first 32 bits of the fraction of a root, exactly: the largest k with k^power <= prime 2^(32 power)
  function rootBits(prime, power) {
    let k = 0n;
    for (let bit = 1n << 36n; bit; bit >>= 1n) if ((k + bit) ** power <= BigInt(prime) << (32n * power)) k += bit;
    return Number(k & 0xffffffffn);
  }
  const START = primes.slice(0, 8).map((p) => rootBits(p, 2n)), ROUND = Int32Array.from(primes, (p) => rootBits(p, 3n));

  function sha256(bytes) {
    const padded = new Uint8Array(Math.ceil((bytes.length + 9) / 64) * 64), view = new DataView(padded.buffer);
    padded.set(bytes);
    padded[bytes.length] = 128;
    view.setBigUint64(padded.length - 8, BigInt(8 * bytes.length));
    const h = Int32Array.from(START), w = new Int32Array(64);
    const turned = (x, n) => (x >>> n) | (x << (32 - n));
    for (let at = 0; at < padded.length; at += 64) {
      for (let i = 0; i < 16; i++) w[i] = view.getInt32(at + 4 * i);
      for (let i = 16; i < 64; i++) {
        const x = w[i - 15], y = w[i - 2];
        w[i] = w[i - 16] + (turned(x, 7) ^ turned(x, 18) ^ (x >>> 3)) + w[i - 7] +
          (turned(y, 17) ^ turned(y, 19) ^ (y >>> 10));
      }
      let [a, b, c, d, e, g, k, l] = h;
      for (let i = 0; i < 64; i++) {
        const s = (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & g) ^ (~e & k)) + l + ROUND[i] + w[i];
        const t = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        [l, k, g, e, d, c, b, a] = [k, g, e, (d + s) | 0, c, b, a, (s + t) | 0];
      }
      [a, b, c, d, e, g, k, l].forEach((x, i) => { h[i] += x; });
    }
    return Array.from(h, (x) => (x >>> 0).toString(16).padStart(8, "0")).join("");
  }

  // ---- weights: a Map from name to numbers, in the form of safetensors

  const KINDS = { F32: Float32Array, I16: Int16Array };

  function readWeights(buffer) {
    const size = Number(new DataView(buffer).getBigUint64(0, true));
    const { __metadata__: about, ...header } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
    const found = new Map();
    for (const [name, { dtype, data_offsets: [begin, end] }] of Object.entries(header)) {
      found.set(name, new KINDS[dtype](buffer.slice(8 + size + begin, 8 + size + end)));
    }
    return found;
  }

  const copied = (weights) => new Map(Array.from(weights, ([name, values]) => [name, values.slice()]));

  // the digest of a ledger: names in order, each followed by a zero byte and the little-endian bytes of its weights
  function digest(weights) {
    const parts = Array.from(weights.keys()).sort().flatMap((name) => {
      const { buffer, byteOffset, byteLength } = weights.get(name);
      return [bytesOf(name + "\0"), new Uint8Array(buffer, byteOffset, byteLength)];
    });
    const all = new Uint8Array(parts.reduce((total, part) => total + part.length, 0));
    parts.reduce((at, part) => (all.set(part, at), at + part.length), 0);
    return sha256(all);
  }

  // ---- the ledger

  // the settings that this file knows; a ledger with another value is refused
  const KNOWN = { precision: "master", antithetic: false, fitness_shaping: "zscore", sigma_schedule: "constant",
    alpha_schedule: "constant", update_scaling: "mean", anchor_decay: 0, rank: 0, frozen: null, search: null };

  function readLedger(text) {
    const lines = text.split("\n");
    if (lines.pop() !== "") throw new Error("the last line of the ledger is torn");
    const [header, ...rest] = lines.map((line) => JSON.parse(line));
    let last = "";
    lines.forEach((line, i) => {
      const at = line.lastIndexOf(',"hash":"'), own = header.evoalign_ledger > 1;
      const found = sha256(bytesOf(own ? last + line.slice(0, at) : line)).slice(0, 32);
      const wrong = own ? JSON.parse(line).hash !== found : i > 0 && rest[i - 1].prev !== last;
      if (wrong) throw new Error(`line ${i + 1} of the ledger does not follow from the one before it`);
      last = found;
    });
    for (const [name, value] of Object.entries(KNOWN)) {
      const set = header.settings[name] ?? value;
      if (set !== value) throw new Error(`this page replays runs with ${name} ${value}, not ${set}`);
    }
    const key = BigInt(header.run_key), { arm, seed } = header.settings;
    if (noise.runKey(arm, seed) !== key) throw new Error(`${header.run_key} is not the key of arm ${arm}, seed ${seed}`);
    const shapes = header.model.parameters.flatMap(([name, shape, n]) =>
      Array.from({ length: n ?? 1 }, (_, i) => [n ? name.replaceAll("#", i) : name, shape]));
    const matrices = shapes.map(([name, shape]) => [name, noise.parameterId(name),
      ...(shape.length < 2 ? [1, shape[0] ?? 1] : [shape[0], shape.slice(1).reduce((a, b) => a * b)])]);
    const steps = rest.filter((line) => "step" in line);
    const digests = new Map([[0, header.model.digest]]);
    for (const line of rest) if (line.weights) digests.set(line.step ?? line.end, line.weights);
    return { key, settings: header.settings, matrices, steps, digests };
  }

  // "17 23-1" of D: 17 / D, and the float64 one unit in the last place nearer to 0 than 23 / D; else Base64 of float64s
  function rewardsOf({ of, rewards }) {
    if (of === undefined) return new Float64Array(bytesOfBase64(rewards).buffer);
    const found = rewards.split(" ").map((part) => part.match(/^(-?\d+)([+-]\d)?$/));
    const values = Float64Array.from(found, ([, k]) => k / of), bits = new BigInt64Array(values.buffer);
    found.forEach(([, , off], i) => { bits[i] += BigInt(Number(off ?? 0)); });
    return values;
  }

  // ---- one step

  // NumPy's sum: eight sums side by side, joined in pairs; more than 128 numbers are halved first
  function sum(x) {
    const n = x.length;
    if (n > 128) {
      const half = (n >> 1) - (n >> 1) % 8;
      return sum(x.subarray(0, half)) + sum(x.subarray(half));
    }
    const r = x.slice(0, 8);
    let i = 8;
    if (n < 8) return x.reduce((total, value) => total + value, 0);
    for (; i < n - n % 8; i++) r[i % 8] += x[i];
    let total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; i++) total += x[i];
    return total;
  }

  // the factor of each member's noise, fl32(alpha z / N); none if the population is tied
  function coefficients(rewards, alpha) {
    const n = rewards.length, mean = sum(rewards) / n, centred = rewards.map((r) => r - mean);
    const deviation = Math.sqrt(sum(centred.map((x) => x * x)) / n);
    if (deviation <= 1e-12 * Math.max(...rewards.map(Math.abs))) return [];
    return Float32Array.from(centred, (x) => alpha * (x / deviation) / n);
  }

  // move the weights by a step: total = 0; for each member total = fl(total + fl(c noise)); weights = fl(weights + total)
  function move(weights, ledger, step) {
    const { alpha, noise: distribution } = ledger.settings;
    const c = Array.from(coefficients(rewardsOf(ledger.steps[step]), alpha));
    const keys = c.map((_, n) => noise.memberKey(ledger.key, step, n));
    if (!c.length) return;
    for (const [name, id, rows, cols] of ledger.matrices) {
      const values = weights.get(name), total = new Float32Array(values.length);
      c.forEach((factor, n) => { if (factor !== 0) noise.add(total, factor, keys[n], id, rows, cols, distribution); });
      for (let i = 0; i < total.length; i++) values[i] = f(values[i] + total[i]);
    }
  }

  // replay all steps; after each, and before the first, yield the number of steps and, where the ledger has one, its
  // digest of the weights and the one found here
  function* replay(weights, ledger) {
    for (let step = 0; step <= ledger.steps.length; step++) {
      if (step) move(weights, ledger, step - 1);
      const recorded = ledger.digests.get(step);
      yield { step, recorded, found: recorded && digest(weights) };
    }
  }

  return { bytesOfBase64, sha256, readWeights, copied, digest, readLedger, rewardsOf, sum, coefficients, move, replay };
};

// The tiny model in plain JavaScript: tokenizer, Qwen2's forward pass, greedy decoding, and the strict grader of Countdown.
// Weights and activations are float32; a dot product is summed in float64 and rounded once, so logits differ from
// PyTorch's in their last digits.
const tinyModel = (config, tokenizer) => {
  "use strict";

  // ---- tokens: one for each of the pieces that the tokenizer lists, else one for each byte

  const ids = new Map(Object.entries(tokenizer.model.vocab)), pieces = [];
  for (const { id, content } of tokenizer.added_tokens) pieces.push([content, id]);
  pieces.sort(([a], [b]) => b.length - a.length);
  // GPT-2's alphabet: printable bytes stand for themselves, the others for signs from U+0100 on
  const printable = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  const alphabet = [];
  for (let b = 0, other = 256; b < 256; b++) alphabet.push(String.fromCharCode(printable(b) ? b : other++));
  const byteOf = new Map(alphabet.map((sign, b) => [ids.get(sign), b])), pieceOf = new Map(pieces.map(([p, id]) => [id, p]));

  function encode(text) {
    const found = [];
    for (let at = 0; at < text.length;) {
      const piece = pieces.find(([content]) => text.startsWith(content, at));
      const sign = String.fromCodePoint(text.codePointAt(at));
      if (piece) found.push(piece[1]);
      else for (const b of new TextEncoder().encode(sign)) found.push(ids.get(alphabet[b]));
      at += piece ? piece[0].length : sign.length;
    }
    return found;
  }

  function decode(tokens) {
    const bytes = tokens.flatMap((id) => pieceOf.has(id)
      ? Array.from(new TextEncoder().encode(pieceOf.get(id))) : [byteOf.get(id)]);
    return new TextDecoder().decode(Uint8Array.from(bytes));
  }

  // ---- the forward pass, one token at a time; keys and values of earlier tokens are kept

  const { hidden_size: d, num_attention_heads: heads, num_key_value_heads: groups, num_hidden_layers: layers } = config;
  const size = d / heads, half = size / 2, theta = config.rope_parameters.rope_theta;

  // x W^T + b
  function linear(x, weight, bias) {
    const y = new Float32Array(weight.length / x.length);
    for (let i = 0, at = 0; i < y.length; i++) {
      let total = bias ? bias[i] : 0;
      for (let j = 0; j < x.length; j++, at++) total += weight[at] * x[j];
      y[i] = total;
    }
    return y;
  }

  function normed(x, weight) {
    const scale = 1 / Math.sqrt(x.reduce((total, v) => total + v * v, 0) / d + config.rms_norm_eps);
    return x.map((v, i) => v * scale * weight[i]);
  }

  // rotate each head's pairs (i, i + half) by position theta^(-i / half)
  function rotated(x, position) {
    const y = new Float32Array(x.length);
    for (let at = 0; at < x.length; at += size) {
      for (let i = 0; i < half; i++) {
        const angle = position * theta ** (-i / half), c = Math.cos(angle), s = Math.sin(angle);
        y[at + i] = x[at + i] * c - x[at + i + half] * s;
        y[at + i + half] = x[at + i + half] * c + x[at + i] * s;
      }
    }
    return y;
  }

  // the softmax-weighted mean of the values, for each head
  function attended(q, keys, values) {
    const y = new Float32Array(q.length);
    for (let head = 0; head < heads; head++) {
      const from = size * Math.floor(head * groups / heads), at = size * head;
      const scores = keys.map((k) => {
        let total = 0;
        for (let i = 0; i < size; i++) total += q[at + i] * k[from + i];
        return total / Math.sqrt(size);
      });
      const most = Math.max(...scores), shares = scores.map((s) => Math.exp(s - most));
      const total = shares.reduce((a, b) => a + b);
      for (let i = 0; i < size; i++) y[at + i] = values.reduce((sum, v, t) => sum + v[from + i] * shares[t], 0) / total;
    }
    return y;
  }

  const sum = (x, y) => x.map((v, i) => v + y[i]);

  // the logits after a token; cache has [keys, values] for each layer
  function forward(weights, cache, token) {
    const position = cache[0][0].length, embedding = weights.get("model.embed_tokens.weight");
    let x = embedding.slice(d * token, d * (token + 1));
    for (let layer = 0; layer < layers; layer++) {
      const w = (name) => weights.get(`model.layers.${layer}.${name}`), [keys, values] = cache[layer];
      const project = (h, name) => linear(h, w(`self_attn.${name}_proj.weight`), w(`self_attn.${name}_proj.bias`));
      const h = normed(x, w("input_layernorm.weight"));
      keys.push(rotated(project(h, "k"), position));
      values.push(project(h, "v"));
      x = sum(x, project(attended(rotated(project(h, "q"), position), keys, values), "o"));
      const m = normed(x, w("post_attention_layernorm.weight")), up = linear(m, w("mlp.up_proj.weight"));
      const gated = linear(m, w("mlp.gate_proj.weight")).map((g, i) => g / (1 + Math.exp(-g)) * up[i]);
      x = sum(x, linear(gated, w("mlp.down_proj.weight")));
    }
    return linear(normed(x, weights.get("model.norm.weight")), embedding);  // embeddings are tied
  }

  // the completion of a prompt, at most so many tokens, without the end token
  function greedy(weights, prompt, most) {
    const cache = Array.from({ length: layers }, () => [[], []]), written = [];
    let logits;
    for (const token of encode(prompt)) logits = forward(weights, cache, token);
    while (written.length < most) {
      const token = logits.indexOf(Math.max(...logits));
      if (token === config.eos_token_id) break;
      written.push(token);
      logits = forward(weights, cache, token);
    }
    return decode(written);
  }

  // ---- the strict grader

  // the value of an expression as a fraction [numerator, denominator]: digits, + - * / ( ) and spaces, else null
  function valueOf(text) {
    const tokens = text.match(/\d+|[^ ]/g) ?? [];
    let at = 0;
    const fail = () => { throw new SyntaxError("no expression"); };
    const operand = () => {
      const token = tokens[at++];
      if (token === "-") return (([a, b]) => [-a, b])(operand());
      if (token === "(") return ((inner) => tokens[at++] === ")" ? inner : fail())(total());
      return /^(0+|[1-9]\d*)$/.test(token) ? [BigInt(token), 1n] : fail();
    };
    const product = () => {
      let [a, b] = operand();
      while (tokens[at] === "*" || tokens[at] === "/") {
        const times = tokens[at++] === "*", [c, e] = operand();
        if (!times && !c) fail();
        [a, b] = times ? [a * c, b * e] : [a * e, b * c];
      }
      return [a, b];
    };
    const total = () => {
      let [a, b] = product();
      while (tokens[at] === "+" || tokens[at] === "-") {
        const sign = tokens[at++] === "+" ? 1n : -1n, [c, e] = product();
        [a, b] = [a * e + sign * c * b, b * e];
      }
      return [a, b];
    };
    try {
      const found = total();
      return at === tokens.length ? found : null;
    } catch (error) {
      if (error instanceof SyntaxError) return null;
      throw error;
    }
  }

  // whether a completion's last answer is right, and why not
  function grade(completion, numbers, target) {
    const closed = completion.split("</answer>").slice(0, -1).filter((part) => part.includes("<answer>"));
    if (!closed.length) return { right: false, why: "gives no answer" };
    const last = closed[closed.length - 1], answer = last.slice(last.indexOf("<answer>") + 8).replace(/\n$/, "");
    const value = valueOf(answer), used = (answer.match(/\d+/g) ?? []).map(Number);
    const order = (list) => list.slice().sort((a, b) => a - b).join();
    if (!value) return { right: false, why: "is no expression" };
    if (order(used) !== order(numbers)) return { right: false, why: "does not use each number once" };
    const [a, b] = value, right = a === BigInt(target) * b;
    return { right, why: right ? "right" : `equals ${a % b ? Number((Number(a) / Number(b)).toFixed(3)) : a / b}` };
  }

  return { encode, decode, forward, greedy, valueOf, grade };
};

"""A decoding loop for small decoder-only models on one CPU core.

`transformers.generate` spends most of a decoding step of a small model outside the matrix products (cache
concatenation, mask building, logits processors). This loop preallocates the cache and runs only the products. It
covers the Qwen2 and Llama architectures with default rotary embedding; `supports` says whether a model is one of them.

Every row is computed by the same operations whatever the other rows hold, as long as the batch shape is the same; the
shape is therefore part of the batch plan (see `engines.local`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MODEL_TYPES = {"qwen2", "llama"}
_MASKED = torch.finfo(torch.float32).min  # finite, so that a fully padded query row stays finite


def supports(config) -> str | None:
    """Return None where the loop can decode a model of this configuration, else the reason why not."""
    if config.model_type not in _MODEL_TYPES:
        return f"model_type {config.model_type!r} is not one of {sorted(_MODEL_TYPES)}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not 'silu'"
    if getattr(config, "use_sliding_window", False):
        return "sliding-window attention is on"
    if getattr(config, "mlp_bias", False):
        return "its feed-forward layers have biases"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        return f"rope_type {rope['rope_type']!r} is not 'default'"
    return None


class Decoder:
    """Decode batches of prompts with weights that may change between calls.

    Args:
        config: the model's Hugging Face configuration.
        weights: canonical Hugging Face name -> tensor; read at every call, so views of a working copy may be passed
            once and rewritten in place.
        eos_ids: token ids that end a completion.
        pad_id: id that fills a finished row.

    Raises:
        ValueError: the architecture is not covered; the message says why.
    """

    def __init__(self, config, weights: dict[str, Tensor], eos_ids: list[int], pad_id: int):
        if reason := supports(config):
            raise ValueError(f"the decoding loop does not cover this model: {reason}. Use decoder='generate'.")
        self.config, self.weights, self.pad_id = config, weights, pad_id
        self.eos_ids = torch.tensor(sorted(eos_ids))
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self._inverse_frequency = 1.0 / theta**exponent

    @torch.inference_mode()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, uniforms: Tensor | None = None
    ) -> Tensor:
        """Decode one batch.

        Args:
            input_ids: (rows, width) int64, padded on the left.
            attention_mask: (rows, width), 0 at padding.
            max_new_tokens: tokens a row at most.
            uniforms: (rows, max_new_tokens) numbers in [0, 1); sampling at temperature 1 by inversion of the
                distribution function. None: greedy.

        Returns:
            (rows, max_new_tokens) int64: the new tokens with the end token, then `pad_id`.
        """
        rows, width = input_ids.shape
        positions = (attention_mask.cumsum(1) - 1).clamp_(min=0)
        total = width + max_new_tokens
        angles = torch.arange(total, dtype=torch.float32)[:, None] * self._inverse_frequency
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        layers = self._layers()
        keys = torch.empty(len(layers), rows, self.kv_heads, total, self.head_dim)
        values = torch.empty_like(keys)
        pad_bias = torch.zeros(rows, 1, 1, total)
        pad_bias[:, 0, 0, :width].masked_fill_(attention_mask == 0, _MASKED)
        causal = torch.full((width, width), _MASKED).triu_(1)
        prompt_bias = torch.maximum(pad_bias[..., :width] + causal, torch.tensor(_MASKED))

        embedding = self.weights["model.embed_tokens.weight"]
        head = embedding if self.config.tie_word_embeddings else self.weights["lm_head.weight"]
        final_norm = self.weights["model.norm.weight"]

        x = embedding[input_ids]
        for i, layer in enumerate(layers):
            final = i + 1 == len(layers)
            x = self._layer(x, layer, cos[positions], sin[positions], keys[i], values[i], 0, prompt_bias, final)
        out = torch.full((rows, max_new_tokens), self.pad_id, dtype=torch.int64)
        finished = torch.zeros(rows, dtype=torch.bool)
        last, position = x[:, -1:], positions[:, -1]
        for t in range(max_new_tokens):
            logits = F.linear(self._norm(last, final_norm), head)[:, 0]
            if uniforms is None:
                token = logits.argmax(-1)
            else:
                cumulative = logits.softmax(-1).cumsum(-1)
                # the last value of the cumulative sum may be just below 1: scale the number, never run off the end
                token = (cumulative <= uniforms[:, t, None] * cumulative[:, -1:]).sum(-1)
                token = token.clamp_(max=logits.shape[-1] - 1)
            token = token.masked_fill(finished, self.pad_id)
            out[:, t] = token
            finished |= torch.isin(token, self.eos_ids)
            if t + 1 == max_new_tokens or bool(finished.all()):
                break
            position = position + 1
            x = embedding[token][:, None]
            c, s = cos[position][:, None], sin[position][:, None]
            stop = width + t + 1
            for i, layer in enumerate(layers):
                x = self._layer(x, layer, c, s, keys[i], values[i], stop - 1, pad_bias[..., :stop])
            last = x
        return out

    def _layers(self) -> list[tuple]:
        """The weights of each layer, those with a common input joined into one product."""
        w, out = self.weights, []
        for i in range(self.config.num_hidden_layers):
            p = f"model.layers.{i}."
            qkv = [p + f"self_attn.{n}_proj" for n in "qkv"]
            bias = torch.cat([w[n + ".bias"] for n in qkv]) if qkv[0] + ".bias" in w else None
            gate_up = torch.cat([w[p + "mlp.gate_proj.weight"], w[p + "mlp.up_proj.weight"]])
            out.append(
                (
                    w[p + "input_layernorm.weight"],
                    torch.cat([w[n + ".weight"] for n in qkv]),
                    bias,
                    w[p + "self_attn.o_proj.weight"],
                    w.get(p + "self_attn.o_proj.bias"),
                    w[p + "post_attention_layernorm.weight"],
                    gate_up,
                    w[p + "mlp.down_proj.weight"],
                )
            )
        return out

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * gain

    def _layer(self, x, layer, cos, sin, keys, values, start, bias, last_only=False) -> Tensor:
        """One transformer layer for x (rows, length, hidden) at cache columns start..start+length.

        last_only: the output is wanted at the last position alone; the cache is filled for all.
        """
        norm1, qkv, qkv_bias, o, o_bias, norm2, gate_up, down = layer
        rows, length, _ = x.shape
        stop = start + length
        h = F.linear(self._norm(x, norm1), qkv, qkv_bias).view(rows, length, -1, self.head_dim)
        turning = h[:, :, : self.heads + self.kv_heads]
        half = self.head_dim // 2
        turned = torch.cat((-turning[..., half:], turning[..., :half]), -1)
        turning = turning * cos[:, :, None] + turned * sin[:, :, None]
        keys[:, :, start:stop] = turning[:, :, self.heads :].transpose(1, 2)
        values[:, :, start:stop] = h[:, :, self.heads + self.kv_heads :].transpose(1, 2)
        q = turning[:, :, : self.heads].transpose(1, 2)
        if last_only:
            x, q, bias, length = x[:, -1:], q[:, :, -1:], bias[:, :, -1:], 1
        group = self.heads // self.kv_heads
        if length == 1:  # the queries of a group share their keys: one product a key head
            q = q.reshape(rows, self.kv_heads, group, self.head_dim)
            scores = q @ keys[:, :, :stop].transpose(2, 3) * self.head_dim**-0.5 + bias
            a = (scores.softmax(-1) @ values[:, :, :stop]).reshape(rows, 1, -1)
        else:
            k, v = keys[:, :, :stop], values[:, :, :stop]
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=group > 1)
            a = a.transpose(1, 2).reshape(rows, length, -1)
        x = x + F.linear(a, o, o_bias)
        gate, up = F.linear(self._norm(x, norm2), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)
